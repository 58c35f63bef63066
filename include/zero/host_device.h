// Marks functions that both compilers build, for the CPU and for CUDA.
#pragma once

// Inlined always: a copy compiled for one instruction set must not serve callers of another.
#ifdef __CUDACC__
#define ZERO_HD __host__ __device__ __forceinline__
#else
#define ZERO_HD [[gnu::always_inline]] inline
#endif

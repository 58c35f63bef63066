// What libcudart.so.13 exports beside CUDA: faults, checks and counts for tests, and the few calls
// by which other libraries run work on its streams. Plain C, so that dlsym finds it; a program that
// shall also run on a GPU looks these names up instead of linking them.
#pragma once

#include <cuda_runtime_api.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

// ---- Faults. Each can also be set in the environment, read at the first CUDA call.

// The k-th allocation from now (1: the next) of device or pinned memory fails with
// cudaErrorMemoryAllocation, once. 0 switches it off.  CUDA_ON_CPU_FAIL_ALLOCATION=k
void cudaOnCpuFailAllocation(uint64_t k);
// The k-th kernel launch from now fails with `code`, once: a sticky code (700, 710, 715, 716, 719)
// breaks the device when the kernel would run; any other is what the launch returns.
// CUDA_ON_CPU_FAIL_LAUNCH=k or k:code (default 719)
void cudaOnCpuFailLaunch(uint64_t k, cudaError_t code);
// How many of these faults came true since the process began, so that a loop over k can end.
uint64_t cudaOnCpuFaultsInjected(void);
// Short random delays before each piece of work of every stream, and blocks of a kernel
// interleaved. 0 switches it off.  CUDA_ON_CPU_JITTER=seed
void cudaOnCpuSetJitter(uint64_t seed);
// With a seed: blocks also start in any order, for kernels that must not rely on the usual one.
// CUDA_ON_CPU_ANY_BLOCK_ORDER=0 or 1
void cudaOnCpuSetAnyBlockOrder(int any);
// Which checks run, comma separated: pointers, uninitialised, shared_hazards, global_hazards; "all"
// or "none". The default is "pointers". Returns cudaErrorInvalidValue for any other word.
// "uninitialised" holds for memory that is allocated from then on.  CUDA_ON_CPU_CHECK=list
cudaError_t cudaOnCpuSetChecks(const char* list);
// Forgets the sticky error of every device, which no CUDA call does: for tests of several faults
// in one process. Waits for all work first.
void cudaOnCpuForgetErrors(void);
// Copies the report of the device's sticky error (cut to `bytes`, ends with 0). Returns its length
// without that 0; 0: the device works.
size_t cudaOnCpuReport(int device, char* text, size_t bytes);

// ---- Counts

typedef struct cudaOnCpuCounts {
  uint64_t launches, warp_instructions, thread_instructions;
  uint64_t loads[5], stores[5];  // of global memory, one a thread, by width: 1, 2, 4, 8, 16 bytes
} cudaOnCpuCounts;

// Counts launches from now on, or no more. Off at the start.
void cudaOnCpuSetCounting(int on);
// The sum over finished launches of the kernels whose mangled name contains `part` ("": all).
cudaOnCpuCounts cudaOnCpuTotals(const char* part);
// The counts of the last launch that finished.
cudaOnCpuCounts cudaOnCpuLastLaunch(void);
void cudaOnCpuResetCounts(void);

// ---- Work of other libraries

// `run` is called once each time that the work's turn comes (again at each launch of a graph that
// captured it). A status other than cudaSuccess says that the device is broken or the process ends:
// the work must not touch device memory. It may block; then it polls cudaOnCpuStopped.
typedef void (*cudaOnCpuRun)(void* data, cudaError_t status);
typedef void (*cudaOnCpuDestroy)(void* data);

// Puts work on a stream (0: the legacy default stream of the current device), in stream order; on
// a capturing stream it becomes a node of the graph. `destroy` (may be null) is called once, when
// the work can never run again. `name` stands in messages and is copied. On an error neither is
// called.
cudaError_t cudaOnCpuEnqueue(cudaStream_t stream, const char* name, cudaOnCpuRun run, void* data,
                             cudaOnCpuDestroy destroy);
// The device of a stream; cudaErrorInvalidResourceHandle or cudaErrorContextIsDestroyed if there is
// no such stream (any more).
cudaError_t cudaOnCpuStreamDevice(cudaStream_t stream, int* device);
// Whether the stream is capturing (*capturing is 0 or 1).
cudaError_t cudaOnCpuStreamIsCapturing(cudaStream_t stream, int* capturing);
int cudaOnCpuCurrentDevice(void);
// Whether kernels of `device` may use all bytes of [pointer, pointer + bytes): device memory of its
// own or of a peer that it has access to, or pinned memory, within one allocation that is not
// freed. Returns cudaErrorInvalidValue if not; cudaOnCpuDescribe says why. 0 bytes are always good.
cudaError_t cudaOnCpuCheckRange(int device, const void* pointer, size_t bytes);
// Says what is at the address, as seen by `device`: "freed ...", "host memory", "400 bytes of ...".
void cudaOnCpuDescribe(int device, const void* pointer, char* text, size_t bytes);
// Tells the check for uninitialised reads that work has written these bytes.
void cudaOnCpuMarkWritten(const void* pointer, size_t bytes);
// Breaks a device as a kernel's fault does: `code` is sticky, the report goes to stderr. Work calls
// it for what cannot go on.
void cudaOnCpuBreakDevice(int device, cudaError_t code, const char* report);
// Whether blocked work must give up: its device is broken, or the process ends.
int cudaOnCpuStopped(int device);

#ifdef __cplusplus
}
#endif

#include "cpu/cpu_memory.h"

#include <new>
#include <string>

#include <sys/mman.h>

#include "zero/error.h"
#include "zero/plan.h"

namespace zero {
namespace {

constexpr std::align_val_t kAlignment{256};
constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
// Mapped blocks go back to the system when released; smaller ones are not worth a system call.
constexpr std::size_t kMapFrom = std::size_t{256} << 10;
// The kernel aligns mappings alike, and streams that are equal modulo some power of two share
// cache sets and memory banks: each block starts a little later than the one before it.
constexpr std::size_t kStagger = 2 * kPage + 256;
constexpr std::size_t kStaggers = 16;

[[noreturn]] void throw_out_of_memory(std::size_t bytes) {
  throw OutOfMemory("the system has no " + format_bytes(bytes) +
                        " for the CPU backend; end other programs, or raise the limit (ulimit -v)",
                    {.asked_bytes = bytes});
}

}  // namespace

CpuMemory::~CpuMemory() {
  for (const auto& [data, mapping] : mappings_) {
    munmap(mapping.base, mapping.bytes);
  }
}

void* CpuMemory::allocate(std::size_t bytes) {
  if (bytes == 0) {
    return nullptr;
  }
  try {
    return bytes < kMapFrom ? ::operator new(bytes, kAlignment) : map(bytes);
  } catch (const std::bad_alloc&) {
    throw_out_of_memory(bytes);
  }
}

void* CpuMemory::map(std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const std::size_t offset = (count_++ % kStaggers) * kStagger;
  const std::size_t all = bytes + offset;
  if (all < bytes) {
    throw std::bad_alloc();
  }
  void* const base = mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (base == MAP_FAILED) {
    throw std::bad_alloc();
  }
  if (bytes >= 4 * kHugePage) {
    (void)madvise(base, all, MADV_HUGEPAGE);  // advice: without it, it is only slower
  }
  void* const data = static_cast<std::byte*>(base) + offset;
  try {
    mappings_.emplace(data, Mapping{base, all});
  } catch (...) {
    munmap(base, all);
    throw;
  }
  return data;
}

void CpuMemory::release(void* data) noexcept {
  if (data == nullptr) {
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    const auto found = mappings_.find(data);
    if (found != mappings_.end()) {
      munmap(found->second.base, found->second.bytes);
      mappings_.erase(found);
      return;
    }
  }
  ::operator delete(data, kAlignment);
}

}  // namespace zero

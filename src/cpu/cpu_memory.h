// Host memory for arrays that are streamed side by side.
#pragma once

#include <cstddef>
#include <mutex>
#include <unordered_map>

namespace zero {

class CpuMemory {
 public:
  CpuMemory() = default;
  CpuMemory(const CpuMemory&) = delete;
  CpuMemory& operator=(const CpuMemory&) = delete;
  ~CpuMemory();

  // 256-byte aligned and untouched; null for 0 bytes.
  // Throws: OutOfMemory when the system has none
  [[nodiscard]] void* allocate(std::size_t bytes);
  void release(void* data) noexcept;

 private:
  struct Mapping {
    void* base = nullptr;
    std::size_t bytes = 0;
  };
  [[nodiscard]] void* map(std::size_t bytes);

  std::mutex mutex_;
  std::unordered_map<void*, Mapping> mappings_;  // by the address that was handed out
  std::size_t count_ = 0;                        // of mappings so far, for their offsets
};

}  // namespace zero

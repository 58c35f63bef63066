// Runs PTX on the CPU: a program is parsed once, loaded on each device, and its kernels launched.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

namespace cuda_on_cpu {

// PTX outside the whitelist. The message names kernel, PTX line and the line's text.
class LoadError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class FaultKind : std::uint8_t {
  kIllegalAddress,  // a device would raise it, too
  kMisalignedAddress,
  kAssert,
  kTrap,
  kIllegalInstruction,  // an instruction outside the whitelist that was reached
  kHang,                // no lane can make progress
  kHazard,  // a check that hardware lacks: uninitialised read, race, wrong mask, barrier
};

// Why a kernel ended. The report names kernel, block, thread and source line (PTX line without
// -lineinfo).
struct Fault {
  FaultKind kind;
  std::string report;
};

// What a kernel may touch, as one device sees it.
class MemoryMap {
 public:
  struct Range {
    std::uint64_t first = 0, last = 0;  // [first, last); empty: nothing there
    bool writable = true;
  };

  MemoryMap() = default;
  virtual ~MemoryMap() = default;
  MemoryMap(const MemoryMap&) = delete;
  MemoryMap& operator=(const MemoryMap&) = delete;

  // Returns the allocation that holds `address` and that kernels of this device may use.
  [[nodiscard]] virtual Range find(std::uint64_t address) const = 0;
  // Changes whenever a range has gone, so that a range found before may be kept until then.
  [[nodiscard]] virtual std::uint64_t generation() const = 0;
  // Says what is at `address`, for a report: "4 bytes past the end of 400 bytes ...", "freed",
  // "host memory".
  [[nodiscard]] virtual std::string describe(std::uint64_t address) const = 0;
  // One bit a byte: whether device memory was written since it was allocated. Null where unchecked.
  [[nodiscard]] virtual std::uint8_t* written_bits(Range range) const = 0;
};

struct Dim3 {
  std::uint32_t x = 1, y = 1, z = 1;
};

struct ParameterInfo {
  std::size_t offset, bytes;
};

struct KernelInfo {
  std::string name;  // mangled
  std::vector<ParameterInfo> parameters;
  std::size_t parameter_bytes = 0;
  std::size_t static_shared_bytes = 0;
  std::size_t local_bytes = 0;  // a thread
  int registers = 0;            // 32-bit, virtual, at most 255
  int max_threads = 1024;       // of a block: .maxntid, .reqntid
  std::string unsupported;      // why it cannot run; empty: it can
};

struct GlobalInfo {
  std::string name;  // mangled
  std::size_t bytes = 0, alignment = 1;
  bool constant = false;
};

// Dynamic counts of a launch; by width: 1, 2, 4, 8, 16 bytes a lane.
struct Counts {
  std::uint64_t warp_instructions = 0, thread_instructions = 0;
  std::uint64_t loads[5] = {}, stores[5] = {};  // global memory, a lane each
};

struct Checks {
  bool pointers = true;
  bool uninitialised = false;   // reads of global memory that nothing wrote
  bool shared_hazards = false;  // between warps of a block, without a barrier between
  bool global_hazards = false;  // between blocks of one kernel
};

struct Launch {
  Dim3 grid, block;
  std::size_t dynamic_shared_bytes = 0;
  std::span<const std::byte> parameters;  // as laid out by KernelInfo::parameters
  const MemoryMap* memory = nullptr;
  int device = 0;
  Checks checks;
  std::uint64_t jitter_seed = 0;  // 0: blocks in order, warps in turn
  bool any_block_order = false;   // with a seed: blocks start in any order, not only interleaved
  std::function<void(std::string_view)> print;   // device printf
  const std::atomic<bool>* cancelled = nullptr;  // polled: the process ends
  Counts* counts = nullptr;
};

class Program;

// A program on one device: its globals have addresses, so that its code can run.
class Image {
 public:
  using Allocate = std::function<std::byte*(const GlobalInfo&)>;  // aligned, kept by the caller

  // Throws LoadError where an initialiser cannot be placed.
  Image(std::shared_ptr<const Program> program, const Allocate& allocate);
  ~Image();
  Image(Image&&) noexcept;
  Image& operator=(Image&&) noexcept;

  [[nodiscard]] const std::vector<KernelInfo>& kernels() const;
  [[nodiscard]] const std::vector<GlobalInfo>& globals() const;
  [[nodiscard]] std::byte* address(std::size_t global) const;  // by index in globals()

  // Runs the kernel to its end on the calling thread. Thread-safe.
  [[nodiscard]] std::optional<Fault> run(std::size_t kernel, const Launch& launch) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// Parses PTX text. `name` stands in messages. Functions that hold something unsupported are kept,
// with KernelInfo::unsupported; what is unsupported outside of functions throws LoadError.
[[nodiscard]] std::shared_ptr<const Program> parse(std::string_view ptx, const std::string& name);

// Each unsupported line of a program: "kernel, line, text: reason". Empty: all is supported.
[[nodiscard]] std::vector<std::string> unsupported(const Program& program);

// Appends hits by source line, of all launches so far, to an lcov tracefile.
void write_coverage(const std::string& path);

}  // namespace cuda_on_cpu

// One rank's side of an exchange: its memory, the call, and the check of what came out.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "zero/communicator.h"

#include "tests/comm/exchange.h"

namespace zero::testing {

// Device memory with a zone on either side that nobody may touch.
class GuardedArray {
 public:
  GuardedArray(Backend& backend, std::size_t bytes)
      : backend_(&backend),
        buffer_(backend.allocate({.bytes = bytes + 2 * kGuard, .category = Category::kUser})) {
    backend.fill(buffer_.data(), kPattern, buffer_.bytes(), kHost);
  }

  [[nodiscard]] std::byte* data() const { return buffer_.as<std::byte>() + kGuard; }

  // All bytes, after a check of the zones.
  [[nodiscard]] std::vector<std::byte> read() const {
    std::vector<std::byte> all(buffer_.bytes());
    backend_->copy(all.data(), buffer_.data(), all.size(), kHost);
    const auto touched = [](std::byte b) { return b != std::byte{kPattern}; };
    EXPECT_FALSE(std::any_of(all.begin(), all.begin() + kGuard, touched)) << "wrote below an array";
    EXPECT_FALSE(std::any_of(all.end() - kGuard, all.end(), touched)) << "wrote above an array";
    return {all.begin() + kGuard, all.end() - kGuard};
  }

 private:
  static constexpr std::ptrdiff_t kGuard = 256;
  static constexpr int kPattern = 0x5a;
  Backend* backend_;
  Buffer buffer_;
};

inline void expect_bytes(std::span<const std::byte> found, std::span<const std::byte> expected,
                         std::size_t width, const std::string& what) {
  ASSERT_EQ(found.size(), expected.size()) << what;
  const auto at = std::mismatch(found.begin(), found.end(), expected.begin());
  if (at.first == found.end()) {
    return;
  }
  const auto element = static_cast<std::size_t>(at.first - found.begin()) / width;
  std::uint64_t bits[2] = {};
  std::memcpy(&bits[0], &found[element * width], width);
  std::memcpy(&bits[1], &expected[element * width], width);
  ADD_FAILURE() << what << ": element " << element << " of " << found.size() / width << " is "
                << std::hex << bits[0] << ", expected " << bits[1];
}

class Side {
 public:
  Side(Exchange exchange, const Communicator& communicator, Backend& backend)
      : exchange_(std::move(exchange)),
        rank_(communicator.rank()),
        world_(communicator.world()),
        backend_(backend) {
    for (std::size_t p = 0; p < exchange_.pieces.size(); ++p) {
      add(p);
      backend_.copy(arrays_[p].in, arrays_[p].input.data(), arrays_[p].input.size(), kHost);
    }
  }

  [[nodiscard]] std::span<const Transfer> transfers() const { return transfers_; }
  // The bytes that this rank gives, on the host; they stay valid as long as the side does.
  [[nodiscard]] std::span<const std::byte> input(std::size_t piece) const {
    return arrays_[piece].input;
  }
  [[nodiscard]] std::byte* in(std::size_t piece) const { return arrays_[piece].in; }
  [[nodiscard]] std::byte* out(std::size_t piece) const { return arrays_[piece].out; }
  [[nodiscard]] std::size_t output_bytes(std::size_t piece) const {
    return output_count(exchange_, piece, world_) * bytes_of(output_dtype(exchange_, piece));
  }

  [[nodiscard]] Event start(Communicator& communicator, const On& on) const {
    switch (exchange_.verb) {
      case Verb::kReduceScatter:
        return communicator.reduce_scatter(transfers_, exchange_.order, on);
      case Verb::kAllGather:
        return communicator.all_gather(transfers_, on);
      case Verb::kAllReduce:
        return communicator.all_reduce(transfers_, on);
      default:
        return communicator.all_to_all(transfers_, on);
    }
  }

  // Compares outputs, and inputs that lie apart, by bits.
  void check() const {
    for (std::size_t p = 0; p < arrays_.size(); ++p) {
      const Arrays& a = arrays_[p];
      const auto whole = a.array.read();
      const auto other = a.separate.has_value() ? a.separate->read() : std::vector<std::byte>{};
      const std::span<const std::byte> out = a.separate.has_value() ? other : whole;
      const auto offset = a.separate.has_value() ? 0 : a.out - a.array.data();
      check_output(p, out.subspan(static_cast<std::size_t>(offset), output_bytes(p)));
      if (a.separate.has_value()) {
        expect_bytes(whole, a.input, bytes_of(exchange_.pieces[p].dtype), name(p) + " input");
      }
    }
  }

  void check_output(std::size_t piece, std::span<const std::byte> found) const {
    expect_bytes(found, output_of(exchange_, piece, rank_, world_),
                 bytes_of(output_dtype(exchange_, piece)), name(piece));
  }

 private:
  struct Arrays {
    GuardedArray array;  // of the inputs; of both when in place
    std::optional<GuardedArray> separate;
    std::byte* in = nullptr;
    std::byte* out = nullptr;
    std::vector<std::byte> input;
  };

  void add(std::size_t piece) {
    const Piece& what = exchange_.pieces[piece];
    const std::size_t in_bytes = input_count(exchange_, piece, world_) * bytes_of(what.dtype);
    const std::size_t block = what.count * bytes_of(what.dtype) * static_cast<std::size_t>(rank_);
    auto input = input_of(exchange_, piece, rank_, world_);
    if (what.place == Place::kApart) {
      GuardedArray in(backend_, in_bytes);
      GuardedArray out(backend_, output_bytes(piece));
      std::byte* const in_at = in.data();
      std::byte* const out_at = out.data();
      arrays_.push_back({std::move(in), std::move(out), in_at, out_at, std::move(input)});
    } else {
      GuardedArray both(backend_, std::max(in_bytes, output_bytes(piece)));
      std::byte* const base = both.data();
      std::byte* const in_at = exchange_.verb == Verb::kAllGather ? base + block : base;
      std::byte* const out_at = exchange_.verb == Verb::kReduceScatter ? base + block : base;
      arrays_.push_back({std::move(both), std::nullopt, in_at, out_at, std::move(input)});
    }
    transfers_.push_back({arrays_.back().in, arrays_.back().out, what.count, what.dtype});
  }

  [[nodiscard]] std::string name(std::size_t piece) const {
    const Piece& what = exchange_.pieces[piece];
    return std::string(name_of(exchange_.verb)) + " of " + std::to_string(what.count) + " x " +
           std::string(zero::name_of(what.dtype)) +
           (what.place == Place::kInPlace ? " in place" : "") + ", array " + std::to_string(piece) +
           ", rank " + std::to_string(rank_) + " of " + std::to_string(world_);
  }

  Exchange exchange_;
  int rank_, world_;
  Backend& backend_;
  std::vector<Arrays> arrays_;
  std::vector<Transfer> transfers_;
};

}  // namespace zero::testing

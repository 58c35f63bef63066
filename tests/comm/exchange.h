// One collective with its data and its right answer, computed plainly from rank numbers.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "zero/communicator.h"

namespace zero::testing {

enum class Verb : std::uint8_t { kReduceScatter, kAllGather, kAllReduce, kAllToAll };
enum class Place : std::uint8_t { kApart, kInPlace };
enum class Values : std::uint8_t {
  kRough,  // exponents over 2^-20..2^20: any other order of summation gives other bits
  kExact,  // small integers: the same bits in any order
};

struct Piece {
  std::size_t count = 0;
  DType dtype = DType::kFloat32;
  Place place = Place::kApart;
};

struct Exchange {
  Verb verb = Verb::kAllReduce;
  std::vector<Piece> pieces{};
  std::uint64_t seed = 0;
  SumOrder order = SumOrder::kTree;
  Values values = Values::kRough;
};

inline std::string_view name_of(Verb verb) {
  constexpr std::string_view kNames[] = {"reduce_scatter", "all_gather", "all_reduce",
                                         "all_to_all"};
  return kNames[static_cast<std::size_t>(verb)];
}

[[nodiscard]] inline std::uint64_t mixed(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30U)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27U)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31U);
}

// Element `index` of the input that `rank` gives to piece `piece`.
struct InputValue {
  std::uint64_t hash = 0;
  Values values = Values::kRough;

  [[nodiscard]] float as_float() const {
    if (values == Values::kExact) {
      return static_cast<float>(static_cast<int>(hash % 15U)) - 7.0F;
    }
    const auto exponent = static_cast<std::uint32_t>(107U + (hash >> 32U) % 41U);
    return std::bit_cast<float>((static_cast<std::uint32_t>(hash) & 0x807fffffU) |
                                (exponent << 23U));
  }
  [[nodiscard]] bf16 as_bf16() const {  // no rounding: the test owns the bits
    return {static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(as_float()) >> 16U)};
  }
  [[nodiscard]] std::int64_t as_int64() const {  // eight of them do not overflow
    return static_cast<std::int64_t>(hash) >> 4;
  }
};

class Inputs {
 public:
  Inputs(const Exchange& exchange, int world) : exchange_(exchange), world_(world) {
    for (std::size_t piece = 0; piece < exchange.pieces.size(); ++piece) {
      for (int rank = 0; rank < world; ++rank) {
        lanes_.push_back(
            mixed(mixed(exchange.seed * 64U + piece) + static_cast<std::uint64_t>(rank)));
      }
    }
  }

  [[nodiscard]] InputValue at(std::size_t piece, int rank, std::size_t index) const {
    const std::size_t lane =
        piece * static_cast<std::size_t>(world_) + static_cast<std::size_t>(rank);
    return {mixed(lanes_[lane] ^ index), exchange_.values};
  }

  // The bytes of one element as a sender holds it.
  void store(std::size_t piece, int rank, std::size_t index, std::byte* to) const {
    const InputValue value = at(piece, rank, index);
    switch (exchange_.pieces[piece].dtype) {
      case DType::kFloat32: {
        const float x = value.as_float();
        std::memcpy(to, &x, sizeof x);
        return;
      }
      case DType::kBfloat16: {
        const bf16 x = value.as_bf16();
        std::memcpy(to, &x, sizeof x);
        return;
      }
      case DType::kInt64: {
        const std::int64_t x = value.as_int64();
        std::memcpy(to, &x, sizeof x);
        return;
      }
      default:  // these are only moved: any bits will do
        std::memcpy(to, &value.hash, bytes_of(exchange_.pieces[piece].dtype));
    }
  }

  // The bytes of the sum over ranks, as a receiver must find them.
  void store_sum(std::size_t piece, std::size_t index, std::byte* to) const {
    if (exchange_.pieces[piece].dtype == DType::kInt64) {
      std::int64_t sum = 0;
      for (int r = 0; r < world_; ++r) {
        sum += at(piece, r, index).as_int64();
      }
      std::memcpy(to, &sum, sizeof sum);
      return;
    }
    const float sum = tree(piece, 0, world_, index);
    std::memcpy(to, &sum, sizeof sum);
  }

 private:
  // The binary tree over [first, first + n), split at the largest power of two below n.
  [[nodiscard]] float tree(std::size_t piece, int first, int n, std::size_t index) const {
    if (n == 1) {
      const InputValue value = at(piece, first, index);
      return exchange_.pieces[piece].dtype == DType::kBfloat16 ? to_float(value.as_bf16())
                                                               : value.as_float();
    }
    int left = 1;
    while (2 * left < n) {
      left *= 2;
    }
    return tree(piece, first, left, index) + tree(piece, first + left, n - left, index);
  }

  const Exchange& exchange_;
  int world_;
  std::vector<std::uint64_t> lanes_;  // by piece, by rank: where the hashes start
};

// How many elements of `piece` a rank gives and gets.
[[nodiscard]] inline std::size_t input_count(const Exchange& x, std::size_t piece, int world) {
  const bool blocks = x.verb == Verb::kReduceScatter || x.verb == Verb::kAllToAll;
  return x.pieces[piece].count * (blocks ? static_cast<std::size_t>(world) : 1);
}
[[nodiscard]] inline std::size_t output_count(const Exchange& x, std::size_t piece, int world) {
  const bool blocks = x.verb == Verb::kAllGather || x.verb == Verb::kAllToAll;
  return x.pieces[piece].count * (blocks ? static_cast<std::size_t>(world) : 1);
}
[[nodiscard]] inline DType output_dtype(const Exchange& x, std::size_t piece) {
  const DType dtype = x.pieces[piece].dtype;
  return x.verb == Verb::kReduceScatter && dtype == DType::kBfloat16 ? DType::kFloat32 : dtype;
}

[[nodiscard]] inline std::vector<std::byte> input_of(const Exchange& x, std::size_t piece, int rank,
                                                     int world) {
  const std::size_t width = bytes_of(x.pieces[piece].dtype);
  std::vector<std::byte> bytes(input_count(x, piece, world) * width);
  const Inputs inputs(x, world);
  for (std::size_t i = 0; i * width < bytes.size(); ++i) {
    inputs.store(piece, rank, i, bytes.data() + i * width);
  }
  return bytes;
}

// What `rank` must find in its output.
[[nodiscard]] inline std::vector<std::byte> output_of(const Exchange& x, std::size_t piece,
                                                      int rank, int world) {
  const std::size_t n = x.pieces[piece].count;
  const std::size_t width = bytes_of(output_dtype(x, piece));
  const std::size_t own = static_cast<std::size_t>(rank) * n;
  std::vector<std::byte> bytes(output_count(x, piece, world) * width);
  const Inputs inputs(x, world);
  for (std::size_t i = 0; i * width < bytes.size(); ++i) {
    std::byte* to = bytes.data() + i * width;
    switch (x.verb) {
      case Verb::kReduceScatter:
        inputs.store_sum(piece, own + i, to);
        break;
      case Verb::kAllReduce:
        inputs.store_sum(piece, i, to);
        break;
      case Verb::kAllGather:
        inputs.store(piece, static_cast<int>(i / n), i % n, to);
        break;
      case Verb::kAllToAll:
        inputs.store(piece, static_cast<int>(i / n), own + i % n, to);
        break;
    }
  }
  return bytes;
}

}  // namespace zero::testing

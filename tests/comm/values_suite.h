// Conformance: what every verb leaves in memory, by bits.
#pragma once

#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include <gtest/gtest.h>

#include "tests/comm/launcher.h"
#include "tests/comm/side.h"

namespace zero::testing {

inline std::vector<std::size_t> counts_for(int world) {
  const auto w = static_cast<std::size_t>(world);
  return {0, 1, w - 1, w, 1009, 65537};
}

inline const std::vector<DType> kSummed = {DType::kFloat32, DType::kBfloat16, DType::kInt64};
inline const std::vector<DType> kMoved = {DType::kFloat32, DType::kBfloat16, DType::kUint8,
                                          DType::kInt64};  // every width

template <class T>
inline constexpr DType dtype_of_sum = dtype_of<T>::value;
template <>
inline constexpr DType dtype_of_sum<std::int64_t> = DType::kInt64;

class CommValues : public WorldTest {
 protected:
  // Every count, one exchange each.
  static void run_all_counts(Verb verb, DType dtype, Place place,
                             SumOrder order = SumOrder::kTree) {
    const std::vector<std::size_t> counts = counts_for(world());
    run([&](Communicator& communicator, Backend& backend) {
      const OwnStream stream(backend);
      std::uint64_t seed = 1;
      for (const std::size_t count : counts) {
        const Side side({.verb = verb,
                         .pieces = {{count, dtype, place}},
                         .seed = seed++,
                         .order = order,
                         .values = order == SumOrder::kTree ? Values::kRough : Values::kExact},
                        communicator, backend);
        backend.host_wait(side.start(communicator, {backend, stream}));
        side.check();
      }
    });
  }

  // One element of fp32 from each rank; every rank must pass `expect`.
  static void all_reduce_floats(const std::function<float(int rank)>& give,
                                const std::function<void(float)>& expect) {
    run([&](Communicator& communicator, Backend& backend) {
      const float mine = give(communicator.rank());
      const Buffer data = backend.allocate({.bytes = sizeof mine});
      backend.copy(data.data(), &mine, sizeof mine, kHost);
      const Transfer t{data.data(), data.data(), 1};
      backend.host_wait(communicator.all_reduce({&t, 1}, {backend, kHost}));
      float sum = 0;
      backend.copy(&sum, data.data(), sizeof sum, kHost);
      expect(sum);
    });
  }
};

TEST_P(CommValues, ReduceScatterIsTheBinaryTreeOverRanks) {
  for (const DType dtype : kSummed) {
    run_all_counts(Verb::kReduceScatter, dtype, Place::kApart);
  }
}

TEST_P(CommValues, ReduceScatterMayWriteIntoItsOwnBlock) {
  run_all_counts(Verb::kReduceScatter, DType::kFloat32, Place::kInPlace);
}

TEST_P(CommValues, ReduceScatterInTheTransportsOrderIsASum) {
  for (const DType dtype : kSummed) {
    run_all_counts(Verb::kReduceScatter, dtype, Place::kApart, SumOrder::kTransport);
  }
}

TEST_P(CommValues, AllGatherMovesEveryBit) {
  for (const DType dtype : kMoved) {
    run_all_counts(Verb::kAllGather, dtype, Place::kApart);
  }
}

TEST_P(CommValues, AllGatherMayReadItsOwnBlock) {
  for (const DType dtype : kMoved) {
    run_all_counts(Verb::kAllGather, dtype, Place::kInPlace);
  }
}

TEST_P(CommValues, AllReduceIsTheBinaryTreeOverRanks) {
  run_all_counts(Verb::kAllReduce, DType::kFloat32, Place::kApart);
  run_all_counts(Verb::kAllReduce, DType::kInt64, Place::kApart);
}

TEST_P(CommValues, AllReduceMayBeInPlace) {
  run_all_counts(Verb::kAllReduce, DType::kFloat32, Place::kInPlace);
  run_all_counts(Verb::kAllReduce, DType::kInt64, Place::kInPlace);
}

TEST_P(CommValues, AllToAllMovesEveryBit) {
  for (const DType dtype : kMoved) {
    run_all_counts(Verb::kAllToAll, dtype, Place::kApart);
  }
}

TEST_P(CommValues, AGroupMixesDtypesCountsAndEmptyArrays) {
  const auto w = static_cast<std::size_t>(world());
  const std::vector<Exchange> groups = {
      {.verb = Verb::kReduceScatter,
       .pieces = {{1009, DType::kBfloat16},
                  {0, DType::kFloat32},
                  {w, DType::kFloat32, Place::kInPlace},
                  {3, DType::kInt64},
                  {1, DType::kFloat32}}},
      {.verb = Verb::kAllGather,
       .pieces = {{7, DType::kUint8},
                  {65, DType::kFloat16, Place::kInPlace},
                  {9, DType::kUint16},
                  {1009, DType::kFloat32, Place::kInPlace},
                  {0, DType::kBfloat16, Place::kInPlace},
                  {5, DType::kInt64},
                  {3, DType::kBfloat16}}},
      {.verb = Verb::kAllReduce,
       .pieces = {{1009, DType::kFloat32, Place::kInPlace},
                  {0, DType::kInt64},
                  {14, DType::kInt64, Place::kInPlace},
                  {1, DType::kFloat32}}},
      {.verb = Verb::kAllToAll,
       .pieces = {{0, DType::kFloat32},
                  {257, DType::kBfloat16},
                  {3, DType::kUint8},
                  {5, DType::kFloat16},
                  {11, DType::kUint16}}},
      {.verb = Verb::kAllReduce, .pieces = {}},
      {.verb = Verb::kAllGather, .pieces = {{0, DType::kFloat32}}},
  };
  run([&](Communicator& communicator, Backend& backend) {
    const OwnStream stream(backend);
    for (const Exchange& group : groups) {
      const Side side(group, communicator, backend);
      backend.host_wait(side.start(communicator, {backend, stream}));
      side.check();
    }
  });
}

TEST_P(CommValues, EmptyArraysMayBeNull) {
  run([](Communicator& communicator, Backend& backend) {
    const Transfer nothing{};
    const On on{backend, kHost};
    backend.host_wait(communicator.reduce_scatter({&nothing, 1}, SumOrder::kTree, on));
    backend.host_wait(communicator.all_gather({&nothing, 1}, on));
    backend.host_wait(communicator.all_reduce({&nothing, 1}, on));
    backend.host_wait(communicator.all_to_all({&nothing, 1}, on));
  });
}

TEST_P(CommValues, OnTheHostEveryVerbIsDoneWhenItReturns) {
  run([](Communicator& communicator, Backend& backend) {
    for (const Verb verb :
         {Verb::kReduceScatter, Verb::kAllGather, Verb::kAllReduce, Verb::kAllToAll}) {
      const Side side({.verb = verb, .pieces = {{1009}}}, communicator, backend);
      const Event done = side.start(communicator, {backend, kHost});
      EXPECT_TRUE(backend.done(done));
      side.check();
    }
  });
}

// Rank r gives 2r + 1 in every element (so 1 and 3 make 4); the sum over W ranks is W * W.
template <class In, class Out>
void expect_odd_numbers_summed(Communicator& communicator, Backend& backend, std::size_t count,
                               In (*make)(int)) {
  const int w = communicator.world();
  const std::vector<In> mine(count * static_cast<std::size_t>(w),
                             make(2 * communicator.rank() + 1));
  const GuardedArray in(backend, mine.size() * sizeof(In));
  const GuardedArray out(backend, count * sizeof(Out));
  backend.copy(in.data(), mine.data(), mine.size() * sizeof(In), kHost);
  const Transfer t{in.data(), out.data(), count, dtype_of_sum<In>};
  const On on{backend, kHost};
  backend.host_wait(communicator.reduce_scatter({&t, 1}, SumOrder::kTransport, on));
  const std::vector<Out> sums(count, static_cast<Out>(w * w));
  expect_bytes(out.read(), std::as_bytes(std::span(sums)), sizeof(Out), "a sum, no average");
}

// B010: on some transports an average came back as a sum, or a sum as an average.
TEST_P(CommValues, B010ASumIsNeverAnAverage) {
  const auto squared = static_cast<float>(world() * world());
  all_reduce_floats([](int rank) { return static_cast<float>(2 * rank + 1); },
                    [=](float sum) { EXPECT_EQ(sum, squared); });
  run([](Communicator& communicator, Backend& backend) {
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{5}}) {
      expect_odd_numbers_summed<float, float>(communicator, backend, count,
                                              [](int x) { return static_cast<float>(x); });
      expect_odd_numbers_summed<bf16, float>(communicator, backend, count,
                                             [](int x) { return to_bf16(static_cast<float>(x)); });
      expect_odd_numbers_summed<std::int64_t, std::int64_t>(communicator, backend, count,
                                                            [](int x) { return std::int64_t{x}; });
    }
  });
}

TEST_P(CommValues, ANegativeZeroFromEveryRankStaysNegative) {
  all_reduce_floats([](int) { return -0.0F; },
                    [](float sum) { EXPECT_EQ(std::bit_cast<std::uint32_t>(sum), 0x80000000U); });
  run([](Communicator& communicator, Backend& backend) {
    const auto w = static_cast<std::size_t>(communicator.world());
    const std::vector<bf16> zeros(w, bf16{0x8000});
    const GuardedArray in(backend, w * sizeof(bf16));
    const GuardedArray out(backend, sizeof(float));
    backend.copy(in.data(), zeros.data(), w * sizeof(bf16), kHost);
    const Transfer t{in.data(), out.data(), 1, DType::kBfloat16};
    backend.host_wait(communicator.reduce_scatter({&t, 1}, SumOrder::kTree, {backend, kHost}));
    EXPECT_EQ(out.read(),
              (std::vector<std::byte>{std::byte{0}, std::byte{0}, std::byte{0}, std::byte{0x80}}));
  });
}

TEST_P(CommValues, NonFiniteValuesOfOneRankReachAll) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  const int last = world() - 1;
  for (const float special : {kInf, -kInf}) {
    all_reduce_floats([=](int rank) { return rank == last ? special : 1.0F; },
                      [=](float sum) { EXPECT_EQ(sum, special); });
  }
  const auto expect_nan = [](float sum) { EXPECT_TRUE(std::isnan(sum)) << sum; };
  all_reduce_floats(
      [=](int rank) { return rank == last ? std::numeric_limits<float>::quiet_NaN() : 1.0F; },
      expect_nan);
  if (last > 0) {
    all_reduce_floats([=](int rank) { return rank == last ? kInf
                                             : rank == 0  ? -kInf
                                                          : 1.0F; },
                      expect_nan);
  }
}

TEST_P(CommValues, MovingKeepsTheBitsOfNans) {
  run([](Communicator& communicator, Backend& backend) {
    const auto w = static_cast<std::size_t>(communicator.world());
    // signalling and quiet NaNs with a payload that tells the sender
    const auto nan_of = [](std::size_t rank) {
      return static_cast<std::uint32_t>(0x7f800001U | ((rank & 1U) << 22U) | (rank << 8U));
    };
    const std::uint32_t mine = nan_of(static_cast<std::size_t>(communicator.rank()));
    const GuardedArray in(backend, sizeof mine);
    const GuardedArray out(backend, w * sizeof mine);
    backend.copy(in.data(), &mine, sizeof mine, kHost);
    const Transfer t{in.data(), out.data(), 1, DType::kFloat32};
    backend.host_wait(communicator.all_gather({&t, 1}, {backend, kHost}));
    const auto bytes = out.read();
    for (std::size_t r = 0; r < w; ++r) {
      std::uint32_t found = 0;
      std::memcpy(&found, &bytes[r * sizeof found], sizeof found);
      EXPECT_EQ(found, nan_of(r));
    }
  });
}

}  // namespace zero::testing

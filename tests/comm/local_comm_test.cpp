// The local communicator's values, orderings and splits, and what only it promises.
#include <cstdint>
#include <utility>
#include <vector>

#include <gtest/gtest.h>

#include "zero/cpu.h"
#include "zero/launch.h"

#include "tests/comm/counting_backend.h"
#include "tests/comm/order_suite.h"
#include "tests/comm/split_suite.h"
#include "tests/comm/values_suite.h"

namespace zero::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Local, CommValues,
                         ::testing::Combine(::testing::Values(local_launcher(1)),
                                            ::testing::Values(1, 2, 3, 4, 7, 8)),
                         name_of_instance);
INSTANTIATE_TEST_SUITE_P(LocalTwoThreads, CommValues,
                         ::testing::Combine(::testing::Values(local_launcher(2)),
                                            ::testing::Values(3)),
                         name_of_instance);
INSTANTIATE_TEST_SUITE_P(Local, CommOrder,
                         ::testing::Combine(::testing::Values(local_launcher()),
                                            ::testing::Values(1, 2, 3, 4, 8)),
                         name_of_instance);
INSTANTIATE_TEST_SUITE_P(Local, CommSplit,
                         ::testing::Combine(::testing::Values(local_launcher()),
                                            ::testing::Values(1, 2, 3, 4, 7, 8)),
                         name_of_instance);

// communicator.h states what each rank sends; ranks that read in place receive as much.
TEST(LocalCommunicator, ReadsAsManyBytesOfOthersAsTheWireWouldCarry) {
  const Watchdog watchdog;
  for (const int world : {1, 2, 3, 4, 7, 8}) {
    run_ranks(world, [](Communicator& communicator) {
      const auto device = make_cpu_backend();
      CountingBackend counting(*device);
      const auto w = static_cast<std::size_t>(communicator.world());
      const std::size_t n = 840;  // every world divides it
      const std::vector<std::pair<Exchange, std::uint64_t>> cases = {
          {{Verb::kReduceScatter, {{n, DType::kFloat32}}}, (w - 1) * n * 4},
          {{Verb::kReduceScatter, {{n, DType::kBfloat16}, {n, DType::kInt64}}}, (w - 1) * n * 10},
          {{Verb::kReduceScatter, {{n, DType::kFloat32, Place::kInPlace}}}, (w - 1) * n * 4},
          {{Verb::kAllGather, {{n, DType::kBfloat16}}}, (w - 1) * n * 2},
          {{Verb::kAllGather, {{n, DType::kFloat32, Place::kInPlace}}}, (w - 1) * n * 4},
          {{Verb::kAllReduce, {{n, DType::kFloat32}}}, 2 * (w - 1) * (n / w) * 4},
          {{Verb::kAllReduce, {{n, DType::kInt64, Place::kInPlace}}}, 2 * (w - 1) * (n / w) * 8},
          {{Verb::kAllToAll, {{n, DType::kFloat32}}}, (w - 1) * n * 4},
      };
      for (const auto& [exchange, bytes] : cases) {
        const Side side(exchange, communicator, counting);
        (void)counting.take_foreign_bytes();  // of filling the inputs
        counting.host_wait(side.start(communicator, {counting, kHost}));
        EXPECT_EQ(counting.take_foreign_bytes(), bytes)
            << name_of(exchange.verb) << " over " << w << " ranks";
      }
    });
  }
}

// What a rank brings need not outlive the call.
TEST(LocalCommunicator, KeepsNothingOfTheCallersArguments) {
  const Watchdog watchdog;
  run_ranks(2, [](Communicator& communicator) {
    const auto backend = make_cpu_backend();
    const Side side({.verb = Verb::kAllReduce, .pieces = {{64}}}, communicator, *backend);
    const OwnStream stream(*backend);
    Event done;
    {
      auto label = std::string("a label that is too long for the small string optimization");
      std::vector<Transfer> transfers(side.transfers().begin(), side.transfers().end());
      std::vector<Event> after(3);
      if (communicator.rank() == 0) {
        backend->call(stream, [] { std::this_thread::sleep_for(milliseconds(20)); });
      }
      done = communicator.all_reduce(transfers, {*backend, stream, after, label});
      label.assign(label.size(), 'x');
      transfers.assign(1, {});
    }
    backend->host_wait(done);
    side.check();
  });
}

}  // namespace
}  // namespace zero::testing

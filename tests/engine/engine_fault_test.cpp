// Every allocation and every task of one rank fails in turn: all ranks end with a typed error in
// time, and nothing leaks.
#include <algorithm>
#include <array>
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "memory/fault.h"
#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

constexpr int kWorld = 3;
constexpr int kFaulty = 1;

struct Stream {
  explicit Stream(Backend& device_in) : device(device_in), ref(device_in.make_stream()) {}
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  ~Stream() { device.release_stream(ref); }
  Backend& device;
  StreamRef ref;
};

class EngineFaults : public ::testing::TestWithParam<Stage> {
 protected:
  struct Outcome {
    std::vector<Ending> endings;
    std::uint64_t allocations = 0, tasks = 0;  // of the faulty rank
  };

  static ModelSpec model() {
    ModelSpec out;
    const GroupId all = out.add_group("all");
    const GroupId low = out.add_group("low", {.precision = kBf16WithMaster});
    out.add(out.add_unit("tied", GradientLife::kUntilReady), "w", {311}, all);
    const UnitId h = out.add_unit("h");
    out.add(h, "w", {700}, low);
    out.add(h, "unused", {5}, all);
    out.add(out.add_unit("head"), "w", {}, all);
    return out;
  }

  // A training loop with one of everything, on an asynchronous stream where it may be.
  static void train(Optimizer& optimizer, Backend& device) {
    std::array<float, 700> memory{};
    const Stream stream(device);
    optimizer.initialize(initial_values);
    for (int step = 0; step < 2; ++step) {
      for (const int m : {0, 1}) {
        for (const std::size_t u : {0U, 1U, 2U}) {
          const ParameterLease lease = optimizer.parameters(unit(u), stream.ref);
          device.call(stream.ref, [] {});
        }
        MicroBatch micro = optimizer.begin_micro_batch({.last = m == 1 ? Last::kYes : Last::kNo});
        write(optimizer, micro, parameter(3), [](ParameterId, std::size_t) { return 1.0F; });
        micro.ready(unit(2), stream.ref);
        micro.mark_unused(parameter(2));
        device.call(stream.ref, [&memory] { memory.fill(1); });
        micro.add_gradient(parameter(1), memory.data(), DType::kFloat32, stream.ref);
        micro.ready(unit(1), stream.ref);
        {
          GradientLease lease = micro.gradients(unit(0), stream.ref);
          float* out = lease.data<float>(parameter(0));
          device.call(stream.ref, [out] { std::fill(out, out + 311, 1.0F); });
        }
        micro.ready(unit(0), stream.ref);
      }
      EXPECT_TRUE(optimizer.step().get().applied);
    }
    optimizer.visit_all(Values::kMaster, [](ParameterId, std::uint64_t, std::span<const float>) {});
    (void)optimizer.state_hash();
  }

  static Outcome run(FaultBackend::Faults faults) {
    Outcome out;
    Options options{.stage = GetParam(), .deadline = scaled(std::chrono::seconds(10))};
    options.bucket_bytes = 1;
    out.endings = endings(kWorld, [&](Communicator& communicator) {
      const bool faulty = communicator.rank() == kFaulty;
      std::unique_ptr<Ledger> owned = make_cpu_backend();
      const Ledger& ledger = *owned;
      FaultBackend device(std::move(owned), faulty ? faults : FaultBackend::Faults{});
      const auto finish = [&] {
        EXPECT_EQ(ledger.usage().current_bytes, 0U);
        EXPECT_EQ(ledger.usage().host_bytes, 0U);
        if (faulty) {
          out.allocations = device.allocations();
          out.tasks = device.tasks();
        }
      };
      try {
        Optimizer optimizer(make_plan(model(), options, {.shard_ranks = kWorld}), device,
                            {communicator});
        train(optimizer, device);
      } catch (...) {
        finish();
        throw;
      }
      finish();
    });
    return out;
  }

  static void expect_typed(const Outcome& outcome, const std::string& which) {
    for (const Ending& end : outcome.endings) {
      EXPECT_TRUE(end.kind == "Error" || end.kind == "OutOfMemory" || end.kind == "CommError")
          << which << ": " << end.kind << " " << end.what;
      // All were told: nobody had to wait for the deadline, or to see the others leave.
      EXPECT_EQ(end.what.find("did not come within"), std::string::npos) << which << end.what;
      EXPECT_EQ(end.what.find("has left"), std::string::npos) << which << end.what;
    }
  }

 private:
  Watchdog watchdog_{std::chrono::seconds(200)};
};
INSTANTIATE_TEST_SUITE_P(All, EngineFaults, every_stage());

TEST_P(EngineFaults, EndEveryAllocationInAnErrorOnAllRanksWithoutALeak) {
  const Outcome clean = run({});
  for (const Ending& end : clean.endings) {
    ASSERT_EQ(end.what, "");
  }
  ASSERT_GT(clean.allocations, 10U);
  for (std::uint64_t k = 0; k < clean.allocations; ++k) {
    const Outcome found = run({.allocation = k});
    expect_typed(found, "allocation " + std::to_string(k));
    EXPECT_EQ(found.endings[kFaulty].kind, "OutOfMemory") << k;
  }
  EXPECT_EQ(run({.allocation = clean.allocations}).endings[kFaulty].what, "");
}

TEST_P(EngineFaults, EndEveryTaskInAnErrorOnAllRanksWithoutALeak) {
  const std::uint64_t count = run({}).tasks;
  ASSERT_GT(count, 100U);
  for (std::uint64_t k = 0; k < count; ++k) {
    expect_typed(run({.task = k}), "task " + std::to_string(k));
  }
  EXPECT_EQ(run({.task = count + 1000}).endings[kFaulty].what, "");
}

}  // namespace
}  // namespace zero::testing

#include "zero/cpu.h"

#include "tests/memory/kernel_suite.h"
#include "tests/memory/step_suite.h"

namespace zero::testing {
namespace {

template <int kThreads>
struct CpuFactory {
  static std::unique_ptr<Backend> make() { return make_cpu_backend(kUnlimited, kThreads); }
};
using Factories = ::testing::Types<CpuFactory<1>, CpuFactory<2>, CpuFactory<3>>;

INSTANTIATE_TYPED_TEST_SUITE_P(Cpu, BackendSuite, Factories);
INSTANTIATE_TYPED_TEST_SUITE_P(Cpu, KernelSuite, Factories);
INSTANTIATE_TYPED_TEST_SUITE_P(Cpu, StepSuite, Factories);

TEST(CpuBackend, RefusesFewerThanOneThread) {
  for (const int threads : {0, -1}) {
    try {
      (void)make_cpu_backend(kUnlimited, threads);
      FAIL();
    } catch (const UsageError& e) {
      EXPECT_NE(std::string(e.what()).find(std::to_string(threads)), std::string::npos);
    }
  }
}

TEST(CpuBackend, RefusesAStreamOfAnotherBackend) {
  const auto backend = make_cpu_backend();
  int x = 0;
  EXPECT_THROW(backend->fill(&x, 0, sizeof(x), {&x, StreamRef::Kind::kCuda}), UsageError);
  EXPECT_THROW((void)backend->record({nullptr, StreamRef::Kind::kCpu}), UsageError);
}

TEST(CpuBackend, ReportsWhatTheSystemCannotGive) {
  const auto backend = make_cpu_backend();
  try {
    (void)backend->allocate({std::size_t{1} << 55U, Category::kUser});
    FAIL();
  } catch (const OutOfMemory& e) {
    EXPECT_EQ(e.facts().asked_bytes, std::uint64_t{1} << 55U);
  }
  EXPECT_EQ(backend->usage().current_bytes, 0U);
  EXPECT_EQ(backend->usage().peak_bytes, 0U) << "what failed was never in use";
}

TEST(CpuBackend, StartsLargeArraysAtDifferentOffsets) {
  const auto backend = make_cpu_backend();
  std::vector<Buffer> buffers;
  std::vector<std::uintptr_t> offsets;
  for (int i = 0; i < 6; ++i) {
    buffers.push_back(backend->allocate({64UL << 20U, Category::kUser}));
    offsets.push_back(reinterpret_cast<std::uintptr_t>(buffers.back().data()) % (64UL << 10U));
  }
  std::sort(offsets.begin(), offsets.end());
  EXPECT_EQ(std::adjacent_find(offsets.begin(), offsets.end()), offsets.end());
}

TEST(CpuBackend, PassesOnTheErrorOfARuleFromAnyThread) {
  UpdateRule rule = adamw();
  rule.cpu = [](const UpdateArguments&, std::size_t first, std::size_t last) {
    if (first <= 3 && 3 < last) {
      throw UsageError("rule");
    }
  };
  for (const int threads : {1, 2, 3}) {
    const auto backend = make_cpu_backend(kUnlimited, threads);
    const DeviceStep step(*backend, usual_step_case(1));
    EXPECT_THROW(backend->update(rule, step.arguments, kHost), UsageError);
    EXPECT_NO_THROW(backend->update(adamw(), step.arguments, kHost));
  }
}

TEST(CpuBackend, SharesItsThreadsBetweenStreamsAndCallers) {
  const auto backend = make_cpu_backend(kUnlimited, 3);
  const std::size_t count = 200'003;
  const auto values = values_as<float>(count, 1);
  std::vector<StreamRef> streams;
  std::vector<Buffer> from, to;
  for (int i = 0; i < 4; ++i) {
    streams.push_back(backend->make_stream());
    from.push_back(upload(*backend, values));
    to.push_back(backend->allocate({count * sizeof(float), Category::kUser}));
  }
  for (int round = 0; round < 20; ++round) {
    for (std::size_t i = 0; i < streams.size(); ++i) {
      backend->copy(to[i].data(), from[i].data(), to[i].bytes(), streams[i]);
    }
    backend->fill(from[0].data(), 0, 0, kHost);
  }
  for (std::size_t i = 0; i < streams.size(); ++i) {
    backend->host_wait(backend->record(streams[i]));
    EXPECT_EQ(differ(download<float>(*backend, to[i]), values), "");
    backend->release_stream(streams[i]);
  }
}

}  // namespace
}  // namespace zero::testing

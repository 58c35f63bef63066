#include "zero/ledger.h"

#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "zero/cpu.h"
#include "zero/error.h"

#include "memory/fault.h"
#include "tests/memory/kernel_suite.h"
#include "tests/memory/step_suite.h"

namespace zero::testing {
namespace {

struct LedgerFactory {
  static std::unique_ptr<Backend> make() {
    return std::make_unique<Ledger>(make_cpu_backend(), 1ULL << 40U);
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(Ledger, BackendSuite, LedgerFactory);
INSTANTIATE_TYPED_TEST_SUITE_P(Ledger, KernelSuite, LedgerFactory);
INSTANTIATE_TYPED_TEST_SUITE_P(Ledger, StepSuite, LedgerFactory);

TEST(Ledger, CountsBytesByCategoryAndPaddingApart) {
  const auto ledger = make_cpu_backend();
  const Buffer a = ledger->allocate({1000, Category::kParameters, 24});
  const Buffer b = ledger->allocate({500, Category::kStates});
  const Buffer c = ledger->allocate({7, Category::kStates, 7});
  const MemoryUsage usage = ledger->usage();
  EXPECT_EQ(usage.of(Category::kParameters), 976U);
  EXPECT_EQ(usage.of(Category::kStates), 500U);
  EXPECT_EQ(usage.of(Category::kPadding), 31U);
  EXPECT_EQ(usage.of(Category::kUser), 0U);
  EXPECT_EQ(usage.current_bytes, 1507U);
  EXPECT_EQ(usage.peak_bytes, 1507U);
  EXPECT_EQ(usage.allocations, 3U);
}

TEST(Ledger, KeepsThePeakOfEachCategoryAndOfAll) {
  const auto ledger = make_cpu_backend();
  {
    const Buffer a = ledger->allocate({300, Category::kBuckets, 100});
    const Buffer b = ledger->allocate({50, Category::kUser});
  }
  { const Buffer c = ledger->allocate({260, Category::kUser}); }
  const MemoryUsage usage = ledger->usage();
  EXPECT_EQ(usage.current_bytes, 0U);
  EXPECT_EQ(usage.current, (std::array<std::uint64_t, kCategoryCount>{}));
  EXPECT_EQ(usage.peak_bytes, 350U) << "not the sum of the categories' peaks";
  EXPECT_EQ(usage.peak[static_cast<std::size_t>(Category::kBuckets)], 200U);
  EXPECT_EQ(usage.peak[static_cast<std::size_t>(Category::kPadding)], 100U);
  EXPECT_EQ(usage.peak[static_cast<std::size_t>(Category::kUser)], 260U);
}

TEST(Ledger, CountsABufferOnceHoweverItMoves) {
  const auto ledger = make_cpu_backend();
  Buffer a = ledger->allocate({100, Category::kUser});
  Buffer b = std::move(a);
  EXPECT_EQ(ledger->usage().current_bytes, 100U);
  Buffer c = ledger->allocate({10, Category::kUser});
  c = std::move(b);
  EXPECT_EQ(ledger->usage().current_bytes, 100U);
  c = Buffer();
  EXPECT_EQ(ledger->usage().current_bytes, 0U);
}

TEST(Ledger, GivesTheWholeBudgetAndNotAByteMore) {
  const auto ledger = make_cpu_backend(1000);
  Buffer first = ledger->allocate({600, Category::kParameters});
  const Buffer rest = ledger->allocate({400, Category::kStates});
  EXPECT_THROW((void)ledger->allocate({1, Category::kUser}), OutOfMemory);
  EXPECT_NO_THROW((void)ledger->allocate({0, Category::kUser}));
  first = Buffer();
  EXPECT_THROW((void)ledger->allocate({601, Category::kUser}), OutOfMemory);
  EXPECT_NO_THROW((void)ledger->allocate({600, Category::kUser}));
  EXPECT_EQ(ledger->usage().peak_bytes, 1000U);
}

TEST(Ledger, RefusesWithATableAndWhatToDo) {
  const auto ledger = make_cpu_backend(4096);
  const Buffer a = ledger->allocate({2048, Category::kParameters, 1024});
  const std::uint64_t before = ledger->usage().allocations;
  try {
    (void)ledger->allocate({3000, Category::kLiveUnits});
    FAIL();
  } catch (const OutOfMemory& e) {
    EXPECT_EQ(e.facts().asked_bytes, 3000U);
    EXPECT_EQ(e.facts().used_bytes, 2048U);
    EXPECT_EQ(e.facts().budget_bytes, 4096U);
    const std::string what = e.what();
    for (const std::string_view part :
         {std::string_view("3000"), std::string_view("4096"), name_of(Category::kParameters),
          name_of(Category::kPadding), name_of(Category::kLiveUnits), std::string_view("1.00 KiB"),
          std::string_view("Options::stage")}) {
      EXPECT_NE(what.find(part), std::string::npos) << part << "\n" << what;
    }
    EXPECT_EQ(what.find(name_of(Category::kBuckets)), std::string::npos) << "an empty line";
  }
  EXPECT_EQ(ledger->usage().current_bytes, 2048U);
  EXPECT_EQ(ledger->usage().peak_bytes, 2048U);
  EXPECT_EQ(ledger->usage().allocations, before);
}

TEST(Ledger, RefusesSizesThatOverflow) {
  const auto ledger = make_cpu_backend();
  const Buffer a = ledger->allocate({100, Category::kUser});
  EXPECT_THROW((void)ledger->allocate({~std::size_t{0}, Category::kUser}), OutOfMemory);
  EXPECT_THROW((void)ledger->allocate({~std::size_t{0} - 50, Category::kUser}), OutOfMemory);
  EXPECT_EQ(ledger->usage().current_bytes, 100U);
}

TEST(Ledger, RefusesMorePaddingThanBytes) {
  const auto ledger = make_cpu_backend();
  EXPECT_THROW((void)ledger->allocate({10, Category::kUser, 11}), UsageError);
}

TEST(Ledger, CountsPageLockedMemoryOutsideTheBudget) {
  const auto ledger = make_cpu_backend(100);
  {
    const Buffer pinned = ledger->allocate_host({5000, Category::kScratch});
    const MemoryUsage usage = ledger->usage();
    EXPECT_EQ(usage.host_bytes, 5000U);
    EXPECT_EQ(usage.current_bytes, 0U);
    EXPECT_EQ(usage.of(Category::kScratch), 0U);
    EXPECT_EQ(usage.allocations, 1U);
  }
  EXPECT_EQ(ledger->usage().host_bytes, 0U);
  EXPECT_EQ(ledger->usage().host_peak_bytes, 5000U);
  EXPECT_EQ(ledger->usage().peak_bytes, 0U);
}

TEST(Ledger, CountsAdoptedMemoryWithinTheBudget) {
  const auto ledger = make_cpu_backend(100);
  std::vector<char> mine(100);
  {
    const Buffer adopted = ledger->adopt(mine.data(), {100, Category::kUser});
    EXPECT_EQ(ledger->usage().of(Category::kUser), 100U);
    EXPECT_THROW((void)ledger->adopt(mine.data(), {1, Category::kUser}), OutOfMemory);
  }
  EXPECT_EQ(ledger->usage().current_bytes, 0U);
  mine.assign(100, 'x');
}

TEST(Ledger, CountsNothingThatTheInnerBackendDidNotGive) {
  Ledger ledger(
      std::make_unique<FaultBackend>(make_cpu_backend(), FaultBackend::Faults{.allocation = 1}),
      kUnlimited);
  const Buffer a = ledger.allocate({64, Category::kUser});
  EXPECT_THROW((void)ledger.allocate({64, Category::kUser}), OutOfMemory);
  EXPECT_EQ(ledger.usage().current_bytes, 64U);
  EXPECT_EQ(ledger.usage().peak_bytes, 64U);
  EXPECT_EQ(ledger.usage().allocations, 1U);
}

TEST(Ledger, IsExactWhenThreadsAllocateAtOnce) {
  const auto ledger = make_cpu_backend(4 * 100 * 64);
  const Buffer always = ledger->allocate({1, Category::kStates, 1});
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&ledger] {
      for (int round = 0; round < 20; ++round) {
        std::vector<Buffer> held;
        for (int i = 0; i < 90; ++i) {
          held.push_back(ledger->allocate({64, Category::kUser, 4}));
        }
        held.push_back(ledger->allocate_host({32, Category::kUser}));
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  const MemoryUsage usage = ledger->usage();
  EXPECT_EQ(usage.current_bytes, 1U);
  EXPECT_EQ(usage.of(Category::kPadding), 1U);
  EXPECT_EQ(usage.of(Category::kUser), 0U);
  EXPECT_EQ(usage.host_bytes, 0U);
  EXPECT_EQ(usage.allocations, 1U + 4 * 20 * 91);
  EXPECT_LE(usage.peak_bytes, 1U + 4 * 90 * 64);
}

TEST(Ledger, RefusesToStandAroundNothing) {
  EXPECT_THROW(Ledger(nullptr, 1), UsageError);
}

}  // namespace
}  // namespace zero::testing

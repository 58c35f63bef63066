// The chunk table: one launch updates what it lists, so it lists each owned element once.
#include "core/chunks.h"

#include <map>
#include <vector>

#include <gtest/gtest.h>

#include "tests/core/random_model.h"

namespace zero {
namespace {

struct Row {
  Chunk chunk;
  bool own = false;
};

std::vector<Row> rows_of(const Plan& plan, int rank, std::uint32_t class_index) {
  std::vector<Row> rows;
  for_each_chunk(plan, rank, class_index, [&](const Chunk& chunk, bool own) {
    rows.push_back({chunk, own});
  });
  return rows;
}

template <class Fn>
void for_each_plan(Fn&& fn) {
  int plans = 0;
  for (std::uint64_t seed = 0; seed < 120; ++seed) {
    testing::RandomModel random(seed);
    const ModelSpec model = random.model();
    const int world = 1 + static_cast<int>(seed % 8);
    const Plan plan = make_plan(model, random.options(), {.shard_ranks = world});
    SCOPED_TRACE("seed " + std::to_string(seed));
    fn(plan);
    ++plans;
    if (::testing::Test::HasFailure()) {
      return;
    }
  }
  ASSERT_EQ(plans, 120);
}

// All extents of a rank and class, in order of offset.
std::vector<Extent> extents_of(const Plan& plan, int rank, std::uint32_t class_index) {
  std::vector<Extent> result;
  for (std::size_t u = 0; u < plan.model().units().size(); ++u) {
    for (const Extent& e : plan.extents(rank, static_cast<UnitId>(u))) {
      if (plan.segments()[plan.place(e.parameter).segment].class_index == class_index) {
        result.push_back(e);
      }
    }
  }
  return result;
}

TEST(Chunks, OwnRowsJoinedAreTheExtents) {
  for_each_plan([](const Plan& plan) {
    for (std::uint32_t c = 0; c < plan.classes().size(); ++c) {
      for (int rank = 0; rank < plan.world().shard_ranks; ++rank) {
        const std::vector<Extent> wanted = extents_of(plan, rank, c);
        std::size_t extent = 0;
        std::uint64_t done = 0;  // elements of that extent
        for (const Row& row : rows_of(plan, rank, c)) {
          if (!row.own) {
            break;
          }
          ASSERT_LT(extent, wanted.size());
          ASSERT_EQ(row.chunk.parameter, index(wanted[extent].parameter));
          ASSERT_EQ(row.chunk.first, wanted[extent].first + done);
          done += row.chunk.count;
          ASSERT_LE(done, wanted[extent].count);
          if (done == wanted[extent].count) {
            ++extent;
            done = 0;
          }
        }
        EXPECT_EQ(extent, wanted.size()) << "class " << c << ", rank " << rank;
      }
    }
  });
}

TEST(Chunks, RowsAreShortAndStartAtMultiplesOfTheGranuleOfTheirParameter) {
  for_each_plan([](const Plan& plan) {
    for (std::uint32_t c = 0; c < plan.classes().size(); ++c) {
      for (const Row& row : rows_of(plan, plan.world().shard_ranks / 2, c)) {
        EXPECT_EQ(row.chunk.first % kGranule, 0U);
        EXPECT_EQ(row.chunk.parameter_at % kGranule, 0U);
        EXPECT_EQ(row.chunk.gradient_at % kGranule, 0U);
        EXPECT_EQ(row.chunk.state_at % kGranule, 0U);
        EXPECT_GT(row.chunk.count, 0U);
        EXPECT_LE(row.chunk.count, kChunkElements);
      }
    }
  });
}

TEST(Chunks, OffsetsPointIntoShardsWhereTheStageShardsAndIntoWholeArraysElsewhere) {
  for_each_plan([](const Plan& plan) {
    const auto world = static_cast<std::uint64_t>(plan.world().shard_ranks);
    for (std::uint32_t c = 0; c < plan.classes().size(); ++c) {
      for (std::uint64_t rank = 0; rank < world; ++rank) {
        for (const Row& row : rows_of(plan, static_cast<int>(rank), c)) {
          const Place& place = plan.place(static_cast<ParameterId>(row.chunk.parameter));
          const Segment& s = plan.segments()[place.segment];
          const std::uint64_t whole = s.offset + place.offset + row.chunk.first;
          const std::uint64_t shard =
              s.offset / world + place.offset + row.chunk.first - rank * (s.elements / world);
          const auto wanted = [&](Stage since) {
            return plan.options().stage >= since ? shard : whole;
          };
          ASSERT_EQ(row.chunk.parameter_at, wanted(Stage::kParameters));
          ASSERT_EQ(row.chunk.gradient_at, wanted(Stage::kGradients));
          ASSERT_EQ(row.chunk.state_at, wanted(Stage::kStates));
        }
      }
    }
  });
}

TEST(Chunks, AtStage0EveryRankListsEveryElementOnceAndItsOwnFirst) {
  for_each_plan([](const Plan& drawn) {
    Options options = drawn.options();
    options.stage = Stage::kReplicated;
    const Plan plan = make_plan(drawn.model(), options, drawn.world());
    for (std::uint32_t c = 0; c < plan.classes().size(); ++c) {
      std::map<std::uint32_t, std::map<std::uint64_t, std::uint64_t>> listed;  // first -> count
      bool own_before = true;
      for (const Row& row : rows_of(plan, plan.world().shard_ranks - 1, c)) {
        EXPECT_TRUE(own_before || !row.own);
        own_before = row.own;
        EXPECT_TRUE(listed[row.chunk.parameter].emplace(row.chunk.first, row.chunk.count).second);
      }
      for (const auto& [parameter, runs] : listed) {
        std::uint64_t next = 0;
        for (const auto& [first, count] : runs) {
          ASSERT_EQ(first, next);
          next += count;
        }
        EXPECT_EQ(next, plan.model().parameters()[parameter].count);
      }
    }
  });
}

// A chunk must not cross a shard border at stage 0 either, or the norm of the rank's own part
// would depend on the stage.
TEST(Chunks, OwnRowsAtStage0AreThoseOfStage1) {
  for_each_plan([](const Plan& drawn) {
    Options options = drawn.options();
    options.stage = Stage::kReplicated;
    const Plan replicated = make_plan(drawn.model(), options, drawn.world());
    options.stage = Stage::kStates;
    const Plan sharded = make_plan(drawn.model(), options, drawn.world());
    for (std::uint32_t c = 0; c < drawn.classes().size(); ++c) {
      const std::vector<Row> whole = rows_of(replicated, 0, c), part = rows_of(sharded, 0, c);
      ASSERT_GE(whole.size(), part.size());
      for (std::size_t i = 0; i < part.size(); ++i) {
        ASSERT_TRUE(whole[i].own);
        ASSERT_EQ(whole[i].chunk.parameter, part[i].chunk.parameter);
        ASSERT_EQ(whole[i].chunk.first, part[i].chunk.first);
        ASSERT_EQ(whole[i].chunk.count, part[i].chunk.count);
      }
      EXPECT_TRUE(whole.size() == part.size() || !whole[part.size()].own);
    }
  });
}

TEST(Chunks, CountsOfThePlanAreThoseOfTheTable) {
  for_each_plan([](const Plan& plan) {
    for (std::uint32_t c = 0; c < plan.classes().size(); ++c) {
      for (int rank = 0; rank < plan.world().shard_ranks; ++rank) {
        std::uint64_t own = 0, updated = 0;
        for (const Row& row : rows_of(plan, rank, c)) {
          own += row.own ? 1 : 0;
          ++updated;
        }
        EXPECT_EQ(plan.chunk_counts(rank, c).own, own);
        EXPECT_EQ(plan.chunk_counts(rank, c).updated, updated);
      }
    }
  });
}

}  // namespace
}  // namespace zero

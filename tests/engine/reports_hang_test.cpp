// Hangs and silent mix-ups that users of other systems reported: ranks that disagree.
#include <array>
#include <cmath>
#include <limits>
#include <set>
#include <thread>

#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

[[nodiscard]] bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

class B004 : public StagesAndWorlds {};
INSTANTIATE_TEST_SUITE_P(All, B004, every_case(), case_name);

// The infinity lies in an element that one rank owns, the last and partly padded rank included; it
// is given by one rank only.
TEST_P(B004, AllRanksSkipTogetherWhoeverOwnsTheInfinity) {
  const ModelSpec model = plain_model({static_cast<std::size_t>(world()) * 512 - 100});
  const Plan plan = make_plan(model, options(), {.shard_ranks = world()});
  std::set<int> owners;
  for (int owner = 0; owner < world(); ++owner) {
    const std::vector<Extent> extents = plan.extents(owner, unit(0));
    if (extents.empty()) {
      continue;
    }
    owners.insert(owner);
    const std::size_t where = extents.back().first + extents.back().count - 1;
    run_each(world(), model, options(), [&](Rank& rank) {
      const Snapshot before = snapshot(rank);
      const StepResult result = train_step(rank.optimizer, [&](ParameterId, std::size_t i) {
        return i == where && rank.rank() == rank.world() - 1 ? kInfinity : 1.0F;
      });
      EXPECT_FALSE(result.applied);
      EXPECT_EQ(result.first_non_finite, parameter(0));
      EXPECT_EQ(result.owner, owner);
      EXPECT_EQ(snapshot(rank), before);
      EXPECT_TRUE(
          train_step(rank.optimizer, [](ParameterId, std::size_t) { return 1.0F; }).applied);
    });
  }
  EXPECT_EQ(owners.size(), static_cast<std::size_t>(world()));
}

class B011 : public StagesAndWorlds {
 protected:
  // Value 10 * p + r, so that a mix-up cannot cancel; `order` of units by rank.
  static std::vector<Ending> deliver(const Options& options, Last last,
                                     const std::function<std::array<std::size_t, 4>(int)>& order) {
    const ModelSpec model = plain_model({256, 256, 256, 256});
    return endings(world(), [&](Communicator& communicator) {
      Rank rank(model, options, communicator);
      MicroBatch micro = rank.optimizer.begin_micro_batch({.last = last});
      for (const std::size_t p : order(rank.rank())) {
        write(rank.optimizer, micro, parameter(p), [&](ParameterId, std::size_t) {
          return static_cast<float>(10 * p) + static_cast<float>(rank.rank());
        });
        micro.ready(unit(p), kHost);
      }
      const StepResult result = rank.optimizer.step().get();
      EXPECT_TRUE(result.applied);
      const Tensors gradient = whole(rank, Values::kGradients);
      float ranks = 0;
      for (int r = 0; r < rank.world(); ++r) {
        ranks += static_cast<float>(r);
      }
      const auto w = static_cast<float>(rank.world());
      for (std::size_t p = 0; p < 4; ++p) {
        const float right = (static_cast<float>(10 * p) * w + ranks) / w;
        EXPECT_EQ(gradient[p], std::vector<float>(256, right)) << "parameter " << p;
      }
    });
  }
  // A buffer that holds two of the four units.
  static Options two_a_bucket() {
    Options out = options();
    out.bucket_bytes =
        2 *
        make_plan(plain_model({256}), options(), {.shard_ranks = world()}).gradient_bytes(unit(0));
    return out;
  }
  static std::array<std::size_t, 4> mixed(int rank) {
    return rank == 0 ? std::array<std::size_t, 4>{0, 1, 2, 3}
                     : std::array<std::size_t, 4>{3, 1, 0, 2};
  }
};
INSTANTIATE_TEST_SUITE_P(All, B011, every_case(), case_name);

TEST_P(B011, AnOrderThatIsTheSameEverywhereIsRight) {
  for (const Last last : {Last::kYes, Last::kNo}) {
    for (const Ending& end : deliver(two_a_bucket(), last, [](int) { return mixed(1); })) {
      EXPECT_EQ(end.what, "");
    }
  }
}

// Either the gradient is right or every rank is told; here the units that met are named.
TEST_P(B011, AnOrderThatDiffersIsAnErrorOnEveryRankThatNamesTheUnits) {
  for (const Ending& end : deliver(two_a_bucket(), Last::kYes, mixed)) {
    if (world() == 1) {  // one rank agrees with itself
      EXPECT_EQ(end.what, "");
      continue;
    }
    EXPECT_EQ(end.kind, "CommError") << end.what;
    EXPECT_TRUE(contains(end.what, "'u.0' 'u.1'")) << end.what;
    EXPECT_TRUE(contains(end.what, "'u.3' 'u.1'")) << end.what;
  }
}

// Without `last` stages 0 and 1 reduce at the step, in the plan's order: no order can differ.
TEST_P(B011, AnOrderThatDiffersIsNeverASilentWrongValue) {
  for (const Ending& end : deliver(two_a_bucket(), Last::kNo, mixed)) {
    const bool must_differ = world() > 1 && stage() >= Stage::kGradients;
    EXPECT_EQ(end.kind, must_differ ? "CommError" : "") << end.what;
  }
}

class B012 : public StagesAndWorlds {
 protected:
  // The first and the last slot of a bucket, the middle, and a whole group.
  static ModelSpec heads() {
    ModelSpec model;
    const GroupId shared = model.add_group("shared", {.hyper = kHyper});
    const GroupId head = model.add_group("head", {.hyper = kHyper, .rule = adamw()});
    model.add(model.add_unit("first"), "first.w", {11}, shared);
    const UnitId body = model.add_unit("body");
    model.add(body, "body.a", {300}, shared);
    model.add(body, "body.b", {7}, shared);
    model.add(model.add_unit("last"), "last.w", {5}, head);
    return model;
  }
  static constexpr Hyper kHyper{.lr = 1e-2, .weight_decay = 0.1};
};
INSTANTIATE_TEST_SUITE_P(All, B012, every_case(), case_name);

// Each parameter in turn is absent (a) everywhere, (b) on one rank, (c) in odd steps: (d) and (e)
// are the turns of first.w, last.w, and last.w as its group's only parameter.
TEST_P(B012, AbsentEverywhereIsUntouchedAndAbsentSomewhereIsZeroThere) {
  enum class Absent : std::uint8_t { kEverywhere, kOnOneRank, kInOddSteps };
  const ModelSpec model = heads();
  for (std::size_t absent = 0; absent < model.parameters().size(); ++absent) {
    for (const Absent how : {Absent::kEverywhere, Absent::kOnOneRank, Absent::kInOddSteps}) {
      run_each(world(), model, options(), [&](Rank& rank) {
        const auto takes_part = [&](int r, std::size_t p, int step) {
          const bool out = how == Absent::kEverywhere  ? true
                           : how == Absent::kOnOneRank ? r == 0
                                                       : step % 2 == 1;
          return p != absent || !out;
        };
        const auto value = [](int r, int step) { return static_cast<float>(r + 1 + step); };
        std::vector<AdamElement> right(model.parameters().size());
        for (std::size_t p = 0; p < right.size(); ++p) {
          std::array<float, 1> initial{};
          initial_values(parameter(p), 0, initial);
          right[p].w = static_cast<double>(initial[0]);
        }
        for (int step = 0; step < 4; ++step) {
          run_micro_batch(
              rank.optimizer, [&](ParameterId, std::size_t) { return value(rank.rank(), step); },
              Last::kYes, [&](ParameterId p) { return takes_part(rank.rank(), index(p), step); });
          ASSERT_TRUE(rank.optimizer.step().get().applied);
          for (std::size_t p = 0; p < right.size(); ++p) {
            double sum = 0;
            bool used = false;
            for (int r = 0; r < rank.world(); ++r) {
              used = used || takes_part(r, p, step);
              sum += takes_part(r, p, step) ? static_cast<double>(value(r, step)) : 0.0;
            }
            if (used) {
              right[p].step(sum / rank.world(), kHyper);
            }
          }
        }
        for (std::size_t p = 0; p < right.size(); ++p) {
          EXPECT_EQ(rank.optimizer.step_count(parameter(p)), right[p].t);
          const float found = read(rank.optimizer, parameter(p))[0];
          if (right[p].t == 0) {
            EXPECT_EQ(static_cast<double>(found), right[p].w);
          } else {
            EXPECT_NEAR(static_cast<double>(found), right[p].w, 1e-6);
          }
        }
      });
    }
  }
}

TEST_P(B012, NoGradientAtAllIsAnErrorThatNamesTheParameter) {
  const ModelSpec model = heads();
  const std::vector<Ending> found = endings(world(), [&](Communicator& communicator) {
    Rank rank(model, options(), communicator);
    MicroBatch micro = rank.optimizer.begin_micro_batch();
    write(rank.optimizer, micro, parameter(1), [](ParameterId, std::size_t) { return 1.0F; });
    micro.ready(unit(1), kHost);
  });
  for (std::size_t r = 0; r < found.size(); ++r) {
    EXPECT_TRUE(found[r].kind == "UsageError" || found[r].kind == "CommError");
    EXPECT_TRUE(contains(found[r].what, "'body.b' has no gradient")) << found[r].what;
    EXPECT_TRUE(contains(found[r].what, "mark_unused()")) << found[r].what;
  }
}

class B013 : public ::testing::TestWithParam<Stage> {
 protected:
  Watchdog watchdog_{std::chrono::seconds(20)};
};
INSTANTIATE_TEST_SUITE_P(All, B013, every_stage());

// 5, 5 and 4 steps; then each rank destroys its engine.
TEST_P(B013, ARankThatStopsEarlyIsAnErrorOnTheOthersInBoundedTime) {
  Options options{.stage = GetParam(), .deadline = scaled(std::chrono::seconds(2))};
  const std::vector<Ending> found = endings(3, [&](Communicator& communicator) {
    Rank rank(plain_model({100, 5}), options, communicator);
    for (int step = 0; step < (rank.rank() == 2 ? 4 : 5); ++step) {
      train_step(rank.optimizer, [](ParameterId, std::size_t) { return 1.0F; });
    }
  });
  EXPECT_EQ(found[2].what, "");
  for (const std::size_t r : {0U, 1U}) {
    EXPECT_EQ(found[r].kind, "CommError") << found[r].what;
    EXPECT_TRUE(contains(found[r].what, "rank 2")) << found[r].what;
    EXPECT_TRUE(contains(found[r].what, "collective ")) << found[r].what;
  }
}

// 5, 5 and 4 evaluations between steps: at stage 3 the fifth is a gather that nobody answers.
TEST_P(B013, ARankThatEvaluatesLessIsAnErrorOnAllRanks) {
  Options options{.stage = GetParam(), .deadline = scaled(std::chrono::seconds(2))};
  const std::vector<Ending> found = endings(3, [&](Communicator& communicator) {
    Rank rank(plain_model({100, 5, 3}), options, communicator);
    for (int pass = 0; pass < (rank.rank() == 2 ? 4 : 5); ++pass) {
      for (std::size_t p = 0; p < 3; ++p) {
        (void)read(rank.optimizer, parameter(p));
      }
    }
    train_step(rank.optimizer, [](ParameterId, std::size_t) { return 1.0F; });
  });
  for (const Ending& end : found) {
    EXPECT_EQ(end.kind, GetParam() == Stage::kParameters ? "CommError" : "") << end.what;
    if (GetParam() == Stage::kParameters) {
      EXPECT_TRUE(contains(end.what, "rank 2")) << end.what;
      EXPECT_TRUE(contains(end.what, "parameters of unit")) << end.what;
    }
  }
}

// A rank that neither comes nor leaves: only the deadline can end the wait.
TEST_P(B013, ARankThatNeverComesIsNamedAtTheDeadline) {
  Options options{.stage = GetParam(), .deadline = scaled(std::chrono::seconds(1))};
  const std::vector<Ending> found = endings(3, [&](Communicator& communicator) {
    Rank rank(plain_model({100, 5}), options, communicator);
    if (rank.rank() == 1) {
      std::this_thread::sleep_for(scaled(std::chrono::seconds(3)));
    }
    train_step(rank.optimizer, [](ParameterId, std::size_t) { return 1.0F; });
  });
  for (const Ending& end : found) {
    EXPECT_EQ(end.kind, "CommError") << end.what;
    EXPECT_TRUE(contains(end.what, "rank 1")) << end.what;
  }
}

}  // namespace
}  // namespace zero::testing

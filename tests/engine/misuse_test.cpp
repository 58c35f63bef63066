// Every misuse that the interface forbids, by one rank of several: its message, and that all ranks
// learn of it and stay poisoned.
#include <cmath>
#include <functional>
#include <limits>
#include <ostream>
#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

// Units a (fp32 and frozen), b, c (bf16) and d (frozen): slots 0, 1, 0, 1, a bucket each.
enum : std::size_t { kA, kB, kC, kD };
enum : std::size_t { kAWeight, kABase, kBWeight, kCWeight, kDBase };

ModelSpec quartet() {
  ModelSpec model;
  const GroupId all = model.add_group("all");
  const GroupId low = model.add_group("low", {.precision = kBf16WithMaster});
  const GroupId frozen = model.add_group("frozen", {.train = Train::kFrozen});
  const UnitId a = model.add_unit("a");
  model.add(a, "a.w", {7}, all);
  model.add(a, "a.base", {3}, frozen);
  model.add(model.add_unit("b"), "b.w", {300}, all);
  model.add(model.add_unit("c"), "c.w", {5}, low);
  model.add(model.add_unit("d"), "d.base", {5}, frozen);
  return model;
}

float one(ParameterId, std::size_t) {
  return 1.0F;
}

// By the last rank alone; by all where a lease is part of it, which is collective at stage 3.
enum class By : std::uint8_t { kLast, kAll };

struct Misuse {
  const char* name;
  std::vector<std::string> says;
  std::function<void(Rank&)> act;
  By by = By::kLast;
  Stage only_from = Stage::kReplicated;
};
std::ostream& operator<<(std::ostream& out, const Misuse& misuse) {
  return out << misuse.name;
}

// Makes c ready, as the first unit of a new micro-batch.
MicroBatch begin_with_c(Rank& rank) {
  MicroBatch micro = rank.optimizer.begin_micro_batch();
  write(rank.optimizer, micro, parameter(kCWeight), one);
  micro.ready(unit(kC), kHost);
  return micro;
}

std::vector<Misuse> of_micro_batches() {
  return {
      {"ReadyTwice",
       {"ready() of unit 'c' after ready() in the same micro-batch"},
       [](Rank& r) { begin_with_c(r).ready(unit(kC), kHost); }},
      {"GradientsAfterReady",
       {"gradients() of unit 'c' after ready()"},
       [](Rank& r) { (void)begin_with_c(r).gradients(unit(kC), kHost); }},
      {"AddAfterReady",
       {"add_gradient() of unit 'c' after ready()"},
       [](Rank& r) {
         const std::vector<float> g(5);
         begin_with_c(r).add_gradient(parameter(kCWeight), g.data(), DType::kFloat32, kHost);
       }},
      {"MarkAfterReady",
       {"mark_unused() of unit 'c' after ready()"},
       [](Rank& r) { begin_with_c(r).mark_unused(parameter(kCWeight)); }},
      {"MarkOfWritten",
       {"mark_unused() of parameter 'b.w', which has a gradient"},
       [](Rank& r) {
         MicroBatch micro = r.optimizer.begin_micro_batch();
         write(r.optimizer, micro, parameter(kBWeight), one);
         micro.mark_unused(parameter(kBWeight));
       }},
      {"AddAfterMark",
       {"gradient of parameter 'b.w' after mark_unused()"},
       [](Rank& r) {
         MicroBatch micro = r.optimizer.begin_micro_batch();
         micro.mark_unused(parameter(kBWeight));
         const std::vector<float> g(300);
         micro.add_gradient(parameter(kBWeight), g.data(), DType::kFloat32, kHost);
       }},
      {"AddOfAnUnknownDtype",
       {"add_gradient() of parameter 'c.w'", "fp16"},
       [](Rank& r) {
         MicroBatch micro = r.optimizer.begin_micro_batch();
         const std::vector<float> g(5);
         micro.add_gradient(parameter(kCWeight), g.data(), DType::kFloat16, kHost);
       }},
      {"AddFromNull",
       {"add_gradient() of parameter 'c.w' from a null pointer"},
       [](Rank& r) {
         MicroBatch micro = r.optimizer.begin_micro_batch();
         micro.add_gradient(parameter(kCWeight), nullptr, DType::kFloat32, kHost);
       }},
      {"AddToAFrozenParameter",
       {"parameter 'a.base' is frozen (group 'frozen')"},
       [](Rank& r) {
         MicroBatch micro = r.optimizer.begin_micro_batch();
         const std::vector<float> g(3);
         micro.add_gradient(parameter(kABase), g.data(), DType::kFloat32, kHost);
       }},
      {"MarkOfAnUnknownParameter",
       {"gradient of a parameter that is not in the model"},
       [](Rank& r) { r.optimizer.begin_micro_batch().mark_unused(parameter(99)); }},
      {"GradientsOfAnUnknownUnit",
       {"gradients() of a unit that is not in the model"},
       [](Rank& r) { (void)r.optimizer.begin_micro_batch().gradients(unit(99), kHost); }},
      {"ReadyWithoutAGradient",
       {"ready() of unit 'b'", "parameter 'b.w' has no gradient", "mark_unused()"},
       [](Rank& r) { r.optimizer.begin_micro_batch().ready(unit(kB), kHost); }},
      {"ReadyWithALeaseOpen",
       {"ready() of unit 'c' while a gradient lease of it is open"},
       [](Rank& r) {
         MicroBatch micro = r.optimizer.begin_micro_batch();
         GradientLease lease = micro.gradients(unit(kC), kHost);
         (void)lease.data<bf16>(parameter(kCWeight));
         micro.ready(unit(kC), kHost);
       }},
      {"BeginWithAnotherOpen",
       {"begin_micro_batch() with 1 open", "'a'", "max_open_micro_batches"},
       [](Rank& r) {
         const MicroBatch micro = begin_with_c(r);
         (void)r.optimizer.begin_micro_batch();
       }},
      {"BeginAfterTheLast",
       {"begin_micro_batch() after the one that was begun as the last"},
       [](Rank& r) {
         run_micro_batch(r.optimizer, one, Last::kYes);
         (void)r.optimizer.begin_micro_batch();
       }},
      {"AThirdBucket",
       {"unit 'c' needs a gradient buffer, but all 2 are held", "unit 'a', which is not ready",
        "Options::buckets"},
       [](Rank& r) {
         MicroBatch micro = r.optimizer.begin_micro_batch();
         for (const std::size_t p : {kAWeight, kBWeight, kCWeight}) {
           write(r.optimizer, micro, parameter(p), one);
         }
       }},
      {"DestroyedEarly",
       {"a micro-batch was destroyed before unit 'a' was ready", "abandon()"},
       [](Rank& r) {
         { const MicroBatch micro = begin_with_c(r); }
         (void)r.optimizer.begin_micro_batch();
       }},
      {"UseFromBeforeTheStep",
       {"use of a micro-batch that is complete, abandoned or from before the last step"},
       [](Rank& r) {
         MicroBatch micro = r.optimizer.begin_micro_batch({.last = Last::kYes});
         run_backward(r.optimizer, micro, one);
         r.optimizer.step();
         micro.ready(unit(kA), kHost);
       }},
      {"AbandonOfACompleteOne",
       {"abandon() of a micro-batch that is not open"},
       [](Rank& r) {
         MicroBatch micro = r.optimizer.begin_micro_batch({.last = Last::kYes});
         run_backward(r.optimizer, micro, one);
         micro.abandon();
       }},
      {"AbandonWithALeaseOpen",
       {"a gradient lease of unit 'c' is open: end it first"},
       [](Rank& r) {
         MicroBatch micro = r.optimizer.begin_micro_batch();
         const GradientLease lease = micro.gradients(unit(kC), kHost);
         micro.abandon();
       }},
  };
}

Misuse of_step(const char* name, const StepOptions& options, const char* says) {
  return {name, {"step() with", says}, [options](Rank& r) {
            run_micro_batch(r.optimizer, one);
            r.optimizer.step(options);
          }};
}

std::vector<Misuse> of_steps() {
  return {
      {"StepWithAUnitMissing",
       {"step() before unit 'a' is ready in micro-batch 0"},
       [](Rank& r) {
         const MicroBatch micro = begin_with_c(r);
         r.optimizer.step();
       }},
      {"StepOfNothing", {"step() without a micro-batch"}, [](Rank& r) { r.optimizer.step(); }},
      {"StepWithAParameterLease",
       {"step() while a parameter lease of unit 'b' is open"},
       [](Rank& r) {
         run_micro_batch(r.optimizer, one);
         const ParameterLease lease = r.optimizer.parameters(unit(kB), kHost);
         r.optimizer.step();
       },
       By::kAll},
      {"StepWithAGradientLease",
       {"a gradient lease of unit 'd' is open: end it first"},
       [](Rank& r) {
         MicroBatch micro = r.optimizer.begin_micro_batch();
         run_backward(r.optimizer, micro, one);
         const GradientLease lease = micro.gradients(unit(kD), kHost);
         r.optimizer.step();
       }},
      of_step("StepWithClipZero", {.clip_norm = 0.0}, "clip_norm 0"),
      of_step("StepWithANegativeClip", {.clip_norm = -1.0}, "clip_norm -1"),
      of_step("StepWithClipNan", {.clip_norm = std::nan("")}, "clip_norm"),
      of_step("StepWithAnInfiniteRate", {.lr_scale = std::numeric_limits<double>::infinity()},
              "lr_scale"),
      of_step("StepWithTooManyTokens", {.local_tokens = 1ULL << 40U}, "2^40"),
  };
}

std::vector<Misuse> of_values() {
  const Visit nothing = [](ParameterId, std::uint64_t, std::span<const float>) {};
  return {
      {"MoreLeasesThanLiveUnits",
       {"unit 'c' cannot be leased while the lease of unit 'a' is open", "live_units = 2"},
       [](Rank& r) {
         const ParameterLease a = r.optimizer.parameters(unit(kA), kHost);
         const ParameterLease c = r.optimizer.parameters(unit(kC), kHost);
       },
       By::kAll,
       Stage::kParameters},
      {"ParametersOfAnUnknownUnit",
       {"parameters() of a unit that is not in the model"},
       [](Rank& r) { (void)r.optimizer.parameters(unit(99), kHost); }},
      {"InitializeWithAMicroBatchOpen",
       {"initialize() while a micro-batch is open"},
       [](Rank& r) {
         const MicroBatch micro = begin_with_c(r);
         r.optimizer.initialize(initial_values);
       }},
      {"InitializeInTheMiddleOfAStep",
       {"initialize() in the middle of a step: call abandon_step() first"},
       [](Rank& r) {
         run_micro_batch(r.optimizer, one, Last::kNo);
         r.optimizer.initialize(initial_values);
       }},
      {"OverwriteWithAMicroBatchOpen",
       {"overwrite_own() while a micro-batch is open"},
       [](Rank& r) {
         const MicroBatch micro = begin_with_c(r);
         r.optimizer.overwrite_own(initial_values);
       }},
      {"OverwriteWithALeaseOpen",
       {"overwrite_own() while a parameter lease of unit 'b' is open"},
       [](Rank& r) {
         const ParameterLease lease = r.optimizer.parameters(unit(kB), kHost);
         r.optimizer.overwrite_own(initial_values);
       },
       By::kAll},
      {"VisitAllWithAMicroBatchOpen",
       {"visit_all() while a micro-batch is open"},
       [nothing](Rank& r) {
         const MicroBatch micro = begin_with_c(r);
         r.optimizer.visit_all(Values::kParameters, nothing);
       }},
      {"VisitAllWithALeaseOpen",
       {"visit_all() while a parameter lease of unit 'a' is open"},
       [nothing](Rank& r) {
         const ParameterLease lease = r.optimizer.parameters(unit(kA), kHost);
         r.optimizer.visit_all(Values::kMaster, nothing);
       },
       By::kAll},
      {"VisitAllOfGradientsBeforeAStep",
       {"visit of gradients outside of step() to begin_micro_batch()"},
       [nothing](Rank& r) { r.optimizer.visit_all(Values::kGradients, nothing); }},
      {"VisitAllAtNoRank",
       {"visit_all() with root 99: expected 0 to"},
       [nothing](Rank& r) { r.optimizer.visit_all(Values::kParameters, nothing, 99); }},
      {"VisitAllAtANegativeRank",
       {"visit_all() with root -1"},
       [nothing](Rank& r) { r.optimizer.visit_all(Values::kParameters, nothing, -1); }},
  };
}

std::vector<Misuse> every_misuse() {
  std::vector<Misuse> all = of_micro_batches();
  for (const std::vector<Misuse>& more : {of_steps(), of_values()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  return all;
}

class MisuseByOneRank : public ::testing::TestWithParam<Misuse> {
 protected:
  static Options options(Stage stage) {
    Options out{.stage = stage, .deadline = scaled(std::chrono::seconds(10)), .bucket_bytes = 1};
    return out;
  }
  // Every later call throws the first error again.
  static void expect_poisoned(Rank& rank, const std::string& first) {
    Optimizer& o = rank.optimizer;
    const Visit nothing = [](ParameterId, std::uint64_t, std::span<const float>) {};
    const std::vector<std::function<void()>> calls{
        [&] { (void)o.begin_micro_batch(); },
        [&] { o.step(); },
        [&] { (void)o.parameters(unit(kA), kHost); },
        [&] { o.initialize(initial_values); },
        [&] { o.overwrite_own(initial_values); },
        [&] { o.abandon_step(); },
        [&] { (void)o.state_hash(); },
        [&] { (void)o.step_count(parameter(0)); },
        [&] { o.visit_own(Values::kParameters, nothing); },
        [&] { o.visit_own_state("exp_avg", nothing); },
        [&] { o.visit_all(Values::kParameters, nothing); }};
    for (std::size_t i = 0; i < calls.size(); ++i) {
      try {
        calls[i]();
        ADD_FAILURE() << "call " << i << " succeeded after: " << first;
      } catch (const Error& e) {
        EXPECT_EQ(e.what(), first) << "call " << i;
      }
    }
  }

 private:
  Watchdog watchdog_{std::chrono::seconds(60)};
};

TEST_P(MisuseByOneRank, IsATypedErrorOnAllRanksAndStays) {
  const Misuse& misuse = GetParam();
  for (const Stage stage :
       {Stage::kReplicated, Stage::kStates, Stage::kGradients, Stage::kParameters}) {
    for (const int world : {1, 2, 3}) {
      if (stage < misuse.only_from) {
        continue;
      }
      const std::vector<Ending> found = endings(world, [&](Communicator& communicator) {
        Rank rank(quartet(), options(stage), communicator);
        try {
          if (misuse.by == By::kAll || rank.rank() == world - 1) {
            misuse.act(rank);
          }
          for (int step = 0; step < 3; ++step) {
            train_step(rank.optimizer, one);
          }
        } catch (const Error& e) {
          expect_poisoned(rank, e.what());
          throw;
        }
      });
      for (std::size_t r = 0; r < found.size(); ++r) {
        const bool mine = r + 1 == found.size();
        if (misuse.by == By::kLast) {
          EXPECT_EQ(found[r].kind, mine ? "UsageError" : "CommError") << found[r].what;
          const std::string who = "rank " + std::to_string(world - 1) + ": ";
          EXPECT_NE(found[r].what.find(who), std::string::npos) << found[r].what;
        } else {
          EXPECT_TRUE(found[r].kind == "UsageError" || found[r].kind == "CommError");
        }
        for (const std::string& part : misuse.says) {
          EXPECT_NE(found[r].what.find(part), std::string::npos)
              << "expected: " << part << "\nfound: " << found[r].what;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, MisuseByOneRank, ::testing::ValuesIn(every_misuse()),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace zero::testing

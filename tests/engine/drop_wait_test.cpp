// Leaves out each wait of the engine in turn: every one that orders anything must be missed.
#include <array>
#include <cstdlib>
#include <deque>
#include <map>
#include <set>
#include <string>

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/support/compare.h"
#include "tests/support/stream_clock.h"
#include "tests/support/trainer.h"

#if defined(__SANITIZE_THREAD__)
// A race in a child is what this test looks for; _exit, because other threads are under way.
extern "C" void __tsan_on_report(void*);
namespace {
bool in_child = false;
}
extern "C" void __tsan_on_report(void*) {
  if (in_child) {
    _exit(66);
  }
}
#else
namespace {
bool in_child = false;
}
#endif

namespace zero::testing {
namespace {

constexpr int kWorld = 2;

// More units than gradient buffers or live slots, one with two dtypes, and a tied one: first in
// backward, so that its own buffer's reduction does not wait for what others wait for too.
ModelSpec small_model() {
  ModelSpec model;
  const GroupId low = model.add_group("low", {.precision = kBf16WithMaster});
  const GroupId full = model.add_group("full", {.hyper = {.lr = 0.01, .weight_decay = 0.1}});
  const UnitId a = model.add_unit("a");
  model.add(a, "a.w", {300}, low);
  model.add(a, "a.b", {5}, full);
  const UnitId b = model.add_unit("b");
  model.add(b, "b.w", {400}, full);
  const UnitId c = model.add_unit("c");
  model.add(c, "c.w", {900}, low);
  const UnitId tied = model.add_unit("tied", GradientLife::kUntilReady);
  model.add(tied, "tied.w", {700}, full);
  return model;
}

// Everything that a rank reads, in an order that does not depend on time.
using Observations = std::deque<std::uint64_t>;

// One rank of a run that uses every kind of wait, with four streams of the user's own: forward
// reads on F and G, backward on B, some gradients are written on C.
class Script {
 public:
  Script(Stage stage, Communicator& ranks, WaitFault fault)
      : ranks_(ranks),
        device_(make_cpu_backend(), std::move(fault)),
        optimizer_(make_plan(model_, options_of(stage), {.shard_ranks = kWorld}), device_, {ranks}),
        f_(device_, Streams::kCpuStream),
        g_(device_, Streams::kCpuStream),
        b_(device_, Streams::kCpuStream),
        c_(device_, Streams::kCpuStream) {
    optimizer_.initialize(initial_values);
  }

  [[nodiscard]] const Observations& observations() const { return observations_; }
  [[nodiscard]] const std::vector<WaitRecord>& waits() const { return device_.waits(); }

  void run() {
    one_after_another(0);
    abandon(1);
    interleaved(2);
    overwrite();
    one_after_another(3);
    look();
    device_.begin_phase("initialize");
    optimizer_.initialize(initial_values);
    one_after_another(4);
    look();
    device_.begin_phase("the end");
    for (PendingStep& pending : pending_) {
      observe_step(pending.get());
    }
    for (const OwnedStream* s : {&f_, &g_, &b_, &c_}) {
      device_.order(kHost, device_.record(s->ref));
    }
  }

 private:
  using OwnedStream = detail::OwnedStream;

  static Options options_of(Stage stage) {
    Options options{.stage = stage, .clip_norm = 0.5, .max_open_micro_batches = 2};
    options.bucket_bytes = 1;
    return options;
  }
  [[nodiscard]] std::uint64_t& observe() { return observations_.emplace_back(0); }
  void observe_step(const StepResult& result) {
    observe() = result.applied ? 1 : 0;
    observe() = std::bit_cast<std::uint64_t>(result.grad_norm);
  }
  [[nodiscard]] bool is_low(ParameterId p) const {
    return index(model_.parameters()[index(p)].group) == 0;
  }
  [[nodiscard]] std::vector<ParameterId> parameters_of(UnitId unit) const {
    std::vector<ParameterId> out;
    for (std::uint32_t p = 0; p < model_.parameters().size(); ++p) {
      if (model_.parameters()[p].unit == unit) {
        out.push_back(ParameterId{p});
      }
    }
    return out;
  }

  void read(const ParameterLease& lease, UnitId unit, StreamRef stream) {
    for (const ParameterId p : parameters_of(unit)) {
      const std::size_t bytes = model_.parameters()[index(p)].count * (is_low(p) ? 2 : 4);
      const void* data = is_low(p) ? static_cast<const void*>(lease.data<bf16>(p))
                                   : static_cast<const void*>(lease.data<float>(p));
      device_.call(stream,
                   [&seen = observe(), data, bytes] { seen = detail::hash_bytes(1, data, bytes); });
    }
  }

  void forward() {
    device_.begin_phase("forward");
    for (std::uint32_t u = 0; u < model_.units().size(); ++u) {
      ParameterLease lease = optimizer_.parameters(UnitId{u}, f_.ref);
      read(lease, UnitId{u}, f_.ref);
      device_.order(g_.ref, device_.record(f_.ref));
      read(lease, UnitId{u}, g_.ref);
      lease.used_on(g_.ref);
    }
  }

  // First on B, then on C, and last an addition from the user's own memory; no two commute.
  void write(MicroBatch& micro, UnitId unit, GradientAt at) {
    for (const StreamRef stream : {b_.ref, c_.ref}) {
      GradientLease lease = micro.gradients(unit, stream);
      for (const ParameterId p : parameters_of(unit)) {
        at.parameter = p;
        if (is_low(p)) {
          add(lease.data<bf16>(p), at, stream);
        } else {
          add(lease.data<float>(p), at, stream);
        }
      }
    }
    for (const ParameterId p : parameters_of(unit)) {
      at.parameter = p;
      std::vector<float>& own = user_memory_.emplace_back(model_.parameters()[index(p)].count);
      device_.call(b_.ref, [&own, at] { random_gradient(at, own); });
      micro.add_gradient(p, own.data(), DType::kFloat32, b_.ref);
    }
  }
  template <class T>
  void add(T* out, const GradientAt& at, StreamRef stream) {
    const std::size_t count = model_.parameters()[index(at.parameter)].count;
    device_.call(stream, [out, at, count] {
      std::vector<float> values(count);
      random_gradient(at, values);
      for (std::size_t i = 0; i < count; ++i) {
        detail::store(out + i, 0.5F * detail::load(out[i]) + values[i]);
      }
    });
  }

  void backward_of(MicroBatch& micro, UnitId unit, int step, int m) {
    device_.begin_phase("backward of " + model_.units()[index(unit)].name + " in step " +
                        std::to_string(step) + ", micro-batch " + std::to_string(m));
    {
      const ParameterLease lease = optimizer_.parameters(unit, b_.ref);
      read(lease, unit, b_.ref);
    }
    write(micro, unit, {step, m * kWorld + ranks_.rank(), {}});
    micro.ready(unit, step % 2 == 0 ? b_.ref : c_.ref);
  }

  void one_after_another(int step) {
    for (int m = 0; m < 2; ++m) {
      forward();
      MicroBatch micro = optimizer_.begin_micro_batch({.last = m == 1 ? Last::kYes : Last::kNo});
      for (auto u = static_cast<std::uint32_t>(model_.units().size()); u-- > 0;) {
        backward_of(micro, UnitId{u}, step, m);
      }
    }
    device_.begin_phase("step " + std::to_string(step));
    pending_.push_back(optimizer_.step());
  }

  void interleaved(int step) {
    forward();
    MicroBatch first = optimizer_.begin_micro_batch();
    MicroBatch second = optimizer_.begin_micro_batch({.last = Last::kYes});
    for (auto u = static_cast<std::uint32_t>(model_.units().size()); u-- > 0;) {
      backward_of(first, UnitId{u}, step, 0);
      backward_of(second, UnitId{u}, step, 1);
    }
    device_.begin_phase("step " + std::to_string(step));
    pending_.push_back(optimizer_.step());
  }

  // What C still writes then must not reach the next micro-batch, which starts with the same
  // unit's buffer and B.
  void abandon(int step) {
    forward();
    MicroBatch micro = optimizer_.begin_micro_batch();
    for (const std::uint32_t unit : {2U, 3U}) {
      device_.begin_phase("abandoned gradients");
      const ParameterId p{unit + 1};
      GradientLease lease = micro.gradients(UnitId{unit}, c_.ref);
      if (is_low(p)) {
        add(lease.data<bf16>(p), {step, ranks_.rank(), p}, c_.ref);
      } else {
        add(lease.data<float>(p), {step, ranks_.rank(), p}, c_.ref);
      }
    }
    device_.begin_phase("abandon");
    micro.abandon();
  }

  // Each reads other values than the one before, so that a buffer not yet filled shows.
  void look() {
    device_.begin_phase("look");
    const Visit hash = [&](ParameterId, std::uint64_t first, std::span<const float> values) {
      observe() = detail::hash_bytes(first, values.data(), values.size_bytes());
    };
    optimizer_.visit_own(Values::kGradients, hash);
    optimizer_.visit_all(Values::kMaster, hash);
    optimizer_.visit_all(Values::kGradients, hash);
    optimizer_.visit_all(Values::kParameters, hash);
    observe() = optimizer_.state_hash();
  }

  void overwrite() {
    forward();
    device_.begin_phase("overwrite");
    optimizer_.overwrite_own([](ParameterId p, std::uint64_t first, std::span<float> out) {
      initial_values(ParameterId{static_cast<std::uint32_t>(index(p)) + 9}, first, out);
    });
  }

  const ModelSpec model_ = small_model();
  Communicator& ranks_;
  Observations observations_;
  std::deque<std::vector<float>> user_memory_;
  ClockedBackend device_;
  Optimizer optimizer_;
  std::vector<PendingStep> pending_;
  OwnedStream f_, g_, b_, c_;
};

struct ScriptResult {
  std::array<Observations, kWorld> observations;
  std::vector<WaitRecord> waits;  // of rank 0, which is the one at fault
};

ScriptResult run_script(Stage stage, const WaitFault& fault = {}) {
  const Watchdog watchdog(std::chrono::seconds(60));
  ScriptResult result;
  run_ranks(kWorld, [&](Communicator& ranks) {
    Script script(stage, ranks, ranks.rank() == 0 ? fault : WaitFault{});
    script.run();
    result.observations.at(static_cast<std::size_t>(ranks.rank())) = script.observations();
    if (ranks.rank() == 0) {
      result.waits = script.waits();
    }
  });
  return result;
}

// How a run went that leaves something out. A child of its own: it may crash, and under
// ThreadSanitizer its races are reports.
enum class Outcome : std::uint8_t { kSame, kOtherBits, kError, kRace, kCrash, kHang };

Outcome try_in_child(Stage stage, const WaitFault& fault, const ScriptResult& right) {
  const pid_t child = fork();
  if (child == 0) {
    in_child = true;
    if (std::freopen("/dev/null", "w", stderr) == nullptr) {
      _exit(2);
    }
    try {
      _exit(run_script(stage, fault).observations == right.observations ? 10 : 11);
    } catch (...) {
      _exit(12);
    }
  }
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) {
    throw std::runtime_error("no child process");
  }
  if (WIFSIGNALED(status)) {
    return WTERMSIG(status) == SIGABRT ? Outcome::kHang : Outcome::kCrash;  // the watchdog aborts
  }
  static const std::map<int, Outcome> kCodes{{10, Outcome::kSame},
                                             {11, Outcome::kOtherBits},
                                             {12, Outcome::kError},
                                             {66, Outcome::kRace},
                                             {1, Outcome::kCrash}};  // AddressSanitizer's
  const auto found = kCodes.find(WEXITSTATUS(status));
  if (found == kCodes.end()) {
    throw std::runtime_error("a child ended with " + std::to_string(WEXITSTATUS(status)));
  }
  return found->second;
}

std::string describe(std::size_t number, const WaitRecord& wait) {
  static constexpr std::array kNames{"host", "engine", "F", "G", "B", "C"};
  return "wait " + std::to_string(number) + " of " + kNames.at(wait.stream) + " for work " +
         std::to_string(wait.known + 1) + " to " + std::to_string(wait.point) + " of " +
         kNames.at(wait.source) + " in " + wait.phase;
}

class StreamOrder : public ::testing::TestWithParam<Stage> {};

class DropWait : public ::testing::TestWithParam<Stage> {
 protected:
  // Waits that order nothing and yet stay, each with its reason; at most three.
  [[nodiscard]] static bool is_listed(const WaitRecord& wait) {
    // abandon_step() waits on the host so that ranks which abandon at different points learn of it
    // there; the memory that it drops is guarded by an event of its own.
    return wait.stream == 0 && wait.phase == "abandon";
  }

  // Makes the point late enough for whoever does not wait to be early, before the first work that
  // the wait is for and then before the last; and later if need be: streams may take their time.
  static Outcome drop(std::size_t k, const WaitRecord& wait, const ScriptResult& right) {
    for (int delay = 15; delay <= 1000; delay *= 8) {
      for (const std::uint64_t late : {wait.known + 1, wait.point}) {
        const Outcome outcome =
            try_in_child(GetParam(),
                         {[k](std::size_t number) { return number == k; }, wait.source, late,
                          scaled(std::chrono::milliseconds(delay))},
                         right);
        if (outcome != Outcome::kSame) {
          return outcome;
        }
      }
    }
    return Outcome::kSame;
  }
};

TEST_P(DropWait, IsNoticedForEveryWaitThatOrdersAnything) {
  const ScriptResult right = run_script(GetParam());
  ASSERT_EQ(run_script(GetParam()).observations, right.observations);
  int dropped = 0, listed = 0;
  for (std::size_t k = 0; k < right.waits.size(); ++k) {
    const WaitRecord& wait = right.waits[k];
    if (wait.of_test || wait.cover != Cover::kNeeded) {
      continue;
    }
    if (is_listed(wait)) {
      ++listed;
      continue;
    }
    const Outcome outcome = drop(k, wait, right);
    EXPECT_NE(outcome, Outcome::kSame) << describe(k, wait) << " is not missed";
    EXPECT_NE(outcome, Outcome::kHang) << describe(k, wait) << " hangs";
    ++dropped;
  }
  EXPECT_GT(dropped, 100);
  EXPECT_LE(listed, 1);
}

// A user's stream may wait for what it has waited for (a second lease), and a bucket's units for
// several points of one stream: the engine does not remember streams, which come and go under the
// same handle.
TEST_P(DropWait, IsNotNoticedForWaitsThatOthersCover) {
  const ScriptResult right = run_script(GetParam());
  std::set<std::size_t> covered;
  for (std::size_t k = 0; k < right.waits.size(); ++k) {
    if (right.waits[k].cover != Cover::kNeeded) {
      covered.insert(k);
    }
  }
  EXPECT_GT(covered.size(), 20U);
  EXPECT_EQ(run_script(GetParam(), {[&](std::size_t number) { return covered.contains(number); }})
                .observations,
            right.observations);
}

// Engine, F, G, B and C in turn: whatever waits for the slow one is put to the test.
TEST_P(StreamOrder, HoldsHoweverSlowOneStreamIs) {
  const ScriptResult right = run_script(GetParam());
  for (const std::size_t stream : {1U, 2U, 3U, 4U, 5U}) {
    const WaitFault slow{.late_stream = stream, .delay = std::chrono::milliseconds(1)};
    EXPECT_EQ(run_script(GetParam(), slow).observations, right.observations) << stream;
  }
}

INSTANTIATE_TEST_SUITE_P(Stages, StreamOrder, ::testing::ValuesIn(kAllStages));
INSTANTIATE_TEST_SUITE_P(Stages, DropWait, ::testing::ValuesIn(kAllStages));

}  // namespace
}  // namespace zero::testing

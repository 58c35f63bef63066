// Runs a synthetic model through the public API on W ranks and returns all that can be compared.
#pragma once

#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "zero/zero.h"

#include "tests/support/models.h"
#include "tests/support/watchdog.h"

namespace zero::testing {

enum class Streams : std::uint8_t {
  kHostOnly,   // all work is done by the calling thread
  kCpuStream,  // forward and backward are jobs on an asynchronous stream of the user's own
};

// What to run. Oracles read the same value, so that the two cannot be set up differently.
struct RunSetup {
  ModelSpec model{};
  Options options{};
  int world = 1;
  int micro_batches = 1;
  int steps = 1;
  int threads = 1;  // compute threads of each rank's backend
  Streams streams = Streams::kHostOnly;
  Gradient gradient = random_gradient;
  Fill initial = initial_values;
  std::function<bool(const GradientAt&)> unused{};                   // empty: all are used
  std::function<StepOptions(int step, int rank)> step_options{};     // empty: defaults
  std::function<void(int step, GroupId, Hyper&)> schedule{};         // empty: as in the model
  std::function<std::unique_ptr<Backend>(int rank)> make_backend{};  // empty: the CPU backend
  std::set<int> snapshots{};  // after how many steps to keep the masters
  bool hash_each_step = false;
};

using Tensors = std::vector<std::vector<float>>;  // by ParameterId

struct RunResult {
  std::vector<StepResult> steps;      // of rank 0; `applied` and the norm's bits agree on all ranks
  std::vector<std::uint64_t> hashes;  // state_hash after each step when asked
  std::uint64_t hash = 0;             // state_hash at the end
  Tensors parameters, master;         // by visit_all
  std::map<std::string, Tensors> states;  // from the owned extents; zeros where not trained
  std::vector<std::int64_t> step_counts;
  std::map<int, Tensors> snapshots;
  std::vector<std::uint64_t> seen;  // hash of all parameters as the forward of each step read them
  std::vector<Statistics> statistics;  // by rank
};

inline RunResult run(const RunSetup& setup);

namespace detail {

inline void expect(bool condition, const std::string& message) {
  if (!condition) {
    throw std::logic_error("harness: " + message);
  }
}

inline std::uint64_t hash_bytes(std::uint64_t seed, const void* data, std::size_t bytes) {
  const auto* at = static_cast<const unsigned char*>(data);
  for (std::size_t i = 0; i < bytes; i += 4) {
    std::uint64_t word = 0;
    std::memcpy(&word, at + i, bytes - i < 4 ? bytes - i : 4);
    seed = (seed ^ word) * 0x100000001b3U;
    seed ^= seed >> 29U;
  }
  return seed;
}

inline void store(float* out, float value) {
  *out = value;
}
inline void store(bf16* out, float value) {
  *out = to_bf16(value);
}
inline float load(float value) {
  return value;
}
inline float load(bf16 value) {
  return to_float(value);
}

// A tied unit is visited twice in backward, with one half of the elements each time.
enum class Part : std::uint8_t { kAll, kEven, kOdd };

inline void mask(std::span<float> values, Part part) {
  for (std::size_t i = 0; i < values.size(); ++i) {
    if (part != Part::kAll && (i % 2 == 0) != (part == Part::kEven)) {
      values[i] = 0;
    }
  }
}

struct OwnedStream {
  OwnedStream(Backend& owner, Streams kind)
      : backend(owner), ref(kind == Streams::kHostOnly ? kHost : owner.make_stream()) {}
  OwnedStream(const OwnedStream&) = delete;
  OwnedStream& operator=(const OwnedStream&) = delete;
  ~OwnedStream() {
    if (ref != kHost) {
      backend.release_stream(ref);
    }
  }
  Backend& backend;
  StreamRef ref;
};

// One rank's training loop, as a user would write it.
class RankLoop {
 public:
  RankLoop(const RunSetup& setup, Communicator& communicator, RunResult& result)
      : setup_(setup),
        communicator_(communicator),
        result_(result),
        backend_(setup.make_backend ? setup.make_backend(communicator.rank())
                                    : make_cpu_backend(kUnlimited, setup.threads)),
        user_memory_(setup.model.parameters().size()),
        optimizer_(make_plan(setup.model, setup.options, {.shard_ranks = setup.world}), *backend_,
                   {communicator}),
        stream_(*backend_, setup.streams) {
    for (std::size_t p = 0; p < user_memory_.size(); ++p) {
      user_memory_[p].resize(setup.model.parameters()[p].count);
    }
    forward_seen_.resize(static_cast<std::size_t>(setup.steps * setup.micro_batches));
    backward_seen_.resize(forward_seen_.size());
  }

  void run() {
    optimizer_.initialize(setup_.initial);
    for (int step = 0; step < setup_.steps; ++step) {
      run_step(step);
    }
    backend_->host_wait(backend_->record(stream_.ref));
    check_seen();
    collect();
  }

 private:
  struct Job {
    GradientAt at;
    Part part = Part::kAll;
  };
  [[nodiscard]] const ModelSpec& model() const { return setup_.model; }
  [[nodiscard]] int rank() const { return communicator_.rank(); }
  [[nodiscard]] const GroupOptions& group_of(ParameterId p) const {
    return model().groups()[index(model().parameters()[index(p)].group)].options;
  }
  [[nodiscard]] std::vector<ParameterId> parameters_of(UnitId unit) const {
    std::vector<ParameterId> out;
    for (std::size_t p = 0; p < model().parameters().size(); ++p) {
      if (model().parameters()[p].unit == unit) {
        out.push_back(ParameterId{static_cast<std::uint32_t>(p)});
      }
    }
    return out;
  }
  [[nodiscard]] bool is_tied(UnitId unit) const {
    return model().units()[index(unit)].life == GradientLife::kUntilReady;
  }
  [[nodiscard]] bool is_trained(UnitId unit) const {
    for (const ParameterId p : parameters_of(unit)) {
      if (group_of(p).train == Train::kYes) {
        return true;
      }
    }
    return false;
  }

  void run_step(int step) {
    if (setup_.schedule) {
      for (std::size_t g = 0; g < model().groups().size(); ++g) {
        const GroupId group{static_cast<std::uint32_t>(g)};
        Hyper hyper = optimizer_.hyper(group);
        setup_.schedule(step, group, hyper);
        optimizer_.set(group, hyper);
      }
    }
    for (int m = 0; m < setup_.micro_batches; ++m) {
      forward(static_cast<std::size_t>(step * setup_.micro_batches + m));
      backward(step, m);
    }
    const StepOptions options =
        setup_.step_options ? setup_.step_options(step, rank()) : StepOptions{};
    const StepResult result = optimizer_.step(options).get();
    share_step(result);
    if (setup_.hash_each_step) {
      const std::uint64_t hash = optimizer_.state_hash();
      if (rank() == 0) {
        result_.hashes.push_back(hash);
      }
    }
    if (setup_.snapshots.contains(step + 1)) {
      Tensors masters;
      visit_all(Values::kMaster, masters);
      if (rank() == 0) {
        result_.snapshots[step + 1] = std::move(masters);
      }
    }
  }

  // All ranks must report one decision and one norm, to the bit.
  void share_step(const StepResult& mine) {
    const auto all = communicator_.bootstrap().all_gather(
        std::as_bytes(std::span(&mine.grad_norm, 1)), setup_.options.deadline);
    for (const auto& other : all) {
      double norm = 0;
      std::memcpy(&norm, other.data(), sizeof norm);
      expect(std::memcmp(&norm, &mine.grad_norm, sizeof norm) == 0 ||
                 (std::isnan(norm) && std::isnan(mine.grad_norm)),
             "ranks report different gradient norms");
    }
    expect(mine.applied == !std::isnan(mine.grad_norm), "a norm is NaN when and only when skipped");
    if (rank() == 0) {
      result_.steps.push_back(mine);
    }
  }

  void forward(std::size_t pass) {
    for (std::size_t u = 0; u < model().units().size(); ++u) {
      read(UnitId{static_cast<std::uint32_t>(u)}, forward_seen_[pass]);
    }
    for (std::size_t u = 0; u < model().units().size(); ++u) {
      if (is_tied(UnitId{static_cast<std::uint32_t>(u)})) {  // the head
        read(UnitId{static_cast<std::uint32_t>(u)}, again_);
      }
    }
  }

  void backward(int step, int m) {
    MicroBatch micro = optimizer_.begin_micro_batch(
        {.last = m + 1 == setup_.micro_batches ? Last::kYes : Last::kNo});
    const std::int64_t global_micro = std::int64_t{m} * setup_.world + rank();
    const auto pass = static_cast<std::size_t>(step * setup_.micro_batches + m);
    const auto units = static_cast<std::uint32_t>(model().units().size());
    for (std::uint32_t u = 0; u < units; ++u) {
      if (is_tied(UnitId{u})) {
        read(UnitId{u}, again_);
        write(micro, UnitId{u}, {{step, global_micro, {}}, Part::kEven});
      }
    }
    for (std::uint32_t u = units; u-- > 0;) {
      read(UnitId{u}, backward_seen_[pass]);
      if (is_trained(UnitId{u})) {
        const Part part = is_tied(UnitId{u}) ? Part::kOdd : Part::kAll;
        write(micro, UnitId{u}, {{step, global_micro, {}}, part});
        micro.ready(UnitId{u}, stream_.ref);
      }
    }
  }

  // Adds a hash of the unit's parameters to `seen`, in stream order.
  void read(UnitId unit, std::uint64_t& seen) {
    const ParameterLease lease = optimizer_.parameters(unit, stream_.ref);
    for (const ParameterId p : parameters_of(unit)) {
      const std::size_t count = model().parameters()[index(p)].count;
      const DType dtype = group_of(p).precision.parameter;
      const void* data = dtype == DType::kFloat32 ? static_cast<const void*>(lease.data<float>(p))
                                                  : static_cast<const void*>(lease.data<bf16>(p));
      backend_->call(stream_.ref, [&seen, data, p, bytes = count * bytes_of(dtype)] {
        seen += hash_bytes(mix(index(p)), data, bytes);
      });
    }
  }

  void write(MicroBatch& micro, UnitId unit, Job job) {
    std::optional<GradientLease> lease;
    for (const ParameterId p : parameters_of(unit)) {
      if (group_of(p).train == Train::kFrozen) {
        continue;
      }
      job.at.parameter = p;
      if (setup_.unused && setup_.unused(job.at)) {
        micro.mark_unused(p);
      } else if (index(p) % 4 == 2) {
        add_from_user_memory(micro, job);
      } else {
        if (!lease) {
          lease.emplace(micro.gradients(unit, stream_.ref));
        }
        if (group_of(p).precision.gradient == DType::kFloat32) {
          write_lease<float>(*lease, job);
        } else {
          write_lease<bf16>(*lease, job);
        }
      }
    }
  }

  template <class T>
  void write_lease(GradientLease& lease, const Job& job) {
    const ParameterId p = job.at.parameter;
    const Write how = index(p) % 4 == 1 && job.part == Part::kAll ? Write::kOverwrite : Write::kAdd;
    T* out = lease.data<T>(p, how);
    const std::size_t count = model().parameters()[index(p)].count;
    backend_->call(stream_.ref, [this, out, job, how, count] {
      std::vector<float> values(count);
      setup_.gradient(job.at, values);
      mask(values, job.part);
      for (std::size_t i = 0; i < count; ++i) {
        store(out + i, how == Write::kAdd ? load(out[i]) + values[i] : values[i]);
      }
    });
  }

  void add_from_user_memory(MicroBatch& micro, const Job& job) {
    std::vector<float>& memory = user_memory_[index(job.at.parameter)];
    backend_->call(stream_.ref, [this, job, &memory] {
      setup_.gradient(job.at, memory);
      mask(memory, job.part);
    });
    micro.add_gradient(job.at.parameter, memory.data(), DType::kFloat32, stream_.ref);
  }

  // Parameters change at steps only, and are the same on all ranks and in both passes.
  void check_seen() {
    const auto per_step = static_cast<std::size_t>(setup_.micro_batches);
    for (std::size_t i = 0; i < forward_seen_.size(); ++i) {
      expect(forward_seen_[i] == backward_seen_[i], "backward read other parameters than forward");
      expect(forward_seen_[i] == forward_seen_[i - i % per_step],
             "parameters changed within a step");
    }
    const auto all = communicator_.bootstrap().all_gather(std::as_bytes(std::span(forward_seen_)),
                                                          setup_.options.deadline);
    for (const auto& other : all) {
      expect(std::memcmp(other.data(), forward_seen_.data(), other.size()) == 0,
             "ranks read different parameters");
    }
    if (rank() == 0) {
      for (std::size_t i = 0; i < forward_seen_.size(); i += per_step) {
        result_.seen.push_back(forward_seen_[i]);
      }
    }
  }

  void visit_all(Values values, Tensors& into) {
    if (rank() == 0) {
      into = empty_tensors(std::nanf(""));
    }
    optimizer_.visit_all(values, [&](ParameterId p, std::uint64_t first, std::span<const float> v) {
      expect(rank() == 0, "visit_all visits the root only");
      std::copy(v.begin(), v.end(), into.at(index(p)).begin() + static_cast<std::ptrdiff_t>(first));
    });
  }

  [[nodiscard]] Tensors empty_tensors(float value) const {
    Tensors out;
    for (const ModelSpec::Parameter& p : model().parameters()) {
      out.emplace_back(p.count, value);
    }
    return out;
  }

  void collect() {
    visit_all(Values::kParameters, result_.parameters);
    visit_all(Values::kMaster, result_.master);
    const std::uint64_t hash = optimizer_.state_hash();
    if (rank() == 0) {
      result_.hash = hash;
      for (std::size_t p = 0; p < model().parameters().size(); ++p) {
        result_.step_counts.push_back(
            optimizer_.step_count(ParameterId{static_cast<std::uint32_t>(p)}));
      }
      for (const char* state : {"exp_avg", "exp_avg_sq"}) {
        result_.states[state] = empty_tensors(0);
      }
    }
    (void)communicator_.bootstrap().all_gather({}, setup_.options.deadline);
    for (auto& [state, tensors] : result_.states) {  // extents of different ranks are disjoint
      optimizer_.visit_own_state(state, [&t = tensors](ParameterId p, std::uint64_t first,
                                                       std::span<const float> v) {
        std::copy(v.begin(), v.end(), t.at(index(p)).begin() + static_cast<std::ptrdiff_t>(first));
      });
    }
    result_.statistics[static_cast<std::size_t>(rank())] = optimizer_.statistics();
    (void)communicator_.bootstrap().all_gather({}, setup_.options.deadline);
  }

  const RunSetup& setup_;
  Communicator& communicator_;
  RunResult& result_;
  std::unique_ptr<Backend> backend_;
  std::vector<std::vector<float>> user_memory_;
  std::vector<std::uint64_t> forward_seen_, backward_seen_;
  std::uint64_t again_ = 0;
  Optimizer optimizer_;
  OwnedStream stream_;  // last: destroyed first, which finishes jobs that read the others
};

}  // namespace detail

// Throws: what the library threw; std::logic_error when ranks or passes disagree
inline RunResult run(const RunSetup& setup) {
  const Watchdog watchdog(std::chrono::seconds(100));
  RunResult result;
  result.statistics.resize(static_cast<std::size_t>(setup.world));
  run_ranks(setup.world, [&](Communicator& communicator) {
    detail::RankLoop(setup, communicator, result).run();
  });
  return result;
}

}  // namespace zero::testing

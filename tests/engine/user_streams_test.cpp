// Leases on the user's own asynchronous streams: order comes from events, never from luck.
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

class UserStreams : public StagesAndWorlds {
 protected:
  static ModelSpec model() {
    ModelSpec out;
    const GroupId all = out.add_group("all", {.hyper = {.lr = 1e-2, .weight_decay = 0.1}});
    out.add(out.add_unit("tied", GradientLife::kUntilReady), "w", {311}, all);
    for (const char* name : {"a", "b", "c"}) {
      out.add(out.add_unit(name), "w", {700}, all);
    }
    return out;
  }
  static Options small_buckets() {
    Options out = options();
    out.bucket_bytes = 1;
    return out;
  }
  // Long enough for a missing wait to show as a wrong value, short enough for thousands.
  static void linger() { std::this_thread::sleep_for(std::chrono::microseconds(300)); }

  struct Streams {
    explicit Streams(Backend& device_in) : device(device_in) {
      for (StreamRef& s : ref) {
        s = device.make_stream();
      }
    }
    Streams(const Streams&) = delete;
    Streams& operator=(const Streams&) = delete;
    ~Streams() {
      for (const StreamRef s : ref) {
        device.release_stream(s);
      }
    }
    Backend& device;
    std::array<StreamRef, 3> ref;
  };
  // The gradient of element i is a function of the parameter as it is read on the stream: a lost
  // wait on either side changes the digest.
  static float slope(float w, int rank, std::size_t i) {
    return w + static_cast<float>(rank + 1) * (i % 2 == 0 ? 0.5F : -0.25F);
  }

  static std::uint64_t on_the_host() {
    std::atomic<std::uint64_t> hash = 0;
    run_each(world(), model(), options(), [&](Rank& rank) {
      for (int step = 0; step < 4; ++step) {
        const Tensors w = read_all(rank.optimizer);
        train_step(rank.optimizer, [&](ParameterId p, std::size_t i) {
          return slope(w[index(p)][i], rank.rank(), i);
        });
      }
      hash = rank.optimizer.state_hash();
    });
    return hash;
  }
};
INSTANTIATE_TEST_SUITE_P(All, UserStreams, every_case(), case_name);

// Each unit's parameters are copied on one stream, its gradient is written in two parts on two
// others, and it is made ready on a fourth: the host.
TEST_P(UserStreams, MayShareOneUnitsWorkAmongThem) {
  std::atomic<std::uint64_t> hash = 0;
  run_ranks(world(), [&](Communicator& communicator) {
    Rank rank(model(), small_buckets(), communicator);
    std::array<std::array<float, 700>, 4> copies{};  // outlives the streams
    Streams streams(*rank.device);
    const auto [reads, evens, odds] = streams.ref;
    Backend& device = *rank.device;
    const auto contribute = [&](GradientLease& lease, std::size_t u, StreamRef stream,
                                std::size_t parity) {
      float* out = lease.data<float>(parameter(u));
      const std::size_t count = u == 0 ? 311 : 700;
      device.call(stream, [&copy = copies.at(u), out, count, parity, r = rank.rank()] {
        linger();
        for (std::size_t i = parity; i < count; i += 2) {
          out[i] += slope(copy.at(i), r, i);
        }
      });
    };
    for (int step = 0; step < 4; ++step) {
      MicroBatch micro = rank.optimizer.begin_micro_batch({.last = Last::kYes});
      for (std::size_t u = 4; u-- > 0;) {
        {
          const ParameterLease lease = rank.optimizer.parameters(unit(u), reads);
          const float* from = lease.data<float>(parameter(u));
          device.call(reads, [&copy = copies.at(u), from, count = u == 0 ? 311U : 700U] {
            linger();
            std::copy(from, from + count, copy.begin());
          });
        }
        const Event copied = device.record(reads);
        device.wait(evens, copied);
        device.wait(odds, copied);
        {
          GradientLease lease = micro.gradients(unit(u), evens);
          contribute(lease, u, evens, 0);
        }
        {
          GradientLease lease = micro.gradients(unit(u), odds);
          contribute(lease, u, odds, 1);
        }
        // The next step's copy into the same memory comes after both.
        device.wait(reads, device.record(evens));
        device.wait(reads, device.record(odds));
        micro.ready(unit(u), u % 2 == 0 ? kHost : evens);
      }
      rank.optimizer.step();
    }
    hash = rank.optimizer.state_hash();
  });
  EXPECT_EQ(hash.load(), on_the_host());
}

// The update may not write parameters that a slow reader on a stream still reads.
TEST_P(UserStreams, HoldTheirLeasesParametersUntilTheyAreRead) {
  run_ranks(world(), [&](Communicator& communicator) {
    Rank rank(model(), small_buckets(), communicator);
    const Tensors initial = read_all(rank.optimizer);
    std::array<float, 4> sums{};
    Streams streams(*rank.device);
    Backend& device = *rank.device;
    for (std::size_t u = 0; u < 4; ++u) {
      ParameterLease lease = rank.optimizer.parameters(unit(u), streams.ref[0]);
      const float* from = lease.data<float>(parameter(u));
      device.wait(streams.ref[1], device.record(streams.ref[0]));
      device.call(streams.ref[1], [&sum = sums.at(u), from, count = u == 0 ? 311U : 700U] {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        for (std::size_t i = 0; i < count; ++i) {
          sum += from[i];
        }
      });
      lease.used_on(streams.ref[1]);
    }
    train_step(rank.optimizer, [](ParameterId, std::size_t) { return 1.0F; });
    device.host_wait(device.record(streams.ref[1]));
    for (std::size_t u = 0; u < 4; ++u) {
      float right = 0;
      for (const float x : initial[u]) {
        right += x;
      }
      EXPECT_EQ(sums.at(u), right) << "unit " << u;
    }
    EXPECT_NE(read_all(rank.optimizer), initial);
  });
}

// add_gradient reads the user's memory in stream order: it may be written again on that stream.
TEST_P(UserStreams, AreWhereAddGradientReadsTheUsersMemory) {
  run_ranks(world(), [&](Communicator& communicator) {
    Rank rank(model(), small_buckets(), communicator);
    std::array<float, 700> memory{};
    Streams streams(*rank.device);
    Backend& device = *rank.device;
    MicroBatch micro = rank.optimizer.begin_micro_batch({.last = Last::kYes});
    for (std::size_t u = 4; u-- > 0;) {
      for (const float part : {1.0F, 2.0F}) {
        device.call(streams.ref[0], [&memory, value = part * static_cast<float>(u + 1)] {
          linger();
          memory.fill(value);
        });
        micro.add_gradient(parameter(u), memory.data(), DType::kFloat32, streams.ref[0]);
      }
      micro.ready(unit(u), streams.ref[0]);
    }
    rank.optimizer.step();
    const Tensors gradient = whole(rank, Values::kGradients);
    for (std::size_t u = 0; u < 4; ++u) {
      EXPECT_EQ(gradient[u],
                std::vector<float>(gradient[u].size(), 3.0F * static_cast<float>(u + 1)));
    }
  });
}

// An error in the user's own stream reaches the step: ranks are told, nobody waits for ever.
// Nothing would order the writes of two open leases, not even behind the zero fill of kAdd.
TEST_P(UserStreams, MayNotWriteOneUnitUnderTwoOpenLeases) {
  for (const bool by_add : {true, false}) {
    const std::vector<Ending> found = endings(world(), [&](Communicator& communicator) {
      Rank rank(model(), options(), communicator);
      const Streams streams(*rank.device);
      MicroBatch micro = rank.optimizer.begin_micro_batch();
      const std::vector<float> values(700, 1.0F);
      const GradientLease first = micro.gradients(unit(1), streams.ref[0]);
      const GradientLease same_stream = micro.gradients(unit(1), streams.ref[0]);
      if (by_add) {
        micro.add_gradient(parameter(1), values.data(), DType::kFloat32, streams.ref[1]);
      } else {
        (void)micro.gradients(unit(1), streams.ref[1]);
      }
    });
    for (const Ending& end : found) {
      EXPECT_TRUE(end.kind == "UsageError" || end.kind == "CommError") << end.kind;
      EXPECT_NE(end.what.find("open on another stream"), std::string::npos) << end.what;
    }
  }
}

// The memory is freed at the end, so work under leases that have ended must be over by then.
TEST_P(UserStreams, AreWaitedForAtTheEnd) {
  run_ranks(world(), [&](Communicator& communicator) {
    const auto device = make_cpu_backend();
    const Streams streams(*device);
    std::atomic<int> over = 0;
    {
      Optimizer optimizer(make_plan(model(), options(), {.shard_ranks = communicator.world()}),
                          *device, {communicator});
      optimizer.initialize(initial_values);
      const ParameterLease lease = optimizer.parameters(unit(1), streams.ref[0]);
      device->call(streams.ref[0], [&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(30));
        ++over;
      });
    }
    EXPECT_EQ(over, 1);
  });
}

TEST_P(UserStreams, ThatFailStopTheStepOnEveryRank) {
  const std::vector<Ending> found = endings(world(), [&](Communicator& communicator) {
    Rank rank(model(), small_buckets(), communicator);
    Streams streams(*rank.device);
    for (int step = 0; step < 5; ++step) {
      MicroBatch micro = rank.optimizer.begin_micro_batch({.last = Last::kYes});
      for (std::size_t u = 4; u-- > 0;) {
        {
          GradientLease lease = micro.gradients(unit(u), streams.ref[0]);
          (void)lease.data<float>(parameter(u));
          if (rank.rank() == rank.world() - 1 && step == 1 && u == 2) {
            rank.device->call(streams.ref[0], [] { throw std::runtime_error("no more data"); });
          }
        }
        micro.ready(unit(u), streams.ref[0]);
      }
      EXPECT_LT(step, 2);
      (void)rank.optimizer.step().get();
      EXPECT_EQ(step, 0);
    }
  });
  for (std::size_t r = 0; r < found.size(); ++r) {
    EXPECT_NE(found[r].what.find("no more data"), std::string::npos) << found[r].what;
  }
}

}  // namespace
}  // namespace zero::testing

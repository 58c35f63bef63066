// Two models trained against each other in one process: the generator's backward goes through a
// critic whose gradients are not taken.
#include <array>
#include <atomic>
#include <cmath>

#include <gtest/gtest.h>

#include "tests/support/ranks.h"

namespace zero::testing {
namespace {

// Generator x = a * z + b (elementwise), critic c(x) = sum_i u_i x_i: linear, so that a plain
// double loop beside it shows the right values.
constexpr std::size_t kWidth = 300;
constexpr Hyper kHyper{.lr = 1e-2, .beta1 = 0.5};

ModelSpec generator() {
  ModelSpec model;
  const GroupId all = model.add_group("all", {.hyper = kHyper});
  model.add(model.add_unit("scale"), "a", {kWidth}, all);
  model.add(model.add_unit("shift"), "b", {kWidth}, all);
  return model;
}
ModelSpec critic() {
  ModelSpec model;
  const GroupId all = model.add_group("all", {.hyper = kHyper});
  model.add(model.add_unit("direction"), "u", {kWidth}, all);
  return model;
}
float noise(int rank, int step, std::size_t i) {
  return static_cast<float>((i * 7 + static_cast<std::size_t>(3 * rank + 5 * step)) % 11) / 8.0F;
}
float real(int rank, std::size_t i) {
  return 2.0F + static_cast<float>((i + static_cast<std::size_t>(rank)) % 3) / 4.0F;
}

class Gan : public StagesAndWorlds {
 protected:
  // The same in double, for all ranks at once.
  struct Right {
    std::vector<AdamElement> a, b, u;
    void update_critic(int world, int step) {
      for (std::size_t i = 0; i < kWidth; ++i) {
        double g = 0;
        for (int r = 0; r < world; ++r) {
          g += a[i].w * static_cast<double>(noise(r, step, i)) + b[i].w -
               static_cast<double>(real(r, i));
        }
        u[i].step(g / world, kHyper);
      }
    }
    void update_generator(int world, int step) {
      for (std::size_t i = 0; i < kWidth; ++i) {
        double ga = 0, gb = 0;
        for (int r = 0; r < world; ++r) {
          ga -= u[i].w * static_cast<double>(noise(r, step, i));
          gb -= u[i].w;
        }
        a[i].step(ga / world, kHyper);
        b[i].step(gb / world, kHyper);
      }
    }
  };
  static Right start(const Tensors& g, const Tensors& c) {
    Right out;
    for (std::size_t i = 0; i < kWidth; ++i) {
      out.a.push_back({.w = static_cast<double>(g[0][i])});
      out.b.push_back({.w = static_cast<double>(g[1][i])});
      out.u.push_back({.w = static_cast<double>(c[0][i])});
    }
    return out;
  }
  // The critic's step: a forward of the generator, whose gradients nobody wants.
  static void train_critic(Rank& g, Rank& c, int step) {
    std::vector<float> fake(kWidth);
    {
      const ParameterLease scale = g.optimizer.parameters(unit(0), kHost);
      const ParameterLease shift = g.optimizer.parameters(unit(1), kHost);
      for (std::size_t i = 0; i < kWidth; ++i) {
        fake[i] = scale.data<float>(parameter(0))[i] * noise(g.rank(), step, i) +
                  shift.data<float>(parameter(1))[i];
      }
    }
    train_step(c.optimizer,
               [&](ParameterId, std::size_t i) { return fake[i] - real(g.rank(), i); });
  }
  // The generator's step: its gradient is -u, read from leases of the critic in the middle of the
  // generator's backward. The critic opens no micro-batch, so it owes no gradient.
  static void train_generator(Rank& g, Rank& c, int step) {
    MicroBatch micro = g.optimizer.begin_micro_batch({.last = Last::kYes});
    for (const std::size_t u : {1U, 0U}) {
      const ParameterLease own = g.optimizer.parameters(unit(u), kHost);
      const ParameterLease through = c.optimizer.parameters(unit(0), kHost);
      const float* direction = through.data<float>(parameter(0));
      write(g.optimizer, micro, parameter(u), [&](ParameterId, std::size_t i) {
        return -direction[i] * (u == 0 ? noise(g.rank(), step, i) : 1.0F);
      });
      micro.ready(unit(u), kHost);
    }
    g.optimizer.step();
  }
};
INSTANTIATE_TEST_SUITE_P(All, Gan, every_case(), case_name);

TEST_P(Gan, TrainsBothAsOneProcessWould) {
  run_ranks(world(), [&](Communicator& ranks) {
    const auto for_critic = ranks.split(0, ranks.rank());
    Rank g(generator(), options(), ranks);
    Rank c(critic(), options(), *for_critic);
    Right right = start(read_all(g.optimizer), read_all(c.optimizer));
    for (int step = 0; step < 6; ++step) {
      train_critic(g, c, step);
      right.update_critic(g.world(), step);
      train_generator(g, c, step);
      right.update_generator(g.world(), step);
    }
    const Tensors found_g = read_all(g.optimizer), found_c = read_all(c.optimizer);
    for (std::size_t i = 0; i < kWidth; ++i) {
      ASSERT_NEAR(found_g[0][i], right.a[i].w, 2e-6) << i;
      ASSERT_NEAR(found_g[1][i], right.b[i].w, 2e-6) << i;
      ASSERT_NEAR(found_c[0][i], right.u[i].w, 2e-6) << i;
    }
    EXPECT_EQ(c.optimizer.step_count(parameter(0)), 6);
    EXPECT_EQ(g.optimizer.step_count(parameter(0)), 6);
  });
}

// The generator's step leaves every bit of the critic, and the other way round.
TEST_P(Gan, NeitherTouchesTheOther) {
  run_ranks(world(), [&](Communicator& ranks) {
    const auto for_critic = ranks.split(0, ranks.rank());
    Rank g(generator(), options(), ranks);
    Rank c(critic(), options(), *for_critic);
    const Snapshot g_before = snapshot(g);
    train_critic(g, c, 0);
    EXPECT_EQ(snapshot(g), g_before);
    const Snapshot c_before = snapshot(c);
    train_generator(g, c, 0);
    EXPECT_EQ(snapshot(c), c_before);
    EXPECT_NE(snapshot(g), g_before);
  });
}

// Their collectives interleave in program order.
TEST_P(Gan, MayShareOneCommunicatorAndOneDevice) {
  std::array<std::atomic<std::uint64_t>, 2> shared{}, apart{};
  for (const bool together : {true, false}) {
    run_ranks(world(), [&](Communicator& ranks) {
      const auto other = ranks.split(0, ranks.rank());
      const auto device = make_cpu_backend();
      const auto second_device = make_cpu_backend();
      const World shard{.shard_ranks = ranks.world()};
      Optimizer g(make_plan(generator(), options(), shard), *device, {ranks});
      Optimizer c(make_plan(critic(), options(), shard), together ? *device : *second_device,
                  {together ? ranks : *other});
      g.initialize(initial_values);
      c.initialize(initial_values);
      for (int step = 0; step < 3; ++step) {
        train_step(
            g, [](ParameterId p, std::size_t i) { return static_cast<float>(index(p) + i % 3); });
        train_step(c, [](ParameterId, std::size_t i) { return static_cast<float>(i % 5); });
      }
      auto& out = together ? shared : apart;
      out[0] = g.state_hash();
      out[1] = c.state_hash();
    });
  }
  EXPECT_EQ(shared[0].load(), apart[0].load());
  EXPECT_EQ(shared[1].load(), apart[1].load());
}

}  // namespace
}  // namespace zero::testing

// Two ranks take one step at stage 3.
#include <cstdio>

#include "zero/zero.h"

int main() {
  zero::ModelSpec model;
  const auto group = model.add_group("all", {.hyper = {.lr = 0.5}});
  const auto unit = model.add_unit("layer");
  const auto weight = model.add(unit, "weight", {3, 5}, group);
  const zero::Plan plan =
      zero::make_plan(model, {.stage = zero::Stage::kParameters}, {.shard_ranks = 2});
  int applied[2] = {0, 0};
  zero::run_ranks(2, [&](zero::Communicator& ranks) {
    const auto device = zero::make_cpu_backend();
    zero::Optimizer optimizer(plan, *device, {ranks});
    optimizer.initialize([](zero::ParameterId, std::uint64_t, std::span<float> out) {
      for (float& x : out) {
        x = 1;
      }
    });
    auto micro = optimizer.begin_micro_batch({.last = zero::Last::kYes});
    const std::vector<float> gradient(15, 2.0F);
    micro.add_gradient(weight, gradient.data(), zero::DType::kFloat32, zero::kHost);
    micro.ready(unit, zero::kHost);
    applied[ranks.rank()] = optimizer.step().get().applied ? 1 : 0;
    const auto lease = optimizer.parameters(unit, zero::kHost);
    for (int i = 0; i < 15; ++i) {  // AdamW's first step is lr in the gradient's direction
      const float w = lease.data<float>(weight)[i];
      applied[ranks.rank()] &= w > 0.49F && w < 0.51F ? 1 : 0;
    }
  });
  std::printf("steps applied: %d\n", applied[0] + applied[1]);
  return applied[0] + applied[1] == 2 ? 0 : 1;
}

// Trains a two-layer net. before.cpp is the loop as it was, over plain buffers of one process;
// after.cpp is the same loop with its state partitioned over three ranks.
#include <cstdio>
#include <vector>

#include "zero/zero.h"

#include "net.h"

void train(zero::Communicator& ranks, int rank, int world) {
  zero::ModelSpec model;
  const auto all = model.add_group("all", {.hyper = {.lr = kLearningRate}});
  const auto net = model.add_unit("net");  // a big model has a unit for each layer
  const auto w = model.add(net, "weights", {kWeights}, all);
  const auto plan = zero::make_plan(model, {.stage = zero::Stage::kParameters}, {world});
  const auto device = zero::make_cpu_backend();
  zero::Optimizer optimizer(plan, *device, {ranks});
  optimizer.initialize([](auto, auto first, auto out) { initial_weights(first, out); });
  std::vector<float> dw(kWeights);
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = training_batch(step, rank, world);
    float loss = backward(optimizer.parameters(net, zero::kHost).data<float>(w), batch, dw.data());
    auto micro = optimizer.begin_micro_batch({.last = zero::Last::kYes});
    micro.add_gradient(w, dw.data(), zero::DType::kFloat32, zero::kHost);
    micro.ready(net, zero::kHost);
    optimizer.step();
    std::printf("step %d rank %d loss %.6f\n", step, rank, static_cast<double>(loss));
  }
}

int main() {
  zero::run_ranks(3, [](auto& ranks) { train(ranks, ranks.rank(), ranks.world()); });
}

// Trains a two-layer net. before.cpp is the loop as it was, over plain buffers of one process;
// after.cpp is the same loop with its state partitioned over three ranks.
#include <cstdio>
#include <vector>

#include "net.h"

void train(int rank, int world) {
  std::vector<float> weights(kWeights);
  initial_weights(0, weights);
  AdamW optimizer(kWeights);
  std::vector<float> dw(kWeights);
  for (int step = 0; step < kSteps; ++step) {
    const Batch batch = training_batch(step, rank, world);
    float loss = backward(weights.data(), batch, dw.data());
    optimizer.step(weights.data(), dw.data());
    std::printf("step %d rank %d loss %.6f\n", step, rank, static_cast<double>(loss));
  }
}

int main() {
  train(0, 1);
}

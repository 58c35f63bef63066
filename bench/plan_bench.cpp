// Times make_plan and the memory table: linear in tensors, independent of the world for one rank.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <vector>

#include "zero/plan.h"

namespace {

using namespace zero;

// Units of ten tensors, of sizes from a scalar to a large matrix.
ModelSpec model_of(int tensors) {
  ModelSpec model;
  const GroupId decay = model.add_group("decay", {.precision = kBf16WithMaster});
  const GroupId plain = model.add_group("plain");
  UnitId unit{};
  for (int i = 0; i < tensors; ++i) {
    if (i % 10 == 0) {
      unit = model.add_unit("h." + std::to_string(i / 10));
    }
    const auto rows = static_cast<std::size_t>(1 + i % 10 * 123);
    model.add(unit, "attn.weight." + std::to_string(i), {rows, 1024}, i % 3 == 0 ? plain : decay);
  }
  return model;
}

// Median of `rounds` calls, in milliseconds.
template <class Fn>
double time_of(Fn&& fn, int rounds = 7) {
  std::vector<double> times;
  for (int i = 0; i < rounds; ++i) {
    const auto start = std::chrono::steady_clock::now();
    fn();
    times.push_back(
        std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
            .count());
  }
  std::nth_element(times.begin(), times.begin() + rounds / 2, times.end());
  return times[static_cast<std::size_t>(rounds / 2)];
}

void time_plan(int tensors, int world) {
  const ModelSpec model = model_of(tensors);
  const Options options{.stage = Stage::kParameters};
  const Plan plan = make_plan(model, options, {.shard_ranks = world});
  std::uint64_t sink = 0;
  const double make = time_of(
      [&] { sink += make_plan(model, options, {.shard_ranks = world}).bucket_buffer_bytes(); });
  const double items = time_of([&] { sink += plan.peak_bytes(world / 2); });
  const double fullest = time_of([&] { sink += static_cast<std::uint64_t>(plan.fullest_rank()); });
  std::printf("%8d %8d %12.2f %12.2f %12.2f%s\n", tensors, world, make, items, fullest,
              sink == 0 ? " " : "");
}

}  // namespace

int main() {
  std::printf("%8s %8s %12s %12s %12s\n", "tensors", "world", "make_plan/ms", "table/ms",
              "fullest/ms");
  for (const int tensors : {10'000, 100'000}) {
    for (const int world : {1, 1024, 100'000}) {
      time_plan(tensors, world);
    }
  }
}

// Times the fused update beside a copy, alternated in one run.
// usage: update_bench [PARAMETERS [THREADS [RUNS [TENSORS]]]]    67108864, 2, 9 and 1
//
// Prints one JSON line a case, as bench/peers/adamw.py does for PyTorch: parameters a second and
// GB/s from the median, where the bytes are those that must be read and written once (a formula),
// and the fraction of the copy's GB/s.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "zero/cpu.h"
#include "zero/error.h"
#include "zero/update_arguments.h"

namespace {

using namespace zero;

struct Sizes {
  std::size_t parameters = std::size_t{64} << 20U;
  int threads = 2;
  std::size_t runs = 9;
  std::size_t tensors = 1;
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// The arrays of a step over equal tensors, filled with small noise.
class Step {
 public:
  Step(Backend& backend, const Sizes& sizes, Precision precision)
      : backend_(backend), count_(sizes.parameters / sizes.tensors * sizes.tensors) {
    fill_tables(sizes);
    arguments_.parameter_dtype = precision.parameter;
    arguments_.parameters = noise(count_ * bytes_of(precision.parameter), precision.parameter);
    arguments_.gradients = static_cast<const float*>(noise(count_ * sizeof(float)));
    if (precision.master == Master::kFloat32) {
      arguments_.master = static_cast<float*>(noise(count_ * sizeof(float)));
    }
    for (std::size_t s = 0; s < 2; ++s) {
      arguments_.states.at(s) = noise(count_ * sizeof(float));
    }
  }

  void update(const UpdateRule& rule) { backend_.update(rule, arguments_, kHost); }
  void measure() { backend_.measure(arguments_, kHost); }

 private:
  template <class T>
  T* table(const std::vector<T>& rows) {
    buffers_.push_back(backend_.allocate({rows.size() * sizeof(T), Category::kScratch}));
    backend_.copy(buffers_.back().data(), rows.data(), buffers_.back().bytes(), kHost);
    return buffers_.back().as<T>();
  }

  void fill_tables(const Sizes& sizes) {
    const std::uint64_t each = count_ / sizes.tensors;
    std::vector<Chunk> chunks;
    for (std::uint32_t t = 0; t < sizes.tensors; ++t) {
      for (std::uint64_t first = 0; first < each; first += kChunkElements) {
        const std::uint64_t at = t * each + first;
        const auto count = static_cast<std::uint32_t>(std::min(kChunkElements, each - first));
        chunks.push_back({at, at, at, first, count, t});
      }
    }
    arguments_.chunks = table(chunks);
    arguments_.chunk_count = arguments_.measured_chunks = chunks.size();
    arguments_.row_count = sizes.tensors;
    arguments_.rows = table(std::vector(sizes.tensors, ParameterRow{.step = 100, .used = 1}));
    arguments_.groups = table(std::vector{Hyper{.weight_decay = 0.01}});
    arguments_.inputs = table(std::vector{StepInputs{}});
    arguments_.scalars = table(std::vector{StepScalars{.divisor = 3, .clip_factor = 0.9}});
    arguments_.control = table(std::vector<std::int64_t>(ControlLayout::words(1, sizes.tensors)));
  }

  void* noise(std::size_t bytes, DType dtype = DType::kFloat32) {
    buffers_.push_back(backend_.allocate({bytes, Category::kUser}));
    const Buffer& buffer = buffers_.back();
    std::uint32_t state = static_cast<std::uint32_t>(buffers_.size());
    for (std::size_t i = 0; i < bytes / bytes_of(dtype); ++i) {
      state = state * 1664525U + 1013904223U;
      const float x = static_cast<float>(state >> 8U) * 0x1p-24F * 1e-3F;
      if (dtype == DType::kFloat32) {
        buffer.as<float>()[i] = x;
      } else {
        buffer.as<bf16>()[i] = to_bf16(x);
      }
    }
    return buffer.data();
  }

  Backend& backend_;
  std::size_t count_;
  std::vector<Buffer> buffers_;
  UpdateArguments arguments_;
};

struct Case {
  std::string name;
  double bytes_per_parameter = 0;
  std::function<void()> work;
  std::vector<double> seconds{};
};

void time_alternately(std::vector<Case>& cases, std::size_t runs) {
  for (std::size_t run = 0; run < runs + 2; ++run) {
    for (Case& c : cases) {
      const auto begin = std::chrono::steady_clock::now();
      c.work();
      const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - begin;
      if (run >= 2) {  // the first runs touch the memory
        c.seconds.push_back(taken.count());
      }
    }
  }
}

void print(const std::vector<Case>& cases, const Sizes& sizes) {
  const auto parameters = static_cast<double>(sizes.parameters);
  const auto rate = [&](const Case& c) {
    return c.bytes_per_parameter * parameters / median(c.seconds) / 1e9;
  };
  for (const Case& c : cases) {
    std::printf(
        "{\"case\": \"%s\", \"tensors\": %zu, \"threads\": %d, \"gparam_per_second\": %.4f, "
        "\"bytes_per_parameter\": %g, \"gb_per_second\": %.2f, \"of_copy\": %.3f}\n",
        c.name.c_str(), sizes.tensors, sizes.threads, parameters / median(c.seconds) / 1e9,
        c.bytes_per_parameter, rate(c), rate(c) / rate(cases.front()));
  }
}

void run(const Sizes& sizes) {
  const auto backend = make_cpu_backend(kUnlimited, sizes.threads);
  Step full(*backend, sizes, kFloat32Only), low(*backend, sizes, kBf16WithMaster);
  const std::size_t bytes = sizes.parameters * sizeof(float);
  const Buffer from = backend->allocate({bytes, Category::kUser});
  const Buffer to = backend->allocate({bytes, Category::kUser});
  backend->fill(from.data(), 1, bytes, kHost);
  const UpdateRule rule = adamw();
  std::vector<Case> cases{{"copy", 8, [&] { backend->copy(to.data(), from.data(), bytes, kHost); }},
                          {"adamw fp32", 28, [&] { full.update(rule); }},
                          {"adamw bf16 with master", 30, [&] { low.update(rule); }},
                          {"measure the norm", 4, [&] { full.measure(); }}};
  time_alternately(cases, sizes.runs);
  print(cases, sizes);
}

}  // namespace

int main(int argc, char** argv) {
  const auto number = [&](int i, std::size_t otherwise) {
    return argc > i ? static_cast<std::size_t>(std::strtoull(argv[i], nullptr, 10)) : otherwise;
  };
  Sizes sizes;
  sizes.parameters = number(1, sizes.parameters);
  sizes.threads = static_cast<int>(number(2, 2));
  sizes.runs = number(3, sizes.runs);
  sizes.tensors = number(4, sizes.tensors);
  if (sizes.runs == 0 || sizes.tensors == 0 || sizes.parameters < sizes.tensors) {
    std::fprintf(stderr, "usage: update_bench [PARAMETERS [THREADS [RUNS [TENSORS]]]]\n");
    return 2;
  }
  try {
    run(sizes);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "update_bench: %s\n", e.what());
    return 1;
  }
  return 0;
}

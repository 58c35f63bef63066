// Times the local communicator's collectives beside a copy, alternated in one run.
// usage: comm_bench [BYTES [RUNS]]    64 MiB and 9; bytes of the full (unsharded) fp32 message
//
// Prints one JSON line an operation, as bench/peers/collectives.py does for gloo: median
// milliseconds and GB/s of the full message; besides, the bytes that all ranks together read and
// write (a formula), their GB/s, and the fraction of a copy's.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "zero/cpu.h"
#include "zero/launch.h"

namespace {

using namespace zero;

constexpr std::chrono::seconds kDeadline{60};

struct Case {
  std::string name;
  double moved_bytes = 0;  // read and written by all ranks together
  std::function<Event()> start;
  std::vector<double> milliseconds{};
};

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

// One rank's arrays and operations.
class Rank {
 public:
  Rank(Communicator& communicator, std::size_t bytes)
      : communicator_(communicator),
        ranks_(static_cast<std::size_t>(communicator.world())),
        count_(bytes / sizeof(float) / ranks_),
        backend_(make_cpu_backend()),
        stream_(backend_->make_stream()),
        source_(allocate(ranks_ * count_)),
        full_(allocate(ranks_ * count_)),
        shard_(allocate(count_)) {
    std::uint32_t state = static_cast<std::uint32_t>(communicator.rank()) + 1;
    for (std::size_t i = 0; i < ranks_ * count_; ++i) {
      state = state * 1664525U + 1013904223U;
      source_.as<float>()[i] = static_cast<float>(state >> 8U) * 0x1p-24F - 0.5F;
    }
  }
  Rank(const Rank&) = delete;
  Rank& operator=(const Rank&) = delete;
  ~Rank() { backend_->release_stream(stream_); }

  void run(int runs) {
    std::vector<Case> cases = make_cases();
    constexpr int kWarmUp = 2;
    for (int i = 0; i < runs + kWarmUp; ++i) {
      for (Case& c : cases) {
        const double time = time_once(c);
        if (i >= kWarmUp) {
          c.milliseconds.push_back(time);
        }
      }
    }
    if (communicator_.rank() == 0) {
      print(cases);
    }
  }

 private:
  Buffer allocate(std::size_t count) {
    return backend_->allocate({.bytes = count * sizeof(float), .category = Category::kUser});
  }

  std::vector<Case> make_cases() {
    const auto w = static_cast<double>(ranks_);
    const auto message = static_cast<double>(ranks_ * count_ * sizeof(float));
    const On on{*backend_, stream_, {}, "bench", kDeadline};
    const Transfer scatter{full_.data(), shard_.data(), count_};
    const Transfer gather{shard_.data(), full_.data(), count_};
    const Transfer reduce{full_.data(), full_.data(), ranks_ * count_};
    return {{"copy by every rank", 2 * w * message,
             [this] {
               backend_->copy(full_.data(), source_.data(), full_.bytes(), stream_);
               return backend_->record(stream_);
             }},
            {"local reduce_scatter", (w + 1) * message,
             [=, this] {
               return communicator_.reduce_scatter({&scatter, 1}, SumOrder::kTree, on);
             }},
            {"local all_gather", 2 * w * message,
             [=, this] {
               return communicator_.all_gather({&gather, 1}, on);
             }},
            {"local all_reduce", (3 * w - 1) * message, [=, this] {
               return communicator_.all_reduce({&reduce, 1}, on);
             }}};
  }

  void meet() { (void)communicator_.bootstrap().all_gather({}, kDeadline); }

  // From the moment when all ranks are there until all have ended; the data are fresh, no zeros.
  double time_once(const Case& c) {
    backend_->copy(full_.data(), source_.data(), full_.bytes(), kHost);
    backend_->copy(shard_.data(), source_.data(), shard_.bytes(), kHost);
    meet();
    const auto start = std::chrono::steady_clock::now();
    backend_->host_wait(c.start());
    meet();
    return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start)
        .count();
  }

  void print(const std::vector<Case>& cases) const {
    const std::size_t bytes = ranks_ * count_ * sizeof(float);
    const auto rate = [](double moved, const Case& c) {
      return moved / median(c.milliseconds) / 1e6;
    };
    const double copy = rate(cases[0].moved_bytes, cases[0]);
    for (const Case& c : cases) {
      const double moved = rate(c.moved_bytes, c);
      std::printf(
          "{\"name\": \"%s\", \"ranks\": %zu, \"bytes\": %zu, \"ms\": %.2f, "
          "\"gb_per_second\": %.2f, \"moved_bytes\": %.0f, \"moved_gb_per_second\": %.2f, "
          "\"fraction_of_copy\": %.2f}\n",
          c.name.c_str(), ranks_, bytes, median(c.milliseconds),
          rate(static_cast<double>(bytes), c), c.moved_bytes, moved, moved / copy);
    }
    std::fflush(stdout);
  }

  Communicator& communicator_;
  std::size_t ranks_, count_;
  std::unique_ptr<Backend> backend_;
  StreamRef stream_;
  Buffer source_, full_, shard_;
};

// Returns: the number, 0 when it is none
unsigned long number(const char* text) {
  char* end = nullptr;
  const unsigned long value = std::strtoul(text, &end, 10);
  return *end == '\0' ? value : 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::size_t bytes = argc > 1 ? number(argv[1]) : std::size_t{64} << 20U;
  const std::size_t runs = argc > 2 ? number(argv[2]) : 9;
  if (argc > 3 || bytes < 1024 || runs < 1 || runs > 100'000) {
    std::fprintf(stderr, "usage: comm_bench [BYTES (>= 1024) [RUNS (>= 1)]]\n");
    return 2;
  }
  try {
    for (const int world : {2, 4}) {
      run_ranks(world, [&](Communicator& communicator) {
        Rank(communicator, bytes).run(static_cast<int>(runs));
      });
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "comm_bench: %s\n", error.what());
    return 1;
  }
  return 0;
}

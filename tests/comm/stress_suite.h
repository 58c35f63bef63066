// Conformance: random sequences of collectives over several communicators and streams, against
// the plain answers. All ranks draw the same sequence; delays and host waits are each rank's own.
#pragma once

#include <array>
#include <memory>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "tests/comm/launcher.h"
#include "tests/comm/side.h"

namespace zero::testing {

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : state_(mixed(seed)) {}
  // A number in [0, n).
  [[nodiscard]] std::size_t roll(std::size_t n) { return (state_ = mixed(state_)) % n; }
  template <class T>
  [[nodiscard]] T pick(const std::vector<T>& from) {
    return from[roll(from.size())];
  }

 private:
  std::uint64_t state_;
};

[[nodiscard]] inline Exchange random_exchange(Dice& dice) {
  static const std::vector<DType> summed = {DType::kFloat32, DType::kInt64};
  static const std::vector<DType> scattered = {DType::kFloat32, DType::kInt64, DType::kBfloat16};
  static const std::vector<DType> moved = {DType::kFloat32, DType::kBfloat16, DType::kUint8,
                                           DType::kInt64};
  Exchange x{.verb = static_cast<Verb>(dice.roll(4)), .seed = dice.roll(1U << 30U)};
  const std::size_t pieces = dice.roll(4);
  for (std::size_t i = 0; i < pieces; ++i) {
    Piece piece{.count = dice.roll(8) == 0 ? dice.roll(20'000) : dice.roll(70)};
    const bool in_place = dice.roll(2) == 0;
    if (x.verb == Verb::kReduceScatter) {
      piece.dtype = dice.pick(scattered);
    } else {
      piece.dtype = dice.pick(x.verb == Verb::kAllReduce ? summed : moved);
    }
    const bool may = x.verb == Verb::kAllGather || x.verb == Verb::kAllReduce ||
                     (x.verb == Verb::kReduceScatter && piece.dtype == DType::kFloat32);
    piece.place = in_place && may ? Place::kInPlace : Place::kApart;
    x.pieces.push_back(piece);
  }
  return x;
}

// One rank's part in a random run.
class RandomTraffic {
 public:
  RandomTraffic(Communicator& communicator, Backend& backend, std::uint64_t seed)
      : backend_(backend),
        common_(seed),
        own_(seed * 1000 + static_cast<std::uint64_t>(communicator.rank())),
        half_(communicator.split(communicator.rank() % 2, -communicator.rank())),
        twin_(communicator.split(0, communicator.rank())),
        through_{&communicator, half_.get(), twin_.get()} {
    for (auto& stream : streams_) {
      stream = std::make_unique<OwnStream>(backend);
    }
  }

  void run(int batches, int exchanges) {
    for (int b = 0; b < batches; ++b) {
      for (int i = 0; i < exchanges; ++i) {
        disturb();
        start_one();
      }
      for (const auto& stream : streams_) {
        backend_.host_wait(backend_.record(*stream));
      }
      for (const auto& side : sides_) {
        side->check();
      }
      sides_.clear();
      done_.clear();
    }
  }

 private:
  void start_one() {
    Communicator& through = *through_[common_.roll(through_.size())];
    const StreamRef stream = *streams_[common_.roll(streams_.size())];
    std::vector<Event> after;
    for (std::size_t i = common_.roll(3); i > 0 && !done_.empty(); --i) {
      after.push_back(done_[common_.roll(done_.size())]);
    }
    sides_.push_back(std::make_unique<Side>(random_exchange(common_), through, backend_));
    done_.push_back(sides_.back()->start(
        through, {backend_, stream, after, "random", scaled(milliseconds(30'000))}));
    if (common_.roll(12) == 0) {
      host_meeting(through);
    }
  }

  void disturb() {
    const std::size_t what = own_.roll(10);
    if (what == 0) {
      const auto time = std::chrono::microseconds(own_.roll(300));
      backend_.call(*streams_[own_.roll(streams_.size())],
                    [time] { std::this_thread::sleep_for(time); });
    } else if (what == 1) {
      std::this_thread::sleep_for(std::chrono::microseconds(own_.roll(300)));
    } else if (what == 2 && !done_.empty()) {
      backend_.host_wait(done_[own_.roll(done_.size())]);
    }
  }

  Backend& backend_;
  Dice common_, own_;
  std::unique_ptr<Communicator> half_, twin_;
  std::array<Communicator*, 3> through_;
  std::vector<std::unique_ptr<Side>> sides_;
  std::vector<Event> done_;
  std::array<std::unique_ptr<OwnStream>, 3> streams_;  // last: they end before what they use
};

class CommStress : public WorldTest {};

TEST_P(CommStress, RandomTrafficGivesThePlainAnswers) {
  for (std::uint64_t seed = 1; seed <= 4; ++seed) {
    run([seed](Communicator& communicator, Backend& backend) {
      SCOPED_TRACE("seed " + std::to_string(seed));
      RandomTraffic(communicator, backend, seed).run(4, 30);
    });
  }
}

// Errors at random places: the run ends, on all ranks, with the error that was first.
TEST_P(CommStress, RandomTrafficEndsOnAllRanksWhenOneThrows) {
  for (std::uint64_t seed = 100; seed <= 107; ++seed) {
    const auto culprit = static_cast<int>(mixed(seed) % static_cast<std::uint64_t>(world()));
    const auto exchanges = static_cast<int>(mixed(seed + 1) % 40);
    const auto start = [=] {
      run([=](Communicator& communicator, Backend& backend) {
        RandomTraffic traffic(communicator, backend, seed);
        traffic.run(1, exchanges);
        if (communicator.rank() == culprit) {
          throw std::domain_error("seed " + std::to_string(seed));
        }
        traffic.run(4, 30);
      });
    };
    EXPECT_THROW(start(), std::domain_error) << "seed " << seed;
  }
}

}  // namespace zero::testing

#include "comm/local_comm.h"

#include <algorithm>
#include <array>
#include <exception>
#include <functional>
#include <utility>

#include "zero/error.h"

namespace zero {
namespace {

const std::byte* bytes_at(const void* base, std::size_t offset) {
  return static_cast<const std::byte*>(base) + offset;
}
std::byte* bytes_at(void* base, std::size_t offset) {
  return static_cast<std::byte*>(base) + offset;
}

bool overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
  const std::less<const std::byte*> before;
  return a_bytes > 0 && b_bytes > 0 && before(bytes_at(a, 0), bytes_at(b, b_bytes)) &&
         before(bytes_at(b, 0), bytes_at(a, a_bytes));
}

DType summed(DType in) {
  return in == DType::kInt64 ? DType::kInt64 : DType::kFloat32;
}

void copy_unless_in_place(Backend& device, void* to, const void* from, std::size_t bytes) {
  if (to != from && bytes > 0) {
    device.copy(to, from, bytes, kHost);
  }
}

// Sums elements [first, first + count) of array i over ranks into `out`.
void sum_over_ranks(Backend& device, std::span<const Arrival> arrivals, std::size_t i,
                    std::size_t first, std::size_t count, void* out) {
  if (count == 0) {
    return;
  }
  const DType dtype = arrivals[0].transfers[i].dtype;
  std::vector<const void*> in(arrivals.size());
  std::transform(arrivals.begin(), arrivals.end(), in.begin(), [&](const Arrival& v) {
    return bytes_at(v.transfers[i].in, first * bytes_of(dtype));
  });
  device.sum_tree(out, in, dtype, count, kHost);
}

// Reads W-1 blocks of the others and writes one: (W+1) * n elements move.
std::vector<Room::Round> reduce_scatter_rounds(Backend& device, int rank, int /*world*/) {
  return {[&device, me = static_cast<std::size_t>(rank)](std::span<const Arrival> arrivals) {
    for (std::size_t i = 0; i < arrivals[me].transfers.size(); ++i) {
      const Transfer& t = arrivals[me].transfers[i];
      sum_over_ranks(device, arrivals, i, me * t.count, t.count, t.out);
    }
  }};
}

std::vector<Room::Round> all_gather_rounds(Backend& device, int rank, int world) {
  return {[&device, me = static_cast<std::size_t>(rank),
           ranks = static_cast<std::size_t>(world)](std::span<const Arrival> arrivals) {
    for (std::size_t i = 0; i < arrivals[me].transfers.size(); ++i) {
      const Transfer& t = arrivals[me].transfers[i];
      const std::size_t block = t.count * bytes_of(t.dtype);
      for (std::size_t turn = 0; turn < ranks; ++turn) {
        const std::size_t peer = (me + turn) % ranks;  // ranks start at different peers
        copy_unless_in_place(device, bytes_at(t.out, peer * block), arrivals[peer].transfers[i].in,
                             block);
      }
    }
  }};
}

// A reduce-scatter into out, then an all-gather from the others' out: in == out is legal, since a
// rank's part of `in` is read only by the rank that writes that part.
std::vector<Room::Round> all_reduce_rounds(Backend& device, int rank, int world) {
  const auto me = static_cast<std::size_t>(rank);
  const auto ranks = static_cast<std::size_t>(world);
  const auto part = [ranks](const Transfer& t, std::size_t r) {
    return std::pair(t.count * r / ranks, t.count * (r + 1) / ranks);
  };
  return {[&device, me, part](std::span<const Arrival> arrivals) {
            for (std::size_t i = 0; i < arrivals[me].transfers.size(); ++i) {
              const Transfer& t = arrivals[me].transfers[i];
              const auto [first, end] = part(t, me);
              sum_over_ranks(device, arrivals, i, first, end - first,
                             bytes_at(t.out, first * bytes_of(t.dtype)));
            }
          },
          [&device, me, part, ranks](std::span<const Arrival> arrivals) {
            for (std::size_t i = 0; i < arrivals[me].transfers.size(); ++i) {
              const Transfer& t = arrivals[me].transfers[i];
              for (std::size_t r = 0; r < ranks; ++r) {
                const auto [first, end] = part(t, r);
                const std::size_t at = first * bytes_of(t.dtype);
                copy_unless_in_place(device, bytes_at(t.out, at),
                                     bytes_at(arrivals[r].transfers[i].out, at),
                                     (end - first) * bytes_of(t.dtype));
              }
            }
          }};
}

std::vector<Room::Round> all_to_all_rounds(Backend& device, int rank, int world) {
  return {[&device, me = static_cast<std::size_t>(rank),
           ranks = static_cast<std::size_t>(world)](std::span<const Arrival> arrivals) {
    for (std::size_t i = 0; i < arrivals[me].transfers.size(); ++i) {
      const Transfer& t = arrivals[me].transfers[i];
      const std::size_t block = t.count * bytes_of(t.dtype);
      for (std::size_t turn = 0; turn < ranks; ++turn) {
        const std::size_t peer = (me + turn) % ranks;
        copy_unless_in_place(device, bytes_at(t.out, peer * block),
                             bytes_at(arrivals[peer].transfers[i].in, me * block), block);
      }
    }
  }};
}

// What a verb makes of n = count elements: blocks of in and out, dtype of out, aliasing.
struct Rule {
  const char* operation;
  std::size_t in_blocks, out_blocks;
  bool sums = false;      // else it only moves bytes
  bool bf16_too = false;  // of the sums
  // Where out may lie in in (or in in out): at block `own`, or nowhere.
  enum class Alias : std::uint8_t { kNo, kOwnBlock, kSame } alias = Alias::kNo;
};

bool legal_alias(const Rule& rule, const Transfer& t, std::size_t rank) {
  const std::size_t own = rank * t.count * bytes_of(t.dtype);
  switch (rule.alias) {
    case Rule::Alias::kSame:
      return t.in == t.out;
    case Rule::Alias::kOwnBlock:
      return rule.sums ? t.dtype == summed(t.dtype) && bytes_at(t.in, own) == t.out
                       : bytes_at(t.out, own) == t.in;
    case Rule::Alias::kNo:
      break;
  }
  return false;
}

void check_transfer(const Rule& rule, const Transfer& t, std::size_t i, int rank,
                    std::string_view label) {
  const auto fail = [&](const std::string& what) {
    throw UsageError("rank " + std::to_string(rank) + ": " + rule.operation + " of \"" +
                     std::string(label) + "\", array " + std::to_string(i) + ": " + what);
  };
  const bool can_sum = t.dtype == DType::kFloat32 || t.dtype == DType::kInt64 ||
                       (rule.bf16_too && t.dtype == DType::kBfloat16);
  if (rule.sums && !can_sum) {
    fail(std::string("expected fp32, ") + (rule.bf16_too ? "bf16 " : "") + "or int64, found " +
         std::string(name_of(t.dtype)) + "; convert it before");
  }
  if (t.count == 0) {
    return;
  }
  if (t.in == nullptr || t.out == nullptr) {
    fail("expected memory for " + std::to_string(t.count) + " elements, found a null pointer");
  }
  const DType out_dtype = rule.sums ? summed(t.dtype) : t.dtype;
  if (overlap(t.in, rule.in_blocks * t.count * bytes_of(t.dtype), t.out,
              rule.out_blocks * t.count * bytes_of(out_dtype)) &&
      !legal_alias(rule, t, static_cast<std::size_t>(rank))) {
    fail("in and out overlap in a way that this operation does not allow; see communicator.h");
  }
}

}  // namespace

std::vector<std::vector<std::byte>> LocalBootstrap::all_gather(std::span<const std::byte> mine,
                                                               std::chrono::milliseconds deadline) {
  std::vector<std::vector<std::byte>> all;
  const Room::Round read = [&all](std::span<const Arrival> arrivals) {
    for (const Arrival& v : arrivals) {
      all.emplace_back(v.bytes.begin(), v.bytes.end());
    }
  };
  const Room::Caller caller{rank_, Room::Channel::kBootstrap,
                            room_.issue(rank_, Room::Channel::kBootstrap), deadline};
  room_.meet(caller, {.operation = "bootstrap all_gather", .bytes = mine}, std::span(&read, 1));
  return all;
}

void LocalBootstrap::raise(const std::string& error) noexcept {
  try {
    room_.fail("rank " + std::to_string(rank_) + " reported: " + error,
               {.rank = rank_, .peer = rank_}, rank_);
  } catch (...) {  // no memory for the text
    room_.fail({}, {}, rank_);
  }
}

LocalCommunicator::LocalCommunicator(std::shared_ptr<Room> room, int rank,
                                     std::chrono::milliseconds deadline)
    : room_(std::move(room)),
      rank_(rank),
      deadline_(deadline),
      bootstrap_(*room_, rank),
      exceptions_(std::uncaught_exceptions()) {}

LocalCommunicator::~LocalCommunicator() {
  if (std::uncaught_exceptions() > exceptions_) {
    abort("an exception ended the scope of its communicator");
  }
  room_->leave(rank_);
}

Event LocalCommunicator::enqueue(const char* operation, std::span<const Transfer> transfers,
                                 SumOrder order, const On& on, Rounds rounds) {
  for (const Event& e : on.after) {
    on.backend.wait(on.stream, e);
  }
  const Room::Caller caller{rank_, Room::Channel::kData, room_->issue(rank_, Room::Channel::kData),
                            on.deadline};
  on.backend.call(on.stream, [room = room_, caller, rounds, &device = on.backend,
                              arrival = Arrival{.operation = operation,
                                                .label = std::string(on.label),
                                                .transfers = {transfers.begin(), transfers.end()},
                                                .order = order}]() mutable {
    room->meet(caller, std::move(arrival), rounds(device, caller.rank, room->world()));
  });
  return on.backend.record(on.stream);
}

Event LocalCommunicator::reduce_scatter(std::span<const Transfer> transfers, SumOrder order,
                                        const On& on) {
  const Rule rule{.operation = "reduce_scatter",
                  .in_blocks = static_cast<std::size_t>(world()),
                  .out_blocks = 1,
                  .sums = true,
                  .bf16_too = true,
                  .alias = Rule::Alias::kOwnBlock};
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    check_transfer(rule, transfers[i], i, rank_, on.label);
  }
  return enqueue(rule.operation, transfers, order, on, reduce_scatter_rounds);
}

Event LocalCommunicator::all_gather(std::span<const Transfer> transfers, const On& on) {
  const Rule rule{.operation = "all_gather",
                  .in_blocks = 1,
                  .out_blocks = static_cast<std::size_t>(world()),
                  .alias = Rule::Alias::kOwnBlock};
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    check_transfer(rule, transfers[i], i, rank_, on.label);
  }
  return enqueue(rule.operation, transfers, SumOrder::kTransport, on, all_gather_rounds);
}

Event LocalCommunicator::all_reduce(std::span<const Transfer> transfers, const On& on) {
  const Rule rule{.operation = "all_reduce",
                  .in_blocks = 1,
                  .out_blocks = 1,
                  .sums = true,
                  .alias = Rule::Alias::kSame};
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    check_transfer(rule, transfers[i], i, rank_, on.label);
  }
  return enqueue(rule.operation, transfers, SumOrder::kTree, on, all_reduce_rounds);
}

Event LocalCommunicator::all_to_all(std::span<const Transfer> transfers, const On& on) {
  const auto blocks = static_cast<std::size_t>(world());
  const Rule rule{.operation = "all_to_all", .in_blocks = blocks, .out_blocks = blocks};
  for (std::size_t i = 0; i < transfers.size(); ++i) {
    check_transfer(rule, transfers[i], i, rank_, on.label);
  }
  return enqueue(rule.operation, transfers, SumOrder::kTransport, on, all_to_all_rounds);
}

std::unique_ptr<Communicator> LocalCommunicator::split(int color, int key) {
  const std::array<int, 2> mine{color, key};
  const auto all = bootstrap_.all_gather(std::as_bytes(std::span(mine)), deadline_);
  std::vector<std::pair<int, int>> members;  // (key, rank) of my color
  for (std::size_t r = 0; r < all.size(); ++r) {
    std::array<int, 2> theirs{};
    std::copy(all[r].begin(), all[r].end(), std::as_writable_bytes(std::span(theirs)).begin());
    if (theirs[0] == color) {
      members.emplace_back(theirs[1], static_cast<int>(r));
    }
  }
  std::sort(members.begin(), members.end());
  std::vector<int> ranks(members.size());
  std::transform(members.begin(), members.end(), ranks.begin(),
                 [](const auto& member) { return member.second; });
  const auto me = std::find(ranks.begin(), ranks.end(), rank_);
  return std::make_unique<LocalCommunicator>(room_->child(splits_++, color, ranks),
                                             static_cast<int>(me - ranks.begin()), deadline_);
}

void LocalCommunicator::abort(const std::string& why) noexcept {
  try {
    room_->fail("rank " + std::to_string(rank_) + " aborted: " + why,
                {.rank = rank_, .peer = rank_}, rank_);
  } catch (...) {  // no memory for the text
    room_->fail({}, {}, rank_);
  }
}

}  // namespace zero

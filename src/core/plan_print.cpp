// The plan in words: the table, and what would fit when it does not.
#include <iomanip>
#include <optional>
#include <ostream>
#include <sstream>

#include "zero/error.h"
#include "zero/plan.h"

namespace zero {
namespace {

constexpr int kNameWidth = 26, kBytesWidth = 12;

std::string_view describe(Stage stage) {
  switch (stage) {
    case Stage::kReplicated:
      return "stage 0 (nothing is sharded)";
    case Stage::kStates:
      return "stage 1 (states are sharded)";
    case Stage::kGradients:
      return "stage 2 (states and gradients are sharded)";
    case Stage::kParameters:
      return "stage 3 (states, gradients and parameters are sharded)";
  }
  return "unknown stage";
}

std::string ranks(int count) {
  return std::to_string(count) + (count == 1 ? " rank" : " ranks");
}

void print_line(std::ostream& out, std::string_view name, std::uint64_t bytes) {
  out << "  " << std::left << std::setw(kNameWidth) << name << std::right << std::setw(kBytesWidth)
      << format_bytes(bytes) << '\n';
}

void print_items(std::ostream& out, const std::vector<PlanItem>& items, bool transient) {
  std::uint64_t sum = 0;
  for (const PlanItem& item : items) {
    if (item.transient == transient) {
      print_line(out, "  " + item.name, item.bytes);
      sum += item.bytes;
    }
  }
  print_line(out, transient ? "while a step runs" : "always", sum);
}

Plan with(const Plan& plan, Stage stage, int world) {
  Options options = plan.options();
  options.stage = stage;
  World other = plan.world();
  other.shard_ranks = world;
  return make_plan(plan.model(), options, other);
}

std::uint64_t highest_peak(const Plan& plan) {
  return plan.peak_bytes(plan.fullest_rank());
}

void print_wire(std::ostream& out, const Plan& plan) {
  const auto more = [](const Plan& p) {
    return p.wire_bytes_per_step(3) - p.wire_bytes_per_step(2);
  };
  out << "wire, sent by each rank and step: " << format_bytes(plan.wire_bytes_per_step(1))
      << " with 1 micro-batch, " << format_bytes(plan.wire_bytes_per_step(2)) << " with 2, "
      << format_bytes(more(plan)) << " for each one more\n";
  if (plan.options().stage <= Stage::kStates && plan.options().numerics != Numerics::kFast) {
    Options fast = plan.options();
    fast.numerics = Numerics::kFast;
    const Plan other = make_plan(plan.model(), fast, plan.world());
    out << "  of this, numerics " << name_of(plan.options().numerics) << " costs "
        << format_bytes(more(plan) - more(other)) << " for each micro-batch after the second\n";
  }
}

// Stage 3 on 1, 2, 4, ... ranks: the first that fits, else the one that needs least. Padding to the
// world makes small models grow again on many ranks.
Plan find_world(const Plan& plan, std::uint64_t device_bytes) {
  constexpr int kMostRanks = 65'536;
  Plan least = with(plan, Stage::kParameters, 1);
  for (int w = 2; w <= kMostRanks && highest_peak(least) > device_bytes; w *= 2) {
    Plan other = with(plan, Stage::kParameters, w);
    if (highest_peak(other) < highest_peak(least)) {
      least = std::move(other);
    }
  }
  return least;
}

void print_remedy(std::ostream& out, const Plan& plan, std::uint64_t device_bytes) {
  const std::uint64_t peak = highest_peak(plan);
  out << "  stage " << static_cast<int>(plan.options().stage) << " on "
      << ranks(plan.world().shard_ranks) << ": " << format_bytes(peak)
      << (peak <= device_bytes ? ", fits\n" : ", does not fit\n");
}

// Higher stages on as many ranks, then the ranks at stage 3 that would do.
void print_remedies(std::ostream& out, const Plan& plan, std::uint64_t device_bytes) {
  const int world = plan.world().shard_ranks;
  const int stage = static_cast<int>(plan.options().stage);
  for (int s = stage + 1; s <= static_cast<int>(Stage::kParameters); ++s) {
    print_remedy(out, with(plan, static_cast<Stage>(s), world), device_bytes);
  }
  const Plan found = find_world(plan, device_bytes);
  if (found.world().shard_ranks != world) {
    print_remedy(out, found, device_bytes);
  }
  if (highest_peak(found) > device_bytes) {
    const int rank = found.fullest_rank();
    const auto of = [&](Category c) { return format_bytes(found.bytes(c, rank)); };
    out << "  no number of ranks fits at stage 3; the least is " << ranks(found.world().shard_ranks)
        << ", where live units take " << of(Category::kLiveUnits) << ", gradient buckets "
        << of(Category::kBuckets) << ", the user's own bytes " << of(Category::kUser)
        << "; make units, bucket_bytes, live_units or activations smaller\n";
  }
}

}  // namespace

std::string_view name_of(Category category) {
  switch (category) {
    case Category::kParameters:
      return "parameters";
    case Category::kGradients:
      return "gradients";
    case Category::kMaster:
      return "master weights";
    case Category::kStates:
      return "optimizer states";
    case Category::kPadding:
      return "padding";
    case Category::kLiveUnits:
      return "live units";
    case Category::kBuckets:
      return "gradient buckets";
    case Category::kScratch:
      return "scratch and tables";
    case Category::kUser:
      return "user's own";
  }
  return "unknown category";
}

std::string format_bytes(std::uint64_t bytes) {
  constexpr std::uint64_t kKibi = 1024;
  if (bytes < kKibi) {
    return std::to_string(bytes) + " B";
  }
  constexpr std::string_view kUnits[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  std::size_t unit = 0;
  double value = static_cast<double>(bytes) / kKibi;
  // 1023.995 would print as 1024.00 of its unit.
  while (value >= kKibi - 0.005 && unit + 1 < std::size(kUnits)) {
    value /= kKibi;
    ++unit;
  }
  std::ostringstream text;
  text << std::fixed << std::setprecision(2) << value << ' ' << kUnits[unit];
  return text.str();
}

std::ostream& operator<<(std::ostream& out, const Plan& plan) {
  const int rank = plan.fullest_rank();
  const std::vector<PlanItem> items = plan.items(rank);
  std::ostringstream text;
  text << "plan: " << describe(plan.options_.stage) << ", " << ranks(plan.world_.shard_ranks)
       << ", numerics " << name_of(plan.options_.numerics) << '\n'
       << "model: " << plan.parameter_count() << " elements (" << plan.trained_count()
       << " trained) in " << plan.model_.parameters().size() << " parameters, "
       << plan.model_.units().size() << " units, " << plan.model_.groups().size() << " groups\n"
       << "bytes of rank " << rank << ", the fullest:\n";
  print_items(text, items, false);
  print_items(text, items, true);
  print_line(text, "peak", plan.peak_bytes(rank));
  print_wire(text, plan);
  return out << text.str();
}

void Plan::require_fit(std::uint64_t device_bytes) const {
  const std::uint64_t peak = highest_peak(*this);
  if (peak <= device_bytes) {
    return;
  }
  std::ostringstream message;
  message << "the plan does not fit: its fullest rank needs " << format_bytes(peak)
          << ", the device has " << format_bytes(device_bytes) << ", "
          << format_bytes(peak - device_bytes) << " are missing\n"
          << *this << "what would fit in " << format_bytes(device_bytes) << ":\n";
  print_remedies(message, *this, device_bytes);
  throw OutOfMemory(message.str(),
                    {.asked_bytes = peak, .used_bytes = 0, .budget_bytes = device_bytes});
}

}  // namespace zero

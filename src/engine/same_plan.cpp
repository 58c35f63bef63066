#include "engine/same_plan.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "zero/error.h"

namespace zero {
namespace {

using Texts = std::vector<std::vector<std::byte>>;

Texts exchange(const std::string& mine, const Plan& plan, Bootstrap& ranks) {
  return ranks.all_gather(std::as_bytes(std::span(mine)), plan.options().deadline);
}

std::string text_of(const std::vector<std::byte>& bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::string introduce(const Plan& plan) {
  std::ostringstream out;
  out << plan.model().units().size() << " units, " << plan.model().parameters().size()
      << " parameters of " << plan.parameter_count() << " elements, stage "
      << static_cast<int>(plan.options().stage) << ", world " << plan.world().shard_ranks
      << ", plan digest " << std::hex << plan.digest();
  return out.str();
}

void describe_group(std::ostream& out, const ModelSpec::Group& group) {
  const auto& [hyper, rule, precision, train] = group.options;
  out << "group '" << group.name << "': lr " << hyper.lr << ", weight_decay " << hyper.weight_decay
      << ", beta1 " << hyper.beta1 << ", beta2 " << hyper.beta2 << ", eps " << hyper.eps
      << ", momentum " << hyper.momentum;
  for (const double value : hyper.user) out << ", user " << value;
  out << ", rule '" << rule.name << "', parameters " << name_of(precision.parameter)
      << ", gradients " << name_of(precision.gradient) << ", master weights "
      << static_cast<int>(precision.master) << ", trained " << static_cast<int>(train) << "\n";
}

// Everything that the digest covers, one thing a line, so that the first line that differs tells.
std::string describe(const Plan& plan) {
  std::ostringstream out;
  out.precision(17);
  const Options& o = plan.options();
  out << "options: stage " << static_cast<int>(o.stage) << ", numerics "
      << static_cast<int>(o.numerics) << ", clip_norm " << o.clip_norm.value_or(0)
      << ", max_open_micro_batches " << o.max_open_micro_batches << ", max_micro_batches "
      << o.max_micro_batches << ", deadline " << o.deadline.count() << " ms, live_units "
      << o.live_units << ", buckets " << o.buckets << ", bucket_bytes " << o.bucket_bytes
      << ", world " << plan.world().shard_ranks << " x " << plan.world().replicate_ranks << "\n";
  for (const ModelSpec::Group& group : plan.model().groups()) describe_group(out, group);
  for (const ModelSpec::Unit& unit : plan.model().units()) {
    out << "unit '" << unit.name << "': gradient life " << static_cast<int>(unit.life) << "\n";
  }
  for (const ModelSpec::Parameter& p : plan.model().parameters()) {
    out << "parameter '" << p.name << "' of unit '" << plan.model().units()[index(p.unit)].name
        << "', group '" << plan.model().groups()[index(p.group)].name << "', in norm "
        << static_cast<int>(p.norm) << ", shape";
    for (const std::size_t dimension : p.shape) out << " " << dimension;
    out << "\n";
  }
  return out.str();
}

std::string line_at(const std::string& text, std::size_t at) {
  if (at >= text.size()) return "nothing more";
  const std::size_t before = text.rfind('\n', at);
  const std::size_t begin = text[at] == '\n' && at > 0 ? text.rfind('\n', at - 1) : before;
  const std::size_t first = begin == std::string::npos ? 0 : begin + 1;
  return text.substr(first, text.find('\n', first) - first);
}

}  // namespace

void require_same_plan(const Plan& plan, Bootstrap& ranks) {
  const Texts introductions = exchange(introduce(plan), plan, ranks);
  const auto other = std::find_if(introductions.begin(), introductions.end(),
                                  [&](const auto& text) { return text != introductions[0]; });
  if (other == introductions.end()) return;
  const auto r = static_cast<std::size_t>(other - introductions.begin());
  const Texts details = exchange(describe(plan), plan, ranks);
  const std::string a = text_of(details[0]), b = text_of(details[r]);
  const auto [in_a, in_b] = std::mismatch(a.begin(), a.end(), b.begin(), b.end());
  const auto at = static_cast<std::size_t>(in_a - a.begin());
  const std::string detail = a == b ? "in what an update rule or a state is made of"
                                    : "rank 0 has " + line_at(a, at) + "; rank " +
                                          std::to_string(r) + " has " + line_at(b, at);
  throw UsageError("the plans of rank 0 (" + text_of(introductions[0]) + ") and rank " +
                   std::to_string(r) + " (" + text_of(*other) + ") differ: " + detail +
                   "; make the same model, options and world on all ranks");
}

}  // namespace zero

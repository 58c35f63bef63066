// When two plans are the same: compared in one process, or by digest between ranks.
#include <algorithm>
#include <bit>
#include <memory>
#include <string_view>
#include <type_traits>

#include <xxhash.h>

#include "zero/error.h"
#include "zero/plan.h"

namespace zero {
namespace {

class Hasher {
 public:
  Hasher() : state_(XXH3_createState()) {
    require(state_ != nullptr && XXH3_64bits_reset(state_.get()) == XXH_OK,
            "expected memory for a hash state, found none; free some");
  }
  // Numbers are hashed as 8 little-endian bytes, so that machines agree.
  void add(std::uint64_t value) {
    if constexpr (std::endian::native == std::endian::big) {
      value = __builtin_bswap64(value);
    }
    XXH3_64bits_update(state_.get(), &value, sizeof(value));
  }
  void add(double value) { add(std::bit_cast<std::uint64_t>(value)); }
  void add(std::string_view text) {
    add(std::uint64_t{text.size()});
    XXH3_64bits_update(state_.get(), text.data(), text.size());
  }
  template <class T>
  requires std::is_enum_v<T>
  void add(T value) { add(static_cast<std::uint64_t>(value)); }
  void add(int value) { add(static_cast<std::uint64_t>(value)); }
  [[nodiscard]] std::uint64_t digest() const { return XXH3_64bits_digest(state_.get()); }

 private:
  struct Free {
    void operator()(XXH3_state_t* state) const { XXH3_freeState(state); }
  };
  std::unique_ptr<XXH3_state_t, Free> state_;
};

void add_rule(Hasher& hash, const UpdateRule& rule) {
  hash.add(std::string_view(rule.name));
  hash.add(rule.between);
  hash.add(std::uint64_t{rule.states.size()});
  for (const StateSpec& state : rule.states) {
    hash.add(std::string_view(state.name));
    hash.add(state.dtype);
    hash.add(std::uint64_t{state.elements_per_value});
  }
}

void add_group(Hasher& hash, const ModelSpec::Group& group) {
  const auto& [hyper, rule, precision, train] = group.options;
  hash.add(std::string_view(group.name));
  for (const double value :
       {hyper.lr, hyper.weight_decay, hyper.beta1, hyper.beta2, hyper.eps, hyper.momentum,
        hyper.user[0], hyper.user[1], hyper.user[2], hyper.user[3]}) {
    hash.add(value);
  }
  add_rule(hash, rule);
  hash.add(precision.parameter);
  hash.add(precision.gradient);
  hash.add(precision.master);
  hash.add(train);
}

// User bytes are left out: ranks may need different ones and still run together.
void add_model(Hasher& hash, const ModelSpec& model) {
  hash.add(std::uint64_t{model.groups().size()});
  for (const ModelSpec::Group& group : model.groups()) {
    add_group(hash, group);
  }
  hash.add(std::uint64_t{model.units().size()});
  for (const ModelSpec::Unit& unit : model.units()) {
    hash.add(std::string_view(unit.name));
    hash.add(unit.life);
  }
  hash.add(std::uint64_t{model.parameters().size()});
  for (const ModelSpec::Parameter& p : model.parameters()) {
    hash.add(std::string_view(p.name));
    hash.add(std::uint64_t{p.shape.size()});
    for (const std::size_t dimension : p.shape) {
      hash.add(std::uint64_t{dimension});
    }
    hash.add(std::uint64_t{index(p.unit)});
    hash.add(std::uint64_t{index(p.group)});
    hash.add(p.norm);
  }
}

void add_options(Hasher& hash, const Options& options, const World& world) {
  hash.add(options.stage);
  hash.add(options.numerics);
  hash.add(options.clip_norm.has_value() ? 1 : 0);
  hash.add(options.clip_norm.value_or(0));
  hash.add(options.max_open_micro_batches);
  hash.add(options.max_micro_batches);
  hash.add(static_cast<std::uint64_t>(options.deadline.count()));
  hash.add(options.live_units);
  hash.add(options.buckets);
  hash.add(std::uint64_t{options.bucket_bytes});
  hash.add(world.shard_ranks);
  hash.add(world.replicate_ranks);
  hash.add(world.transport);
}

bool same(const GroupOptions& a, const GroupOptions& b) {
  return a.hyper == b.hyper && a.rule == b.rule && a.precision == b.precision && a.train == b.train;
}

bool same(const ModelSpec& a, const ModelSpec& b) {
  const auto equal = [](const auto& x, const auto& y, const auto& is_same) {
    return std::equal(x.begin(), x.end(), y.begin(), y.end(), is_same);
  };
  return equal(a.groups(), b.groups(),
               [](const ModelSpec::Group& x, const ModelSpec::Group& y) {
                 return x.name == y.name && same(x.options, y.options);
               }) &&
         equal(a.units(), b.units(),
               [](const ModelSpec::Unit& x, const ModelSpec::Unit& y) {
                 return x.name == y.name && x.life == y.life;
               }) &&
         equal(a.parameters(), b.parameters(),
               [](const ModelSpec::Parameter& x, const ModelSpec::Parameter& y) {
                 return x.name == y.name && x.shape == y.shape && x.unit == y.unit &&
                        x.group == y.group && x.norm == y.norm;
               }) &&
         a.user_bytes() == b.user_bytes();
}

}  // namespace

std::uint64_t Plan::digest() const {
  Hasher hash;
  add_model(hash, model_);
  add_options(hash, options_, world_);
  return hash.digest();
}

// The layout follows from these three.
bool operator==(const Plan& a, const Plan& b) {
  return same(a.model_, b.model_) && a.options_ == b.options_ && a.world_ == b.world_;
}

}  // namespace zero

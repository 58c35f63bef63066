#include "engine/values.h"

#include <algorithm>
#include <array>
#include <cstring>

#include <xxhash.h>

#include "zero/error.h"

namespace zero {
namespace {

// Elements that are staged on the host at once.
constexpr std::uint64_t kPiece = 1U << 18;

}  // namespace

ValueAccess::ValueAccess(Context& context, Arrays& arrays, Gather& gather)
    : context_(context), arrays_(arrays), gather_(gather) {}

void ValueAccess::overwrite(const Fill& fill) {
  gather_.order_after_readers();
  context_.finish();
  for (std::size_t u = 0; u < context_.model().units().size(); ++u) {
    for (const Extent& e : context_.plan.extents(context_.rank, static_cast<UnitId>(u))) {
      write_own(fill, e);
    }
  }
  refresh_replicas();
  gather_.invalidate();
}

void ValueAccess::write_own(const Fill& fill, const Extent& e) {
  const Segment& s = context_.plan.segments()[context_.plan.place(e.parameter).segment];
  const Precision& precision = context_.plan.classes()[s.class_index].precision;
  const std::uint64_t at = e.offset - s.offset / static_cast<std::uint64_t>(context_.world);
  std::vector<float> values;
  std::vector<bf16> low;
  for (std::uint64_t done = 0; done < e.count; done += values.size()) {
    values.assign(std::min(kPiece, e.count - done), 0.0F);
    fill(e.parameter, e.first + done, values);
    const void* parameters = values.data();
    if (precision.parameter == DType::kBfloat16) {
      low.resize(values.size());
      std::transform(values.begin(), values.end(), low.begin(), to_bf16);
      parameters = low.data();
    }
    const std::size_t size = bytes_of(precision.parameter);
    context_.device.copy(arrays_.own_parameters(s) + (at + done) * size, parameters,
                         values.size() * size, kHost);
    if (float* master = arrays_.own_master(s); context_.trained(s) && master != nullptr) {
      context_.device.copy(master + at + done, values.data(), values.size() * sizeof(float), kHost);
    }
  }
}

void ValueAccess::refresh_replicas() {
  for (std::size_t u = 0; u < context_.model().units().size(); ++u) {
    const auto unit = static_cast<UnitId>(u);
    transfers_.clear();
    for (const Segment& s : context_.plan.segments(unit)) {
      const Precision& precision = context_.plan.classes()[s.class_index].precision;
      if (!context_.parameters_sharded()) {
        transfers_.push_back({arrays_.own_parameters(s), arrays_.full_parameters(s),
                              context_.shard_elements(s), precision.parameter});
      }
      if (!context_.states_sharded() && context_.trained(s) && arrays_.own_master(s) != nullptr) {
        transfers_.push_back({arrays_.own_master(s), arrays_.full_master(s),
                              context_.shard_elements(s), DType::kFloat32});
      }
    }
    if (!transfers_.empty()) {
      gather_.set_ready(unit, context_.all_gather(transfers_, "written parameters of unit '" +
                                                                  context_.name(unit) + "'"));
    }
  }
}

ValueAccess::Source ValueAccess::source(Values values, const Segment& s, double divisor) const {
  const Precision& precision = context_.plan.classes()[s.class_index].precision;
  const auto bytes = [](const float* p) { return reinterpret_cast<const std::byte*>(p); };
  if (values == Values::kGradients) {
    if (!context_.trained(s)) {
      return {};
    }
    return {bytes(arrays_.own_gradients(s)),
            context_.stage() == Stage::kReplicated ? bytes(arrays_.full_gradients(s)) : nullptr,
            DType::kFloat32, divisor};
  }
  if (values == Values::kMaster && context_.trained(s) && arrays_.own_master(s) != nullptr) {
    return {bytes(arrays_.own_master(s)),
            context_.states_sharded() ? nullptr : bytes(arrays_.full_master(s)), DType::kFloat32,
            1};
  }
  return {arrays_.own_parameters(s),
          context_.parameters_sharded() ? nullptr : arrays_.full_parameters(s), precision.parameter,
          1};
}

double ValueAccess::divisor() const {
  StepScalars scalars;
  context_.device.copy(&scalars, arrays_.scalars(), sizeof(scalars), kHost);
  return scalars.divisor;
}

void ValueAccess::read(std::vector<float>& out, const std::byte* from, DType dtype,
                       double divisor) const {
  if (dtype == DType::kBfloat16) {
    std::vector<bf16> low(out.size());
    context_.device.copy(low.data(), from, low.size() * sizeof(bf16), kHost);
    std::transform(low.begin(), low.end(), out.begin(), to_float);
  } else {
    context_.device.copy(out.data(), from, out.size() * sizeof(float), kHost);
  }
  if (divisor != 1) {
    for (float& x : out) {
      x /= static_cast<float>(divisor);
    }
  }
}

void ValueAccess::visit_own(Values values, const Visit& visit) const {
  context_.finish();
  const double d = values == Values::kGradients ? divisor() : 1;
  for (const Segment& s : context_.plan.segments()) {
    const Source from = source(values, s, d);
    if (from.own != nullptr) {
      const std::uint64_t shard = context_.shard_elements(s);
      visit_range(s, shard * static_cast<std::uint64_t>(context_.rank), shard, from, visit);
    }
  }
}

void ValueAccess::visit_own_state(const std::string& state, const Visit& visit) const {
  context_.finish();
  bool found = false;
  for (const Segment& s : context_.plan.segments()) {
    const ParameterClass& c = context_.plan.classes()[s.class_index];
    for (std::size_t i = 0; c.train == Train::kYes && i < c.rule.states.size(); ++i) {
      if (c.rule.states[i].name == state) {
        found = true;
        const std::uint64_t shard = context_.shard_elements(s);
        const Source from{reinterpret_cast<const std::byte*>(arrays_.own_state(s, i))};
        visit_range(s, shard * static_cast<std::uint64_t>(context_.rank), shard, from, visit);
      }
    }
  }
  require(found, context_.who() + "no update rule of this model has a state '" + state + "'");
}

// `source.own` points at element `first` of the segment.
void ValueAccess::visit_range(const Segment& s, std::uint64_t first, std::uint64_t count,
                              const Source& from, const Visit& visit) const {
  std::vector<float> values;
  for (const ParameterId id : context_.plan.layout().subspan(s.first, s.count)) {
    const std::uint64_t begin = context_.plan.place(id).offset;
    const std::uint64_t end = begin + context_.model().parameters()[index(id)].count;
    const std::uint64_t stop = std::min(end, first + count);
    for (std::uint64_t at = std::max(begin, first); at < stop; at += values.size()) {
      values.resize(std::min(kPiece, stop - at));
      read(values, from.own + (at - first) * bytes_of(from.dtype), from.dtype, from.divisor);
      visit(id, at - begin, values);
    }
  }
}

void ValueAccess::visit_all(Values values, const Visit& visit, int root) {
  require(root >= 0 && root < context_.world, context_.who() + "visit_all() with root " +
                                                  std::to_string(root) + ": expected 0 to " +
                                                  std::to_string(context_.world - 1));
  double d = 1;
  if (values == Values::kGradients) {
    context_.finish();
    d = divisor();
  }
  const Visit* mine = context_.rank == root ? &visit : nullptr;
  for (const Segment& s : context_.plan.segments()) {
    Source from = source(values, s, d);
    if (from.own == nullptr || s.elements == 0) {
      continue;
    }
    if (from.full == nullptr) {
      gather_and_visit(s, from, mine);
    } else if (mine != nullptr) {
      context_.finish();
      from.own = from.full;
      visit_range(s, 0, s.elements, from, *mine);
    }
  }
}

// Goes through the unit's live slot (stage 3) or a gradient buffer, both idle now, in as many
// turns as it needs.
void ValueAccess::gather_and_visit(const Segment& s, const Source& from, const Visit* visit) {
  std::byte* room = nullptr;
  std::uint64_t room_bytes = 0;
  const std::size_t size = bytes_of(from.dtype);
  if (context_.parameters_sharded()) {
    gather_.take_slot(s.unit);
    room = arrays_.live(s.unit);
    room_bytes = context_.plan.slots()[context_.plan.slot_of(s.unit)].bytes;
  } else if (context_.plan.bucket_buffer_bytes() >= s.elements) {
    room = arrays_.bucket(0);
    room_bytes = context_.plan.bucket_buffer_bytes();
  } else {
    room = arrays_.until_ready(s.unit, 0);
    room_bytes = context_.plan.gradient_bytes(s.unit);
  }
  const auto world = static_cast<std::uint64_t>(context_.world);
  const std::uint64_t shard = context_.shard_elements(s);
  const std::uint64_t turn = std::min(shard, room_bytes / size / world);
  for (std::uint64_t at = 0; at < shard; at += turn) {
    const std::uint64_t count = std::min(turn, shard - at);
    transfers_.assign(1, {from.own + at * size, room, count, from.dtype});
    context_.device.host_wait(
        context_.all_gather(transfers_, "visited values of unit '" + context_.name(s.unit) + "'"));
    for (std::uint64_t r = 0; visit != nullptr && r < world; ++r) {
      Source block = from;
      block.own = room + r * count * size;
      visit_range(s, r * shard + at, count, block, *visit);
    }
  }
}

std::int64_t ValueAccess::step_count(ParameterId parameter) const {
  require(index(parameter) < context_.model().parameters().size(),
          context_.who() + "step_count() of a parameter that is not in the model");
  context_.finish();
  ParameterRow row;
  context_.device.copy(&row, arrays_.rows() + index(parameter), sizeof(row), kHost);
  return row.step;
}

std::uint64_t ValueAccess::state_hash() const {
  context_.finish();
  std::uint64_t sum = 0;
  for (std::size_t u = 0; u < context_.model().units().size(); ++u) {
    for (const Extent& e : context_.plan.extents(context_.rank, static_cast<UnitId>(u))) {
      const Segment& s = context_.plan.segments()[context_.plan.place(e.parameter).segment];
      const ParameterClass& c = context_.plan.classes()[s.class_index];
      const std::uint64_t at = e.offset - s.offset / static_cast<std::uint64_t>(context_.world);
      // Units may have parameters of one name.
      const std::string name = context_.name(s.unit) + '\n' + context_.name(e.parameter);
      const std::size_t size = bytes_of(c.precision.parameter);
      sum += hash_own(name, "parameter", e, arrays_.own_parameters(s) + at * size, size);
      if (!context_.trained(s)) {
        continue;
      }
      const auto add = [&](const std::string& array, const float* data) {
        sum +=
            hash_own(name, array, e, reinterpret_cast<const std::byte*>(data + at), sizeof(float));
      };
      if (arrays_.own_master(s) != nullptr) {
        add("master", arrays_.own_master(s));
      }
      for (std::size_t i = 0; i < c.rule.states.size(); ++i) {
        add(c.rule.states[i].name, arrays_.own_state(s, i));
      }
    }
  }
  const auto all = context_.ranks.bootstrap().all_gather(std::as_bytes(std::span(&sum, 1)),
                                                         context_.plan.options().deadline);
  std::uint64_t total = 0;
  for (const auto& bytes : all) {
    std::uint64_t part = 0;
    std::memcpy(&part, bytes.data(), sizeof(part));
    total += part;
  }
  return total;
}

// One hash a logical block of kGranule elements, seeded with what and where it is.
std::uint64_t ValueAccess::hash_own(const std::string& parameter, const std::string& array,
                                    const Extent& e, const std::byte* data,
                                    std::size_t size) const {
  const std::uint64_t seed =
      XXH64(array.data(), array.size(), XXH64(parameter.data(), parameter.size(), 0));
  std::vector<std::byte> piece;
  std::uint64_t sum = 0;
  for (std::uint64_t done = 0; done < e.count; done += kPiece) {
    const std::uint64_t count = std::min(kPiece, e.count - done);
    piece.resize(count * size);
    context_.device.copy(piece.data(), data + done * size, piece.size(), kHost);
    for (std::uint64_t block = 0; block < count; block += kGranule) {
      const std::uint64_t number = (e.first + done + block) / kGranule;
      sum += XXH64(piece.data() + block * size, std::min(kGranule, count - block) * size,
                   XXH64(&number, sizeof(number), seed));
    }
  }
  return sum;
}

}  // namespace zero

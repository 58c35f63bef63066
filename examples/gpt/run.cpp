#include "gpt/run.h"

#include <filesystem>
#include <iostream>
#include <sstream>
#include <utility>

#include <unistd.h>

#include "zero/cpu.h"
#include "zero/error.h"
#include "zero/safetensors.h"

#include "gpt/data.h"
#include "gpt/weights.h"

namespace gpt {
namespace {

namespace fs = std::filesystem;

GptModel describe(const Settings& s) {
  const bool low = s.element == Element::kBfloat16;
  GptModel model = make_model(s.shape, s.hyper, low ? zero::kBf16WithMaster : zero::kFloat32Only);
  for (const UserMemory& memory : user_memory(s.shape, s.workspace())) {
    model.spec.add_user_bytes(memory.name, memory.bytes);
  }
  return model;
}

zero::Plan plan_of(const Settings& s, const zero::ModelSpec& spec) try {
  zero::Options options;
  options.stage = s.stage;
  options.numerics = s.numerics;
  if (s.clip > 0) {
    options.clip_norm = s.clip;
  }
  options.max_micro_batches = static_cast<int>(s.micro_batches);
  options.live_units = static_cast<int>(s.live_units);
  options.bucket_bytes = s.bucket_bytes;
  return zero::make_plan(spec, options, {.shard_ranks = s.ranks});
} catch (const zero::UsageError& error) {
  throw Refusal(error.what());
}

// The first line of the plan's own message says what is missing, the last ones what would fit.
[[noreturn]] void refuse(const std::string& who, const std::string& message) {
  std::istringstream lines(message);
  std::string line, first, fits, last;
  std::getline(lines, first);
  while (std::getline(lines, line)) {
    std::cout << line << '\n';
    last = line.empty() ? last : line.substr(line.find_first_not_of(' '));
    if (last.ends_with(", fits")) {
      fits.append(fits.empty() ? "" : "; ").append(last);
    }
  }
  std::cout << std::flush;
  throw Refusal(who + first + "; what would fit: " + (fits.empty() ? last : fits));
}

void require_fit(const zero::Plan& plan, const Settings& s) {
  if (s.device_bytes.has_value()) {
    try {
      plan.require_fit(*s.device_bytes);
    } catch (const zero::OutOfMemory& error) {
      refuse("--device-memory: ", error.what());
    }
  }
  const auto machine = static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) *
                       static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  try {
    plan.require_fit(machine / s.ranks_count());
  } catch (const zero::OutOfMemory& error) {
    refuse("this machine's memory, shared by the ranks: ", error.what());
  }
}

bool same_file(const std::string& a, const std::string& b) {
  std::error_code error;
  return fs::equivalent(a, b, error) ||
         fs::weakly_canonical(a, error) == fs::weakly_canonical(b, error);
}

void require_apart(const std::string& option, const std::string& path, const Settings& s) {
  for (const std::string& data : s.data) {
    if (same_file(path, data)) {
      throw Refusal("--" + option + ": expected another file than --data, found '" + path + "'");
    }
  }
}

void check_save(const Settings& s, const zero::ModelSpec& spec) {
  if (!s.save.has_value()) {
    return;
  }
  if (fs::path(*s.save).filename().empty()) {
    throw Refusal("--save: expected the name of a file, found '" + *s.save + "'");
  }
  require_apart("save", *s.save, s);
  std::vector<zero::SafetensorsWriter::Entry> entries;
  for (const auto& p : spec.parameters()) {
    entries.push_back({p.name, p.shape});
  }
  try {
    const zero::SafetensorsWriter removed_again(*s.save, entries);
  } catch (const zero::CheckpointError& error) {
    throw Refusal("--save: " + std::string(error.what()));
  }
}

std::ofstream open_log(const Settings& s) {
  std::ofstream log;
  if (!s.log.has_value()) {
    return log;
  }
  require_apart("log", *s.log, s);
  for (const auto& other : {s.init, s.save}) {
    if (other.has_value() && same_file(*s.log, *other)) {
      throw Refusal("--log: expected another file than --init and --save, found '" + *s.log + "'");
    }
  }
  std::error_code error;
  if (fs::is_fifo(*s.log, error) || fs::is_socket(*s.log, error)) {  // opening would wait
    throw Refusal("--log: expected a file, found a pipe or socket '" + *s.log + "'");
  }
  log.open(*s.log, std::ios::trunc);
  if (!log.is_open()) {
    throw Refusal("--log '" + *s.log +
                  "': expected a path that can be written, found one that "
                  "cannot: is its folder there?");
  }
  return log;
}

}  // namespace

Run prepare(const Settings& settings) {
  check_data(settings);
  GptModel model = describe(settings);
  if (settings.init.has_value()) {
    check_init(*settings.init, model.spec);
  }
  zero::Plan plan = plan_of(settings, model.spec);
  require_fit(plan, settings);
  std::vector<std::uint8_t> text = load_text(settings);
  check_save(settings, model.spec);
  Run run{settings, std::move(model), std::move(plan), std::move(text), {}, open_log(settings)};
  std::cout << run.plan << std::flush;
  for (int rank = 0; rank < settings.ranks; ++rank) {
    run.devices.push_back(
        zero::make_cpu_backend(settings.device_bytes.value_or(zero::kUnlimited), settings.threads));
  }
  return run;
}

}  // namespace gpt

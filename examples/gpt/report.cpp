#include "gpt/report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iomanip>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>

#include <nlohmann/json.hpp>
#include <sys/resource.h>

namespace gpt {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::array<const char*, zero::kCategoryCount> kKeys{
    "parameters",       "gradients", "master_weights",
    "optimizer_states", "padding",   "live_units",
    "gradient_buckets", "scratch",   "user"};

// JSON has no NaN.
Json number(double value) {
  return std::isfinite(value) ? Json(value) : Json(nullptr);
}

Json number(const std::optional<double>& value) {
  return value.has_value() ? number(*value) : Json(nullptr);
}

Json bytes_by_category(const zero::MemoryUsage& usage) {
  Json out = Json::object();
  for (std::size_t c = 0; c < kKeys.size(); ++c) {
    out[kKeys.at(c)] = {{"current", usage.current.at(c)}, {"peak", usage.peak.at(c)}};
  }
  return out;
}

// The step after which the caches are warm, as in the peer's report.
constexpr std::size_t kWarmSteps = 3;

std::optional<double> median_after_warm_up(std::vector<double> values) {
  if (values.size() > kWarmSteps) {
    values.erase(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(kWarmSteps));
  }
  if (values.empty()) {
    return std::nullopt;
  }
  std::sort(values.begin(), values.end());
  const std::size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

std::uint64_t resident_peak_bytes() {
  rusage usage{};
  return getrusage(RUSAGE_SELF, &usage) == 0 ? static_cast<std::uint64_t>(usage.ru_maxrss) * 1024
                                             : 0;
}

std::string duration(double seconds) {
  std::ostringstream out;
  const auto whole = static_cast<std::int64_t>(std::llround(seconds));
  if (whole >= 60) {
    out << whole / 60 << " min ";
  }
  out << whole % 60 << " s";
  return out.str();
}

void print_row(int rank, std::size_t category, const Run& run, const zero::MemoryUsage& usage) {
  const auto c = static_cast<zero::Category>(category);
  const std::uint64_t planned = run.plan.bytes(c, rank), measured = usage.peak.at(category);
  const std::uint64_t formula = run.plan.formula_bytes(c);
  if (planned == 0 && measured == 0) {
    return;
  }
  std::cout << std::setw(6) << rank << "  " << std::left << std::setw(20) << zero::name_of(c)
            << std::right << std::setw(16) << planned << std::setw(16) << measured << std::setw(16)
            << (formula > 0 ? std::to_string(formula) : "-")
            << (planned == measured ? "" : "  differs") << '\n';
}

}  // namespace

void Reporter::step(const StepReport& report) {
  const double tokens_per_second =
      static_cast<double>(run_.settings.tokens_per_step()) * 1000 / report.step_ms;
  outcome_.tokens_per_second.push_back(tokens_per_second);
  outcome_.first_loss = outcome_.first_loss.value_or(report.loss);
  outcome_.last_loss = report.loss;
  outcome_.skipped += report.applied ? 0 : 1;
  elapsed_ms_ += report.step_ms;
  write_log(report, tokens_per_second);
  print_progress(report, tokens_per_second);
}

void Reporter::write_log(const StepReport& report, double tokens_per_second) {
  if (!run_.log.is_open()) {
    return;
  }
  const auto fullest = static_cast<std::size_t>(run_.plan.fullest_rank());
  const Json line{{"step", report.step},
                  {"loss", number(report.loss)},
                  {"grad_norm", report.applied ? number(report.grad_norm) : Json(nullptr)},
                  {"lr", report.lr},
                  {"applied", report.applied},
                  {"tokens_per_second", tokens_per_second},
                  {"step_ms", report.step_ms},
                  {"bytes", bytes_by_category(run_.devices[fullest]->usage())}};
  run_.log << line.dump() << '\n' << std::flush;
  if (!run_.log) {
    throw std::runtime_error("--log '" + *run_.settings.log + "': a line could not be written");
  }
}

void Reporter::print_progress(const StepReport& report, double tokens_per_second) {
  const auto now = std::chrono::steady_clock::now();
  const std::size_t done = report.step + 1, steps = run_.settings.steps;
  if (done < steps && printed_.has_value() && now - *printed_ < std::chrono::seconds(1)) {
    return;
  }
  printed_ = now;
  const double left_ms =
      elapsed_ms_ / static_cast<double>(done) * static_cast<double>(steps - done);
  std::cout << "step " << done << '/' << steps << std::fixed << std::setprecision(4) << "  loss "
            << report.loss << std::setprecision(0) << "  " << tokens_per_second << " tokens/s  "
            << duration(left_ms / 1000) << " left" << (report.applied ? "" : "  skipped")
            << std::endl;
}

void Reporter::sample(const std::vector<std::uint8_t>& text) const {
  std::string shown;
  for (const std::uint8_t byte : text) {
    const bool plain = byte == '\n' || byte == '\t' || (byte >= 32 && byte < 127);
    shown += plain ? static_cast<char>(byte) : '?';
  }
  std::cout << "---- sample\n" << shown << "\n----" << std::endl;
}

void print_memory_table(const Run& run) {
  std::cout << "bytes of each rank: planned, measured (the ledger's peak), by the formula\n"
            << std::setw(6) << "rank"
            << "  " << std::left << std::setw(20) << "category" << std::right << std::setw(16)
            << "planned" << std::setw(16) << "measured" << std::setw(16) << "formula" << '\n';
  for (int rank = 0; rank < run.settings.ranks; ++rank) {
    const zero::MemoryUsage usage = run.devices[static_cast<std::size_t>(rank)]->usage();
    for (std::size_t c = 0; c < zero::kCategoryCount; ++c) {
      print_row(rank, c, run, usage);
    }
    const std::uint64_t planned = run.plan.peak_bytes(rank);
    std::cout << std::setw(6) << rank << "  " << std::left << std::setw(20) << "peak" << std::right
              << std::setw(16) << planned << std::setw(16) << usage.peak_bytes << std::setw(16)
              << '-' << (planned == usage.peak_bytes ? "" : "  differs") << '\n';
  }
  std::cout << "resident peak of the process: " << zero::format_bytes(resident_peak_bytes())
            << '\n';
}

void print_last_line(const Run& run, const Outcome& outcome) {
  const int fullest = run.plan.fullest_rank();
  std::ostringstream hash;
  hash << std::hex << std::setw(16) << std::setfill('0') << outcome.state_hash;
  const Json line{
      {"tokens_per_second", number(median_after_warm_up(outcome.tokens_per_second))},
      {"planned_peak_bytes", run.plan.peak_bytes(fullest)},
      {"ledger_peak_bytes", run.devices[static_cast<std::size_t>(fullest)]->usage().peak_bytes},
      {"resident_peak_bytes", resident_peak_bytes()},
      {"first_loss", number(outcome.first_loss)},
      {"last_loss", number(outcome.last_loss)},
      {"skipped_steps", outcome.skipped},
      {"state_hash", hash.str()}};
  if (outcome.skipped > 0) {
    std::cerr << "gpt_train: " << outcome.skipped << " of " << outcome.tokens_per_second.size()
              << " steps were skipped, as a gradient was not finite; a lower --lr may help\n";
  }
  std::cout << line.dump() << std::endl;
}

}  // namespace gpt

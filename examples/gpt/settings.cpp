#include "gpt/settings.h"

#include <array>
#include <charconv>
#include <cmath>
#include <iostream>
#include <limits>
#include <set>
#include <sstream>
#include <utility>

#include <boost/program_options.hpp>

namespace gpt {
namespace {

namespace po = boost::program_options;

// What is parsed before it is checked: wide signed numbers and words.
struct Raw {
  std::int64_t layers = 6, heads = 6, width = 384, sequence = 256, micro_batch = 4;
  std::int64_t micro_batches = 1, steps = 20, ranks = 1, warmup = 10, threads = 1, stage = 0;
  std::int64_t sample = 0, sample_every = 0, live_units = 2;
  double lr = 1e-3, min_lr_ratio = 0.1, weight_decay = 0.1, beta1 = 0.9, beta2 = 0.95;
  double eps = 1e-8, clip = 1;
  std::uint64_t seed = 1;
  std::string precision = "fp32", numerics = "fast", bucket = "4MiB";
  std::string device_memory, init, save, log;
  std::vector<std::string> data;
};

template <class T>
po::typed_value<T>* into(T& value) {
  return po::value<T>(&value)->default_value(value)->value_name("N");
}

po::typed_value<std::string>* word(std::string& value, const char* what) {
  return po::value<std::string>(&value)->default_value(value)->value_name(what);
}

po::typed_value<std::string>* path(std::string& value) {
  return po::value<std::string>(&value)->value_name("FILE");
}

void add_model_options(po::options_description& all, Raw& r) {
  po::options_description_easy_init add = all.add_options();
  add("layers", into(r.layers), "transformer blocks");
  add("heads", into(r.heads), "attention heads; divide the width");
  add("width", into(r.width), "elements of a token's row");
  add("sequence", into(r.sequence), "tokens of a sequence");
  add("micro-batch", into(r.micro_batch), "sequences per rank and micro-batch");
  add("micro-batches", into(r.micro_batches), "micro-batches per rank and step");
  add("recompute", po::bool_switch(), "keep only each block's input for backward");
  add("precision", word(r.precision, "fp32|bf16"), "of parameters and gradients");
  add("data", po::value(&r.data)->multitoken()->value_name("FILE..."),
      "plain text files; without it the King James Bible (Debian: bible-kjv)");
  add("init", path(r.init), "first weights (safetensors)");
  add("seed", into(r.seed), "of the first weights without --init, and of samples");
}

void add_training_options(po::options_description& all, Raw& r) {
  po::options_description_easy_init add = all.add_options();
  add("steps", into(r.steps), "optimizer steps");
  add("lr", into(r.lr), "highest learning rate");
  add("warmup", into(r.warmup), "steps of linear warm-up");
  add("min-lr-ratio", into(r.min_lr_ratio), "last learning rate / highest (cosine)");
  add("weight-decay", into(r.weight_decay), "of parameters of two dimensions or more");
  add("beta1", into(r.beta1), "AdamW");
  add("beta2", into(r.beta2), "AdamW");
  add("eps", into(r.eps), "AdamW");
  add("clip", into(r.clip), "largest global gradient norm; 0: no clipping");
  add("numerics", word(r.numerics, "fast|stage-invariant|world-invariant"),
      "in which order gradients are summed");
}

void add_run_options(po::options_description& all, Raw& r) {
  po::options_description_easy_init add = all.add_options();
  add("ranks", into(r.ranks), "ranks, each a thread with a device of its own");
  add("stage", into(r.stage),
      "what is sharded: 0 nothing, 1 optimizer states, 2 + gradients, 3 + parameters");
  add("device-memory", po::value(&r.device_memory)->value_name("BYTES"),
      "budget of each rank's device: bytes, or with KiB, MiB, GiB");
  add("threads", into(r.threads), "compute threads per rank; they never change a bit");
  add("bucket", word(r.bucket, "BYTES"), "gradient bytes that one call reduces");
  add("live-units", into(r.live_units), "units gathered at once at stage 3");
  add("save", path(r.save), "last weights (safetensors)");
  add("log", path(r.log), "a JSON object a step");
  add("sample", into(r.sample), "bytes of text to generate at the end");
  add("sample-every", into(r.sample_every), "also after each N steps; 0: at the end only");
  add("help", "print this");
}

[[noreturn]] void refuse(const std::string& option, const std::string& expected,
                         const std::string& found) {
  throw Refusal("--" + option + ": expected " + expected + ", found " + found);
}

template <class T>
std::string text_of(const T& value) {
  std::ostringstream out;
  out << value;
  return out.str();
}

std::size_t count_of(const char* option, std::int64_t value, std::int64_t lowest,
                     std::int64_t highest) {
  if (value < lowest || value > highest) {
    refuse(option, std::to_string(lowest) + " to " + std::to_string(highest),
           std::to_string(value));
  }
  return static_cast<std::size_t>(value);
}

// A finite number in [0, highest]; `open`: highest is out.
double number_of(const char* option, double value, double highest, bool open) {
  const bool inside = value >= 0 && (open ? value < highest : value <= highest);
  if (!std::isfinite(value) || !inside) {
    const std::string range = std::isfinite(highest)
                                  ? "a number in [0, " + text_of(highest) + (open ? ")" : "]")
                                  : "a finite number >= 0";
    refuse(option, range, text_of(value));
  }
  return value;
}

std::uint64_t bytes_of_option(const char* option, const std::string& text) {
  const auto bytes = parse_bytes(text);
  if (!bytes.has_value() || *bytes == 0) {
    refuse(option, "bytes above 0, such as 1048576, 512KiB, 256MiB or 2GiB", "'" + text + "'");
  }
  return *bytes;
}

template <class T, std::size_t kCount>
T choice_of(const char* option, const std::array<std::pair<const char*, T>, kCount>& choices,
            const std::string& text) {
  std::string names;
  for (const auto& [name, value] : choices) {
    if (text == name) {
      return value;
    }
    names += (names.empty() ? "" : " or ") + std::string(name);
  }
  refuse(option, names, "'" + text + "'");
}

void fill_sizes(const Raw& r, Settings& s) {
  constexpr std::int64_t kMany = 1'000'000'000, kRows = std::int64_t{1} << 24;
  s.shape.layers = count_of("layers", r.layers, 1, 4096);
  s.shape.width = count_of("width", r.width, 1, 65'536);
  s.shape.heads = count_of("heads", r.heads, 1, 65'536);
  s.shape.sequence = count_of("sequence", r.sequence, 1, kRows);
  s.shape.micro_batch = count_of("micro-batch", r.micro_batch, 1, kRows / r.sequence);
  s.micro_batches = count_of("micro-batches", r.micro_batches, 1, 1'000'000);
  s.steps = count_of("steps", r.steps, 0, kMany);
  s.warmup = count_of("warmup", r.warmup, 0, kMany);
  s.ranks = static_cast<int>(count_of("ranks", r.ranks, 1, 1024));
  s.threads = static_cast<int>(count_of("threads", r.threads, 1, 1024));
  s.live_units = count_of("live-units", r.live_units, 1, 1'000'000);
  s.stage = static_cast<zero::Stage>(count_of("stage", r.stage, 0, 3));
  s.sample_bytes = count_of("sample", r.sample, 0, kMany);
  s.sample_every = count_of("sample-every", r.sample_every, 0, kMany);
  if (s.shape.width % s.shape.heads != 0) {
    refuse("heads", "a divisor of --width " + std::to_string(s.shape.width),
           std::to_string(s.shape.heads));
  }
}

void fill_numbers(const Raw& r, Settings& s) {
  constexpr double kAny = std::numeric_limits<double>::infinity();
  s.hyper.lr = number_of("lr", r.lr, kAny, false);
  s.hyper.weight_decay = number_of("weight-decay", r.weight_decay, kAny, false);
  s.hyper.beta1 = number_of("beta1", r.beta1, 1, true);
  s.hyper.beta2 = number_of("beta2", r.beta2, 1, true);
  s.hyper.eps = number_of("eps", r.eps, kAny, false);
  s.min_lr_ratio = number_of("min-lr-ratio", r.min_lr_ratio, 1, false);
  s.clip = number_of("clip", r.clip, kAny, false);
  s.seed = r.seed;
}

void fill_words(const Raw& r, const po::variables_map& given, Settings& s) {
  s.element = choice_of<Element, 2>(
      "precision", {{{"fp32", Element::kFloat32}, {"bf16", Element::kBfloat16}}}, r.precision);
  s.numerics =
      choice_of<zero::Numerics, 3>("numerics",
                                   {{{"fast", zero::Numerics::kFast},
                                     {"stage-invariant", zero::Numerics::kStageInvariant},
                                     {"world-invariant", zero::Numerics::kWorldInvariant}}},
                                   r.numerics);
  s.keep = given["recompute"].as<bool>() ? Keep::kInputs : Keep::kActivations;
  s.bucket_bytes = bytes_of_option("bucket", r.bucket);
  if (given.count("device-memory") > 0) {
    s.device_bytes = bytes_of_option("device-memory", r.device_memory);
  }
  s.data = r.data;
  const auto path = [&](const char* option, const std::string& value) {
    return given.count(option) > 0 ? std::optional(value) : std::nullopt;
  };
  s.init = path("init", r.init);
  s.save = path("save", r.save);
  s.log = path("log", r.log);
}

// Boost collects a repeated --data and drops words that belong to no option.
void refuse_repeated(const po::parsed_options& parsed) {
  std::set<std::string> seen;
  for (const auto& option : parsed.options) {
    if (option.string_key.empty()) {
      throw Refusal("expected options that begin with --, found '" + option.original_tokens.at(0) +
                    "'; see --help");
    }
    if (!seen.insert(option.string_key).second) {
      throw Refusal("--" + option.string_key + ": expected once, found again");
    }
  }
}

}  // namespace

std::optional<std::uint64_t> parse_bytes(const std::string& text) {
  std::uint64_t value = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, value);
  if (error != std::errc()) {
    return std::nullopt;
  }
  const std::string unit(rest, end);
  for (const auto& [name, shift] :
       {std::pair{"", 0}, std::pair{"KiB", 10}, std::pair{"MiB", 20}, std::pair{"GiB", 30}}) {
    if (unit == name) {
      const bool fits = value <= (std::numeric_limits<std::uint64_t>::max() >> shift);
      return fits ? std::optional(value << shift) : std::nullopt;
    }
  }
  return std::nullopt;
}

std::optional<Settings> parse_settings(int argc, const char* const* argv) try {
  Raw raw;
  po::options_description options(
      "gpt_train: trains a GPT-2 on bytes, its state sharded over ranks", 100, 50);
  add_model_options(options, raw);
  add_training_options(options, raw);
  add_run_options(options, raw);
  const int style = po::command_line_style::allow_long |
                    po::command_line_style::long_allow_adjacent |
                    po::command_line_style::long_allow_next;
  const po::parsed_options parsed =
      po::command_line_parser(argc, argv).options(options).style(style).run();
  refuse_repeated(parsed);
  po::variables_map given;
  po::store(parsed, given);
  if (given.count("help") > 0) {
    std::cout << options;
    return std::nullopt;
  }
  po::notify(given);
  Settings settings;
  fill_sizes(raw, settings);
  fill_numbers(raw, settings);
  fill_words(raw, given, settings);
  return settings;
} catch (const po::error& error) {
  throw Refusal(std::string(error.what()) + "; see --help");
}

}  // namespace gpt

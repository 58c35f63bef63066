#include "gpt/data.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

namespace gpt {
namespace {

namespace fs = std::filesystem;

constexpr const char* kBible = "bible -f 'gen1:1-rev22:21' 2>/dev/null </dev/null";

std::string quoted(const std::string& path) {
  return "--data '" + path + "'";
}

void require_length(const Settings& s, std::uint64_t bytes) {
  const std::uint64_t least = s.shape.sequence + 2;
  if (bytes < least) {
    throw Refusal("--data: expected at least --sequence + 2 = " + std::to_string(least) +
                  " bytes of text, found " + std::to_string(bytes));
  }
}

// Throws: Refusal
std::uint64_t bytes_of_file(const std::string& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (!fs::exists(status)) {
    throw Refusal(quoted(path) + ": expected a file, found nothing of that name");
  }
  if (!fs::is_regular_file(status)) {
    throw Refusal(quoted(path) + ": expected a regular file, found " +
                  (fs::is_directory(status) ? "a directory" : "something else"));
  }
  const std::uintmax_t bytes = fs::file_size(path, error);
  if (error || bytes == 0) {
    throw Refusal(quoted(path) + ": expected text, found " +
                  (error ? error.message() : std::string("an empty file")));
  }
  if (!std::ifstream(path, std::ios::binary).is_open()) {
    throw Refusal(quoted(path) + ": expected a file that can be read, found one that cannot");
  }
  return bytes;
}

void append_file(const std::string& path, std::vector<std::uint8_t>& text) {
  const std::uint64_t bytes = bytes_of_file(path), before = text.size();
  try {
    text.resize(before + bytes);
  } catch (const std::exception&) {  // bad_alloc or length_error
    throw Refusal(quoted(path) + ": expected a text that fits in memory, found " +
                  std::to_string(bytes) + " bytes");
  }
  std::ifstream file(path, std::ios::binary);
  file.read(reinterpret_cast<char*>(text.data() + before), static_cast<std::streamsize>(bytes));
  if (static_cast<std::uint64_t>(file.gcount()) != bytes) {
    throw Refusal(quoted(path) + ": expected " + std::to_string(bytes) + " bytes, read " +
                  std::to_string(file.gcount()));
  }
}

std::vector<std::uint8_t> read_bible() {
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(kBible, "r"), pclose);
  std::vector<std::uint8_t> text;
  std::vector<std::uint8_t> piece(1U << 16);
  while (pipe != nullptr) {
    const std::size_t count = std::fread(piece.data(), 1, piece.size(), pipe.get());
    if (count == 0) {
      break;
    }
    text.insert(text.end(), piece.begin(), piece.begin() + static_cast<std::ptrdiff_t>(count));
  }
  if (text.empty()) {
    throw Refusal(
        "no --data, and the program 'bible' printed nothing: install the Debian package "
        "bible-kjv (apt-get install bible-kjv), or give --data FILE");
  }
  return text;
}

}  // namespace

void check_data(const Settings& settings) {
  std::uint64_t bytes = 0;
  for (const std::string& path : settings.data) {
    bytes += bytes_of_file(path);
  }
  if (!settings.data.empty()) {
    require_length(settings, bytes);
  }
}

std::vector<std::uint8_t> load_text(const Settings& settings) {
  std::vector<std::uint8_t> text;
  for (const std::string& path : settings.data) {
    append_file(path, text);
  }
  if (settings.data.empty()) {
    text = read_bible();
  }
  require_length(settings, text.size());
  return text;
}

Batches::Batches(const Settings& settings, const std::vector<std::uint8_t>& text, int rank)
    : settings_(settings), text_(text), rank_(static_cast<std::size_t>(rank)) {
  inputs_.resize(settings.shape.rows());
  targets_.resize(settings.shape.rows());
}

Tokens Batches::micro_batch(std::size_t step, std::size_t micro) {
  const std::size_t length = settings_.shape.sequence, count = settings_.shape.micro_batch;
  const std::size_t starts = text_.size() - length - 1;
  const std::size_t first = (micro * settings_.ranks_count() + rank_) * count;
  for (std::size_t b = 0; b < count; ++b) {
    const std::size_t sequence = step * settings_.sequences() + first + b;
    const std::uint8_t* from = text_.data() + sequence % starts * length % starts;
    std::copy_n(from, length, inputs_.data() + b * length);
    std::copy_n(from + 1, length, targets_.data() + b * length);
  }
  return {inputs_, targets_};
}

}  // namespace gpt

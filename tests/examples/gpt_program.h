// Runs gpt_train as a user does: arguments in; exit code, output and files out.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include <fcntl.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "zero/safetensors.h"

namespace gpt::testing {

// A folder of its own, removed with all that is in it.
class Folder {
 public:
  Folder() : path_(::testing::TempDir() + "gpt_XXXXXX") {
    if (mkdtemp(path_.data()) == nullptr) {
      throw std::runtime_error("no temporary folder: " + path_);
    }
  }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;
  ~Folder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  [[nodiscard]] std::string operator/(const std::string& name) const { return path_ + "/" + name; }
  [[nodiscard]] std::string make_file(const std::string& name, const std::string& text) const {
    std::ofstream(*this / name, std::ios::binary) << text;
    return *this / name;
  }
  // Names and sizes of all that is in it, so that a change shows.
  [[nodiscard]] std::map<std::string, std::uintmax_t> contents() const {
    std::map<std::string, std::uintmax_t> out;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(path_)) {
      out[entry.path().string()] = entry.is_regular_file() ? entry.file_size() : 0;
    }
    return out;
  }

 private:
  std::string path_;
};

[[nodiscard]] inline std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

[[nodiscard]] inline std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> out;
  std::istringstream in(text);
  for (std::string line; std::getline(in, line);) {
    out.push_back(line);
  }
  return out;
}

struct Ended {
  int code = -1;  // -1: by a signal
  std::string out, err;
  std::chrono::duration<double> time{};
  // The last line on stdout.
  [[nodiscard]] nlohmann::json last_line() const {
    const std::vector<std::string> lines = lines_of(out);
    return lines.empty() ? nlohmann::json() : nlohmann::json::parse(lines.back());
  }
};

using Arguments = std::vector<std::string>;

inline Arguments operator+(Arguments a, const Arguments& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

inline Ended run_program(const Arguments& arguments) {
  const Folder folder;
  const std::string out = folder / "out", err = folder / "err";
  std::vector<std::string> words = Arguments{GPT_TRAIN} + arguments;
  std::vector<char*> pointers;
  for (std::string& word : words) {
    pointers.push_back(word.data());
  }
  pointers.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  const int flags = O_WRONLY | O_CREAT | O_TRUNC;
  posix_spawn_file_actions_addopen(&actions, STDOUT_FILENO, out.c_str(), flags, 0600);
  posix_spawn_file_actions_addopen(&actions, STDERR_FILENO, err.c_str(), flags, 0600);
  const auto start = std::chrono::steady_clock::now();
  pid_t child = 0;
  const int error = posix_spawn(&child, GPT_TRAIN, &actions, nullptr, pointers.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    throw std::runtime_error(std::string("cannot start ") + GPT_TRAIN);
  }
  int status = 0;
  waitpid(child, &status, 0);
  Ended ended;
  ended.time = std::chrono::steady_clock::now() - start;
  ended.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  ended.out = read_file(out);
  ended.err = read_file(err);
  return ended;
}

[[nodiscard]] inline std::string golden(const std::string& name) {
  return ZERO_SOURCE_DIR "/tests/golden/gpt2-tiny/" + name;
}

// The golden model and schedule; how G = 8 is split, and --init, are the caller's.
[[nodiscard]] inline Arguments golden_model(int steps = 50, const std::string& clip = "1") {
  return {"--layers",       "2",
          "--heads",        "2",
          "--width",        "64",
          "--sequence",     "64",
          "--steps",        std::to_string(steps),
          "--lr",           "1e-3",
          "--warmup",       "10",
          "--min-lr-ratio", "0.1",
          "--weight-decay", "0.1",
          "--beta1",        "0.9",
          "--beta2",        "0.95",
          "--eps",          "1e-8",
          "--clip",         clip,
          "--data",         golden("text.txt")};
}

struct Split {
  int micro_batch = 8, micro_batches = 1, ranks = 1;
};

[[nodiscard]] inline Arguments split_arguments(const Split& s) {
  return {"--micro-batch",   std::to_string(s.micro_batch),
          "--micro-batches", std::to_string(s.micro_batches),
          "--ranks",         std::to_string(s.ranks)};
}

[[nodiscard]] inline std::vector<nlohmann::json> read_log(const std::string& path) {
  std::vector<nlohmann::json> out;
  for (const std::string& line : lines_of(read_file(path))) {
    out.push_back(nlohmann::json::parse(line));
  }
  return out;
}

}  // namespace gpt::testing

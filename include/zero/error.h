// The errors that the library throws: one small tree. It never exits, aborts or prints.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <string_view>

namespace zero {

class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// The caller did something that the interface forbids; the message names unit, parameter and rank.
class UsageError : public Error {
 public:
  using Error::Error;
};

// A device's byte budget does not hold an allocation (or a plan).
class OutOfMemory : public Error {
 public:
  struct Facts {
    std::uint64_t asked_bytes = 0, used_bytes = 0, budget_bytes = 0;
  };
  OutOfMemory(const std::string& what, Facts facts) : Error(what), facts_(facts) {}
  [[nodiscard]] const Facts& facts() const { return facts_; }

 private:
  Facts facts_;
};

// A collective failed, or another rank reported an error while this one waited.
class CommError : public Error {
 public:
  struct Facts {
    std::string operation{};     // "reduce_scatter", ...; empty when no collective was under way
    std::uint64_t sequence = 0;  // number of the collective on its communicator, from 0
    int rank = -1;               // who reports
    int peer = -1;               // whom it is about; -1: nobody in particular
  };
  CommError(const std::string& what, Facts facts) : Error(what), facts_(std::move(facts)) {}
  [[nodiscard]] const Facts& facts() const { return facts_; }

 private:
  Facts facts_;
};

// A file of weights or states is not what it should be.
class CheckpointError : public Error {
 public:
  CheckpointError(const std::string& what, std::string path)
      : Error(what), path_(std::move(path)) {}
  [[nodiscard]] const std::string& path() const { return path_; }

 private:
  std::string path_;
};

// Throws UsageError(message) unless `condition` holds.
inline void require(bool condition, std::string_view message) {
  if (!condition) {
    throw UsageError(std::string(message));
  }
}

}  // namespace zero

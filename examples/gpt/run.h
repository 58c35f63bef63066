// Everything that the ranks of one run share, prepared and checked before they start.
#pragma once

#include <cstdint>
#include <fstream>
#include <memory>
#include <optional>
#include <vector>

#include "zero/ledger.h"
#include "zero/plan.h"

#include "gpt/model.h"
#include "gpt/settings.h"

namespace gpt {

struct Run {
  Settings settings;
  GptModel model;
  zero::Plan plan;
  std::vector<std::uint8_t> text;
  std::vector<std::unique_ptr<zero::Ledger>> devices;  // by rank
  std::ofstream log;                                   // closed without --log
};

// Checks files, plans, prints the plan, takes the memory budget's word, and opens the log last:
// whoever is refused has written nothing.
// Throws: Refusal
[[nodiscard]] Run prepare(const Settings& settings);

}  // namespace gpt

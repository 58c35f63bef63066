// The text: plain files, or the King James Bible; and which bytes of it a micro-batch takes.
#pragma once

#include <cstdint>
#include <vector>

#include "gpt/gpt.h"
#include "gpt/settings.h"

namespace gpt {

// Looks at the files without reading them.
// Throws: Refusal for what is missing, empty, no regular file or too short
void check_data(const Settings& settings);

// Throws: Refusal when a file cannot be read or the text is too short
[[nodiscard]] std::vector<std::uint8_t> load_text(const Settings& settings);

// Sequence j of step s starts at byte ((s G + j) T) mod (bytes - T - 1); micro-batch m of rank r
// takes sequences (m W + r) B to (m W + r) B + B - 1.
class Batches {
 public:
  // Requires: `text` outlives this
  Batches(const Settings& settings, const std::vector<std::uint8_t>& text, int rank);
  // Valid until the next call.
  [[nodiscard]] Tokens micro_batch(std::size_t step, std::size_t micro);

 private:
  const Settings& settings_;
  const std::vector<std::uint8_t>& text_;
  std::size_t rank_;
  std::vector<std::uint8_t> inputs_, targets_;
};

}  // namespace gpt

// gpt_train: trains a GPT-2 whose parameters, gradients and states are sharded over ranks.
#include <algorithm>
#include <exception>
#include <iostream>
#include <optional>
#include <string>

#include "zero/launch.h"

#include "gpt/gemm.h"
#include "gpt/report.h"
#include "gpt/run.h"
#include "gpt/settings.h"
#include "gpt/train.h"

namespace {

constexpr int kFailed = 1, kRefused = 2;

int complain(const std::exception& error, int code) {
  std::string line = error.what();
  std::replace(line.begin(), line.end(), '\n', ' ');
  std::cerr << "gpt_train: " << line << std::endl;
  return code;
}

void run(const gpt::Settings& settings) {
  gpt::Run run = gpt::prepare(settings);
  gpt::Reporter reporter(run);
  gpt::use_one_blas_thread();
  zero::run_ranks(settings.ranks,
                  [&](zero::Communicator& ranks) { gpt::train(run, ranks, reporter); });
  gpt::print_memory_table(run);
  gpt::print_last_line(run, reporter.outcome());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    const std::optional<gpt::Settings> settings = gpt::parse_settings(argc, argv);
    if (settings.has_value()) {
      run(*settings);
    }
    return 0;
  } catch (const gpt::Refusal& refusal) {
    return complain(refusal, kRefused);
  } catch (const std::exception& error) {
    return complain(error, kFailed);
  }
}

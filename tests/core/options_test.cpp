// The defaults, which the documentation of options.h promises.
#include "zero/options.h"

#include <gtest/gtest.h>

namespace zero {
namespace {

TEST(Options, DefaultsAreThoseOfPlainDataParallelTraining) {
  const Options options;
  EXPECT_EQ(options.stage, Stage::kReplicated);
  EXPECT_EQ(options.numerics, Numerics::kFast);
  EXPECT_FALSE(options.clip_norm.has_value());
  EXPECT_EQ(options.live_units, 2);
  EXPECT_EQ(options.buckets, 2);
  EXPECT_EQ(options.bucket_bytes, 25U * 1024 * 1024);
  EXPECT_EQ(options.deadline, std::chrono::minutes(10));
}

TEST(Options, NumericsHaveTheNamesOfTheCommandLine) {
  EXPECT_EQ(name_of(Numerics::kFast), "fast");
  EXPECT_EQ(name_of(Numerics::kStageInvariant), "stage-invariant");
  EXPECT_EQ(name_of(Numerics::kWorldInvariant), "world-invariant");
  EXPECT_EQ(name_of(static_cast<Numerics>(9)), "unknown numerics");
}

}  // namespace
}  // namespace zero

// What every Backend promises of measure, prepare and update.
#pragma once

#include "tests/memory/backend_suite.h"
#include "tests/memory/step_case.h"

namespace zero::testing {

[[nodiscard]] inline double value_of_control(const std::vector<std::int64_t>& control) {
  double sum = 0;  // good to a few ULPs: digits are added from the highest down
  for (std::size_t i = ControlLayout::kBins; i-- > 0;) {
    sum += std::ldexp(static_cast<double>(control[i]), 48 * static_cast<int>(i) - 298);
  }
  return sum;
}

template <class Factory>
class StepSuite : public ::testing::Test {
 protected:
  ~StepSuite() override { owner_->release_stream(stream_); }

  [[nodiscard]] StepCase measured(const StepCase& c) {
    const DeviceStep step(backend_, c);
    backend_.measure(step.arguments, stream_);
    backend_.host_wait(backend_.record(stream_));
    return step.read();
  }
  [[nodiscard]] StepCase prepared(const StepCase& c) {
    const DeviceStep step(backend_, c);
    backend_.prepare(step.arguments, stream_);
    backend_.host_wait(backend_.record(stream_));
    return step.read();
  }
  [[nodiscard]] StepCase updated(const StepCase& c, const UpdateRule& rule) {
    const DeviceStep step(backend_, c);
    backend_.update(rule, step.arguments, stream_);
    backend_.host_wait(backend_.record(stream_));
    return step.read();
  }

  std::unique_ptr<Backend> owner_ = Factory::make();
  Backend& backend_ = *owner_;
  StreamRef stream_ = owner_->make_stream();
};
TYPED_TEST_SUITE_P(StepSuite);

TYPED_TEST_P(StepSuite, MeasuresTheSquaresOfItsOwnCountedChunks) {
  StepCase c = usual_step_case(1);
  c.rows[4].counted = 0;
  c.measured_chunks -= 2;
  long double expected = 0;
  for (std::size_t k = 0; k < c.measured_chunks; ++k) {
    for (std::size_t i = 0; i < c.chunks[k].count && c.chunks[k].parameter != 4; ++i) {
      const long double g = c.gradients[c.chunks[k].gradient_at + i];
      expected += g * g;
    }
  }
  const StepCase found = this->measured(c);
  EXPECT_NEAR(value_of_control(found.control) / static_cast<double>(expected), 1, 1e-14);
  for (std::size_t i = 0; i < ControlLayout::kBins; ++i) {
    EXPECT_GE(found.control[i], 0);
    EXPECT_LT(found.control[i], std::int64_t{1} << 48) << "not carried";
  }
  for (std::size_t i = ControlLayout::kBins; i < found.control.size(); ++i) {
    EXPECT_EQ(found.control[i], 0) << i;
  }
}

TYPED_TEST_P(StepSuite, MeasuresTheSameBitsInAnyOrderAndGrouping) {
  StepCase c = usual_step_case(2);
  const StepCase whole = this->measured(c);
  std::reverse(c.chunks.begin(), c.chunks.end());
  EXPECT_EQ(this->measured(c).control, whole.control);
  const std::vector<Chunk> all = c.chunks;
  for (const Chunk& chunk : all) {
    c.chunks = {chunk};
    c.measured_chunks = 1;
    c.control = this->measured(c).control;
  }
  EXPECT_EQ(c.control, whole.control);
}

TYPED_TEST_P(StepSuite, MeasuresTheLargestAndTheSmallestNumbers) {
  StepCase c = make_step_case({256, 300}, 3);
  std::fill(c.gradients.begin(), c.gradients.end(), std::numeric_limits<float>::max());
  const double largest = std::numeric_limits<float>::max();
  EXPECT_NEAR(value_of_control(this->measured(c).control) / (largest * largest), 556, 1e-9);
  std::fill(c.gradients.begin(), c.gradients.end(), std::numeric_limits<float>::denorm_min());
  const StepCase found = this->measured(c);
  EXPECT_EQ(found.control[0], 556);
  EXPECT_EQ(found.control[ControlLayout::kNonFinite], 0);
}

TYPED_TEST_P(StepSuite, NotesNonFiniteElementsAndTheLowestParameter) {
  StepCase c = usual_step_case(4);
  c.world = 3;
  c.rank = 1;
  c.control.assign(ControlLayout::words(3, c.rows.size()), 0);
  c.rows[5].counted = 0;
  const auto chunk_of = [&](std::uint32_t p) {
    return *std::find_if(c.chunks.begin(), c.chunks.end(),
                         [&](const Chunk& chunk) { return chunk.parameter == p; });
  };
  c.gradients[chunk_of(6).gradient_at + 300] = std::nanf("");
  c.gradients[chunk_of(6).gradient_at + 301] = -std::numeric_limits<float>::infinity();
  c.gradients[chunk_of(5).gradient_at] = std::numeric_limits<float>::infinity();
  c.control = this->measured(c).control;
  EXPECT_EQ(c.control[ControlLayout::kNonFinite], 3);
  EXPECT_EQ(c.control[ControlLayout::kFirstSlot], 0);
  EXPECT_EQ(c.control[ControlLayout::kFirstSlot + 1], 6) << "parameter 5, whether counted or not";
  EXPECT_EQ(c.control[ControlLayout::kFirstSlot + 2], 0);
  c.chunks = {chunk_of(6)};  // a later class: the lowest parameter stays
  c.measured_chunks = 1;
  EXPECT_EQ(this->measured(c).control[ControlLayout::kFirstSlot + 1], 6);
}

TYPED_TEST_P(StepSuite, PreparesDivisorNormClipAndCounts) {
  StepCase c = make_step_case({1, 1, 1, 1, 1}, 5);
  c.world = 2;
  c.control.assign(ControlLayout::words(2, 5), 0);
  c.control[6] = 1LL << (298 - 6 * 48 + 8);  // squares add up to 2^8
  const std::size_t used = ControlLayout::used_at(2);
  c.control[used] = 1LL | (2LL << 42U);  // parameter 0 on one rank, 2 on both, 1 on none
  c.control[used + 1] = 1LL << 21U;      // parameter 4
  c.inputs = {.clip_norm = 2, .lr_scale = 0.25, .micro_batches = 2};
  StepCase found = this->prepared(c);
  EXPECT_EQ(found.scalars.divisor, 4);
  EXPECT_EQ(found.scalars.grad_norm, 4);
  EXPECT_EQ(found.scalars.clip_factor, 2 / (4 + 1e-6));
  EXPECT_EQ(found.scalars.lr_scale, 0.25);
  EXPECT_EQ(found.scalars.skip, 0);
  EXPECT_EQ(found.scalars.first_non_finite, -1);
  EXPECT_EQ(found.scalars.owner, -1);
  const std::uint32_t expected[] = {1, 0, 1, 0, 1};
  for (std::size_t p = 0; p < 5; ++p) {
    EXPECT_EQ(found.rows[p].used, expected[p]) << p;
    EXPECT_EQ(found.rows[p].step, static_cast<std::int64_t>(p + expected[p])) << p;
  }
  c.inputs.clip_norm = 4;
  EXPECT_EQ(this->prepared(c).scalars.clip_factor, 1) << "the norm itself is not clipped";
  c.inputs.clip_norm = std::numeric_limits<double>::infinity();
  EXPECT_EQ(this->prepared(c).scalars.clip_factor, 1);
  c.inputs.tokens_given = 1;
  c.control[ControlLayout::kTokens] = 8;
  found = this->prepared(c);
  EXPECT_EQ(found.scalars.divisor, 8);
  EXPECT_EQ(found.scalars.grad_norm, 2);
}

TYPED_TEST_P(StepSuite, PreparesASkipThatCountsNoStep) {
  StepCase c = make_step_case({1, 1}, 6);
  c.world = 3;
  c.control.assign(ControlLayout::words(3, 2), 0);
  c.control[ControlLayout::used_at(3)] = 1 | (1LL << 21U);
  c.control[ControlLayout::kNonFinite] = 7;
  c.control[ControlLayout::kFirstSlot] = 9;
  c.control[ControlLayout::kFirstSlot + 1] = 2;
  c.control[ControlLayout::kFirstSlot + 2] = 2;
  StepCase found = this->prepared(c);
  EXPECT_EQ(found.scalars.skip, 1);
  EXPECT_EQ(found.scalars.first_non_finite, 1);
  EXPECT_EQ(found.scalars.owner, 1);
  EXPECT_EQ(found.rows[0].step, 0);
  EXPECT_EQ(found.rows[1].step, 1);
  c.control.assign(c.control.size(), 0);
  c.inputs.tokens_given = 1;
  found = this->prepared(c);
  EXPECT_EQ(found.scalars.skip, 1) << "no tokens: there is no mean";
  EXPECT_EQ(found.scalars.first_non_finite, -1);
}

TYPED_TEST_P(StepSuite, PreparesTheNormOfDigitsThatRanksHaveSummed) {
  StepCase c = make_step_case({1}, 7);
  c.control[2] = (std::int64_t{1} << 61) + 3;  // not carried: as after an all-reduce of many
  c.control[0] = 1;
  const double sum = value_of_control(c.control);
  EXPECT_EQ(this->prepared(c).scalars.grad_norm, std::sqrt(sum));
}

TYPED_TEST_P(StepSuite, UpdatesEveryPrecisionToTheBitsOfAPlainLoop) {
  struct Rule {
    UpdateRule rule;
    PlainRule plain;
  };
  for (const Rule& r : {Rule{adamw(), plain_adamw}, Rule{adam(), plain_adam}}) {
    for (const DType dtype : {DType::kFloat32, DType::kBfloat16}) {
      for (const bool has_master : {false, true}) {
        StepCase c = usual_step_case(8);
        c.dtype = dtype;
        c.has_master = has_master;
        c.scalars = {.divisor = 3, .clip_factor = 0.7, .lr_scale = 0.5};
        for (std::size_t p = 0; p < c.rows.size(); ++p) {
          c.rows[p].step = static_cast<std::int64_t>(1 + p * p * p);
        }
        EXPECT_EQ(differ(this->updated(c, r.rule), plain_update(c, r.plain)), "")
            << r.rule.name << " " << name_of(dtype) << " " << has_master;
      }
    }
  }
}

TYPED_TEST_P(StepSuite, LeavesUnusedParametersAndSkippedStepsAlone) {
  StepCase c = usual_step_case(9);
  for (ParameterRow& row : c.rows) {
    row.step = 5;
  }
  c.rows[3].used = c.rows[6].used = 0;
  const StepCase found = this->updated(c, adamw());
  EXPECT_EQ(differ(found, plain_update(c, plain_adamw)), "");
  EXPECT_NE(differ(found, c), "");
  c.scalars.skip = 1;
  c.scalars.divisor = std::nan("");
  EXPECT_EQ(differ(this->updated(c, adamw()), c), "");
}

TYPED_TEST_P(StepSuite, UpdatesWithTinyAndHugeNumbers) {
  StepCase c = make_step_case({65'537}, 10);
  c.rows[0].step = 1;
  const auto wild = mixed_values(c.gradients.size(), 11);
  c.gradients = wild;  // squares overflow and underflow, subnormals in every state
  EXPECT_EQ(differ(this->updated(c, adamw()), plain_update(c, plain_adamw)), "");
  EXPECT_EQ(differ(this->updated(c, adam()), plain_update(c, plain_adam)), "");
}

TYPED_TEST_P(StepSuite, RefusesARuleThatItCannotRun) {
  const DeviceStep step(this->backend_, make_step_case({1}, 12));
  UpdateRule rule{.name = "nowhere", .states = {}};
  EXPECT_THROW(this->backend_.update(rule, step.arguments, this->stream_), UsageError);
  rule = adamw();
  rule.between = Between::kWholeParameter;
  EXPECT_THROW(this->backend_.update(rule, step.arguments, this->stream_), UsageError);
}

REGISTER_TYPED_TEST_SUITE_P(StepSuite, MeasuresTheSquaresOfItsOwnCountedChunks,
                            MeasuresTheSameBitsInAnyOrderAndGrouping,
                            MeasuresTheLargestAndTheSmallestNumbers,
                            NotesNonFiniteElementsAndTheLowestParameter,
                            PreparesDivisorNormClipAndCounts, PreparesASkipThatCountsNoStep,
                            PreparesTheNormOfDigitsThatRanksHaveSummed,
                            UpdatesEveryPrecisionToTheBitsOfAPlainLoop,
                            LeavesUnusedParametersAndSkippedStepsAlone,
                            UpdatesWithTinyAndHugeNumbers, RefusesARuleThatItCannotRun);

}  // namespace zero::testing

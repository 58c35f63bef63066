// What every Backend promises of copy, fill, accumulate and sum_tree: the bits of plain loops.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <span>

#include "tests/memory/backend_suite.h"

namespace zero::testing {

inline const std::vector<std::size_t>& kernel_counts() {
  static const std::vector<std::size_t> counts{0, 1, 2, 15, 16, 17, 257, 1009, 65'537, 200'003};
  return counts;
}

template <class Into, class From>
void expect_accumulates(Backend& backend, std::size_t count, First first, StreamRef stream) {
  const auto into = values_as<Into>(count, 1);
  const auto from = values_as<From>(count, 2);
  const Buffer to = upload(backend, into), source = upload(backend, from);
  backend.accumulate(to.data(), dtype_of<Into>::value, source.data(), dtype_of<From>::value, count,
                     first, stream);
  std::vector<Into> expected;
  for (std::size_t i = 0; i < count; ++i) {
    const float x = value_of(from[i]);
    expected.push_back(as<Into>(first == First::kYes ? x : value_of(into[i]) + x));
  }
  backend.host_wait(backend.record(stream));
  EXPECT_EQ(differ(download<Into>(backend, to), expected), "") << count;
}

// The tree as the design draws it: split at the largest power of two below n.
template <class T>
[[nodiscard]] T plain_tree(const std::vector<T>& values, std::size_t first, std::size_t n) {
  if (n == 1) {
    return values[first];
  }
  const std::size_t half = std::bit_floor(n - 1);
  return plain_tree(values, first, half) + plain_tree(values, first + half, n - half);
}

template <class In, class Sum>
void expect_sums(Backend& backend, const std::vector<std::vector<In>>& rows, DType dtype,
                 bool in_place, StreamRef stream) {
  const std::size_t count = rows[0].size();
  std::vector<Buffer> buffers;
  std::vector<const void*> in;
  for (const auto& row : rows) {
    buffers.push_back(upload(backend, row));
    in.push_back(buffers.back().data());
  }
  const Buffer own = backend.allocate({count * sizeof(Sum), Category::kUser});
  const Buffer& out = in_place ? buffers[rows.size() / 2] : own;
  backend.sum_tree(out.data(), in, dtype, count, stream);
  in.assign(in.size(), nullptr);  // the span is the caller's
  std::vector<Sum> expected, column(rows.size());
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t r = 0; r < rows.size(); ++r) {
      if constexpr (std::is_same_v<In, std::int64_t>) {
        column[r] = rows[r][i];
      } else {
        column[r] = value_of(rows[r][i]);
      }
    }
    expected.push_back(plain_tree(column, 0, rows.size()));
  }
  backend.host_wait(backend.record(stream));
  EXPECT_EQ(differ(download<Sum>(backend, out), expected), "")
      << rows.size() << " rows of " << count;
}

template <class Factory>
class KernelSuite : public ::testing::Test {
 protected:
  ~KernelSuite() override { owner_->release_stream(stream_); }
  std::unique_ptr<Backend> owner_ = Factory::make();
  Backend& backend_ = *owner_;
  StreamRef stream_ = owner_->make_stream();
};
TYPED_TEST_SUITE_P(KernelSuite);

TYPED_TEST_P(KernelSuite, CopiesAndFillsExactlyTheBytesAsked) {
  Backend& backend = this->backend_;
  for (const std::size_t count : kernel_counts()) {
    const std::size_t bytes = count * 3;
    std::vector<unsigned char> values(bytes + 2, 7);
    std::iota(values.begin() + 1, values.end() - 1, static_cast<unsigned char>(3));
    const Buffer from = upload(backend, values);
    const Buffer to = upload(backend, std::vector<unsigned char>(bytes + 2, 9));
    backend.copy(to.as<unsigned char>() + 1, from.as<unsigned char>() + 1, bytes, this->stream_);
    backend.host_wait(backend.record(this->stream_));
    auto expected = values;
    expected.front() = expected.back() = 9;
    EXPECT_EQ(download<unsigned char>(backend, to), expected);
    backend.fill(to.as<unsigned char>() + 1, 0x1ff, bytes, this->stream_);
    backend.host_wait(backend.record(this->stream_));
    std::fill(expected.begin() + 1, expected.end() - 1, static_cast<unsigned char>(0xff));
    EXPECT_EQ(download<unsigned char>(backend, to), expected);
  }
}

TYPED_TEST_P(KernelSuite, AccumulatesEveryPairOfDtypesInFp32) {
  for (const std::size_t count : kernel_counts()) {
    for (const First first : {First::kYes, First::kNo}) {
      for (const StreamRef on : {kHost, this->stream_}) {
        expect_accumulates<float, float>(this->backend_, count, first, on);
        expect_accumulates<float, bf16>(this->backend_, count, first, on);
        expect_accumulates<bf16, float>(this->backend_, count, first, on);
        expect_accumulates<bf16, bf16>(this->backend_, count, first, on);
      }
    }
  }
}

TYPED_TEST_P(KernelSuite, AccumulatesAnArrayIntoItself) {
  Backend& backend = this->backend_;
  const auto values = values_as<float>(1009, 3);
  const Buffer buffer = upload(backend, values);
  backend.accumulate(buffer.data(), DType::kFloat32, buffer.data(), DType::kFloat32, values.size(),
                     First::kNo, this->stream_);
  backend.host_wait(backend.record(this->stream_));
  std::vector<float> expected;
  for (const float x : values) {
    expected.push_back(x + x);
  }
  EXPECT_EQ(differ(download<float>(backend, buffer), expected), "");
}

TYPED_TEST_P(KernelSuite, SumsRowsAsTheBinaryTreeOverTheirNumbers) {
  for (const std::size_t n : {1U, 2U, 3U, 4U, 5U, 6U, 7U, 8U, 9U, 12U, 13U, 16U, 17U, 33U}) {
    for (const std::size_t count : {std::size_t{0}, std::size_t{1}, n - 1, n, std::size_t{1025}}) {
      std::vector<std::vector<float>> rows;
      std::vector<std::vector<bf16>> low;
      std::vector<std::vector<std::int64_t>> integers;
      std::mt19937_64 random(n);
      for (std::size_t r = 0; r < n; ++r) {
        rows.push_back(values_as<float>(count, static_cast<std::uint32_t>(r)));
        low.push_back(rounded(rows.back()));
        integers.emplace_back();
        for (std::size_t i = 0; i < count; ++i) {
          integers.back().push_back(static_cast<std::int64_t>(random() >> 8U));
        }
      }
      for (const bool in_place : {false, true}) {
        expect_sums<float, float>(this->backend_, rows, DType::kFloat32, in_place, this->stream_);
        expect_sums<std::int64_t, std::int64_t>(this->backend_, integers, DType::kInt64, in_place,
                                                kHost);
      }
      expect_sums<bf16, float>(this->backend_, low, DType::kBfloat16, false, this->stream_);
    }
  }
}

TYPED_TEST_P(KernelSuite, SumsLongRowsOfManyRanks) {
  std::vector<std::vector<float>> rows;
  for (std::uint32_t r = 0; r < 7; ++r) {
    rows.push_back(values_as<float>(65'537, r));
  }
  expect_sums<float, float>(this->backend_, rows, DType::kFloat32, false, this->stream_);
  expect_sums<float, float>(this->backend_, rows, DType::kFloat32, true, this->stream_);
}

TYPED_TEST_P(KernelSuite, KeepsNonFiniteValuesNonFinite) {
  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> values{inf, -inf, std::nanf(""), 3.4e38F};
  const std::vector<float> others{1, inf, 1, 3.4e38F};
  const Buffer a = upload(this->backend_, values), b = upload(this->backend_, others);
  const void* const in[] = {a.data(), b.data()};
  this->backend_.sum_tree(a.data(), in, DType::kFloat32, 4, kHost);
  const auto sum = download<float>(this->backend_, a);
  EXPECT_EQ(sum[0], inf);
  EXPECT_TRUE(std::isnan(sum[1]));
  EXPECT_TRUE(std::isnan(sum[2]));
  EXPECT_EQ(sum[3], inf);
  const Buffer low = this->backend_.allocate({4 * sizeof(bf16), Category::kUser});
  this->backend_.accumulate(low.data(), DType::kBfloat16, a.data(), DType::kFloat32, 4, First::kYes,
                            kHost);
  EXPECT_TRUE(std::isnan(to_float(download<bf16>(this->backend_, low)[2])));
}

TYPED_TEST_P(KernelSuite, RefusesDtypesThatItCannotSum) {
  Backend& backend = this->backend_;
  float x = 0, y = 0;
  const void* const in[] = {&y};
  EXPECT_THROW(backend.accumulate(&x, DType::kFloat16, &y, DType::kFloat32, 1, First::kNo, kHost),
               UsageError);
  EXPECT_THROW(
      backend.accumulate(&x, DType::kFloat32, &y, DType::kInt64, 1, First::kNo, this->stream_),
      UsageError);
  EXPECT_THROW(backend.sum_tree(&x, in, DType::kUint8, 1, this->stream_), UsageError);
  EXPECT_THROW(backend.sum_tree(&x, {}, DType::kFloat32, 1, this->stream_), UsageError);
  EXPECT_EQ(error_of(backend, backend.record(this->stream_)), "") << "refused before enqueuing";
}

REGISTER_TYPED_TEST_SUITE_P(KernelSuite, CopiesAndFillsExactlyTheBytesAsked,
                            AccumulatesEveryPairOfDtypesInFp32, AccumulatesAnArrayIntoItself,
                            SumsRowsAsTheBinaryTreeOverTheirNumbers, SumsLongRowsOfManyRanks,
                            KeepsNonFiniteValuesNonFinite, RefusesDtypesThatItCannotSum);

}  // namespace zero::testing

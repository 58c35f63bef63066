// The fused kernels against the same arithmetic in double, at widths with and without a tail.
#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <vector>

#include <gtest/gtest.h>

#include "gpt/gemm.h"
#include "gpt/kernels.h"
#include "gpt/settings.h"
#include "gpt/weights.h"

namespace gpt::testing {
namespace {

using Floats = std::vector<float>;
using Doubles = std::vector<double>;

constexpr std::size_t kRows = 5;
constexpr std::size_t kWidths[] = {1, 3, 7, 8, 9, 30, 64, 385};

Floats random_floats(std::size_t count, std::uint64_t seed, double scale = 1) {
  Floats out(count);
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = static_cast<float>(scale * (2 * uniform(mix(seed * 1000 + i)) - 1));
  }
  return out;
}

void expect_near(const Floats& found, const Doubles& expected, double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  double largest = 0;
  for (const double x : expected) {
    largest = std::max(largest, std::abs(x));
  }
  for (std::size_t i = 0; i < found.size(); ++i) {
    ASSERT_NEAR(static_cast<double>(found[i]), expected[i], tolerance * (largest + 1e-30)) << i;
  }
}

Doubles norm_of(const Floats& x, const Floats& w, const Floats& b, std::size_t width) {
  Doubles out;
  for (std::size_t r = 0; r < x.size() / width; ++r) {
    double mean = 0, square = 0;
    for (std::size_t i = 0; i < width; ++i) {
      mean += static_cast<double>(x[r * width + i]) / static_cast<double>(width);
    }
    for (std::size_t i = 0; i < width; ++i) {
      const double d = static_cast<double>(x[r * width + i]) - mean;
      square += d * d / static_cast<double>(width);
    }
    for (std::size_t i = 0; i < width; ++i) {
      const double d = static_cast<double>(x[r * width + i]) - mean;
      out.push_back(d / std::sqrt(square + 1e-5) * static_cast<double>(w[i]) +
                    static_cast<double>(b[i]));
    }
  }
  return out;
}

double gelu_of(double x) {
  return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
}

TEST(GptKernels, NormaliseRowsOfAnyWidth) {
  for (const std::size_t width : kWidths) {
    const Floats x = random_floats(kRows * width, 1), w = random_floats(width, 2),
                 b = random_floats(width, 3);
    Floats out(x.size());
    layer_norm(x.data(), {w.data(), b.data()}, out.data(), {kRows, width});
    expect_near(out, norm_of(x, w, b, width), 2e-5);
  }
}

// d/dx of sum(norm(x) * d_out), by central differences in double.
TEST(GptKernels, DifferentiateTheNorm) {
  for (const std::size_t width : {3UL, 8UL, 30UL}) {
    const Floats x = random_floats(kRows * width, 1), w = random_floats(width, 2), b(width, 0.0F),
                 d_out = random_floats(kRows * width, 4);
    Floats d_x(x.size(), 1.0F), d_w(width), d_b(width);
    layer_norm_backward({.d_out = d_out.data(),
                         .x = x.data(),
                         .weight = w.data(),
                         .d_x = d_x.data(),
                         .into = Into::kAdd,
                         .d_weight = d_w.data(),
                         .d_bias = d_b.data()},
                        {kRows, width});
    const auto value = [&](const Floats& at) {
      double sum = 0;
      const Doubles out = norm_of(at, w, b, width);
      for (std::size_t i = 0; i < out.size(); ++i) {
        sum += out[i] * static_cast<double>(d_out[i]);
      }
      return sum;
    };
    Doubles expected;
    for (std::size_t i = 0; i < x.size(); ++i) {
      Floats up = x, down = x;
      up[i] += 0x1p-10F;
      down[i] -= 0x1p-10F;
      const double step = static_cast<double>(up[i]) - static_cast<double>(down[i]);
      expected.push_back(1 + (value(up) - value(down)) / step);
    }
    expect_near(d_x, expected, 1e-3);
    Doubles sums(width);
    for (std::size_t i = 0; i < d_out.size(); ++i) {
      sums[i % width] += static_cast<double>(d_out[i]);
    }
    expect_near(d_b, sums, 1e-6);
    Floats stored = x;
    layer_norm_backward({.d_out = d_out.data(),
                         .x = stored.data(),
                         .weight = w.data(),
                         .d_x = stored.data(),
                         .into = Into::kStore,
                         .d_weight = d_w.data(),
                         .d_bias = d_b.data()},
                        {kRows, width});
    for (std::size_t i = 0; i < x.size(); ++i) {
      ASSERT_NEAR(stored[i], d_x[i] - 1, 1e-5);
    }
  }
}

TEST(GptKernels, ActivateAndDifferentiateOverTheWholeRange) {
  Floats x;
  Doubles value, slope;
  for (double at = -40; at < 40; at += 0.0137) {
    x.push_back(static_cast<float>(at));
    const auto exact = static_cast<double>(x.back());
    value.push_back(gelu_of(exact));
    slope.push_back((gelu_of(exact + 1e-5) - gelu_of(exact - 1e-5)) / 2e-5);
  }
  Floats with_bias = x, out(x.size());
  const Floats bias(x.size(), 0.0F);
  bias_gelu(with_bias.data(), bias.data(), out.data(), {1, x.size()});
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_NEAR(out[i], value[i], 4e-7 * (1 + std::abs(value[i]))) << x[i];
  }
  Floats split = x, again(x.size());
  split_gelu(split.data(), again.data(), x.size());
  EXPECT_EQ(again, out);
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_NEAR(split[i], slope[i], 2e-6) << x[i];
  }
}

TEST(GptKernels, SeeNoTokenOfTheFuture) {
  for (const std::size_t first : {0UL, 1UL, 6UL, 13UL}) {
    const std::size_t width = first + kRows;
    const Floats before = random_floats(kRows * width, first, 20);
    Floats p = before;
    causal_softmax(p.data(), first, {kRows, width});
    for (std::size_t r = 0; r < kRows; ++r) {
      double sum = 0;
      for (std::size_t i = 0; i <= first + r; ++i) {
        sum += std::exp(static_cast<double>(before[r * width + i]) - 20);
      }
      for (std::size_t i = 0; i < width; ++i) {
        const double e = std::exp(static_cast<double>(before[r * width + i]) - 20) / sum;
        ASSERT_NEAR(p[r * width + i], i <= first + r ? e : 0.0, 1e-6);
      }
    }
  }
}

TEST(GptKernels, SumTheLossAndStoreItsGradient) {
  const Floats before = random_floats(kRows * 256, 9, 30);
  const std::vector<std::uint8_t> targets{0, 255, 17, 128, 99};
  Floats logits = before;
  const double loss = cross_entropy(logits.data(), targets.data(), 0.5F, {kRows, 256});
  double expected = 0;
  for (std::size_t r = 0; r < kRows; ++r) {
    double sum = 0;
    for (std::size_t i = 0; i < 256; ++i) {
      sum += std::exp(static_cast<double>(before[r * 256 + i]));
    }
    for (std::size_t i = 0; i < 256; ++i) {
      const double p = std::exp(static_cast<double>(before[r * 256 + i])) / sum;
      ASSERT_NEAR(logits[r * 256 + i], 0.5 * (p - (i == targets[r] ? 1 : 0)), 1e-6);
    }
    expected += std::log(sum) - static_cast<double>(before[r * 256 + targets[r]]);
  }
  EXPECT_NEAR(loss, expected, 1e-5);
}

TEST(GptKernels, LetNaNThroughToTheLoss) {
  Floats logits(256, 0.0F);
  logits[3] = std::nanf("");
  const std::uint8_t target = 0;
  EXPECT_TRUE(std::isnan(cross_entropy(logits.data(), &target, 1, {1, 256})));
}

TEST(GptKernels, ConvertLikeTheLibrary) {
  Floats values = random_floats(70'001, 5, 1e30);
  for (const std::uint32_t bits : {0x7f800000U, 0xff800000U, 0x7fc00000U, 0x7f800001U, 0x00000001U,
                                   0x3f808000U, 0x3f818000U, 0x7f7fffffU, 0x80000000U}) {
    values.push_back(std::bit_cast<float>(bits));
  }
  std::vector<zero::bf16> low(values.size());
  convert(std::span<const float>(values), low.data());
  Floats back(values.size());
  convert(std::span<const zero::bf16>(low), back.data());
  for (std::size_t i = 0; i < values.size(); ++i) {
    ASSERT_EQ(low[i].bits, zero::to_bf16(values[i]).bits) << values[i];
    ASSERT_EQ(std::bit_cast<std::uint32_t>(back[i]),
              std::bit_cast<std::uint32_t>(zero::to_float(low[i])));
  }
}

TEST(GptKernels, SumColumnsAndPartsInOrder) {
  for (const std::size_t width : kWidths) {
    const Floats x = random_floats(kRows * width, 1), factor = random_floats(kRows * width, 2);
    Floats sums(width), product = x, product_sums(width), running(width);
    sum_columns(x.data(), sums.data(), {kRows, width});
    multiply(product.data(), factor.data(), product_sums.data(), {kRows, width});
    Floats expected(width), expected_product(width);
    for (std::size_t i = 0; i < x.size(); ++i) {
      expected[i % width] += x[i];
      expected_product[i % width] += x[i] * factor[i];
      ASSERT_EQ(product[i], x[i] * factor[i]);
    }
    EXPECT_EQ(sums, expected);
    EXPECT_EQ(product_sums, expected_product);
    add_parts(x.data(), running.data(), {kRows, width});
    EXPECT_EQ(running, expected);
  }
}

TEST(GptGemm, CutsRowsByTheirNumberAloneAndCoversEach) {
  for (const std::size_t rows :
       {1UL, 63UL, 64UL, 383UL, 384UL, 768UL, 1000UL, 1024UL, 4096UL, 100'003UL}) {
    const RowBlocks blocks(rows);
    std::size_t next = 0;
    for (std::size_t b = 0; b < blocks.count; ++b) {
      EXPECT_EQ(blocks.first(b), next);
      EXPECT_GT(blocks.rows_of(b), 0U);
      next += blocks.rows_of(b);
    }
    EXPECT_EQ(next, rows);
    EXPECT_LE(blocks.count, RowBlocks::kMost);
  }
}

TEST(GptGemm, HasTheSameBitsWithAnyThreads) {
  use_one_blas_thread();
  constexpr std::size_t kM = 1000, kN = 33, kK = 70;
  const Floats a = random_floats(kM * kK, 1), b = random_floats(kK * kN, 2);
  std::vector<Floats> results;
  for (const int threads : {1, 2, 5}) {
    Pool pool(threads);
    results.emplace_back(kM * kN);
    multiply({.a = {a.data(), kM, Layout::kTransposed},
              .b = {b.data(), kN},
              .c = results.back().data(),
              .c_stride = kN,
              .rows = kM,
              .columns = kN,
              .inner = kK},
             pool);
  }
  Doubles exact(kM * kN);
  for (std::size_t m = 0; m < kM; ++m) {
    for (std::size_t k = 0; k < kK; ++k) {
      for (std::size_t n = 0; n < kN; ++n) {
        exact[m * kN + n] +=
            static_cast<double>(a[k * kM + m]) * static_cast<double>(b[k * kN + n]);
      }
    }
  }
  expect_near(results[0], exact, 1e-6);
  EXPECT_EQ(results[0], results[1]);
  EXPECT_EQ(results[0], results[2]);
}

TEST(GptSettings, ReadsBytesWithAndWithoutUnit) {
  EXPECT_EQ(parse_bytes("1048576"), 1048576U);
  EXPECT_EQ(parse_bytes("3KiB"), 3072U);
  EXPECT_EQ(parse_bytes("256MiB"), 268435456U);
  EXPECT_EQ(parse_bytes("2GiB"), 2147483648U);
  EXPECT_EQ(parse_bytes("18446744073709551615"), 18446744073709551615U);
  for (const char* bad : {"", "MiB", "1.5GiB", "-1", "+1", " 1", "1 MiB", "1MB", "1mib", "1MiBx",
                          "18446744073709551616", "17179869184GiB"}) {
    EXPECT_EQ(parse_bytes(bad), std::nullopt) << bad;
  }
}

}  // namespace
}  // namespace gpt::testing

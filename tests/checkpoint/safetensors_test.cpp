// Safetensors files on the disk: round trips, the golden files, and files that lie.
#include "zero/safetensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zero/dtype.h"
#include "zero/error.h"

#include "tests/checkpoint/temporary_folder.h"

namespace zero {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

template <class Call>
std::string refusal(Call&& call) {
  try {
    call();
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what(), HasSubstr(error.path()));
    return error.what();
  }
  return "accepted";
}

template <class Value>
std::vector<Value> read_all(const SafetensorsReader& reader, const std::string& name) {
  std::vector<Value> out(reader.tensors().at(name).count());
  reader.read(name, 0, std::span(out));
  return out;
}

std::vector<float> counting(std::size_t count) {
  std::vector<float> values(count);
  std::iota(values.begin(), values.end(), 0.5F);
  return values;
}

// A file with one tensor "t" whose elements have the given bytes.
template <class Stored>
std::string file_of(const TemporaryFolder& folder, const std::string& dtype,
                    const std::vector<Stored>& elements) {
  std::string data(elements.size() * sizeof(Stored), '\0');
  std::memcpy(data.data(), elements.data(), data.size());
  const std::string header = R"({"t":{"dtype":")" + dtype + R"(","shape":[)" +
                             std::to_string(elements.size()) + R"(],"data_offsets":[0,)" +
                             std::to_string(data.size()) + "]}}";
  testing::write_file(folder.file(dtype), testing::safetensors_bytes(header, data));
  return folder.file(dtype);
}

TEST(Safetensors, WhatWasWrittenInAnyOrderIsReadBackByBits) {
  const TemporaryFolder folder;
  std::vector<float> large = counting(100'003);
  large[17] = -0.0F;
  large[18] = std::numeric_limits<float>::quiet_NaN();
  large[19] = std::numeric_limits<float>::denorm_min();
  SafetensorsWriter writer(
      folder.file("x"), {{"large", {100'003}}, {"scalar", {}}, {"empty", {3, 0}}, {"w", {2, 2}}});
  writer.write("w", 0, std::vector<float>{1, 2, 3, 4});
  writer.write("large", 50'000, std::span(large).subspan(50'000));
  writer.write("scalar", 0, std::vector<float>{7});
  writer.write("large", 0, std::span(large).first(30'000));
  writer.write("large", 30'000, std::span(large).subspan(30'000, 20'000));
  writer.finish();
  const SafetensorsReader reader(folder.file("x"));
  ASSERT_EQ(reader.tensors().size(), 4U);
  const std::vector<float> found = read_all<float>(reader, "large");
  EXPECT_EQ(std::memcmp(found.data(), large.data(), large.size() * sizeof(float)), 0);
  EXPECT_THAT(read_all<float>(reader, "scalar"), ElementsAre(7));
  EXPECT_THAT(read_all<float>(reader, "w"), ElementsAre(1, 2, 3, 4));
  EXPECT_THAT(reader.tensors().at("empty").shape, ElementsAre(3U, 0U));
}

TEST(Safetensors, TensorsLieInTheOrderOfTheEntries) {
  const TemporaryFolder folder;
  SafetensorsWriter writer(folder.file("x"), {{"z", {2}}, {"a", {3}}});
  writer.write("z", 0, counting(2));
  writer.write("a", 0, counting(3));
  writer.finish();
  const SafetensorsReader reader(folder.file("x"));
  EXPECT_EQ(reader.tensors().at("z").begin, 0U);
  EXPECT_EQ(reader.tensors().at("a").begin, 8U);
}

TEST(Safetensors, AFileOfNoTensorsIsAFile) {
  const TemporaryFolder folder;
  SafetensorsWriter(folder.file("x"), {}).finish();
  EXPECT_TRUE(SafetensorsReader(folder.file("x")).tensors().empty());
}

TEST(Safetensors, ReadsAnyRange) {
  const TemporaryFolder folder;
  const std::vector<float> values = counting(40'000);
  const SafetensorsReader reader(file_of(folder, "F32", values));
  for (const std::uint64_t first : {0U, 1U, 16'383U, 16'384U, 39'999U, 40'000U}) {
    for (const std::uint64_t count : {0U, 1U, 16'384U, 16'385U}) {
      if (first + count > values.size()) {
        continue;
      }
      std::vector<float> out(count);
      reader.read("t", first, std::span(out));
      EXPECT_TRUE(std::equal(out.begin(), out.end(), values.begin() + std::ptrdiff_t(first)));
    }
  }
}

TEST(Safetensors, ReadsEveryRealTypeAsFloatAndDouble) {
  const TemporaryFolder folder;
  const SafetensorsReader f64(file_of<double>(folder, "F64", {0.1, -2, 1e300}));
  EXPECT_THAT(read_all<double>(f64, "t"), ElementsAre(0.1, -2, 1e300));
  std::vector<float> narrow(2);
  f64.read("t", 0, std::span(narrow));
  EXPECT_THAT(narrow, ElementsAre(0.1F, -2));
  const SafetensorsReader f32(file_of<float>(folder, "F32", {0.1F, -2}));
  EXPECT_THAT(read_all<float>(f32, "t"), ElementsAre(0.1F, -2));
  EXPECT_THAT(read_all<double>(f32, "t"), ElementsAre(double{0.1F}, -2));
  const SafetensorsReader brain(file_of<std::uint16_t>(folder, "BF16", {0x3f80, 0xc000, 0x3dcd}));
  EXPECT_THAT(read_all<float>(brain, "t"), ElementsAre(1, -2, to_float(bf16{0x3dcd})));
  EXPECT_THAT(read_all<double>(brain, "t"), ElementsAre(1, -2, double{to_float(bf16{0x3dcd})}));
}

TEST(Safetensors, ReadsHalvesExactly) {
  const TemporaryFolder folder;
  const SafetensorsReader half(file_of<std::uint16_t>(
      folder, "F16",
      {0x3c00, 0xc000, 0x7bff, 0x0400, 0x0001, 0x03ff, 0x8000, 0x7c00, 0xfc00, 0x3555, 0x7e01}));
  const std::vector<float> found = read_all<float>(half, "t");
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const float wanted[] = {1,     -2,        65'504,     0x1p-14F,  0x1p-24F, 1023 * 0x1p-24F,
                          -0.0F, kInfinity, -kInfinity, 0x555p-12F};
  for (std::size_t i = 0; i < std::size(wanted); ++i) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(found[i]), std::bit_cast<std::uint32_t>(wanted[i])) << i;
  }
  EXPECT_TRUE(std::isnan(found.back()));
}

TEST(Safetensors, RefusesToReadWholeNumbersAsValues) {
  const TemporaryFolder folder;
  const SafetensorsReader reader(file_of<std::int64_t>(folder, "I64", {1, 2}));
  EXPECT_EQ(reader.tensors().at("t").count(), 2U);
  std::vector<float> out(2);
  EXPECT_THAT(refusal([&] { reader.read("t", 0, std::span(out)); }),
              HasSubstr("tensor \"t\": expected F32, F16, BF16 or F64, found I64"));
}

TEST(Safetensors, RefusesNamesAndRangesThatAreNotThere) {
  const TemporaryFolder folder;
  const SafetensorsReader reader(file_of<float>(folder, "F32", {1, 2, 3}));
  std::vector<float> two(2);
  EXPECT_THAT(refusal([&] { reader.read("u", 0, std::span(two)); }),
              HasSubstr("expected a tensor \"u\", found none of that name among 1"));
  for (const std::uint64_t first : {std::uint64_t{2}, std::uint64_t{4}, ~std::uint64_t{0}}) {
    EXPECT_THAT(
        refusal([&] { reader.read("t", first, std::span(two)); }),
        HasSubstr("expected a range of its 3 elements, found 2 from " + std::to_string(first)));
  }
}

TEST(Safetensors, AReaderThatWasMovedReadsOn) {
  const TemporaryFolder folder;
  SafetensorsReader reader(file_of<float>(folder, "F32", {1, 2}));
  const SafetensorsReader moved(std::move(reader));
  EXPECT_THAT(read_all<float>(moved, "t"), ElementsAre(1, 2));
}

TEST(Safetensors, ReadsTheGoldenFiles) {
  int files = 0;
  for (const char* folder : {"gpt2-tiny", "optimizers"}) {
    const std::string path = std::string(ZERO_SOURCE_DIR "/tests/golden/") + folder;
    for (const auto& entry : std::filesystem::directory_iterator(path)) {
      if (entry.path().extension() != ".safetensors") {
        continue;
      }
      const SafetensorsReader reader(entry.path().string());
      EXPECT_FALSE(reader.tensors().empty()) << entry.path();
      for (const auto& [name, tensor] : reader.tensors()) {
        EXPECT_EQ(read_all<double>(reader, name).size(), tensor.count());
      }
      ++files;
    }
  }
  EXPECT_GE(files, 14);
}

// ---- files that lie

std::string small_file() {
  return testing::safetensors_bytes(
      R"({"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},)"
      R"("b":{"dtype":"F16","shape":[],"data_offsets":[8,10]}})",
      "0123456789");
}

// Opens the file and reads all of it.
void read_everything(const std::string& path) {
  const SafetensorsReader reader(path);
  for (const auto& [name, tensor] : reader.tensors()) {
    std::vector<double> out(tensor.count());
    reader.read(name, 0, std::span(out));
  }
}

TEST(Safetensors, AFileCutAtAnyByteIsRefused) {
  const TemporaryFolder folder;
  const std::string whole = small_file();
  testing::write_file(folder.file("x"), whole);
  EXPECT_EQ(refusal([&] { read_everything(folder.file("x")); }), "accepted");
  testing::write_file(folder.file("x"), whole + "x");
  EXPECT_NE(refusal([&] { read_everything(folder.file("x")); }), "accepted");
  for (std::size_t length = whole.size(); length-- > 0;) {
    std::filesystem::resize_file(folder.file("x"), length);
    EXPECT_NE(refusal([&] { read_everything(folder.file("x")); }), "accepted") << length;
  }
}

TEST(Safetensors, AFileWithAnyBitFlippedIsReadOrRefused) {
  const TemporaryFolder folder;
  const std::string whole = small_file();
  testing::write_file(folder.file("x"), whole);
  std::fstream file(folder.file("x"), std::ios::binary | std::ios::in | std::ios::out);
  const auto put = [&](std::size_t at, int byte) {
    file.seekp(static_cast<std::streamoff>(at));
    file.put(static_cast<char>(byte));
    file.flush();
  };
  std::size_t refused = 0;
  for (std::size_t bit = 0; bit < 8 * (whole.size() - 10); ++bit) {
    put(bit / 8, whole[bit / 8] ^ (1 << bit % 8));
    refused += refusal([&] { read_everything(folder.file("x")); }) == "accepted" ? 0U : 1U;
    put(bit / 8, whole[bit / 8]);
  }
  EXPECT_EQ(testing::read_file(folder.file("x")), whole);
  EXPECT_GT(refused, 4 * whole.size());
}

TEST(Safetensors, ALengthBeyondTheFileCostsNoMemory) {
  const TemporaryFolder folder;
  for (const std::uint64_t length :
       {std::uint64_t{3}, std::uint64_t{100'000'000}, std::uint64_t{100'000'001},
        std::uint64_t{1} << 40, ~std::uint64_t{0}, ~std::uint64_t{0} - 7}) {
    std::string text(8, '\0');
    std::memcpy(text.data(), &length, 8);
    testing::write_file(folder.file("x"), text + "{}");
    EXPECT_THAT(refusal([&] { read_everything(folder.file("x")); }),
                HasSubstr("and a length of " + std::to_string(length)));
  }
}

TEST(Safetensors, AFileThatShrinksWhileItIsOpenIsAnError) {
  const TemporaryFolder folder;
  const SafetensorsReader reader(file_of(folder, "F32", counting(1000)));
  std::filesystem::resize_file(folder.file("F32"), 2000);
  std::vector<float> out(1000);
  EXPECT_THAT(refusal([&] { reader.read("t", 0, std::span(out)); }),
              HasSubstr("found the end of the file"));
}

// ---- the writer

TEST(SafetensorsWriter, TheFileHasItsNameOnlyWhenItIsFinished) {
  const TemporaryFolder folder;
  testing::write_file(folder.file("x"), "old");
  SafetensorsWriter writer(folder.file("x"), {{"w", {2}}});
  writer.write("w", 0, counting(2));
  EXPECT_EQ(testing::read_file(folder.file("x")), "old");
  EXPECT_TRUE(folder.has("x.partial"));
  writer.finish();
  EXPECT_FALSE(folder.has("x.partial"));
  EXPECT_THAT(read_all<float>(SafetensorsReader(folder.file("x")), "w"), ElementsAre(0.5, 1.5));
}

TEST(SafetensorsWriter, AnUnfinishedFileIsRemoved) {
  const TemporaryFolder folder;
  {
    SafetensorsWriter writer(folder.file("x"), {{"w", {2}}});
    const SafetensorsWriter moved(std::move(writer));
    EXPECT_TRUE(folder.has("x.partial"));
  }
  EXPECT_FALSE(folder.has("x.partial"));
  EXPECT_FALSE(folder.has("x"));
}

TEST(SafetensorsWriter, LeavesAloneWhatItsTemporaryNameHolds) {
  const TemporaryFolder folder;
  testing::write_file(folder.file("x.partial"), "another's");
  testing::write_file(folder.file("target"), "another's, too");
  std::filesystem::create_symlink(folder.file("target"), folder.file("x.partial.1"));
  for (const bool finished : {true, false}) {
    SafetensorsWriter writer(folder.file("x"), {{"w", {2}}});
    EXPECT_TRUE(folder.has("x.partial.2"));
    if (finished) {
      writer.write("w", 0, counting(2));
      writer.finish();
    }
  }
  EXPECT_FALSE(folder.has("x.partial.2"));
  EXPECT_EQ(testing::read_file(folder.file("x.partial")), "another's");
  EXPECT_EQ(testing::read_file(folder.file("target")), "another's, too");
  EXPECT_THAT(read_all<float>(SafetensorsReader(folder.file("x")), "w"), ElementsAre(0.5, 1.5));
}

TEST(SafetensorsWriter, FinishingNeedsEveryElement) {
  const TemporaryFolder folder;
  SafetensorsWriter writer(folder.file("x"), {{"w", {10}}, {"empty", {0}}});
  const auto missing = [&] { return refusal([&] { writer.finish(); }); };
  const auto write = [&](std::uint64_t first, std::size_t count) {
    writer.write("w", first, counting(count));
  };
  EXPECT_THAT(missing(), HasSubstr("tensor \"w\": expected all 10 elements written, found none for "
                                   "element 0"));
  write(2, 3);
  EXPECT_THAT(missing(), HasSubstr("element 0"));
  write(0, 2);
  EXPECT_THAT(missing(), HasSubstr("element 5"));
  write(7, 3);
  EXPECT_THAT(missing(), HasSubstr("element 5"));
  write(6, 1);
  write(3, 2);  // again: no harm
  EXPECT_THAT(missing(), HasSubstr("element 5"));
  EXPECT_FALSE(folder.has("x"));
  write(4, 3);
  EXPECT_EQ(missing(), "accepted");
  EXPECT_THAT(refusal([&] { writer.finish(); }), HasSubstr("expected calls before finish()"));
  EXPECT_THAT(refusal([&] { write(0, 1); }), HasSubstr("expected calls before finish()"));
}

TEST(SafetensorsWriter, EveryOrderOfPiecesIsComplete) {
  const TemporaryFolder folder;
  std::vector<std::uint64_t> order{0, 1, 2, 3};
  do {
    SafetensorsWriter writer(folder.file("x"), {{"w", {8}}});
    for (std::size_t i = 0; i < order.size(); ++i) {
      EXPECT_NE(refusal([&] { writer.finish(); }), "accepted");
      writer.write("w", 2 * order[i], counting(2));
    }
    EXPECT_EQ(refusal([&] { writer.finish(); }), "accepted");
  } while (std::next_permutation(order.begin(), order.end()));
}

TEST(SafetensorsWriter, RefusesNamesAndRangesOfNobody) {
  const TemporaryFolder folder;
  SafetensorsWriter writer(folder.file("x"), {{"w", {3}}});
  EXPECT_THAT(refusal([&] { writer.write("v", 0, counting(1)); }), HasSubstr("a tensor \"v\""));
  EXPECT_THAT(refusal([&] { writer.write("w", 2, counting(2)); }), HasSubstr("its 3 elements"));
  EXPECT_THAT(refusal([&] { writer.write("w", ~std::uint64_t{0}, counting(1)); }),
              HasSubstr("its 3 elements"));
}

TEST(SafetensorsWriter, RefusesEntriesThatNoFileCanHold) {
  const TemporaryFolder folder;
  const auto make = [&](const std::vector<SafetensorsWriter::Entry>& entries) {
    return refusal([&] { const SafetensorsWriter writer(folder.file("x"), entries); });
  };
  EXPECT_THAT(make({{"w", {1}}, {"w", {1}}}), HasSubstr("found \"w\" again"));
  EXPECT_THAT(make({{"__metadata__", {1}}}), HasSubstr("\"__metadata__\""));
  EXPECT_NE(make({{"w", {std::size_t{1} << 62}}}), "accepted");
  EXPECT_NE(make({{"v", {std::size_t{1} << 61}}, {"w", {std::size_t{1} << 61}}}), "accepted");
  EXPECT_THAT(make({{"\xff", {1}}}), HasSubstr("UTF-8"));
  EXPECT_FALSE(folder.has("x.partial"));
}

TEST(SafetensorsWriter, RefusesPathsBeforeAnythingIsWritten) {
  const TemporaryFolder folder;
  const auto make = [&](const std::string& path) {
    return refusal([&] { const SafetensorsWriter writer(path, {{"w", {1}}}); });
  };
  EXPECT_THAT(make(folder.file("no/such/x")), HasSubstr("No such file or directory"));
  EXPECT_FALSE(folder.has("no"));
  std::filesystem::create_directory(folder.file("d"));
  EXPECT_THAT(make(folder.file("d")), HasSubstr("found a directory, pipe or device"));
  EXPECT_FALSE(folder.has("d.partial"));
}

}  // namespace
}  // namespace zero

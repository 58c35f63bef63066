// Headers of safetensors files: what is well-formed, and that nothing else gets through.
#include "checkpoint/safetensors_header.h"

#include <random>
#include <string>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zero/error.h"

namespace zero {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// The message of the CheckpointError; "accepted" when there is none.
std::string refusal(std::string_view header, std::uint64_t data_bytes) {
  try {
    (void)parse_header(header, data_bytes, "weights");
  } catch (const CheckpointError& error) {
    EXPECT_EQ(error.path(), "weights");
    EXPECT_THAT(error.what(), HasSubstr("weights: "));
    return error.what();
  }
  return "accepted";
}

// One tensor "a" whose fields are given as text.
std::string one(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"a":{"dtype":)" + dtype + R"(,"shape":)" + shape + R"(,"data_offsets":)" + offsets +
         "}}";
}

TEST(SafetensorsHeader, ReadsNamesTypesShapesAndOffsets) {
  const auto tensors =
      parse_header(R"({"__metadata__":{"format":"pt"},)"
                   R"("b":{"data_offsets":[24,28],"shape":[2],"dtype":"BF16"},)"
                   R"("a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
                   R"("scalar":{"dtype":"I64","shape":[],"data_offsets":[28,36]},)"
                   R"("empty":{"dtype":"F64","shape":[0,7],"data_offsets":[24,24]}}   )",
                   36, "weights");
  ASSERT_EQ(tensors.size(), 4U);
  EXPECT_EQ(tensors.at("a").type, TensorType::kFloat32);
  EXPECT_THAT(tensors.at("a").shape, ElementsAre(2U, 3U));
  EXPECT_EQ(tensors.at("a").count(), 6U);
  EXPECT_EQ(tensors.at("b").type, TensorType::kBfloat16);
  EXPECT_EQ(tensors.at("b").begin, 24U);
  EXPECT_EQ(tensors.at("b").end, 28U);
  EXPECT_THAT(tensors.at("scalar").shape, IsEmpty());
  EXPECT_EQ(tensors.at("scalar").count(), 1U);
  EXPECT_EQ(tensors.at("empty").count(), 0U);
}

TEST(SafetensorsHeader, ReadsEveryTypeItKnows) {
  const std::pair<const char*, std::uint64_t> types[] = {{"F64", 8},  {"F32", 4}, {"F16", 2},
                                                         {"BF16", 2}, {"I64", 8}, {"I32", 4},
                                                         {"U8", 1},   {"BOOL", 1}};
  for (const auto& [name, size] : types) {
    const std::string header =
        one("\"" + std::string(name) + "\"", "[3]", "[0," + std::to_string(3 * size) + "]");
    const auto tensors = parse_header(header, 3 * size, "weights");
    EXPECT_EQ(name_of(tensors.at("a").type), name);
    EXPECT_EQ(bytes_of(tensors.at("a").type), size);
  }
}

TEST(SafetensorsHeader, AFileMayHoldNothing) {
  EXPECT_THAT(parse_header("{}", 0, "weights"), IsEmpty());
  EXPECT_THAT(parse_header(R"({"__metadata__":{}})", 0, "weights"), IsEmpty());
  EXPECT_THAT(refusal("{}", 1), HasSubstr("expected 0 bytes of data, found 1"));
}

TEST(SafetensorsHeader, RefusesTextThatIsNotAnObject) {
  for (const char* text : {"", " {}", "[]", "1", "null", "\xef\xbb\xbf{}", "\"{}\""}) {
    EXPECT_THAT(refusal(text, 0), HasSubstr("that starts with {")) << text;
  }
  EXPECT_THAT(refusal(std::string_view("{}\0{}", 5), 0), HasSubstr("found other bytes"));
  for (const char* text :
       {"{", "{}}", "{} x", "{\"a\"", "{\"a\":", "{'a':1}", "{,}", "{\"\xff\":1}", "{\"a\":nan}",
        "{\"a\":NaN}", "{\"a\":-}", "{\"\\ud800\":1}"}) {
    EXPECT_THAT(refusal(text, 0), HasSubstr("expected JSON, found an error at byte")) << text;
  }
}

TEST(SafetensorsHeader, RefusesValuesInTheWrongPlace) {
  for (const char* text :
       {R"({"a":1})", R"({"a":null})", R"({"a":[]})", R"({"a":"F32"})", R"({"a":true})",
        R"({"__metadata__":1})", R"({"__metadata__":{"k":1}})", R"({"__metadata__":{"k":{}}})",
        R"({"__metadata__":{"k":[]}})", R"({"__metadata__":[]})"}) {
    EXPECT_THAT(refusal(text, 0), HasSubstr("in another place")) << text;
  }
  for (const char* shape :
       {"1", "null", "{}", "\"1\"", "[[1]]", "[null]", "[\"1\"]", "[{}]", "[true]"}) {
    EXPECT_THAT(refusal(one("\"F32\"", shape, "[0,4]"), 4), HasSubstr("in another place")) << shape;
  }
  EXPECT_THAT(refusal(one("1", "[1]", "[0,4]"), 4), HasSubstr("in another place"));
  EXPECT_THAT(refusal(one("[\"F32\"]", "[1]", "[0,4]"), 4), HasSubstr("in another place"));
}

TEST(SafetensorsHeader, RefusesNumbersThatAreNotWhole) {
  for (const char* number : {"-1", "-0", "1.0", "1e0", "0.5", "1e400", "-1e400",
                             "18446744073709551616", "99999999999999999999999999"}) {
    const std::string list = "[" + std::string(number) + "]";
    EXPECT_NE(refusal(one("\"F32\"", list, "[0,4]"), 4), "accepted") << number;
    const std::string offsets = "[" + std::string(number) + ",4]";
    EXPECT_NE(refusal(one("\"F32\"", "[1]", offsets), 4), "accepted") << number;
    const std::string ends = "[0," + std::string(number) + "]";
    EXPECT_NE(refusal(one("\"F32\"", "[1]", ends), 4), "accepted") << number;
  }
}

TEST(SafetensorsHeader, RefusesUnknownTypes) {
  for (const char* type : {"", "f32", "F32 ", "F8_E4M3", "I8", "C64", "F128"}) {
    EXPECT_THAT(refusal(one("\"" + std::string(type) + "\"", "[1]", "[0,4]"), 4),
                HasSubstr("expected a dtype that this library knows"))
        << type;
  }
}

TEST(SafetensorsHeader, RefusesNamesTwice) {
  const std::string tensor = R"({"dtype":"F32","shape":[],"data_offsets":[0,4]})";
  EXPECT_THAT(refusal("{\"a\":" + tensor + ",\"a\":" + tensor + "}", 4),
              HasSubstr("expected each name once, found \"a\" again"));
  EXPECT_THAT(refusal("{\"a\":" + tensor + ",\"\\u0061\":" + tensor + "}", 4),
              HasSubstr("found \"a\" again"));
  EXPECT_THAT(refusal(R"({"__metadata__":{},"__metadata__":{}})", 0), HasSubstr("again"));
  EXPECT_THAT(refusal(R"({"__metadata__":{"k":"1","k":"2"}})", 0), HasSubstr("\"k\" again"));
}

TEST(SafetensorsHeader, RefusesFieldsMissingTwiceOrUnknown) {
  EXPECT_THAT(refusal(R"({"a":{}})", 0), HasSubstr("found less"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F32","shape":[1]}})", 0), HasSubstr("found less"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F32","data_offsets":[0,4]}})", 4), HasSubstr("found less"));
  EXPECT_THAT(refusal(R"({"a":{"shape":[1],"data_offsets":[0,4]}})", 4), HasSubstr("found less"));
  // The second tensor must not take a field from the first.
  EXPECT_THAT(refusal(R"({"a":{"dtype":"U8","shape":[],"data_offsets":[0,1]},"b":{}})", 1),
              HasSubstr("\"b\": expected dtype, shape and two data_offsets"));
  EXPECT_THAT(refusal(R"({"a":{"dtype":"F32","dtype":"F32"}})", 0), HasSubstr("found \"dtype\""));
  EXPECT_THAT(refusal(R"({"a":{"shape":[],"shape":[]}})", 0), HasSubstr("found \"shape\""));
  EXPECT_THAT(refusal(R"({"a":{"data_offsets":[],"data_offsets":[]}})", 0), HasSubstr("once each"));
  EXPECT_THAT(refusal(R"({"a":{"stride":[]}})", 0), HasSubstr("found \"stride\""));
  for (const char* offsets : {"[]", "[0]", "[0,4,4]"}) {
    EXPECT_THAT(refusal(one("\"F32\"", "[1]", offsets), 4), HasSubstr("found less")) << offsets;
  }
}

TEST(SafetensorsHeader, RefusesOffsetsThatDoNotFitTheShape) {
  EXPECT_THAT(refusal(one("\"F32\"", "[2]", "[0,4]"), 4),
              HasSubstr("expected data_offsets that hold the shape's 8 bytes, found [0, 4]"));
  EXPECT_THAT(refusal(one("\"F32\"", "[1]", "[4,0]"), 4), HasSubstr("found [4, 0]"));
  EXPECT_THAT(refusal(one("\"F32\"", "[0]", "[0,4]"), 4), HasSubstr("the shape's 0 bytes"));
  EXPECT_THAT(refusal(one("\"F32\"", "[4611686018427387904]", "[0,0]"), 0),
              HasSubstr("bytes (over 2^64)"));
  EXPECT_THAT(refusal(one("\"U8\"", "[4294967296,4294967296]", "[0,0]"), 0),
              HasSubstr("bytes (over 2^64)"));
  EXPECT_EQ(refusal(one("\"U8\"", "[4294967296,4294967296,0]", "[0,0]"), 0), "accepted");
}

TEST(SafetensorsHeader, RefusesHolesOverlapsAndDataThatIsNobodys) {
  const auto two = [](const std::string& first, const std::string& second) {
    return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + first +
           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}";
  };
  EXPECT_EQ(refusal(two("[0,4]", "[4,8]"), 8), "accepted");
  EXPECT_EQ(refusal(two("[4,8]", "[0,4]"), 8), "accepted");
  EXPECT_THAT(refusal(two("[0,4]", "[3,7]"), 7), HasSubstr("found 3 (an overlap)"));
  EXPECT_THAT(refusal(two("[0,4]", "[0,4]"), 4), HasSubstr("found 0 (an overlap)"));
  EXPECT_THAT(refusal(two("[0,4]", "[5,9]"), 9), HasSubstr("found 5 (a hole)"));
  EXPECT_THAT(refusal(two("[1,5]", "[5,9]"), 9), HasSubstr("found 1 (a hole)"));
  EXPECT_THAT(refusal(two("[0,4]", "[4,8]"), 9), HasSubstr("expected 8 bytes of data, found 9"));
  EXPECT_THAT(refusal(two("[0,4]", "[4,8]"), 7), HasSubstr("expected 8 bytes of data, found 7"));
}

TEST(SafetensorsHeader, RefusesDepthAndWidthWithoutKeepingThem) {
  const std::string deep(200'000, '[');
  EXPECT_NE(refusal("{\"a\":" + deep, 0), "accepted");
  EXPECT_NE(refusal("{\"__metadata__\":" + deep, 0), "accepted");
  std::string objects;
  for (int i = 0; i < 100'000; ++i) {
    objects += "{\"a\":";
  }
  EXPECT_NE(refusal(objects, 0), "accepted");
  std::string ones = "1";
  for (int i = 0; i < 100'000; ++i) {
    ones += ",1";
  }
  EXPECT_THAT(refusal(one("\"U8\"", "[" + ones + "]", "[0,1]"), 1),
              HasSubstr("found 1 in another"));
}

TEST(SafetensorsHeader, LongNamesAreCutInMessages) {
  const std::string name(100'000, 'n');
  EXPECT_LT(refusal("{\"" + name + "\":1}", 0).size(), 500U);
}

// Any change to a good header is either still well-formed or a CheckpointError.
TEST(SafetensorsHeader, FuzzedHeadersAreReadOrRefused) {
  const std::string good =
      R"({"__metadata__":{"format":"pt"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
      R"("b":{"dtype":"BF16","shape":[2],"data_offsets":[24,28]}})";
  ASSERT_EQ(refusal(good, 28), "accepted");
  const std::string alphabet = "{}[]\",:0123456789-.eE abdtypeshaF32\\u\x01\x7f\x80\xff";
  std::mt19937_64 random(1);
  int accepted = 0;
  for (int i = 0; i < 20'000; ++i) {
    std::string text = good;
    for (std::uint64_t changes = 1 + random() % 4; changes > 0; --changes) {
      const std::size_t at = random() % text.size();
      const char letter = alphabet[random() % alphabet.size()];
      switch (random() % 4) {
        case 0:
          text[at] = letter;
          break;
        case 1:
          text.insert(at, 1, letter);
          break;
        case 2:
          text.erase(at, 1 + random() % 3);
          break;
        default:
          text.insert(at, text.substr(random() % text.size(), random() % 12));
      }
    }
    accepted += refusal(text, 28) == "accepted" ? 1 : 0;
  }
  EXPECT_GT(accepted, 100);
  EXPECT_LT(accepted, 10'000);
}

TEST(SafetensorsHeader, MadeHeadersAreReadBackAndKeepTheDataAligned) {
  const std::map<std::string, TensorInfo> tensors{
      {"w", {TensorType::kFloat32, {2, 3}, 0, 24}},
      {"quote\" and \\ and \u00fc", {TensorType::kFloat32, {}, 24, 28}},
      {"", {TensorType::kFloat32, {0}, 28, 28}},
  };
  const std::string made = make_header(tensors, "weights");
  EXPECT_EQ(made.size() % 8, 0U);
  const auto read = parse_header(std::string_view(made).substr(8), 28, "weights");
  ASSERT_EQ(read.size(), 3U);
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(read.at(name).shape, tensor.shape);
    EXPECT_EQ(read.at(name).begin, tensor.begin);
    EXPECT_EQ(read.at(name).end, tensor.end);
  }
}

TEST(SafetensorsHeader, NamesThatAreNotUtf8CannotBeWritten) {
  try {
    (void)make_header({{"\xff", {TensorType::kFloat32, {}, 0, 4}}}, "weights");
    FAIL();
  } catch (const CheckpointError& error) {
    EXPECT_THAT(error.what(), HasSubstr("expected names of tensors in UTF-8"));
  }
}

}  // namespace
}  // namespace zero

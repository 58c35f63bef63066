// The description of a model: what is kept, and what is refused.
#include "zero/model.h"

#include <functional>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "zero/error.h"

namespace zero {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

struct Small {
  ModelSpec model;
  GroupId group = model.add_group("all");
  UnitId unit = model.add_unit("u");

  std::size_t count_of(std::vector<std::size_t> shape) {
    const std::string name = "p" + std::to_string(model.parameters().size());
    return model.parameters()[index(model.add(unit, name, std::move(shape), group))].count;
  }
};

TEST(Model, CountsElementsOfAnyShape) {
  Small small;
  EXPECT_EQ(small.count_of({}), 1U);
  EXPECT_EQ(small.count_of({5}), 5U);
  EXPECT_EQ(small.count_of({2, 3, 4}), 24U);
  EXPECT_EQ(small.count_of({7, 0, 3}), 0U);
}

TEST(Model, CountsUpTo2To62AndNoFurther) {
  Small small;
  constexpr std::size_t kMost = std::size_t{1} << 62;
  EXPECT_EQ(small.count_of({kMost}), kMost);
  EXPECT_EQ(small.count_of({std::size_t{1} << 31, std::size_t{1} << 31}), kMost);
  for (const std::vector<std::size_t>& shape :
       {std::vector<std::size_t>{kMost + 1}, {kMost, 2}, {~std::size_t{0}, ~std::size_t{0}}}) {
    EXPECT_THAT(refusal([&] { (void)small.count_of(shape); }),
                HasSubstr("expected at most 2^62 elements, found more; check the shape"));
  }
}

TEST(Model, AZeroDimensionMakesNoElementsWhateverTheOthersAre) {
  Small small;
  EXPECT_EQ(small.count_of({std::size_t{1} << 40, std::size_t{1} << 40, 0}), 0U);
  EXPECT_EQ(small.count_of({0, ~std::size_t{0}, ~std::size_t{0}}), 0U);
}

TEST(Model, KeepsWhatWasAdded) {
  ModelSpec model;
  const GroupId group = model.add_group("decay", {.hyper = {.lr = 0.5}});
  const UnitId unit = model.add_unit("h.0", GradientLife::kUntilReady);
  const ParameterId p = model.add(unit, "w", {2, 3}, group, CountInNorm::kNo);
  model.add_user_bytes("activations", 12);
  EXPECT_EQ(model.groups()[index(group)].name, "decay");
  EXPECT_EQ(model.groups()[index(group)].options.hyper.lr, 0.5);
  EXPECT_EQ(model.units()[index(unit)].name, "h.0");
  EXPECT_EQ(model.units()[index(unit)].life, GradientLife::kUntilReady);
  const ModelSpec::Parameter& kept = model.parameters()[index(p)];
  EXPECT_EQ(kept.name, "w");
  EXPECT_THAT(kept.shape, ElementsAre(2U, 3U));
  EXPECT_EQ(kept.unit, unit);
  EXPECT_EQ(kept.group, group);
  EXPECT_EQ(kept.norm, CountInNorm::kNo);
  EXPECT_THAT(model.user_bytes(), ElementsAre(ModelSpec::UserBytes{"activations", 12}));
}

TEST(Model, RefusesNamesThatAreTaken) {
  Small small;
  small.model.add(small.unit, "w", {1}, small.group);
  EXPECT_THAT(refusal([&] { small.model.add_group("all"); }),
              HasSubstr("group \"all\" was added before"));
  EXPECT_THAT(refusal([&] { small.model.add_unit("u"); }),
              HasSubstr("unit \"u\" was added before"));
  EXPECT_THAT(refusal([&] { small.model.add(small.unit, "w", {2}, small.group); }),
              AllOf(HasSubstr("parameter \"w\" was added to unit \"u\" before"),
                    HasSubstr("its unit leased twice")));
  EXPECT_EQ(small.model.parameters().size(), 1U);
}

TEST(Model, ACopyRefusesTheNamesOfItsOriginalAndTakesNewOnes) {
  Small small;
  small.model.add(small.unit, "w", {1}, small.group);
  const ModelSpec original = small.model;
  ModelSpec copy = original;
  EXPECT_NE(refusal([&] { copy.add(small.unit, "w", {1}, small.group); }), "accepted");
  EXPECT_NE(refusal([&] { copy.add_unit("u"); }), "accepted");
  EXPECT_NE(refusal([&] { copy.add_group("all"); }), "accepted");
  EXPECT_EQ(refusal([&] { copy.add(small.unit, "v", {1}, small.group); }), "accepted");
  EXPECT_NE(refusal([&] { copy.add(small.unit, "v", {1}, small.group); }), "accepted");
  copy = original;
  EXPECT_EQ(refusal([&] { copy.add(small.unit, "v", {1}, small.group); }), "accepted");
  const ModelSpec moved = std::move(copy);
  copy = moved;
  EXPECT_NE(refusal([&] { copy.add(small.unit, "v", {1}, small.group); }), "accepted");
}

TEST(Model, AGroupAUnitAndParametersOfTwoUnitsMayHaveOneName) {
  ModelSpec model;
  const GroupId group = model.add_group("x");
  const UnitId unit = model.add_unit("x");
  const UnitId other = model.add_unit("0/x");
  EXPECT_EQ(refusal([&] { model.add(unit, "x", {1}, group); }), "accepted");
  EXPECT_EQ(refusal([&] { model.add(other, "x", {1}, group); }), "accepted");
}

TEST(Model, RefusesEmptyNames) {
  Small small;
  EXPECT_THAT(refusal([&] { small.model.add_group(""); }), HasSubstr("a name for the group"));
  EXPECT_THAT(refusal([&] { small.model.add_unit(""); }), HasSubstr("a name for the unit"));
  EXPECT_THAT(refusal([&] { small.model.add(small.unit, "", {1}, small.group); }),
              HasSubstr("a name for the parameter"));
}

TEST(Model, RefusesUnitsAndGroupsOfNobody) {
  Small small;
  EXPECT_THAT(refusal([&] { small.model.add(UnitId{1}, "w", {1}, small.group); }),
              HasSubstr("parameter \"w\": expected a unit of this model (0 to 1 exclusive), "
                        "found 1; pass what add_unit returned"));
  EXPECT_THAT(refusal([&] { small.model.add(small.unit, "w", {1}, GroupId{9}); }),
              HasSubstr("expected a group of this model (0 to 1 exclusive), found 9"));
}

TEST(Model, ARefusedParameterLeavesItsNameFree) {
  Small small;
  EXPECT_NE(refusal([&] { small.model.add(small.unit, "w", {1}, GroupId{9}); }), "accepted");
  EXPECT_NE(refusal([&] { small.model.add(small.unit, "w", {~std::size_t{0}}, small.group); }),
            "accepted");
  EXPECT_EQ(refusal([&] { small.model.add(small.unit, "w", {1}, small.group); }), "accepted");
}

TEST(Model, RefusesHyperParametersThatNoStepCouldUse) {
  constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const std::vector<std::pair<std::string, Hyper>> wrong{
      {"Hyper::lr", {.lr = kNaN}},
      {"Hyper::lr", {.lr = kInfinity}},
      {"Hyper::lr", {.lr = -1}},
      {"Hyper::weight_decay", {.weight_decay = -1}},
      {"Hyper::beta1", {.beta1 = 1}},
      {"Hyper::beta1", {.beta1 = -0.5}},
      {"Hyper::beta2", {.beta2 = 1}},
      {"Hyper::eps", {.eps = -1}},
      {"Hyper::momentum", {.momentum = kNaN}}};
  for (const auto& [name, hyper] : wrong) {
    ModelSpec model;
    try {
      model.add_group("decay", {.hyper = hyper});
      ADD_FAILURE() << name << " was taken";
    } catch (const UsageError& error) {
      EXPECT_NE(std::string(error.what()).find(name), std::string::npos) << error.what();
    }
    EXPECT_EQ(model.groups().size(), 0U);
    model.add_group("decay");  // the name is still free
  }
}

std::string refusal_of(Precision precision, Train train = Train::kYes) {
  return refusal([&] {
    ModelSpec model;
    model.add_group("decay", {.precision = precision, .train = train});
  });
}

TEST(Model, AcceptsPrecisionsThatTrainWithoutLosingSmallUpdates) {
  using enum DType;
  EXPECT_EQ(refusal_of(kFloat32Only), "accepted");
  EXPECT_EQ(refusal_of(kBf16WithMaster), "accepted");
  EXPECT_EQ(refusal_of({kFloat32, kBfloat16, Master::kNone}), "accepted");
  EXPECT_EQ(refusal_of({kBfloat16, kFloat32, Master::kFloat32}), "accepted");
  EXPECT_EQ(refusal_of({kBfloat16, kBfloat16, Master::kNone}, Train::kFrozen), "accepted");
}

TEST(Model, RefusesPrecisionsThatCannotBe) {
  using enum DType;
  EXPECT_THAT(refusal_of({kBfloat16, kBfloat16, Master::kNone}),
              AllOf(HasSubstr("group \"decay\": expected an fp32 master beside trained bf16"),
                    HasSubstr("use kBf16WithMaster")));
  EXPECT_THAT(refusal_of({kFloat32, kFloat32, Master::kFloat32}),
              HasSubstr("expected no master beside fp32 parameters"));
  EXPECT_THAT(refusal_of({kFloat16, kFloat32, Master::kFloat32}),
              HasSubstr("expected parameters in fp32 or bf16, found fp16"));
  EXPECT_THAT(refusal_of({kFloat32, kFloat16, Master::kNone}),
              HasSubstr("expected gradients in fp32 or bf16, found fp16"));
  for (const DType dtype : {kUint16, kUint8, kInt64}) {
    EXPECT_THAT(refusal_of({dtype, kFloat32, Master::kFloat32}), HasSubstr("in fp32 or bf16"));
  }
}

}  // namespace
}  // namespace zero

// Random traffic through the local communicator.
#include <gtest/gtest.h>

#include "tests/comm/stress_suite.h"

namespace zero::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Local, CommStress,
                         ::testing::Combine(::testing::Values(local_launcher()),
                                            ::testing::Values(1, 2, 3, 4, 8)),
                         name_of_instance);

}  // namespace
}  // namespace zero::testing

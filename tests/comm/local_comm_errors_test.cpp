// The local communicator's errors, its bootstrap and its memory.
#include <gtest/gtest.h>

#include "tests/comm/bootstrap_suite.h"
#include "tests/comm/errors_suite.h"

namespace zero::testing {
namespace {

INSTANTIATE_TEST_SUITE_P(Local, CommErrors, ::testing::Values(local_launcher()), name_of_launcher);
INSTANTIATE_TEST_SUITE_P(Local, CommMisuse, ::testing::Values(local_launcher()), name_of_launcher);
INSTANTIATE_TEST_SUITE_P(Local, CommBootstrap, ::testing::Values(local_launcher()),
                         name_of_launcher);

}  // namespace
}  // namespace zero::testing

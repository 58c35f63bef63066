// Files by offset: whole reads and writes, or a CheckpointError with the path.
#include "checkpoint/file.h"

#include <csignal>
#include <string>
#include <string_view>
#include <vector>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "zero/error.h"

#include "tests/checkpoint/temporary_folder.h"

namespace zero {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::TemporaryFolder;

std::span<const std::byte> bytes(std::string_view text) {
  return std::as_bytes(std::span(text));
}

// The message of the CheckpointError that names `path`.
template <class Call>
std::string refusal(const std::string& path, Call&& call) {
  try {
    call();
  } catch (const CheckpointError& error) {
    EXPECT_EQ(error.path(), path);
    return error.what();
  }
  return "accepted";
}

TEST(File, ReadsBackWhatWasWrittenAtOffsetsInAnyOrder) {
  const TemporaryFolder folder;
  File out = File::create(folder.file("x"));
  out.write(4, bytes("later"));
  out.write(0, bytes("head"));
  out.sync();
  EXPECT_EQ(testing::read_file(folder.file("x")), "headlater");
  const File in = File::open_to_read(folder.file("x"));
  EXPECT_EQ(in.byte_count(), 9U);
  std::string middle(3, '?');
  in.read(3, std::as_writable_bytes(std::span(middle)));
  EXPECT_EQ(middle, "dla");
}

TEST(File, CreatingEmptiesWhatWasThere) {
  const TemporaryFolder folder;
  testing::write_file(folder.file("x"), "old and long");
  File::create(folder.file("x")).write(0, bytes("new"));
  EXPECT_EQ(testing::read_file(folder.file("x")), "new");
}

TEST(File, ReadingPastTheEndIsAnErrorThatSaysHowMuchIsMissing) {
  const TemporaryFolder folder;
  testing::write_file(folder.file("x"), "12345");
  const File file = File::open_to_read(folder.file("x"));
  std::string out(7, '?');
  EXPECT_THAT(
      refusal(folder.file("x"), [&] { file.read(2, std::as_writable_bytes(std::span(out))); }),
      AllOf(HasSubstr(folder.file("x")), HasSubstr("expected 4 more bytes at offset 5"),
            HasSubstr("found the end of the file")));
}

TEST(File, RefusesPathsThatAreNotThereOrNotFiles) {
  const TemporaryFolder folder;
  const auto open = [&](const std::string& path) {
    return refusal(path, [&] { (void)File::open_to_read(path); });
  };
  EXPECT_THAT(open(folder.file("missing")), HasSubstr("No such file or directory"));
  EXPECT_THAT(open(folder.file("")), HasSubstr("expected a regular file"));
  EXPECT_THAT(open("/dev/null"), HasSubstr("expected a regular file"));
  const std::string pipe = folder.file("pipe");
  ASSERT_EQ(::mkfifo(pipe.c_str(), 0600), 0);
  EXPECT_THAT(open(pipe), HasSubstr("expected a regular file"));  // and does not wait for a writer
}

TEST(File, RefusesToCreateWhereThereIsNoFolder) {
  const TemporaryFolder folder;
  const std::string path = folder.file("no/such/x");
  EXPECT_THAT(refusal(path, [&] { (void)File::create(path); }),
              AllOf(HasSubstr("expected to create the file"), HasSubstr("No such file")));
}

TEST(File, OnlyRegularFilesAndFreeNamesAreReplaceable) {
  const TemporaryFolder folder;
  const auto check = [&](const std::string& path) {
    return refusal(path, [&] { require_replaceable(path); });
  };
  testing::write_file(folder.file("x"), "old");
  EXPECT_EQ(check(folder.file("x")), "accepted");
  EXPECT_EQ(check(folder.file("free")), "accepted");
  EXPECT_THAT(check(folder.file("")), HasSubstr("found a directory, pipe or device"));
  EXPECT_THAT(check("/dev/null"), HasSubstr("found a directory, pipe or device"));
}

// A disk that is full, as far as a test can make one: a limit on the size of files.
class FullDisk {
 public:
  explicit FullDisk(rlim_t bytes) : handler_(std::signal(SIGXFSZ, SIG_IGN)) {
    ::getrlimit(RLIMIT_FSIZE, &old_);
    const rlimit limit{bytes, old_.rlim_max};
    ::setrlimit(RLIMIT_FSIZE, &limit);
  }
  FullDisk(const FullDisk&) = delete;
  FullDisk& operator=(const FullDisk&) = delete;
  ~FullDisk() {
    ::setrlimit(RLIMIT_FSIZE, &old_);
    std::signal(SIGXFSZ, handler_);
  }

 private:
  rlimit old_{};
  void (*handler_)(int);
};

TEST(File, ADiskThatTakesOnlyAPartOfAWriteIsAnError) {
  const TemporaryFolder folder;
  const std::string path = folder.file("x");
  File file = File::create(path);
  const FullDisk disk(1000);
  const std::vector<std::byte> many(1500);
  EXPECT_THAT(refusal(path, [&] { file.write(0, many); }),
              AllOf(HasSubstr("expected to write 500 bytes at 1000"), HasSubstr("too large")));
}

TEST(File, ReplacingKeepsTheOldFileUntilTheNewOneHasItsName) {
  const TemporaryFolder folder;
  testing::write_file(folder.file("x"), "old");
  testing::write_file(folder.file("x.partial"), "new");
  replace_file(folder.file("x.partial"), folder.file("x"));
  EXPECT_EQ(testing::read_file(folder.file("x")), "new");
  EXPECT_FALSE(folder.has("x.partial"));
  EXPECT_THAT(
      refusal(folder.file("x"), [&] { replace_file(folder.file("gone"), folder.file("x")); }),
      HasSubstr("No such file"));
  EXPECT_EQ(testing::read_file(folder.file("x")), "new");
}

}  // namespace
}  // namespace zero

#include "checkpoint/file.h"

#include <cerrno>
#include <filesystem>
#include <system_error>
#include <utility>

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "zero/error.h"

namespace zero {
namespace {

constexpr std::size_t kMostBytesAtOnce = std::size_t{1} << 30;  // Linux moves at most 2 GiB a call

[[noreturn]] void fail(const std::string& path, const std::string& doing) {
  const std::string reason = std::generic_category().message(errno);
  throw CheckpointError(path + ": expected to " + doing + ", found \"" + reason +
                            "\"; check the path, the disk and the permissions",
                        path);
}

template <class Call>
auto retry(Call&& call) {
  auto result = call();
  while (result < 0 && errno == EINTR) {
    result = call();
  }
  return result;
}

}  // namespace

File::File(std::string path, int flags) : path_(std::move(path)) {
  constexpr mode_t kMode = 0666;  // less the umask
  descriptor_ = retry([&] { return ::open(path_.c_str(), flags | O_CLOEXEC, kMode); });
  if (descriptor_ < 0) {
    fail(path_, (flags & O_CREAT) != 0 ? "create the file" : "open the file");
  }
}

File File::open_to_read(const std::string& path) {
  // Without O_NONBLOCK, opening a pipe would wait for its writer.
  File file(path, O_RDONLY | O_NONBLOCK);
  struct stat status {};
  if (::fstat(file.descriptor_, &status) != 0) {
    fail(path, "look at the file");
  }
  if (!S_ISREG(status.st_mode)) {
    throw CheckpointError(
        path + ": expected a regular file, found a directory, pipe or device; name a file", path);
  }
  return file;
}

File File::create(const std::string& path) {
  return {path, O_WRONLY | O_CREAT | O_TRUNC};
}

File File::create_new(const std::string& path) {
  constexpr int kMostNames = 1000;
  for (int k = 1; k < kMostNames; ++k) {
    const std::string name = k == 1 ? path : path + "." + std::to_string(k);
    struct stat status {};
    if (::lstat(name.c_str(), &status) != 0) {
      return {name, O_WRONLY | O_CREAT | O_EXCL};
    }
  }
  errno = EEXIST;
  fail(path, "create a file of this name with a number behind it");
}

File::File(File&& other) noexcept
    : path_(std::move(other.path_)), descriptor_(std::exchange(other.descriptor_, -1)) {}

File::~File() {
  if (descriptor_ >= 0) {
    ::close(descriptor_);
  }
}

std::uint64_t File::byte_count() const {
  struct stat status {};
  if (::fstat(descriptor_, &status) != 0) {
    fail(path_, "look at the file");
  }
  return static_cast<std::uint64_t>(status.st_size);
}

void File::read(std::uint64_t offset, std::span<std::byte> out) const {
  while (!out.empty()) {
    const std::size_t wanted = std::min(out.size(), kMostBytesAtOnce);
    const ssize_t done =
        retry([&] { return ::pread(descriptor_, out.data(), wanted, static_cast<off_t>(offset)); });
    if (done < 0) {
      fail(path_, "read " + std::to_string(wanted) + " bytes at " + std::to_string(offset));
    }
    if (done == 0) {
      throw CheckpointError(path_ + ": expected " + std::to_string(out.size()) +
                                " more bytes at offset " + std::to_string(offset) +
                                ", found the end of the file; it was cut short: copy it again",
                            path_);
    }
    out = out.subspan(static_cast<std::size_t>(done));
    offset += static_cast<std::uint64_t>(done);
  }
}

void File::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const std::size_t wanted = std::min(bytes.size(), kMostBytesAtOnce);
    const ssize_t done = retry(
        [&] { return ::pwrite(descriptor_, bytes.data(), wanted, static_cast<off_t>(offset)); });
    if (done <= 0) {
      fail(path_, "write " + std::to_string(wanted) + " bytes at " + std::to_string(offset));
    }
    bytes = bytes.subspan(static_cast<std::size_t>(done));
    offset += static_cast<std::uint64_t>(done);
  }
}

void File::sync() {
  if (retry([&] { return ::fsync(descriptor_); }) != 0) {
    fail(path_, "sync the file to the disk");
  }
}

void replace_file(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) {
    fail(to, "give " + from + " this name");
  }
  const std::filesystem::path folder = std::filesystem::path(to).parent_path();
  const int descriptor = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor >= 0) {
    ::fsync(descriptor);  // some file systems refuse this for folders; the data are safe without
    ::close(descriptor);
  }
}

void require_replaceable(const std::string& path) {
  struct stat status {};
  if (::stat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    throw CheckpointError(path +
                              ": expected a free name or a regular file to replace, found a "
                              "directory, pipe or device; choose another name",
                          path);
  }
}

}  // namespace zero

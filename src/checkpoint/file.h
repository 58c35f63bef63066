// A file by its descriptor: reads and writes at offsets, whole or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace zero {

// Every failure is a CheckpointError with the path.
class File {
 public:
  // Throws: CheckpointError when it cannot be opened or is not a regular file
  static File open_to_read(const std::string& path);
  // Empties a file that is there.
  static File create(const std::string& path);
  // Makes a file that was not there: `path`, or with ".2" and so on behind it where that is taken.
  static File create_new(const std::string& path);
  [[nodiscard]] const std::string& path() const { return path_; }

  File(File&& other) noexcept;
  File& operator=(File&&) = delete;
  ~File();

  [[nodiscard]] std::uint64_t byte_count() const;
  void read(std::uint64_t offset, std::span<std::byte> out) const;
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  // Returns when the bytes are on the disk, so that a rename cannot overtake them.
  void sync();

 private:
  File(std::string path, int flags);

  std::string path_;
  int descriptor_ = -1;
};

// Renames a synced file, and makes the new name last through a crash.
void replace_file(const std::string& from, const std::string& to);

// Throws: CheckpointError when `path` is there and is not a regular file
void require_replaceable(const std::string& path);

}  // namespace zero

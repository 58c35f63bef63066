#include "ptx/fat_binary.h"

#include <cstdint>
#include <cstring>
#include <fstream>
#include <iterator>
#include <optional>

#include <zstd.h>

#include "ptx/ast.h"

namespace cuda_on_cpu::ptx {
namespace {

constexpr std::uint32_t kMagic = 0xBA55ED50;
constexpr std::uint64_t kCompressedZstd = 0x8000, kCompressedLz4 = 0x2000;
constexpr std::uint16_t kPtx = 1;
constexpr std::size_t kEntryHeader = 64;
constexpr std::uint64_t kMostBytes = std::uint64_t{1} << 31;

template <class T>
T read(std::span<const std::byte> bytes, std::size_t offset) {
  if (offset + sizeof(T) > bytes.size()) throw SyntaxError("a fat binary that is cut off");
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof value);
  return value;
}

struct Entry {
  std::uint16_t kind = 0;
  std::uint32_t architecture = 0;
  std::uint64_t flags = 0, plain_bytes = 0;
  std::span<const std::byte> payload;
};

std::vector<Entry> entries(std::span<const std::byte> binary) {
  if (read<std::uint32_t>(binary, 0) != kMagic) throw SyntaxError("no fat binary: wrong magic");
  const auto header = read<std::uint16_t>(binary, 6);
  const auto size = read<std::uint64_t>(binary, 8);
  if (size > binary.size() || header > binary.size() - size) {
    throw SyntaxError("a fat binary that is cut off");
  }
  binary = binary.subspan(header, static_cast<std::size_t>(size));
  std::vector<Entry> all;
  while (binary.size() >= kEntryHeader) {
    const auto header_bytes = read<std::uint32_t>(binary, 4);
    const auto payload_bytes = read<std::uint64_t>(binary, 8);
    if (header_bytes < kEntryHeader || header_bytes > binary.size() ||
        payload_bytes > binary.size() - header_bytes) {
      throw SyntaxError("a fat binary with an entry that is cut off");
    }
    auto payload = binary.subspan(header_bytes, static_cast<std::size_t>(payload_bytes));
    const auto compressed = read<std::uint32_t>(binary, 16);
    if (compressed > 0 && compressed <= payload.size()) payload = payload.first(compressed);
    all.push_back({read<std::uint16_t>(binary, 0), read<std::uint32_t>(binary, 28),
                   read<std::uint64_t>(binary, 40), read<std::uint64_t>(binary, 56), payload});
    binary = binary.subspan(header_bytes + static_cast<std::size_t>(payload_bytes));
  }
  return all;
}

std::string text_of(const Entry& entry) {
  std::string text;
  if ((entry.flags & kCompressedZstd) != 0) {
    if (entry.plain_bytes > kMostBytes) throw SyntaxError("PTX above 2 GiB");
    text.resize(static_cast<std::size_t>(entry.plain_bytes));
    const std::size_t bytes =
        ZSTD_decompress(text.data(), text.size(), entry.payload.data(), entry.payload.size());
    if (ZSTD_isError(bytes) != 0) {
      throw SyntaxError(std::string("PTX that zstd cannot read: ") + ZSTD_getErrorName(bytes));
    }
    text.resize(bytes);
  } else if ((entry.flags & kCompressedLz4) != 0) {
    throw SyntaxError("PTX compressed with LZ4: compile with nvcc 13, or with -no-compress");
  } else {
    text.assign(reinterpret_cast<const char*>(entry.payload.data()), entry.payload.size());
  }
  return text.substr(0, text.find('\0'));
}

}  // namespace

std::string of_fat_binary(std::span<const std::byte> binary, int most) {
  std::optional<Entry> best;
  std::string found;
  for (const Entry& entry : entries(binary)) {
    found += std::string(found.empty() ? "" : ", ") +
             (entry.kind == kPtx ? "PTX" : "machine code") + " for " +
             std::to_string(entry.architecture);
    if (entry.kind != kPtx || entry.architecture > static_cast<std::uint32_t>(most)) continue;
    if (!best || entry.architecture > best->architecture) best = entry;
  }
  if (!best) {
    throw SyntaxError("expected PTX for compute_" + std::to_string(most) + " or lower, found " +
                      (found.empty() ? "nothing" : found) +
                      "; compile with -gencode arch=compute_80,code=compute_80");
  }
  return text_of(*best);
}

std::vector<std::string> of_file(std::string_view path) {
  std::ifstream file{std::string(path), std::ios::binary};
  if (!file) throw SyntaxError("cannot read '" + std::string(path) + "'");
  const std::string all((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
  std::vector<std::string> texts;
  const std::string magic(reinterpret_cast<const char*>(&kMagic), sizeof kMagic);
  for (std::size_t at = all.find(magic); at != std::string::npos; at = all.find(magic, at + 1)) {
    const auto rest = std::as_bytes(std::span(all)).subspan(at);
    try {
      for (const Entry& entry : entries(rest)) {
        if (entry.kind == kPtx) texts.push_back(text_of(entry));
      }
    } catch (const SyntaxError&) {
      if (at == 0) throw;  // the file itself is a fat binary; elsewhere the magic stands by chance
    }
  }
  return texts;
}

}  // namespace cuda_on_cpu::ptx

#include "bpe_files.hpp"

#include <string>
#include <unordered_map>
#include <unordered_set>

namespace lmcore {

namespace {

// The character that stands for a byte in the files, in UTF-8; see `byte_alphabet` in Python.
std::string stands_for(int byte) {
  const auto printable = [](int c) {
    return (c >= 0x21 && c < 0x7F) || (c >= 0xA1 && c < 0xAD) || c >= 0xAE;
  };
  int code = byte;
  if (!printable(byte)) {
    code = 256;
    for (int other = 0; other < byte; ++other) code += printable(other) ? 0 : 1;
  }
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xC0 | code >> 6), static_cast<char>(0x80 | (code & 0x3F))};
}

bool in_brackets(std::string_view token) {
  return token.size() >= 2 && ((token.front() == '<' && token.back() == '>') ||
                               (token.front() == '[' && token.back() == ']'));
}

std::string_view without_empty_end(std::string_view text) {
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  return text;
}

}  // namespace

bool read_bpe_files(const std::vector<std::pair<std::string_view, std::uint32_t>> &vocabulary,
                    std::string_view merges, BpeFiles *files) {
  std::unordered_map<std::string_view, std::uint32_t> place;  // of a token in the vocabulary
  place.reserve(2 * vocabulary.size());
  for (std::uint32_t i = 0; i < vocabulary.size(); ++i) place.emplace(vocabulary[i].first, i);
  std::vector<bool> made(vocabulary.size(), false);
  for (int byte = 0; byte < 256; ++byte) {
    const auto found = place.find(stands_for(byte));
    if (found == place.end()) return false;
    made[found->second] = true;
    files->byte_ids[static_cast<std::size_t>(byte)] = vocabulary[found->second].second;
  }
  if (merges.find('\r') != std::string_view::npos) return false;
  merges = without_empty_end(merges);
  if (merges.substr(0, 8) == "#version") {
    const std::size_t end = merges.find('\n');
    merges = end == std::string_view::npos ? std::string_view() : merges.substr(end + 1);
  }
  std::unordered_set<std::uint64_t> seen;
  std::string joined;
  while (!merges.empty()) {
    const std::size_t end = merges.find('\n');
    const std::string_view line = merges.substr(0, end);
    merges = end == std::string_view::npos ? std::string_view() : merges.substr(end + 1);
    const std::size_t space = line.find(' ');
    if (space == std::string_view::npos || space == 0 || space + 1 == line.size() ||
        line.find(' ', space + 1) != std::string_view::npos) {
      return false;
    }
    joined.assign(line, 0, space).append(line, space + 1);
    const auto left = place.find(line.substr(0, space));
    const auto right = place.find(line.substr(space + 1));
    const auto merged = place.find(joined);
    if (left == place.end() || right == place.end() || merged == place.end()) return false;
    if (!seen.insert(std::uint64_t{left->second} << 32 | right->second).second) return false;
    made[merged->second] = true;
    for (const std::uint32_t i : {left->second, right->second, merged->second}) {
      files->triples.push_back(static_cast<std::int32_t>(vocabulary[i].second));
    }
  }
  for (std::size_t i = 0; i < vocabulary.size(); ++i) {
    if (!made[i] && !in_brackets(vocabulary[i].first)) return false;
  }
  return true;
}

}  // namespace lmcore

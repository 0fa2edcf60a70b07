#include "bpe_files.hpp"

#include <algorithm>
#include <string>

#include "json_lines.hpp"
#include "vocabulary_json.hpp"

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

// Pairs of tokens, at most as many as it is told.
class PairSet {
 public:
  explicit PairSet(std::size_t most) {
    std::size_t size = 64;
    while (size < 2 * most) size *= 2;
    slots_.assign(size, kEmpty);
  }

  // False for a pair that is there already.
  bool add(std::uint32_t left, std::uint32_t right) {
    const std::uint64_t pair = std::uint64_t{left} << 32 | right;
    const std::size_t mask = slots_.size() - 1;
    std::size_t slot = static_cast<std::size_t>(pair * 0x9E3779B97F4A7C15u >> 32) & mask;
    for (; slots_[slot] != kEmpty; slot = (slot + 1) & mask) {
      if (slots_[slot] == pair) return false;
    }
    slots_[slot] = pair;
    return true;
  }

 private:
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};

  std::vector<std::uint64_t> slots_;
};

// Takes the rules, and marks the places of the tokens that they make.
bool read_rules(std::string_view merges, const Vocabulary &tokens, BpeFiles *files,
                std::vector<bool> *made) {
  if (merges.find('\r') != std::string_view::npos) return false;
  merges = without_empty_end(merges);
  if (merges.substr(0, 8) == "#version") {
    const std::size_t end = merges.find('\n');
    merges = end == std::string_view::npos ? std::string_view() : merges.substr(end + 1);
  }
  PairSet seen(static_cast<std::size_t>(std::count(merges.begin(), merges.end(), '\n')) + 1);
  while (!merges.empty()) {
    const std::size_t end = merges.find('\n');
    const std::string_view line = merges.substr(0, end);
    merges = end == std::string_view::npos ? std::string_view() : merges.substr(end + 1);
    const std::size_t space = line.find(' ');
    if (space == std::string_view::npos || space == 0 || space + 1 == line.size() ||
        line.find(' ', space + 1) != std::string_view::npos) {
      return false;
    }
    const std::string_view left = line.substr(0, space);
    const std::string_view right = line.substr(space + 1);
    const std::uint32_t places[] = {tokens.find(left), tokens.find(right),
                                    tokens.find(left, right)};
    for (const std::uint32_t place : places) {
      if (place == Vocabulary::kNone) return false;
      files->triples.push_back(static_cast<std::int32_t>(tokens.tokens()[place].id));
    }
    if (!seen.add(places[0], places[1])) return false;
    (*made)[places[2]] = true;
  }
  return true;
}

}  // namespace

bool read_bpe_files(std::string_view vocabulary, std::string_view merges, std::string_view end,
                    BpeFiles *files) {
  Vocabulary tokens;
  const auto *const text = reinterpret_cast<const std::uint8_t *>(merges.data());
  if (!tokens.read(vocabulary) || !valid_utf8(text, text + merges.size())) return false;
  std::vector<bool> made(tokens.tokens().size(), false);
  const auto id_of = [&tokens](std::uint32_t place) { return tokens.tokens()[place].id; };
  for (int byte = 0; byte < 256; ++byte) {
    const std::uint32_t found = tokens.find(stands_for(byte));
    if (found == Vocabulary::kNone) return false;
    made[found] = true;
    files->byte_ids[static_cast<std::size_t>(byte)] = id_of(found);
  }
  if (!read_rules(merges, tokens, files, &made)) return false;
  for (std::size_t i = 0; i < made.size(); ++i) {
    if (!made[i] && !in_brackets(tokens.tokens()[i].spelt)) return false;
  }
  files->vocab_size = std::int64_t{tokens.greatest_id()} + 1;
  const std::uint32_t last = tokens.find(end);
  files->end_id = last == Vocabulary::kNone ? -1 : std::int64_t{id_of(last)};
  return true;
}

}  // namespace lmcore

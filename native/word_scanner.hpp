// Cuts UTF-8 into words as GPT-2's pattern does:
//
//   '(?:[sdmt]|ll|re|ve)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
//
// Its twin in Python is `split_words` in lmcore/data/tokenizer/gpt2.py.

#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "character_classes.hpp"

namespace lmcore {

enum Kind : std::uint8_t { kOther = 0, kLetter = 1, kNumber = 2, kSpace = 3, kWide = 4 };

class WordScanner {
 public:
  WordScanner() : wide_(0x110000, kOther) {
    for (const ClassRange &range : kClassRanges) {
      for (std::uint32_t c = range.first; c <= range.last; ++c) wide_[c] = range.kind;
    }
    for (int byte = 0; byte < 256; ++byte) {
      byte_[byte] = byte < 0x80 ? wide_[static_cast<std::size_t>(byte)]
                                : static_cast<std::uint8_t>(kWide);
    }
  }

  // The end of the word that starts at `at`; the text is valid UTF-8 and `at` is before `end`.
  const std::uint8_t *word_end(const std::uint8_t *at, const std::uint8_t *end) const {
    const std::uint8_t *p = at;
    std::uint8_t kind = byte_[*p];
    if (kind == kLetter) return run_end(p + 1, end, kLetter);
    if (*p == ' ' && end - p > 1) {
      const std::uint8_t next = byte_[p[1]];
      if (next == kLetter) return run_end(p + 2, end, kLetter);
      const Character character = read(p + 1);
      if (character.kind != kSpace) return run_end(p + 1 + character.size, end, character.kind);
      return space_end(p, end);
    }
    if (*p == '\'') {
      const std::size_t size = contraction(p, end);
      if (size != 0) return p + size;
    }
    const Character character = read(p);
    if (character.kind != kSpace) return run_end(p + character.size, end, character.kind);
    return space_end(p, end);
  }

 private:
  struct Character {
    std::uint8_t kind;
    std::uint8_t size;
  };

  Character read(const std::uint8_t *p) const {
    const std::uint8_t kind = byte_[*p];
    if (kind != kWide) return {kind, 1};
    std::uint32_t code = 0;
    std::uint8_t size = 0;
    if (*p < 0xE0) {
      code = (*p & 0x1Fu) << 6 | (p[1] & 0x3Fu);
      size = 2;
    } else if (*p < 0xF0) {
      code = (*p & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
      size = 3;
    } else {
      code = (*p & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
      size = 4;
    }
    return {wide_[code], size};
  }

  const std::uint8_t *run_end(const std::uint8_t *p, const std::uint8_t *end,
                              std::uint8_t kind) const {
    for (;;) {
      while (p < end && byte_[*p] == kind) ++p;
      if (p == end || byte_[*p] != kWide) return p;
      const Character character = read(p);
      if (character.kind != kind) return p;
      p += character.size;
    }
  }

  static std::size_t contraction(const std::uint8_t *p, const std::uint8_t *end) {
    if (end - p < 2) return 0;
    const std::uint8_t a = p[1];
    if (a == 's' || a == 'd' || a == 'm' || a == 't') return 2;
    if (end - p < 3) return 0;
    const std::uint8_t b = p[2];
    return (a == 'l' && b == 'l') || ((a == 'r' || a == 'v') && b == 'e') ? 3 : 0;
  }

  // White space at `at`, not a blank that belongs to a word: up to the text's end all of it, else
  // all but its last character, which is left to what follows, or that one where it is alone.
  const std::uint8_t *space_end(const std::uint8_t *at, const std::uint8_t *end) const {
    const std::uint8_t *last = at;
    const std::uint8_t *p = at;
    while (p < end) {
      const Character character = read(p);
      if (character.kind != kSpace) return last == at ? p : last;
      last = p;
      p += character.size;
    }
    return p;
  }

  std::vector<std::uint8_t> wide_;
  std::uint8_t byte_[256];
};

}  // namespace lmcore

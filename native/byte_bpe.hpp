// Byte-level BPE of UTF-8 text: words by GPT-2's pattern, ids from a cache of words, and for words
// that are not in it the merges themselves.
//
// The merges follow the definition, `python_bpe` in lmcore/data/tokenizer/gpt2.py: of all adjacent pairs
// take the one whose rule comes first, merge its every occurrence from the left, repeat.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "session.hpp"
#include "word_scanner.hpp"

namespace lmcore {

// From a pair of adjacent ids to the rule that merges it.
class MergeTable {
 public:
  struct Rule {
    std::uint32_t rank, merged;
  };
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;

  MergeTable(const std::int32_t *triples, std::size_t count);

  Rule find(std::uint32_t left, std::uint32_t right) const {
    const std::uint64_t key = key_of(left, right);
    const std::uint64_t bit = bit_of(key);
    if ((present_[bit / 64] >> (bit % 64) & 1) == 0) return {kNone, kNone};
    for (std::size_t slot = slot_of(key);; slot = (slot + 1) & mask_) {
      const Slot &at = slots_[slot];
      if (at.key == key) return at.rule;
      if (at.key == kEmpty) return {kNone, kNone};
    }
  }

 private:
  struct Slot {
    std::uint64_t key;
    Rule rule;
  };
  static constexpr std::uint64_t kEmpty = ~std::uint64_t{0};
  static constexpr std::uint64_t kBits = 1 << 20;

  static std::uint64_t key_of(std::uint32_t left, std::uint32_t right) {
    return std::uint64_t{left} << 32 | right;
  }
  std::size_t slot_of(std::uint64_t key) const {
    return static_cast<std::size_t>((key * 0x9E3779B97F4A7C15u) >> shift_);
  }

  static std::uint64_t bit_of(std::uint64_t key) {
    return (key * 0xD6E8FEB86659FD93u) >> 44;  // 20 bits
  }

  std::vector<Slot> slots_;
  std::size_t mask_;
  int shift_;
  // Most pairs have no rule: a bit that is not set says so from the processor's own cache.
  std::vector<std::uint64_t> present_;
};

class ByteBpe {
 public:
  ByteBpe(const std::array<std::uint32_t, 256> &byte_ids, const std::int32_t *triples,
          std::size_t count);

  // Write the ids of valid UTF-8 to `out`, which has room for one a byte and two more; return how
  // many.
  // `readable` is where the memory ends in which the text lies, at or after `end`.
  template <typename Token>
  std::size_t encode(Session &session, const std::uint8_t *text, const std::uint8_t *end,
                     const std::uint8_t *readable, Token *out) const;

  const SessionPool &sessions() const { return sessions_; }

 private:
  // Leave the ids of a word in `ids`.
  void merge(const std::uint8_t *word, std::size_t size, std::vector<std::uint32_t> &ids) const;
  void merge_short(std::vector<std::uint32_t> &ids) const;
  void merge_long(std::vector<std::uint32_t> &ids) const;

  WordScanner scanner_;
  std::array<std::uint32_t, 256> byte_ids_;
  MergeTable rules_;
  SessionPool sessions_;
};

}  // namespace lmcore

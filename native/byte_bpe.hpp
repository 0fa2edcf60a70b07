// Byte-level BPE of UTF-8 text: words by GPT-2's pattern, ids from a cache of words, and for words
// that are not in it the merges themselves.
//
// The merges follow the definition in lmcore/data/tokenizer/bpe.py: of all adjacent pairs take the
// one whose rule comes first, merge its every occurrence from the left, repeat.

#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

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

// What one thread keeps between calls: caches of words and room to work in.
class Session {
 public:
  Session();

 private:
  friend class ByteBpe;
  static constexpr std::size_t kShort = 15;   // bytes of a word in the first cache
  static constexpr std::size_t kFew = 3;      // ids of a word there
  static constexpr std::size_t kSets = 1 << 17;
  static constexpr std::size_t kLong = 256;   // bytes of a word in the second one
  static constexpr std::size_t kSlots = 1 << 14;
  static constexpr std::size_t kArena = 4 << 20;

  struct Entry {  // half a cache line; `count` is 0 where nothing is kept
    std::uint64_t low, high;
    std::uint32_t ids[kFew];
    std::uint32_t count;
  };
  struct alignas(64) Set {
    Entry newer, older;
  };
  struct LongEntry {
    std::uint64_t hash;
    std::uint32_t at, ids_at;
    std::uint32_t size, count;
  };

  // Remember `word_`, the ids of a word, in the second cache.
  void keep(LongEntry &entry, std::uint64_t hash, const std::uint8_t *word, std::size_t size);

  struct Freed {
    void operator()(void *memory) const { std::free(memory); }
  };
  std::unique_ptr<Set[], Freed> sets_;
  std::vector<LongEntry> long_;
  std::vector<std::uint8_t> arena_;
  std::vector<std::uint32_t> arena_ids_;
  std::vector<std::uint32_t> word_;
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

  // Sessions are lent to one thread at a time.
  std::unique_ptr<Session> borrow() const;
  void give_back(std::unique_ptr<Session> session) const;

 private:
  template <typename Token>
  Token *encode_unseen(Session &session, const std::uint8_t *word, std::size_t size,
                       Session::Set *set, std::uint64_t low, std::uint64_t high,
                       Token *out) const;
  // Leave the ids of a word in `session.word_`.
  void merge(Session &session, const std::uint8_t *word, std::size_t size) const;
  void merge_short(std::vector<std::uint32_t> &ids) const;
  void merge_long(std::vector<std::uint32_t> &ids) const;

  WordScanner scanner_;
  std::array<std::uint32_t, 256> byte_ids_;
  MergeTable rules_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Session>> idle_;
};

}  // namespace lmcore

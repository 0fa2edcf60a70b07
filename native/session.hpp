// What one thread keeps between calls to encode: caches of the ids of words.
//
// A short word with few ids is in half a cache line of the first cache; longer ones are in the
// second.  Words are looked up in groups: while one waits for its place in the cache to come from
// memory, the next ones are cut and asked for.

#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace lmcore {

std::uint64_t hash_of(const std::uint8_t *p, std::size_t size);

class Session {
 private:
  static constexpr std::size_t kShort = 15;  // bytes of a word in the first cache
  static constexpr std::size_t kFew = 3;     // ids of a word there
  static constexpr std::size_t kSets = 1 << 17;
  static constexpr std::size_t kLong = 256;  // bytes of a word in the second one
  static constexpr std::size_t kSlots = 1 << 14;
  static constexpr std::size_t kArena = 4 << 20;

  struct Key {
    std::uint64_t low, high;
  };
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

 public:
  static constexpr std::size_t kGroup = 32;

  struct Word {
    const std::uint8_t *at;
    std::size_t size;
    Key key;
    Set *set;  // null: the word is too long for the first cache
  };

  Session();

  // Ask for the place of a word in the cache.
  // `readable` is where the memory ends in which the word lies, at or after its end.
  Word find(const std::uint8_t *at, std::size_t size, const std::uint8_t *readable) {
    Word word{at, size, {0, 0}, nullptr};
    if (size <= kShort) {
      word.key = short_key(at, size, readable);
      word.set = &sets_[hash_of(word.key) & (kSets - 1)];
      __builtin_prefetch(word.set);
    }
    return word;
  }

  // Write the ids of words to `out`, which has room for two more; return where they end.
  // `encode(at, size, ids)` leaves the ids of a word that is not in the caches in `ids`.
  template <typename Token, typename Encode>
  Token *write(const Word *first, const Word *last, Token *out, const Encode &encode) {
    for (const Word *word = first; word < last; ++word) {
      Set *const set = word->set;
      if (set == nullptr) {
        out = write_unseen(*word, out, encode);
        continue;
      }
      const Key key = word->key;
      if (set->newer.low != key.low || set->newer.high != key.high) {
        if (set->older.low != key.low || set->older.high != key.high) {
          out = write_unseen(*word, out, encode);
          continue;
        }
        std::swap(set->newer, set->older);
      }
      // Three stores whatever the count: two of them may lie in the room of what follows.
      const Entry &entry = set->newer;
      out[0] = static_cast<Token>(entry.ids[0]);
      out[1] = static_cast<Token>(entry.ids[1]);
      out[2] = static_cast<Token>(entry.ids[2]);
      out += entry.count;
    }
    return out;
  }

 private:
  // The first `size` bytes at `p`, at most 15, and the size in the last one.
  static Key short_key(const std::uint8_t *p, std::size_t size, const std::uint8_t *readable) {
    Key key{0, 0};
    if (readable - p >= 16) {
      std::memcpy(&key, p, 16);
      const std::size_t low_bits = size < 8 ? 8 * size : 0;
      if (size < 8) {
        key.low &= (std::uint64_t{1} << low_bits) - 1;
        key.high = 0;
      } else {
        key.high &= (std::uint64_t{1} << (8 * (size - 8))) - 1;
      }
    } else {
      std::memcpy(&key, p, size);
    }
    key.high |= std::uint64_t{size} << 56;
    return key;
  }

  static std::uint64_t hash_of(Key key) {
    std::uint64_t hash = (key.low ^ (key.high * 0x9E3779B97F4A7C15u)) * 0xD6E8FEB86659FD93u;
    return hash ^ (hash >> 32);
  }

  // A word that is not in the first cache: from the second one, or encoded and kept in one of them.
  template <typename Token, typename Encode>
  Token *write_unseen(const Word &word, Token *out, const Encode &encode) {
    const bool kept = word.size <= kLong;
    const std::uint64_t hash = kept ? lmcore::hash_of(word.at, word.size) : 0;
    LongEntry &entry = long_[hash & (kSlots - 1)];
    if (kept && entry.size == word.size && entry.hash == hash &&
        std::memcmp(&arena_[entry.at], word.at, word.size) == 0) {
      const std::uint32_t *ids = &arena_ids_[entry.ids_at];
      for (std::uint32_t i = 0; i < entry.count; ++i) *out++ = static_cast<Token>(ids[i]);
      return out;
    }
    encode(word.at, word.size, ids_);
    for (const std::uint32_t id : ids_) *out++ = static_cast<Token>(id);
    if (word.set != nullptr && ids_.size() <= kFew) {
      Set &set = *word.set;
      set.older = set.newer;
      set.newer = {word.key.low, word.key.high, {0, 0, 0},
                   static_cast<std::uint32_t>(ids_.size())};
      std::copy(ids_.begin(), ids_.end(), set.newer.ids);
    } else if (kept) {
      keep(entry, hash, word);
    }
    return out;
  }

  // Remember `ids_`, the ids of a word, in the second cache.
  void keep(LongEntry &entry, std::uint64_t hash, const Word &word);

  struct Freed {
    void operator()(void *memory) const { std::free(memory); }
  };
  std::unique_ptr<Set[], Freed> sets_;
  std::vector<LongEntry> long_;
  std::vector<std::uint8_t> arena_;
  std::vector<std::uint32_t> arena_ids_;
  std::vector<std::uint32_t> ids_;
};

// The sessions of an encoder, lent to one thread at a time.
class SessionPool {
 public:
  std::unique_ptr<Session> borrow() const;
  void give_back(std::unique_ptr<Session> session) const;

 private:
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Session>> idle_;
};

}  // namespace lmcore

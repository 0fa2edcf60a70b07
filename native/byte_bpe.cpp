#include "byte_bpe.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <new>
#include <queue>
#include <tuple>
#include <utility>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace lmcore {

namespace {

// A longer word is merged by way of a heap: what a word costs must not grow with its square.
constexpr std::size_t kScanned = 64;
constexpr std::size_t kLargePage = 2 << 20;

struct Key {
  std::uint64_t low, high;
};

// The first `size` bytes at `p`, at most 15, and the size in the last one.
inline Key short_key(const std::uint8_t *p, std::size_t size, const std::uint8_t *readable) {
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

inline std::uint64_t hash_of(Key key) {
  std::uint64_t hash = (key.low ^ (key.high * 0x9E3779B97F4A7C15u)) * 0xD6E8FEB86659FD93u;
  return hash ^ (hash >> 32);
}

std::uint64_t hash_of(const std::uint8_t *p, std::size_t size) {
  std::uint64_t hash = 0xCBF29CE484222325u ^ size;
  while (size >= 8) {
    std::uint64_t part;
    std::memcpy(&part, p, 8);
    hash = (hash ^ part) * 0x9E3779B97F4A7C15u;
    hash ^= hash >> 29;
    p += 8;
    size -= 8;
  }
  std::uint64_t part = 0;
  std::memcpy(&part, p, size);
  hash = (hash ^ part) * 0xD6E8FEB86659FD93u;
  return hash ^ (hash >> 32);
}

std::size_t power_of_two(std::size_t least) {
  std::size_t size = 2;
  while (size < least) size *= 2;
  return size;
}

int log2_of(std::size_t power) {
  int bits = 0;
  while ((std::size_t{1} << bits) < power) ++bits;
  return bits;
}

}  // namespace

MergeTable::MergeTable(const std::int32_t *triples, std::size_t count)
    : slots_(power_of_two(2 * count + 1), Slot{kEmpty, {kNone, kNone}}),
      mask_(slots_.size() - 1),
      shift_(64 - log2_of(slots_.size())),
      present_(kBits / 64, 0) {
  for (std::size_t rank = 0; rank < count; ++rank) {
    const auto left = static_cast<std::uint32_t>(triples[3 * rank]);
    const auto right = static_cast<std::uint32_t>(triples[3 * rank + 1]);
    const auto merged = static_cast<std::uint32_t>(triples[3 * rank + 2]);
    const std::uint64_t key = key_of(left, right);
    std::size_t slot = slot_of(key);
    while (slots_[slot].key != kEmpty) slot = (slot + 1) & mask_;
    slots_[slot] = {key, {static_cast<std::uint32_t>(rank), merged}};
    const std::uint64_t bit = bit_of(key);
    present_[bit / 64] |= std::uint64_t{1} << (bit % 64);
  }
}

Session::Session() : long_(kSlots) {
  constexpr std::size_t size = kSets * sizeof(Set);
  // In large pages, where the system has some to give: every word looks somewhere else.
  void *memory = std::aligned_alloc(kLargePage, size);
  if (memory == nullptr) throw std::bad_alloc();
  sets_.reset(static_cast<Set *>(memory));
#if defined(__linux__)
  madvise(memory, size, MADV_HUGEPAGE);
#endif
  std::memset(memory, 0, size);
}

void Session::keep(LongEntry &entry, std::uint64_t hash, const std::uint8_t *word,
                   std::size_t size) {
  if (arena_.size() + size > kArena) {
    arena_.clear();
    arena_ids_.clear();
    std::fill(long_.begin(), long_.end(), LongEntry{});
  }
  entry = {hash, static_cast<std::uint32_t>(arena_.size()),
           static_cast<std::uint32_t>(arena_ids_.size()), static_cast<std::uint32_t>(size),
           static_cast<std::uint32_t>(word_.size())};
  arena_.insert(arena_.end(), word, word + size);
  arena_ids_.insert(arena_ids_.end(), word_.begin(), word_.end());
}

ByteBpe::ByteBpe(const std::array<std::uint32_t, 256> &byte_ids, const std::int32_t *triples,
                 std::size_t count)
    : byte_ids_(byte_ids), rules_(triples, count) {}

std::unique_ptr<Session> ByteBpe::borrow() const {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!idle_.empty()) {
      std::unique_ptr<Session> session = std::move(idle_.back());
      idle_.pop_back();
      return session;
    }
  }
  return std::make_unique<Session>();
}

void ByteBpe::give_back(std::unique_ptr<Session> session) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_.push_back(std::move(session));
}

// Words are looked at in groups: while one waits for its place in the cache to come from memory,
// the next ones are cut and asked for.
template <typename Token>
std::size_t ByteBpe::encode(Session &session, const std::uint8_t *text, const std::uint8_t *end,
                            const std::uint8_t *readable, Token *out) const {
  struct Word {
    const std::uint8_t *at;
    std::size_t size;
    Key key;
    Session::Set *set;  // null: the word is too long for the first cache
  };
  constexpr std::size_t kGroup = 32;
  Word group[kGroup];
  Token *const first = out;
  const std::uint8_t *p = text;
  while (p < end) {
    std::size_t count = 0;
    for (; count < kGroup && p < end; ++count) {
      const std::uint8_t *const stop = scanner_.word_end(p, end);
      Word &word = group[count];
      word.at = p;
      word.size = static_cast<std::size_t>(stop - p);
      word.set = nullptr;
      if (word.size <= Session::kShort) {
        word.key = short_key(p, word.size, readable);
        word.set = &session.sets_[hash_of(word.key) & (Session::kSets - 1)];
        __builtin_prefetch(word.set);
      }
      p = stop;
    }
    for (std::size_t i = 0; i < count; ++i) {
      const Word &word = group[i];
      Session::Set *const set = word.set;
      if (set == nullptr) {
        out = encode_unseen(session, word.at, word.size, nullptr, 0, 0, out);
        continue;
      }
      const Key key = word.key;
      if (set->newer.low != key.low || set->newer.high != key.high) {
        if (set->older.low != key.low || set->older.high != key.high) {
          out = encode_unseen(session, word.at, word.size, set, key.low, key.high, out);
          continue;
        }
        std::swap(set->newer, set->older);
      }
      // Three stores whatever the count: two of them may lie in the room of what follows.
      const Session::Entry &entry = set->newer;
      out[0] = static_cast<Token>(entry.ids[0]);
      out[1] = static_cast<Token>(entry.ids[1]);
      out[2] = static_cast<Token>(entry.ids[2]);
      out += entry.count;
    }
  }
  return static_cast<std::size_t>(out - first);
}

template std::size_t ByteBpe::encode<std::uint16_t>(Session &, const std::uint8_t *,
                                                    const std::uint8_t *, const std::uint8_t *,
                                                    std::uint16_t *) const;
template std::size_t ByteBpe::encode<std::int32_t>(Session &, const std::uint8_t *,
                                                   const std::uint8_t *, const std::uint8_t *,
                                                   std::int32_t *) const;

// A word that is not in the first cache: from the second one, or merged and kept in one of them.
template <typename Token>
Token *ByteBpe::encode_unseen(Session &session, const std::uint8_t *word, std::size_t size,
                              Session::Set *set, std::uint64_t low, std::uint64_t high,
                              Token *out) const {
  const bool kept = size <= Session::kLong;
  const std::uint64_t hash = kept ? hash_of(word, size) : 0;
  Session::LongEntry &entry = session.long_[hash & (Session::kSlots - 1)];
  if (kept && entry.size == size && entry.hash == hash &&
      std::memcmp(&session.arena_[entry.at], word, size) == 0) {
    const std::uint32_t *ids = &session.arena_ids_[entry.ids_at];
    for (std::uint32_t i = 0; i < entry.count; ++i) *out++ = static_cast<Token>(ids[i]);
    return out;
  }
  merge(session, word, size);
  const std::vector<std::uint32_t> &ids = session.word_;
  for (const std::uint32_t id : ids) *out++ = static_cast<Token>(id);
  if (set != nullptr && ids.size() <= Session::kFew) {
    set->older = set->newer;
    set->newer = {low, high, {0, 0, 0}, static_cast<std::uint32_t>(ids.size())};
    std::copy(ids.begin(), ids.end(), set->newer.ids);
  } else if (kept) {
    session.keep(entry, hash, word, size);
  }
  return out;
}

void ByteBpe::merge(Session &session, const std::uint8_t *word, std::size_t size) const {
  std::vector<std::uint32_t> &ids = session.word_;
  ids.resize(size);
  for (std::size_t i = 0; i < size; ++i) ids[i] = byte_ids_[word[i]];
  if (size <= kScanned) {
    merge_short(ids);
  } else {
    merge_long(ids);
  }
}

void ByteBpe::merge_short(std::vector<std::uint32_t> &ids) const {
  MergeTable::Rule rules[kScanned];  // rules[i] merges ids[i] and ids[i + 1]
  std::size_t count = ids.size();
  for (std::size_t i = 0; i + 1 < count; ++i) rules[i] = rules_.find(ids[i], ids[i + 1]);
  rules[count - 1] = {MergeTable::kNone, MergeTable::kNone};
  while (count > 1) {
    std::uint32_t best = MergeTable::kNone;
    for (std::size_t i = 0; i + 1 < count; ++i) best = std::min(best, rules[i].rank);
    if (best == MergeTable::kNone) break;
    std::size_t to = 0;
    bool changed = false;  // whether ids[to - 1] is new, so that the rule after it is to be found
    for (std::size_t i = 0; i < count;) {
      const bool merges = i + 1 < count && rules[i].rank == best;
      const std::uint32_t id = merges ? rules[i].merged : ids[i];
      const MergeTable::Rule next = rules[i];
      if (to > 0 && (changed || merges)) rules[to - 1] = rules_.find(ids[to - 1], id);
      ids[to] = id;
      if (!merges) rules[to] = next;
      changed = merges;
      ++to;
      i += merges ? 2 : 1;
    }
    count = to;
  }
  ids.resize(count);
}

void ByteBpe::merge_long(std::vector<std::uint32_t> &ids) const {
  constexpr std::uint32_t none = 0xFFFFFFFFu;
  struct Link {
    std::uint32_t before, after;
  };
  struct Found {
    std::uint32_t rank, at, left, right, merged;
    bool operator>(const Found &other) const {
      return std::tie(rank, at) > std::tie(other.rank, other.at);
    }
  };
  const auto size = static_cast<std::uint32_t>(ids.size());
  std::vector<Link> links(size);
  for (std::uint32_t i = 0; i < size; ++i) links[i] = {i - 1, i + 1 < size ? i + 1 : none};
  std::vector<bool> gone(size, false);
  std::priority_queue<Found, std::vector<Found>, std::greater<Found>> queue;
  const auto look = [&](std::uint32_t at) {
    const std::uint32_t after = links[at].after;
    if (after == none) return;
    const MergeTable::Rule rule = rules_.find(ids[at], ids[after]);
    if (rule.rank != MergeTable::kNone) {
      queue.push({rule.rank, at, ids[at], ids[after], rule.merged});
    }
  };
  for (std::uint32_t i = 0; i + 1 < size; ++i) look(i);
  std::vector<Found> round;
  while (!queue.empty()) {
    // All occurrences of the best pair, from the left, before any pair that they make.
    round.clear();
    const std::uint32_t rank = queue.top().rank;
    while (!queue.empty() && queue.top().rank == rank) {
      round.push_back(queue.top());
      queue.pop();
    }
    for (const Found &found : round) {
      if (gone[found.at] || ids[found.at] != found.left) continue;
      const std::uint32_t after = links[found.at].after;
      if (after == none || ids[after] != found.right) continue;
      ids[found.at] = found.merged;
      gone[after] = true;
      links[found.at].after = links[after].after;
      if (links[after].after != none) links[links[after].after].before = found.at;
      if (links[found.at].before != none) look(links[found.at].before);
      look(found.at);
    }
  }
  std::uint32_t to = 0;
  for (std::uint32_t at = 0; at != none; at = links[at].after) ids[to++] = ids[at];
  ids.resize(to);
}

}  // namespace lmcore

#include "byte_bpe.hpp"

#include <algorithm>
#include <functional>
#include <queue>
#include <tuple>

namespace lmcore {

namespace {

// A longer word is merged by way of a heap: what a word costs must not grow with its square.
constexpr std::size_t kScanned = 64;

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

ByteBpe::ByteBpe(const std::array<std::uint32_t, 256> &byte_ids, const std::int32_t *triples,
                 std::size_t count)
    : byte_ids_(byte_ids), rules_(triples, count) {}

template <typename Token>
std::size_t ByteBpe::encode(Session &session, const std::uint8_t *text, const std::uint8_t *end,
                            const std::uint8_t *readable, Token *out) const {
  const auto encode = [this](const std::uint8_t *word, std::size_t size,
                             std::vector<std::uint32_t> &ids) { merge(word, size, ids); };
  Session::Word group[Session::kGroup];
  Token *const first = out;
  for (const std::uint8_t *p = text; p < end;) {
    std::size_t count = 0;
    for (; count < Session::kGroup && p < end; ++count) {
      const std::uint8_t *const stop = scanner_.word_end(p, end);
      group[count] = session.find(p, static_cast<std::size_t>(stop - p), readable);
      p = stop;
    }
    out = session.write(group, group + count, out, encode);
  }
  return static_cast<std::size_t>(out - first);
}

template std::size_t ByteBpe::encode<std::uint16_t>(Session &, const std::uint8_t *,
                                                    const std::uint8_t *, const std::uint8_t *,
                                                    std::uint16_t *) const;
template std::size_t ByteBpe::encode<std::int32_t>(Session &, const std::uint8_t *,
                                                   const std::uint8_t *, const std::uint8_t *,
                                                   std::int32_t *) const;

void ByteBpe::merge(const std::uint8_t *word, std::size_t size,
                    std::vector<std::uint32_t> &ids) const {
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

#include "session.hpp"

#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace lmcore {

namespace {
constexpr std::size_t kLargePage = 2 << 20;
}  // namespace

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

void Session::keep(LongEntry &entry, std::uint64_t hash, const Word &word) {
  if (arena_.size() + word.size > kArena) {
    arena_.clear();
    arena_ids_.clear();
    std::fill(long_.begin(), long_.end(), LongEntry{});
  }
  entry = {hash, static_cast<std::uint32_t>(arena_.size()),
           static_cast<std::uint32_t>(arena_ids_.size()), static_cast<std::uint32_t>(word.size),
           static_cast<std::uint32_t>(ids_.size())};
  arena_.insert(arena_.end(), word.at, word.at + word.size);
  arena_ids_.insert(arena_ids_.end(), ids_.begin(), ids_.end());
}

std::unique_ptr<Session> SessionPool::borrow() const {
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

void SessionPool::give_back(std::unique_ptr<Session> session) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_.push_back(std::move(session));
}

}  // namespace lmcore

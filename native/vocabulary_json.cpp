#include "vocabulary_json.hpp"

#include <algorithm>

#include "json_lines.hpp"

namespace lmcore {

namespace {

constexpr std::uint32_t kGreatest = 0x7FFFFFFEu;  // as in lmcore/data/tokenizer/bpe_files.py

class Hash {
 public:
  void add(const char *p, std::size_t size) {
    for (std::size_t i = 0; i < size; ++i) {
      state_ = (state_ ^ static_cast<std::uint8_t>(p[i])) * 0x100000001B3u;
    }
  }
  std::uint64_t value() const { return state_ ^ state_ >> 32; }

 private:
  std::uint64_t state_ = 0xCBF29CE484222325u;
};

// A position in JSON that tells what is next, blanks left out.
class Cursor {
 public:
  explicit Cursor(std::string_view text)
      : p_(reinterpret_cast<const std::uint8_t *>(text.data())), end_(p_ + text.size()) {}

  bool next(std::uint8_t wanted) {
    blanks();
    if (p_ == end_ || *p_ != wanted) return false;
    ++p_;
    return true;
  }
  bool ended() {
    blanks();
    return p_ == end_;
  }
  bool string(RawText *text) {
    blanks();
    if (p_ == end_ || *p_ != '"') return false;
    p_ = read_string(p_, end_, text);
    return p_ != nullptr;
  }
  // Digits alone: a number of any other look is left to Python, which refuses most of them.
  bool id(std::uint32_t *value) {
    blanks();
    const std::uint8_t *const begin = p_;
    std::uint64_t found = 0;
    for (; p_ < end_ && *p_ >= '0' && *p_ <= '9' && p_ - begin < 11; ++p_) {
      found = found * 10 + (*p_ - '0');
    }
    *value = static_cast<std::uint32_t>(found);
    return p_ > begin && found <= kGreatest && (*begin != '0' || p_ - begin == 1);
  }

 private:
  void blanks() {
    while (p_ < end_ && (*p_ == ' ' || *p_ == '\t' || *p_ == '\r' || *p_ == '\n')) ++p_;
  }

  const std::uint8_t *p_;
  const std::uint8_t *end_;
};

}  // namespace

bool Vocabulary::read(std::string_view text) {
  const auto *const begin = reinterpret_cast<const std::uint8_t *>(text.data());
  return valid_utf8(begin, begin + text.size()) && parse(text) && index();
}

bool Vocabulary::parse(std::string_view text) {
  Cursor at(text);
  if (!at.next('{')) return false;
  do {
    RawText raw;
    Token token{};
    if (!at.string(&raw) || !at.next(':') || !at.id(&token.id)) return false;
    auto size = static_cast<std::size_t>(raw.end - raw.begin);
    token.spelt = {reinterpret_cast<const char *>(raw.begin), size};
    if (raw.escaped) {
      std::string &room = unescaped_.emplace_back(size, '\0');
      if (!unescape(raw, reinterpret_cast<std::uint8_t *>(room.data()), &size)) return false;
      token.spelt = {room.data(), size};
    }
    tokens_.push_back(token);
    greatest_ = std::max(greatest_, token.id);
  } while (at.next(','));
  return at.next('}') && at.ended();
}

// Makes `find` work; false for a token or an id that stands twice.
bool Vocabulary::index() {
  if (tokens_.size() >= kGreatest) return false;
  std::size_t size = 64;
  while (size < 2 * tokens_.size()) size *= 2;
  if (greatest_ / 64 > size) return false;  // few ids, far apart
  slots_.assign(size, Slot{0, kNone});
  std::vector<bool> taken(std::size_t{greatest_} + 1, false);
  for (std::uint32_t place = 0; place < tokens_.size(); ++place) {
    const Token &token = tokens_[place];
    if (taken[token.id]) return false;
    taken[token.id] = true;
    Hash hash;
    hash.add(token.spelt.data(), token.spelt.size());
    const auto wanted = static_cast<std::uint32_t>(hash.value());
    std::size_t slot = wanted & (size - 1);
    for (; slots_[slot].place != kNone; slot = (slot + 1) & (size - 1)) {
      const Slot &other = slots_[slot];
      if (other.hash == wanted && tokens_[other.place].spelt == token.spelt) return false;
    }
    slots_[slot] = {wanted, place};
  }
  return true;
}

std::uint32_t Vocabulary::find(std::string_view left, std::string_view right) const {
  Hash hash;
  hash.add(left.data(), left.size());
  hash.add(right.data(), right.size());
  const auto wanted = static_cast<std::uint32_t>(hash.value());
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t slot = wanted & mask; slots_[slot].place != kNone; slot = (slot + 1) & mask) {
    if (slots_[slot].hash != wanted) continue;
    const std::string_view spelt = tokens_[slots_[slot].place].spelt;
    if (spelt.size() == left.size() + right.size() && spelt.substr(0, left.size()) == left &&
        spelt.substr(left.size()) == right) {
      return slots_[slot].place;
    }
  }
  return kNone;
}

}  // namespace lmcore

#include "wordpiece.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace lmcore {

namespace {

struct Decoded {
  std::uint32_t code;
  std::size_t size;
};

inline Decoded decode(const std::uint8_t *p) {
  if (*p < 0x80) return {*p, 1};
  if (*p < 0xE0) return {(*p & 0x1Fu) << 6 | (p[1] & 0x3Fu), 2};
  if (*p < 0xF0) return {(*p & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu), 3};
  return {(*p & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu), 4};
}

inline bool continues(std::uint8_t byte) { return (byte & 0xC0) == 0x80; }

}  // namespace

void PieceTable::add(const std::string &piece, std::uint32_t id) {
  const auto *const bytes = reinterpret_cast<const std::uint8_t *>(piece.data());
  added_.push_back({hash_of(bytes, piece.size()), static_cast<std::uint32_t>(spellings_.size()),
                    static_cast<std::uint32_t>(piece.size()), id});
  spellings_ += piece;
  longest_ = std::max(longest_, piece.size());
}

void PieceTable::build() {
  std::size_t size = 2;
  while (size < 2 * added_.size() + 1) size *= 2;
  slots_.assign(size, Slot{0, 0, 0, kNone});
  for (const Slot &piece : added_) {
    std::size_t slot = piece.hash & (size - 1);
    while (slots_[slot].id != kNone) slot = (slot + 1) & (size - 1);
    slots_[slot] = piece;
  }
  added_.clear();
  added_.shrink_to_fit();
}

std::uint32_t PieceTable::find(const std::uint8_t *p, std::size_t size) const {
  const std::uint64_t hash = hash_of(p, size);
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t slot = hash & mask;; slot = (slot + 1) & mask) {
    const Slot &found = slots_[slot];
    if (found.id == kNone) return kNone;
    if (found.hash == hash && found.size == size &&
        std::memcmp(spellings_.data() + found.at, p, size) == 0) {
      return found.id;
    }
  }
}

WordPiece::WordPiece(const std::vector<std::string> &vocabulary, std::uint32_t unknown,
                     MakePage make_page)
    : unknown_(unknown), make_page_(std::move(make_page)) {
  for (std::size_t id = 0; id < vocabulary.size(); ++id) {
    const std::string &token = vocabulary[id];
    first_.add(token, static_cast<std::uint32_t>(id));
    if (token.compare(0, 2, "##") == 0) later_.add(token.substr(2), static_cast<std::uint32_t>(id));
  }
  first_.build();
  later_.build();
  for (std::atomic<const CharacterPage *> &page : pages_) page.store(nullptr);
  ascii_.fill(kWide);
  replaced_.fill(0);
  const CharacterPage &latin = page(0);
  for (std::size_t byte = 0; byte < 0x80; ++byte) {
    const CharacterPage::Character &character = latin.characters[byte];
    const std::string text = latin.text.substr(character.at, character.size);
    if (text.empty()) {
      ascii_[byte] = kDropped;
    } else if (text == " ") {
      ascii_[byte] = kBlank;
    } else if (text.size() == 1) {
      ascii_[byte] = kLetter;
      replaced_[byte] = static_cast<std::uint8_t>(text[0]);
    } else if (text.size() == 3 && text[0] == ' ' && text[1] != ' ' && text[2] == ' ') {
      ascii_[byte] = kSign;
      replaced_[byte] = static_cast<std::uint8_t>(text[1]);
    } else {
      throw std::invalid_argument("an ASCII character becomes at most one");
    }
  }
}

WordPiece::~WordPiece() {
  for (const std::atomic<const CharacterPage *> &page : pages_) delete page.load();
}

// Several threads may make the same page; one of them is kept.
const CharacterPage &WordPiece::page(std::uint32_t number) const {
  std::atomic<const CharacterPage *> &place = pages_[number];
  const CharacterPage *found = place.load(std::memory_order_acquire);
  if (found != nullptr) return *found;
  std::unique_ptr<CharacterPage> made = make_page_(number);
  if (place.compare_exchange_strong(found, made.get(), std::memory_order_acq_rel)) {
    return *made.release();
  }
  return *found;
}

// As `str.lower`: a capital sigma is final if a cased letter comes before it and none after it,
// characters between them that can be ignored left aside.
bool WordPiece::final_sigma(const std::uint8_t *text, const std::uint8_t *at,
                            const std::uint8_t *after, const std::uint8_t *end) const {
  const auto flags = [this](const std::uint8_t *p) {
    const std::uint32_t code = decode(p).code;
    return page(code >> 8).characters[code & 0xFF].flags;
  };
  bool cased = false;
  while (at > text) {
    do --at;
    while (continues(*at));
    const std::uint8_t found = flags(at);
    if ((found & CharacterPage::kTransparent) != 0) continue;
    cased = (found & CharacterPage::kCased) != 0;
    break;
  }
  if (!cased) return false;
  for (; after < end; after += decode(after).size) {
    const std::uint8_t found = flags(after);
    if ((found & CharacterPage::kTransparent) == 0) return (found & CharacterPage::kCased) == 0;
  }
  return true;
}

void WordPiece::pieces(const std::uint8_t *word, std::size_t size,
                       std::vector<std::uint32_t> &ids) const {
  ids.clear();
  for (std::size_t at = 0; at < size;) {
    const PieceTable &table = at == 0 ? first_ : later_;
    std::size_t length = std::min(size - at, table.longest());
    std::uint32_t id = PieceTable::kNone;
    for (; length > 0; --length) {
      if (at + length < size && continues(word[at + length])) continue;
      id = table.find(word + at, length);
      if (id != PieceTable::kNone) break;
    }
    if (length == 0) {
      ids.assign(1, unknown_);
      return;
    }
    ids.push_back(id);
    at += length;
  }
}

// The words of a text, gathered in groups and then looked up.
template <typename Token>
class WordPiece::Words {
 public:
  Words(const WordPiece &table, Session &session, Token *out)
      : table_(table), session_(session), out_(out) {}

  void letters(const std::uint8_t *p, std::size_t count) {  // ASCII
    const std::size_t room = characters_ < kLongest ? kLongest - characters_ : 0;
    const std::size_t kept = std::min(count, room);
    for (std::size_t i = 0; i < kept; ++i) end_[i] = table_.replaced_[p[i]];
    end_ += kept;
    characters_ += count;
  }

  void sign(std::uint8_t byte) {
    close();
    *end_++ = byte;
    characters_ = 1;
    close();
  }

  // A character's replacement: UTF-8, and blanks where words end.
  void replacement(const std::uint8_t *p, std::size_t size) {
    for (const std::uint8_t *const end = p + size; p < end; ++p) {
      if (*p == ' ') {
        close();
        continue;
      }
      if (!continues(*p)) ++characters_;
      if (characters_ <= kLongest) *end_++ = *p;
    }
  }

  // End the word, if there is one.
  void close() {
    if (characters_ == 0) return;
    if (characters_ > kLongest) {
      write();
      *out_++ = static_cast<Token>(table_.unknown_);
    } else {
      const auto size = static_cast<std::size_t>(end_ - begin_);
      group_[count_++] = session_.find(begin_, size, room_ + sizeof room_);
      begin_ = end_;
      if (count_ == Session::kGroup) write();
    }
    characters_ = 0;
  }

  // Write the ids of all words; return where they end.
  Token *write() {
    out_ = session_.write(group_, group_ + count_, out_,
                          [this](const std::uint8_t *word, std::size_t size,
                                 std::vector<std::uint32_t> &ids) {
                            table_.pieces(word, size, ids);
                          });
    count_ = 0;
    begin_ = end_ = room_;
    return out_;
  }

 private:
  const WordPiece &table_;
  Session &session_;
  Token *out_;
  Session::Word group_[Session::kGroup];
  std::size_t count_ = 0;
  std::size_t characters_ = 0;  // of the word that is being read
  std::uint8_t room_[(Session::kGroup + 1) * kLongest * 4 + 16];
  std::uint8_t *begin_ = room_;  // of that word
  std::uint8_t *end_ = room_;
};

template <typename Token>
std::size_t WordPiece::encode(Session &session, const std::uint8_t *text, const std::uint8_t *end,
                              const std::uint8_t * /* readable */, Token *out) const {
  Words<Token> words(*this, session, out);
  const std::uint8_t *sorted_end = nullptr;  // of a character with `kSorted` and dropped ones
  for (const std::uint8_t *p = text; p < end;) {
    switch (ascii_[*p]) {
      case kLetter: {
        const std::uint8_t *const first = p;
        do ++p;
        while (p < end && ascii_[*p] == kLetter);
        words.letters(first, static_cast<std::size_t>(p - first));
        break;
      }
      case kBlank:
        words.close();
        ++p;
        break;
      case kSign:
        words.sign(replaced_[*p++]);
        break;
      case kDropped:
        if (p == sorted_end) ++sorted_end;
        ++p;
        break;
      default: {
        const Decoded decoded = decode(p);
        const CharacterPage &found = page(decoded.code >> 8);
        const CharacterPage::Character &character = found.characters[decoded.code & 0xFF];
        const auto *const replacement =
            reinterpret_cast<const std::uint8_t *>(found.text.data()) + character.at;
        const std::uint8_t *const after = p + decoded.size;
        if ((character.flags & CharacterPage::kLeft) != 0) return kLeft;
        if ((character.flags & CharacterPage::kSorted) != 0) {
          if (p == sorted_end) return kLeft;
          sorted_end = after;
        } else if (p == sorted_end && character.size == 0) {
          sorted_end = after;
        }
        if ((character.flags & CharacterPage::kFinalSigma) != 0 &&
            final_sigma(text, p, after, end)) {
          words.replacement(reinterpret_cast<const std::uint8_t *>("\xCF\x82"), 2);
        } else {
          words.replacement(replacement, character.size);
        }
        p = after;
      }
    }
  }
  words.close();
  return static_cast<std::size_t>(words.write() - out);
}

template std::size_t WordPiece::encode<std::uint16_t>(Session &, const std::uint8_t *,
                                                      const std::uint8_t *, const std::uint8_t *,
                                                      std::uint16_t *) const;
template std::size_t WordPiece::encode<std::int32_t>(Session &, const std::uint8_t *,
                                                     const std::uint8_t *, const std::uint8_t *,
                                                     std::int32_t *) const;

}  // namespace lmcore

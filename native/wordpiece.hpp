// BERT's WordPiece of UTF-8 text: normalization and words by tables of characters, ids from a cache
// of words, and for words that are not in it the longest pieces from the left.
//
// The tables come from Python, a page of 256 characters at a time when one is first met, so that the
// interpreter's version of Unicode decides.  Their rules, and the twin in Python, are in
// lmcore/data/tokenizer/bert_pretokenizer.py and wordpiece.py.

#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "session.hpp"

namespace lmcore {

// What becomes of each character of a page.
struct CharacterPage {
  enum Flag : std::uint8_t {
    kCased = 1,        // a capital sigma after it is a final one
    kTransparent = 2,  // does not part a capital sigma from a cased letter
    kFinalSigma = 4,   // the text depends on the neighbors: sigma, or final sigma
    kLeft = 8,         // texts with this character are left to Python
    kSorted = 16,      // two of these in a row may change places: such a text is left to Python
  };
  struct Character {
    std::uint32_t at;  // in `text`: the character's replacement, a blank where a word ends
    std::uint16_t size;
    std::uint8_t flags;
  };
  std::array<Character, 256> characters;
  std::string text;
};

// From the spelling of a piece to its id.
class PieceTable {
 public:
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;

  void add(const std::string &piece, std::uint32_t id);
  // Make the table of all pieces that were added.
  void build();
  std::uint32_t find(const std::uint8_t *p, std::size_t size) const;
  std::size_t longest() const { return longest_; }

 private:
  struct Slot {
    std::uint64_t hash;
    std::uint32_t at, size, id;
  };
  std::vector<Slot> added_, slots_;
  std::string spellings_;
  std::size_t longest_ = 0;
};

class WordPiece {
 public:
  // Makes page `n`: the characters from 256 n on.
  using MakePage = std::function<std::unique_ptr<CharacterPage>(std::uint32_t)>;
  static constexpr std::size_t kLongest = 200;  // characters of a word; a longer one is unknown
  static constexpr std::size_t kLeft = ~std::size_t{0};

  WordPiece(const std::vector<std::string> &vocabulary, std::uint32_t unknown, MakePage make_page);
  ~WordPiece();
  WordPiece(const WordPiece &) = delete;
  WordPiece &operator=(const WordPiece &) = delete;

  // Write the ids of valid UTF-8 to `out`, which has room for one a byte and two more; return how
  // many, or `kLeft` where Python must encode this text.
  template <typename Token>
  std::size_t encode(Session &session, const std::uint8_t *text, const std::uint8_t *end,
                     const std::uint8_t *readable, Token *out) const;

  const SessionPool &sessions() const { return sessions_; }

 private:
  template <typename Token>
  class Words;
  enum Ascii : std::uint8_t { kLetter, kBlank, kSign, kDropped, kWide };
  static constexpr std::size_t kPages = 0x1100;

  const CharacterPage &page(std::uint32_t number) const;
  bool final_sigma(const std::uint8_t *text, const std::uint8_t *at, const std::uint8_t *after,
                   const std::uint8_t *end) const;
  // Leave the ids of a word in `ids`.
  void pieces(const std::uint8_t *word, std::size_t size, std::vector<std::uint32_t> &ids) const;

  PieceTable first_, later_;
  std::uint32_t unknown_;
  MakePage make_page_;
  std::array<std::uint8_t, 256> ascii_;      // the kind of each byte
  std::array<std::uint8_t, 256> replaced_;   // the letter or sign that an ASCII byte becomes
  mutable std::array<std::atomic<const CharacterPage *>, kPages> pages_;
  SessionPool sessions_;
};

}  // namespace lmcore

// Reads a `vocab.json`: one JSON object of tokens and ids.

#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

namespace lmcore {

class Vocabulary {
 public:
  struct Token {
    std::string_view spelt;  // in the text that was read, or in what is kept here
    std::uint32_t id;
  };
  static constexpr std::uint32_t kNone = 0xFFFFFFFFu;

  // False for what Python's reader might see otherwise, or refuse: anything but an object of
  // distinct tokens and distinct ids from 0 to 2^31 - 2, without lone surrogates.  `text` must
  // outlive the vocabulary.
  bool read(std::string_view text);

  const std::vector<Token> &tokens() const { return tokens_; }
  std::uint32_t greatest_id() const { return greatest_; }
  // The place in `tokens` of the token that the two parts make, or kNone.
  std::uint32_t find(std::string_view left, std::string_view right = {}) const;

 private:
  bool parse(std::string_view text);
  bool index();

  struct Slot {
    std::uint32_t hash, place;
  };

  std::vector<Token> tokens_;
  std::deque<std::string> unescaped_;
  std::vector<Slot> slots_;
  std::uint32_t greatest_ = 0;
};

}  // namespace lmcore

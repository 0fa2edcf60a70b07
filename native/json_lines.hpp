// Finds the texts of some keys in one line of JSON.
//
// It takes what is certainly right and leaves every other line to Python (lmcore/data/prepare/encode.py),
// which decides and words the error: broken or deeply nested JSON, escapes in keys, lone
// surrogates, numbers beyond the standard, text that is no UTF-8, a key that is missing.

#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace lmcore {

bool valid_utf8(const std::uint8_t *p, const std::uint8_t *end);

// The contents of a string between its quotes, escapes not yet replaced.
struct RawText {
  const std::uint8_t *begin = nullptr;
  const std::uint8_t *end = nullptr;
  bool escaped = false;
};

// Read the string whose opening quote is at `p`; return where it ends, after its closing quote, or
// null where it is broken.
const std::uint8_t *read_string(const std::uint8_t *p, const std::uint8_t *end, RawText *text);

class LineParser {
 public:
  enum class Line : std::uint8_t { kDocument, kBlank, kDoubtful };

  explicit LineParser(std::vector<std::string> keys)
      : texts_(keys.size()), keys_(std::move(keys)) {}

  // Read one line; of a document `texts` then has each key's.
  Line parse(const std::uint8_t *begin, const std::uint8_t *end);
  const std::vector<RawText> &texts() const { return texts_; }

 private:
  bool object(int depth, bool outermost);
  bool array(int depth);
  bool value(int depth);
  bool string(RawText *text) {
    p_ = read_string(p_, end_, text);
    return p_ != nullptr;
  }
  bool number();
  bool digits();
  bool word(const char *spelt);
  bool member(int depth, bool outermost);
  void blanks() {
    while (p_ < end_ && (*p_ == ' ' || *p_ == '\t' || *p_ == '\r' || *p_ == '\n')) ++p_;
  }
  bool next(std::uint8_t wanted) {
    blanks();
    if (p_ == end_ || *p_ != wanted) return false;
    ++p_;
    return true;
  }

  const std::uint8_t *p_ = nullptr;
  const std::uint8_t *end_ = nullptr;
  std::vector<RawText> texts_;
  std::vector<std::string> keys_;
};

// Write the text with its escapes replaced; false for a lone surrogate or a wrong escape.
// `out` has room for as many bytes as `text` has.
bool unescape(const RawText &text, std::uint8_t *out, std::size_t *size);

}  // namespace lmcore

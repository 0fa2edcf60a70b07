#include "json_lines.hpp"

#include <algorithm>

namespace lmcore {

namespace {

constexpr int kDepth = 64;             // Python goes deeper, up to a limit of its own
constexpr std::size_t kDigits = 4000;  // Python refuses longer numbers

bool continues(std::uint8_t byte) { return (byte & 0xC0) == 0x80; }

// From `p` to the next quote, backslash or control character.
const std::uint8_t *plain_end(const std::uint8_t *p, const std::uint8_t *end) {
#if defined(__SSE2__)
  const __m128i quote = _mm_set1_epi8('"');
  const __m128i slash = _mm_set1_epi8('\\');
  const __m128i control = _mm_set1_epi8(0x1F);
  while (end - p >= 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
    const __m128i low = _mm_cmpeq_epi8(_mm_max_epu8(bytes, control), control);
    const __m128i stops = _mm_or_si128(
        low, _mm_or_si128(_mm_cmpeq_epi8(bytes, quote), _mm_cmpeq_epi8(bytes, slash)));
    const int mask = _mm_movemask_epi8(stops);
    if (mask != 0) return p + __builtin_ctz(static_cast<unsigned>(mask));
    p += 16;
  }
#endif
  while (p < end && *p >= 0x20 && *p != '"' && *p != '\\') ++p;
  return p;
}

int hex(std::uint8_t c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// The four hexadecimal digits at `p`, or -1.
std::int32_t code_unit(const std::uint8_t *p, const std::uint8_t *end) {
  if (end - p < 4) return -1;
  std::int32_t unit = 0;
  for (int i = 0; i < 4; ++i) {
    const int digit = hex(p[i]);
    if (digit < 0) return -1;
    unit = unit * 16 + digit;
  }
  return unit;
}

std::uint8_t *put(std::uint32_t code, std::uint8_t *out) {
  const auto tail = [](std::uint32_t bits) {
    return static_cast<std::uint8_t>(0x80 | (bits & 0x3F));
  };
  if (code < 0x80) {
    *out++ = static_cast<std::uint8_t>(code);
  } else if (code < 0x800) {
    *out++ = static_cast<std::uint8_t>(0xC0 | code >> 6);
    *out++ = tail(code);
  } else if (code < 0x10000) {
    *out++ = static_cast<std::uint8_t>(0xE0 | code >> 12);
    *out++ = tail(code >> 6);
    *out++ = tail(code);
  } else {
    *out++ = static_cast<std::uint8_t>(0xF0 | code >> 18);
    *out++ = tail(code >> 12);
    *out++ = tail(code >> 6);
    *out++ = tail(code);
  }
  return out;
}

// The character that a single letter after a backslash stands for, or 0.
std::uint8_t escape_of(std::uint8_t letter) {
  switch (letter) {
    case '"':
    case '\\':
    case '/':
      return letter;
    case 'b':
      return '\b';
    case 'f':
      return '\f';
    case 'n':
      return '\n';
    case 'r':
      return '\r';
    case 't':
      return '\t';
    default:
      return 0;
  }
}

}  // namespace

bool valid_utf8(const std::uint8_t *p, const std::uint8_t *end) {
  while (p < end) {
    while (end - p >= 8) {
      std::uint64_t eight;
      std::memcpy(&eight, p, 8);
      if ((eight & 0x8080808080808080u) != 0) break;
      p += 8;
    }
    if (p == end) return true;
    const std::uint8_t lead = *p;
    if (lead < 0x80) {
      ++p;
      continue;
    }
    const std::ptrdiff_t left = end - p;
    if (lead >= 0xC2 && lead < 0xE0) {
      if (left < 2 || !continues(p[1])) return false;
      p += 2;
    } else if (lead >= 0xE0 && lead < 0xF0) {
      if (left < 3 || !continues(p[1]) || !continues(p[2])) return false;
      if ((lead == 0xE0 && p[1] < 0xA0) || (lead == 0xED && p[1] > 0x9F)) return false;
      p += 3;
    } else if (lead >= 0xF0 && lead < 0xF5) {
      if (left < 4 || !continues(p[1]) || !continues(p[2]) || !continues(p[3])) return false;
      if ((lead == 0xF0 && p[1] < 0x90) || (lead == 0xF4 && p[1] > 0x8F)) return false;
      p += 4;
    } else {
      return false;
    }
  }
  return true;
}

LineParser::Line LineParser::parse(const std::uint8_t *begin, const std::uint8_t *end) {
  p_ = begin;
  end_ = end;
  blanks();
  if (p_ == end_) return Line::kBlank;
  std::fill(texts_.begin(), texts_.end(), RawText{});
  if (*p_ != '{' || !object(0, true)) return Line::kDoubtful;
  blanks();
  if (p_ != end_ || !valid_utf8(begin, end)) return Line::kDoubtful;
  for (const RawText &text : texts_) {
    if (text.begin == nullptr) return Line::kDoubtful;
  }
  return Line::kDocument;
}

bool LineParser::object(int depth, bool outermost) {
  ++p_;
  if (next('}')) return true;
  do {
    if (!member(depth, outermost)) return false;
  } while (next(','));
  return next('}');
}

bool LineParser::member(int depth, bool outermost) {
  blanks();
  RawText key;
  if (p_ == end_ || *p_ != '"' || !string(&key) || key.escaped || !next(':')) return false;
  blanks();
  if (!outermost) return value(depth);
  const auto size = static_cast<std::size_t>(key.end - key.begin);
  for (std::size_t i = 0; i < keys_.size(); ++i) {
    if (keys_[i].size() != size || std::memcmp(keys_[i].data(), key.begin, size) != 0) continue;
    texts_[i] = RawText{};  // of a key that stands twice the last one counts
    if (p_ < end_ && *p_ == '"') return string(&texts_[i]);
    return false;
  }
  return value(depth);
}

bool LineParser::array(int depth) {
  ++p_;
  if (next(']')) return true;
  do {
    blanks();
    if (!value(depth)) return false;
  } while (next(','));
  return next(']');
}

bool LineParser::value(int depth) {
  if (p_ == end_ || depth >= kDepth) return false;
  switch (*p_) {
    case '"':
      return string(nullptr);
    case '{':
      return object(depth + 1, false);
    case '[':
      return array(depth + 1);
    case 't':
      return word("true");
    case 'f':
      return word("false");
    case 'n':
      return word("null");
    default:
      return number();
  }
}

const std::uint8_t *read_string(const std::uint8_t *p, const std::uint8_t *end, RawText *text) {
  const std::uint8_t *const begin = ++p;
  bool escaped = false;
  for (;;) {
    p = plain_end(p, end);
    if (p == end || *p < 0x20) return nullptr;
    if (*p == '"') break;
    escaped = true;
    if (end - p < 2) return nullptr;
    if (p[1] == 'u') {
      if (code_unit(p + 2, end) < 0) return nullptr;
      p += 6;
    } else if (escape_of(p[1]) != 0) {
      p += 2;
    } else {
      return nullptr;
    }
  }
  if (text != nullptr) *text = {begin, p, escaped};
  return p + 1;
}

bool LineParser::digits() {
  const std::uint8_t *const begin = p_;
  while (p_ < end_ && *p_ >= '0' && *p_ <= '9') ++p_;
  return p_ > begin && static_cast<std::size_t>(p_ - begin) <= kDigits;
}

bool LineParser::number() {
  if (p_ < end_ && *p_ == '-') ++p_;
  if (p_ < end_ && *p_ == '0') {
    ++p_;
  } else if (!digits()) {
    return false;
  }
  if (p_ < end_ && *p_ == '.') {
    ++p_;
    if (!digits()) return false;
  }
  if (p_ < end_ && (*p_ == 'e' || *p_ == 'E')) {
    ++p_;
    if (p_ < end_ && (*p_ == '+' || *p_ == '-')) ++p_;
    if (!digits()) return false;
  }
  return true;
}

bool LineParser::word(const char *spelt) {
  const std::size_t size = std::strlen(spelt);
  if (static_cast<std::size_t>(end_ - p_) < size || std::memcmp(p_, spelt, size) != 0) {
    return false;
  }
  p_ += size;
  return true;
}

bool unescape(const RawText &text, std::uint8_t *out, std::size_t *size) {
  const std::uint8_t *p = text.begin;
  const std::uint8_t *const end = text.end;
  const std::uint8_t *const first = out;
  while (p < end) {
    const auto *slash = static_cast<const std::uint8_t *>(
        std::memchr(p, '\\', static_cast<std::size_t>(end - p)));
    const std::uint8_t *const stop = slash == nullptr ? end : slash;
    std::memcpy(out, p, static_cast<std::size_t>(stop - p));
    out += stop - p;
    p = stop;
    if (p == end) break;
    if (p[1] != 'u') {
      *out++ = escape_of(p[1]);
      p += 2;
      continue;
    }
    auto code = static_cast<std::uint32_t>(code_unit(p + 2, end));
    p += 6;
    if (code >= 0xD800 && code < 0xE000) {
      if (code >= 0xDC00 || end - p < 6 || p[0] != '\\' || p[1] != 'u') return false;
      const std::int32_t low = code_unit(p + 2, end);
      if (low < 0xDC00 || low > 0xDFFF) return false;
      code = 0x10000 + ((code - 0xD800) << 10) + (static_cast<std::uint32_t>(low) - 0xDC00);
      p += 6;
    }
    out = put(code, out);
  }
  *size = static_cast<std::size_t>(out - first);
  return true;
}

}  // namespace lmcore

// From JSON lines or strings to token ids, with the interpreter free meanwhile.
//
// lmcore/data/tokenizer/native.py is the way here from Python; the twins that give the same ids
// are in lmcore/data/tokenizer/gpt2.py and wordpiece.py, and lmcore/data/prepare/encode.py.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "bpe_files.hpp"
#include "byte_bpe.hpp"
#include "json_lines.hpp"
#include "registration.hpp"
#include "session.hpp"
#include "wordpiece.hpp"

namespace py = pybind11;

namespace {

using lmcore::ByteBpe;
using lmcore::CharacterPage;
using lmcore::LineParser;
using lmcore::RawText;
using lmcore::Session;
using lmcore::SessionPool;
using lmcore::WordPiece;

constexpr std::size_t kSlack = 16;

// Numbers that grow, and go to numpy without a copy.
template <typename T>
class Column {
 public:
  Column() = default;
  Column(const Column &) = delete;
  Column &operator=(const Column &) = delete;
  Column(Column &&other) noexcept { *this = std::move(other); }
  Column &operator=(Column &&other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    std::swap(room_, other.room_);
    return *this;
  }
  ~Column() { std::free(data_); }

  std::size_t size() const { return size_; }
  // Room for `more` at the end; `grow` then takes what was written there.
  T *room(std::size_t more) {
    if (size_ + more > room_) {
      const std::size_t wanted = std::max(size_ + more, room_ + room_ / 2);
      void *larger = std::realloc(data_, wanted * sizeof(T));
      if (larger == nullptr) throw std::bad_alloc();
      data_ = static_cast<T *>(larger);
      room_ = wanted;
    }
    return data_ + size_;
  }
  void grow(std::size_t more) { size_ += more; }
  void add(T value) {
    *room(1) = value;
    ++size_;
  }

  py::array_t<T> to_array() {
    // What was asked for and not written goes back: a block's result may wait for its turn.
    void *fitting = std::realloc(data_, std::max<std::size_t>(1, size_ * sizeof(T)));
    if (fitting == nullptr) throw std::bad_alloc();
    py::capsule owner(fitting, [](void *data) { std::free(data); });
    const auto size = static_cast<py::ssize_t>(size_);
    data_ = nullptr;
    size_ = room_ = 0;
    return py::array_t<T>(size, static_cast<T *>(fitting), owner);
  }

 private:
  T *data_ = nullptr;
  std::size_t size_ = 0;
  std::size_t room_ = 0;
};

class Borrowed {
 public:
  explicit Borrowed(const SessionPool &pool) : pool_(pool), session_(pool.borrow()) {}
  ~Borrowed() { pool_.give_back(std::move(session_)); }
  Borrowed(const Borrowed &) = delete;
  Borrowed &operator=(const Borrowed &) = delete;
  Session &operator*() const { return *session_; }

 private:
  const SessionPool &pool_;
  std::unique_ptr<Session> session_;
};

struct Piece {
  const std::uint8_t *text;
  std::size_t size;
};

// What the lines of a block gave, for each key.
template <typename Token>
struct Block {
  explicit Block(std::size_t num_keys) : tokens(num_keys), lengths(num_keys), empty(num_keys, 0) {}
  std::vector<Column<Token>> tokens;
  std::vector<Column<std::int32_t>> lengths;
  std::vector<std::int64_t> empty;
  // For each doubtful line: its number in the block, begin, end, then for each key how many
  // tokens and lengths came before it.
  Column<std::int64_t> doubts;
  std::int64_t documents = 0;
  std::int64_t lines = 0;
};

template <typename Encoder, typename Token>
class BlockEncoder {
 public:
  BlockEncoder(const Encoder &encoder, std::vector<std::string> keys, std::int64_t end_id)
      : encoder_(encoder),
        session_(encoder.sessions()),
        parser_(std::move(keys)),
        counts_(parser_.texts().size()),
        end_id_(end_id) {}

  void encode(const std::uint8_t *begin, const std::uint8_t *end, Block<Token> &block) {
    for (const std::uint8_t *p = begin; p < end; ++block.lines) {
      const auto *newline = static_cast<const std::uint8_t *>(
          std::memchr(p, '\n', static_cast<std::size_t>(end - p)));
      const std::uint8_t *const stop = newline == nullptr ? end : newline + 1;
      const LineParser::Line line = parser_.parse(p, stop);
      if (line == LineParser::Line::kDoubtful ||
          (line == LineParser::Line::kDocument && !document(end, block))) {
        doubt(p - begin, stop - begin, block);
      }
      p = stop;
    }
  }

 private:
  bool document(const std::uint8_t *readable, Block<Token> &block) {
    const std::vector<RawText> &texts = parser_.texts();
    unescaped_.resize(std::max(unescaped_.size(), texts.size()));
    pieces_.clear();
    for (std::size_t i = 0; i < texts.size(); ++i) {  // all of them before anything is kept
      const RawText &text = texts[i];
      auto size = static_cast<std::size_t>(text.end - text.begin);
      if (!text.escaped) {
        pieces_.push_back({text.begin, size});
        continue;
      }
      std::vector<std::uint8_t> &room = unescaped_[i];
      if (room.size() < size + kSlack) room.resize(size + size / 2 + kSlack);
      if (!lmcore::unescape(text, room.data(), &size)) return false;
      pieces_.push_back({room.data(), size});
    }
    for (std::size_t i = 0; i < texts.size(); ++i) {
      const Piece &piece = pieces_[i];
      const std::uint8_t *const limit =
          texts[i].escaped ? piece.text + piece.size + kSlack : readable;
      Column<Token> &tokens = block.tokens[i];
      Token *const out = tokens.room(piece.size + 3);
      counts_[i] = encoder_.encode(*session_, piece.text, piece.text + piece.size, limit, out);
      if (counts_[i] == WordPiece::kLeft) return false;
    }
    for (std::size_t i = 0; i < texts.size(); ++i) {
      Column<Token> &tokens = block.tokens[i];
      std::size_t count = counts_[i];
      if (count == 0) {
        ++block.empty[i];
        continue;
      }
      if (end_id_ >= 0) tokens.room(0)[count++] = static_cast<Token>(end_id_);
      if (count > 0x7FFFFFFF) throw std::length_error("a document of more than 2^31 - 1 tokens");
      tokens.grow(count);
      block.lengths[i].add(static_cast<std::int32_t>(count));
    }
    ++block.documents;
    return true;
  }

  void doubt(std::ptrdiff_t begin, std::ptrdiff_t end, Block<Token> &block) {
    block.doubts.add(block.lines);
    block.doubts.add(begin);
    block.doubts.add(end);
    for (std::size_t i = 0; i < block.tokens.size(); ++i) {
      block.doubts.add(static_cast<std::int64_t>(block.tokens[i].size()));
      block.doubts.add(static_cast<std::int64_t>(block.lengths[i].size()));
    }
  }

  const Encoder &encoder_;
  Borrowed session_;
  LineParser parser_;
  std::vector<std::size_t> counts_;
  std::int64_t end_id_;
  std::vector<std::vector<std::uint8_t>> unescaped_;
  std::vector<Piece> pieces_;
};

template <typename Encoder, typename Token>
py::tuple encode_block(const Encoder &encoder, const py::bytes &data,
                       std::vector<std::string> keys, std::int64_t end_id) {
  char *begin = nullptr;
  py::ssize_t size = 0;
  if (PyBytes_AsStringAndSize(data.ptr(), &begin, &size) != 0) throw py::error_already_set();
  const std::size_t num_keys = keys.size();
  Block<Token> block(num_keys);
  {
    py::gil_scoped_release release;
    const auto *first = reinterpret_cast<const std::uint8_t *>(begin);
    BlockEncoder<Encoder, Token>(encoder, std::move(keys), end_id)
        .encode(first, first + size, block);
  }
  py::list columns;
  for (std::size_t i = 0; i < num_keys; ++i) {
    columns.append(py::make_tuple(block.tokens[i].to_array(), block.lengths[i].to_array(),
                                  block.empty[i]));
  }
  const auto width = static_cast<py::ssize_t>(3 + 2 * num_keys);
  const auto doubts = static_cast<py::ssize_t>(block.doubts.size()) / width;
  return py::make_tuple(columns, block.documents, block.lines,
                        block.doubts.to_array().reshape({doubts, width}));
}

// UTF-8 of every string; raises UnicodeEncodeError for a lone surrogate.
std::vector<Piece> utf8_of(const py::sequence &texts, std::vector<py::object> &kept) {
  std::vector<Piece> pieces;
  pieces.reserve(texts.size());
  for (const py::handle item : texts) {
    py::ssize_t size = 0;
    const char *data = PyUnicode_AsUTF8AndSize(item.ptr(), &size);
    if (data == nullptr) throw py::error_already_set();
    kept.push_back(py::reinterpret_borrow<py::object>(item));
    pieces.push_back({reinterpret_cast<const std::uint8_t *>(data),
                      static_cast<std::size_t>(size)});
  }
  return pieces;
}

template <typename Encoder>
void encode_pieces(const Encoder &encoder, const Piece *first, const Piece *last,
                   Column<std::int32_t> &tokens, std::int64_t *lengths) {
  const Borrowed session(encoder.sessions());
  for (const Piece *piece = first; piece < last; ++piece) {
    const std::uint8_t *const end = piece->text + piece->size;
    std::int32_t *const out = tokens.room(piece->size + 2);
    const std::size_t count = encoder.encode(*session, piece->text, end, end, out);
    const bool left = count == WordPiece::kLeft;
    if (!left) tokens.grow(count);
    *lengths++ = left ? -1 : static_cast<std::int64_t>(count);
  }
}

// The ids of each string, from one thread or several: one array for each thread, and all lengths;
// the length of a text that is left to Python is -1.
template <typename Encoder>
py::tuple encode_texts(const Encoder &encoder, const py::sequence &texts, int num_threads) {
  std::vector<py::object> kept;
  const std::vector<Piece> pieces = utf8_of(texts, kept);
  const auto threads = static_cast<std::size_t>(std::max(1, num_threads));
  std::vector<Column<std::int32_t>> tokens(threads);
  py::array_t<std::int64_t> lengths(static_cast<py::ssize_t>(pieces.size()));
  std::int64_t *const lengths_out = lengths.mutable_data();
  {
    py::gil_scoped_release release;
    std::size_t total = 0;
    for (const Piece &piece : pieces) total += piece.size;
    std::vector<std::thread> pool;
    std::vector<std::exception_ptr> failed(threads);
    std::size_t at = 0;
    std::size_t seen = 0;
    for (std::size_t t = 0; t < threads; ++t) {
      const std::size_t from = at;
      while (at < pieces.size() && (t + 1 == threads || seen < total / threads * (t + 1))) {
        seen += pieces[at++].size;
      }
      const auto work = [&, t, from, to = at] {
        try {
          encode_pieces(encoder, pieces.data() + from, pieces.data() + to, tokens[t],
                        lengths_out + from);
        } catch (...) {
          failed[t] = std::current_exception();
        }
      };
      if (t + 1 == threads) {
        work();
      } else {
        pool.emplace_back(work);
      }
    }
    for (std::thread &thread : pool) thread.join();
    for (const std::exception_ptr &failure : failed) {
      if (failure) std::rethrow_exception(failure);
    }
  }
  py::list arrays;
  for (Column<std::int32_t> &column : tokens) arrays.append(column.to_array());
  return py::make_tuple(arrays, lengths);
}

std::unique_ptr<ByteBpe> make_bpe(
    const py::array_t<std::int32_t, py::array::c_style> &byte_ids,
    const py::array_t<std::int32_t, py::array::c_style> &merges) {
  if (byte_ids.ndim() != 1 || byte_ids.size() != 256) {
    throw std::invalid_argument("there are 256 bytes");
  }
  if (merges.ndim() != 2 || merges.shape(1) != 3) {
    throw std::invalid_argument("a rule is three ids: left, right and merged");
  }
  std::array<std::uint32_t, 256> bytes{};
  for (std::size_t i = 0; i < 256; ++i) {
    bytes[i] = static_cast<std::uint32_t>(byte_ids.data()[i]);
  }
  return std::make_unique<ByteBpe>(bytes, merges.data(),
                                   static_cast<std::size_t>(merges.shape(0)));
}

// The encoder of the contents of `vocab.json` and `merges.txt`, the size of the vocabulary and the
// id of the token `end`, or None; None for all where Python must look first.
py::object bpe_of_files(const py::bytes &vocabulary, const py::bytes &merges,
                        const py::bytes &end) {
  const std::string_view texts[] = {vocabulary, merges, end};
  lmcore::BpeFiles files;
  std::unique_ptr<ByteBpe> bpe;
  {
    py::gil_scoped_release release;
    if (lmcore::read_bpe_files(texts[0], texts[1], texts[2], &files)) {
      bpe = std::make_unique<ByteBpe>(files.byte_ids, files.triples.data(),
                                      files.triples.size() / 3);
    }
  }
  if (bpe == nullptr) return py::none();
  const py::object end_id = files.end_id < 0 ? py::object(py::none()) : py::int_(files.end_id);
  return py::make_tuple(std::move(bpe), files.vocab_size, end_id);
}

// `make_page(n)` returns, for each character from 256 n on, its replacement and its flags.
std::unique_ptr<CharacterPage> page_from(const py::object &make_page, std::uint32_t number) {
  const py::gil_scoped_acquire acquire;
  const auto [texts, flags] =
      make_page(number).cast<std::pair<std::vector<std::string>, std::string>>();
  auto page = std::make_unique<CharacterPage>();
  if (texts.size() != page->characters.size() || flags.size() != page->characters.size()) {
    throw std::invalid_argument("a page has 256 characters");
  }
  for (std::size_t i = 0; i < texts.size(); ++i) {
    if (texts[i].size() > 0xFFFF) throw std::invalid_argument("a replacement is too long");
    page->characters[i] = {static_cast<std::uint32_t>(page->text.size()),
                           static_cast<std::uint16_t>(texts[i].size()),
                           static_cast<std::uint8_t>(flags[i])};
    page->text += texts[i];
  }
  return page;
}

std::unique_ptr<WordPiece> make_wordpiece(const std::vector<std::string> &vocabulary,
                                          std::uint32_t unknown, py::object make_page) {
  return std::make_unique<WordPiece>(
      vocabulary, unknown, [make_page = std::move(make_page)](std::uint32_t number) {
        return page_from(make_page, number);
      });
}

template <typename Encoder>
void add_encoding(py::class_<Encoder> &encoder) {
  encoder.def("encode_texts", &encode_texts<Encoder>, py::arg("texts"), py::arg("threads"))
      .def("encode_block_narrow", &encode_block<Encoder, std::uint16_t>, py::arg("data"),
           py::arg("keys"), py::arg("end_id"))
      .def("encode_block_wide", &encode_block<Encoder, std::int32_t>, py::arg("data"),
           py::arg("keys"), py::arg("end_id"));
}

}  // namespace

namespace lmcore {

void register_text(py::module_ &module) {
  py::class_<ByteBpe> bpe(module, "ByteBpe");
  bpe.def(py::init(&make_bpe), py::arg("byte_ids"), py::arg("merges"))
      .def_static("of_files", &bpe_of_files, py::arg("vocabulary"), py::arg("merges"),
                  py::arg("end"));
  add_encoding(bpe);
  py::class_<WordPiece> wordpiece(module, "WordPiece");
  wordpiece.def(py::init(&make_wordpiece), py::arg("vocabulary"), py::arg("unknown"),
                py::arg("make_page"));
  add_encoding(wordpiece);
}

}  // namespace lmcore

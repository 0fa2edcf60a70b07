// Which sentences make a sample: lmcore/data/dataset/sentence_index.py.
//
// BERT and T5 (pairs and single segments of a random length now and then), and blocks with titles
// for the inverse cloze task.  The numbers are those of std::mt19937 and std::mt19937_64, which the
// C++ standard fixes; what is made of them stands here, for no distribution of it is fixed.

#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <cstdlib>
#include <limits>
#include <new>
#include <random>
#include <utility>

#include "array.hpp"
#include "mersenne_twister.hpp"
#include "registration.hpp"

namespace lmcore {
namespace {

constexpr std::int32_t kLongestSentence = 512;  // a document with a longer one is left out
constexpr std::int64_t kDocuments = 64;  // are looked through together
constexpr std::uint64_t kReserved = std::uint64_t{1} << 32;  // more rows get memory as they come

struct Corpus {
  Values<std::int64_t> documents;  // the first sentence of each, and where the last one ends
  Values<std::int32_t> sizes;      // tokens of each sentence
};

Corpus checked_corpus(const py::array &documents, const py::array &sizes) {
  const Corpus corpus{values_of<std::int64_t>(documents, "documents"),
                      values_of<std::int32_t>(sizes, "sizes")};
  require(corpus.documents.count >= 1, "documents is empty");
  std::int64_t before = 0;
  for (std::int64_t i = 0; i < corpus.documents.count; ++i) {
    require(corpus.documents[i] >= before && corpus.documents[i] <= corpus.sizes.count,
            "documents does not rise within the sentences");
    before = corpus.documents[i];
  }
  return corpus;
}

bool has_long_sentence(const Corpus &corpus, std::int64_t first, std::int64_t last) {
  std::int32_t longest = 0;
  for (std::int64_t sentence = first; sentence < last; ++sentence) {
    longest = std::max(longest, corpus.sizes[sentence]);
  }
  return longest > kLongestSentence;
}

// Rows of `kWidth` entries.
template <typename Entry, int kWidth>
class Rows {
 public:
  Rows() = default;
  Rows(const Rows &) = delete;
  Rows &operator=(const Rows &) = delete;
  ~Rows() { std::free(data_); }

  std::int64_t count() const { return count_; }
  Entry *data() { return data_; }

  // Makes room for so many rows in all; memory that is not touched costs nothing.
  void reserve(std::int64_t rows) {
    if (rows <= room_) {
      return;
    }
    rows = std::max(rows, room_ + room_ / 2);
    const std::size_t size = static_cast<std::size_t>(rows) * kWidth * sizeof(Entry);
    auto *const data = static_cast<Entry *>(std::realloc(data_, size));
    if (data == nullptr) {
      throw std::bad_alloc();
    }
    data_ = data;
    room_ = rows;
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    // Rows that are swapped at random would miss small pages' addresses; a refusal changes nothing.
    const auto begin = (reinterpret_cast<std::uintptr_t>(data) + kHuge - 1) / kHuge * kHuge;
    const auto end = (reinterpret_cast<std::uintptr_t>(data) + size) / kHuge * kHuge;
    if (end > begin) {
      madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
    }
#endif
  }

  // Appends a row, for which there is room.
  template <typename... Values>
  void add(Values... values) {
    static_assert(sizeof...(Values) == kWidth, "a row's entries");
    Entry *entry = data_ + count_ * kWidth;
    ((*entry++ = static_cast<Entry>(values)), ...);
    ++count_;
  }

  // Gives the memory to an array.
  py::array as_array() {
    const py::capsule owner(data_, [](void *memory) { std::free(memory); });
    Entry *const data = data_;
    data_ = nullptr;
    return py::array_t<Entry>({static_cast<py::ssize_t>(count_), py::ssize_t{kWidth}}, data, owner);
  }

 private:
  static constexpr std::uintptr_t kHuge = std::uintptr_t{2} << 20;

  Entry *data_ = nullptr;
  std::int64_t count_ = 0;
  std::int64_t room_ = 0;
};

// The length of a sample: now and then (once in `ratio` times) a shorter one.
class TargetLength {
 public:
  TargetLength(std::uint32_t longest, std::uint32_t ratio, std::uint32_t seed)
      : longest_(longest), ratio_(ratio) {
    Twister::seed(seed, key_);
    std::fill(lengths_, lengths_ + Twister::kSize, longest);
    if (ratio == 0) {
      return;
    }
    while ((ratio >> twos_ & 1) == 0) {
      ++twos_;
    }
    const std::uint32_t odd = ratio >> twos_;
    inverse_ = odd;  // right in three bits, and in twice as many after each step
    for (int bits = 3; bits < 32; bits *= 2) {
      inverse_ *= 2 - odd * inverse_;
    }
  }

  std::uint32_t next() {
    if (position_ == Twister::kSize) {
      draw();
    }
    return lengths_[position_++];
  }

 private:
  using Twister = MersenneTwister<std::mt19937>;

  // A number is divisible by odd * 2^twos if its product with the inverse of `odd`, turned by
  // `twos` bits, is at most the largest quotient (Granlund and Montgomery 1994): no division.
  void draw() {
    position_ = 0;
    if (ratio_ == 0) {
      return;
    }
    std::uint32_t numbers[Twister::kSize];
    Twister::advance(key_);
    Twister::temper(key_, numbers);
    const std::uint32_t largest = std::numeric_limits<std::uint32_t>::max() / ratio_;
    const std::uint32_t right = twos_;
    const std::uint32_t left = (32 - twos_) & 31;
    int short_ones[Twister::kSize];
    int count = 0;
    for (int i = 0; i < Twister::kSize; ++i) {
      const std::uint32_t product = numbers[i] * inverse_;
      lengths_[i] = longest_;
      short_ones[count] = i;
      count += (product >> right | product << left) <= largest ? 1 : 0;
    }
    for (int i = 0; i < count; ++i) {
      lengths_[short_ones[i]] = 2 + numbers[short_ones[i]] % (longest_ - 1);
    }
  }

  std::uint32_t longest_;
  std::uint32_t ratio_;
  std::uint32_t twos_ = 0;
  std::uint32_t inverse_ = 0;
  int position_ = Twister::kSize;
  std::uint32_t key_[Twister::kSize];
  std::uint32_t lengths_[Twister::kSize];
};

// Appends (first sentence, end, target length) for every sample of the sentences of a document.
// `tokens_left`: the tokens of all sentences, or more than these.
template <typename Entry>
void map_segments(const Corpus &corpus, std::int64_t first, std::int64_t last,
                  std::int64_t tokens_left, std::int64_t least_sentences, TargetLength &lengths,
                  Rows<Entry, 3> &rows) {
  std::int64_t start = first;
  std::int64_t tokens = 0;
  std::int64_t target = lengths.next();
  // A sample with less than its target ends with the document: no need to look at each sentence.
  for (std::int64_t sentence = first; tokens_left >= target && last - sentence > 2; ++sentence) {
    tokens += corpus.sizes[sentence];
    if (tokens >= target && sentence + 1 - start >= least_sentences) {
      rows.add(start, sentence + 1, target);
      start = sentence + 1;
      tokens_left -= tokens;
      tokens = 0;
      target = lengths.next();
    }
  }
  rows.add(start, last, target);
  lengths.next();  // as Megatron, which draws for a sample that could follow
}

// The same for the documents from `begin` to `end`.
template <typename Entry>
void map_segments_of(const Corpus &corpus, std::int64_t begin, std::int64_t end,
                     std::int64_t least_sentences, TargetLength &lengths, Rows<Entry, 3> &rows) {
  std::uint32_t plain = 1;  // no sentence is long, and none has a size below zero
  for (std::int64_t i = corpus.documents[begin]; i < corpus.documents[end]; ++i) {
    plain &= static_cast<std::uint32_t>(corpus.sizes[i]) <= kLongestSentence ? 1U : 0U;
  }
  for (std::int64_t document = begin; document < end; ++document) {
    const std::int64_t first = corpus.documents[document];
    const std::int64_t last = corpus.documents[document + 1];
    std::int64_t tokens = 0;
    if (plain != 0) {
      for (std::int64_t sentence = first; sentence < last; ++sentence) {
        tokens += corpus.sizes[sentence];
      }
    } else {
      tokens = std::numeric_limits<std::int64_t>::max() / 2;
      // A sentence that is alone may be long.
      if (last - first > 1 && has_long_sentence(corpus, first, last)) {
        continue;
      }
    }
    if (last - first >= least_sentences) {
      map_segments(corpus, first, last, tokens, least_sentences, lengths, rows);
    }
  }
}

// Appends (first sentence, end, document, block) for every block of a document.
template <typename Entry>
void map_blocks(const Corpus &corpus, std::int64_t document, std::int64_t least_sentences,
                std::int64_t target, std::int64_t first_row, Rows<Entry, 4> &rows) {
  const std::int64_t first = corpus.documents[document];
  const std::int64_t last = corpus.documents[document + 1];
  if (last - first < least_sentences || has_long_sentence(corpus, first, last)) {
    return;
  }
  std::int64_t start = first;
  std::int64_t tokens = 0;
  for (std::int64_t sentence = first; sentence < last; ++sentence) {
    tokens += corpus.sizes[sentence];
    const std::int64_t left = last - sentence - 1;
    const bool full = tokens >= target && left >= least_sentences &&
                      sentence + 1 - start >= least_sentences;
    if (full || left == 0) {
      rows.add(start, sentence + 1, document, rows.count() - first_row);
      start = sentence + 1;
      tokens = 0;
    }
  }
}

// Swaps each row, from the last one down, with one at or before it.  The places are drawn ahead, so
// that the processor fetches them meanwhile.
template <typename Entry, int kWidth>
void shuffle_rows(Rows<Entry, kWidth> &rows, std::uint64_t seed) {
  using Twister = MersenneTwister<std::mt19937_64>;
  struct Row {
    Entry values[kWidth];
  };
  static_assert(sizeof(Row) == kWidth * sizeof(Entry), "rows lie without gaps");
  auto *const all = reinterpret_cast<Row *>(rows.data());
  std::uint64_t key[Twister::kSize];
  std::uint64_t places[Twister::kSize];
  Twister::seed(seed, key);
  for (std::int64_t row = rows.count() - 1; row > 0;) {
    Twister::advance(key);
    Twister::temper(key, places);
    const int drawn = static_cast<int>(std::min<std::int64_t>(Twister::kSize, row));
    for (int i = 0; i < drawn; ++i) {
      places[i] %= static_cast<std::uint64_t>(row - i + 1);
      __builtin_prefetch(all + places[i], 1);
    }
    for (int i = 0; i < drawn; ++i, --row) {
      std::swap(all[row], all[places[i]]);
    }
  }
}

// Maps epochs until there are `num_samples` rows; an epoch without any ends it.  `map` appends the
// rows of the documents from its first argument to its second; the third is the epoch's first row.
template <typename Entry, int kWidth, typename Map>
py::array map_epochs(const Corpus &corpus, std::int64_t num_epochs, std::uint64_t num_samples,
                     std::int64_t least_sentences, std::uint64_t shuffle_seed,
                     const Progress &progress, const Map &map) {
  Rows<Entry, kWidth> rows;
  const std::int64_t documents = corpus.documents.count - 1;
  // At most so many rows are made of these documents: each but a document's last is of
  // `least_sentences`.
  const auto most = [&](std::int64_t begin, std::int64_t end) {
    return (corpus.documents[end] - corpus.documents[begin]) / least_sentences + end - begin;
  };
  {
    py::gil_scoped_release release;
    rows.reserve(most(0, documents) + 1);  // an array needs memory, even one without rows
    for (std::int64_t epoch = 0; epoch < num_epochs; ++epoch) {
      const std::int64_t before = rows.count();
      if (static_cast<std::uint64_t>(before) >= num_samples) {
        break;
      }
      for (std::int64_t begin = 0; begin < documents; begin += kDocuments) {
        const std::int64_t end = std::min(begin + kDocuments, documents);
        rows.reserve(rows.count() + most(begin, end));
        map(begin, end, before, rows);
      }
      if (rows.count() == before) {
        break;
      }
      progress.add(rows.count() - before);
      if (epoch == 0 && num_epochs > 1 && num_samples < kReserved) {
        rows.reserve(static_cast<std::int64_t>(num_samples) + rows.count());
      }
    }
    shuffle_rows(rows, shuffle_seed);
  }
  return rows.as_array();
}

void check_request(std::int64_t num_epochs, std::int64_t longest, std::int64_t seed) {
  require(num_epochs >= 1 && longest >= 2 && longest <= std::numeric_limits<std::int32_t>::max() &&
              seed >= 0 && seed <= std::numeric_limits<std::int32_t>::max(),
          "number of epochs, length or seed out of range");
}

template <typename Entry>
py::array segment_mapping(const Corpus &corpus, std::int64_t num_epochs, std::uint64_t num_samples,
                          std::uint32_t longest, std::uint32_t ratio, std::uint32_t seed,
                          std::int64_t least_sentences, const Progress &progress) {
  TargetLength lengths(longest, ratio, seed);
  return map_epochs<Entry, 3>(
      corpus, num_epochs, num_samples, least_sentences, std::uint64_t{seed} + 1, progress,
      [&](std::int64_t begin, std::int64_t end, std::int64_t, Rows<Entry, 3> &rows) {
        map_segments_of(corpus, begin, end, least_sentences, lengths, rows);
      });
}

py::array build_segment_mapping(const py::array &documents, const py::array &sizes,
                                std::int64_t num_epochs, std::uint64_t num_samples,
                                std::int64_t longest, std::uint32_t short_ratio, std::int64_t seed,
                                std::int64_t least_sentences, const py::object &counter) {
  const Corpus corpus = checked_corpus(documents, sizes);
  const Progress progress(counter);
  check_request(num_epochs, longest, seed);
  require(least_sentences >= 1, "a sample has at least one sentence");
  const auto build = corpus.sizes.count > std::numeric_limits<std::uint32_t>::max()
                         ? &segment_mapping<std::uint64_t>
                         : &segment_mapping<std::uint32_t>;
  return build(corpus, num_epochs, num_samples, static_cast<std::uint32_t>(longest), short_ratio,
               static_cast<std::uint32_t>(seed), least_sentences, progress);
}

template <typename Entry>
py::array block_mapping(const Corpus &corpus, const Values<std::int32_t> &titles,
                        std::int64_t num_epochs, std::uint64_t num_samples, std::int64_t longest,
                        std::uint64_t seed, std::int64_t least_sentences,
                        const Progress &progress) {
  return map_epochs<Entry, 4>(
      corpus, num_epochs, num_samples, least_sentences, seed + 1, progress,
      [&](std::int64_t begin, std::int64_t end, std::int64_t first_row, Rows<Entry, 4> &rows) {
        for (std::int64_t document = begin; document < end; ++document) {
          map_blocks(corpus, document, least_sentences, longest - titles[document], first_row,
                     rows);
        }
      });
}

py::array build_block_mapping(const py::array &documents, const py::array &sizes,
                              const py::array &title_sizes, std::int64_t num_epochs,
                              std::uint64_t num_samples, std::int64_t longest, std::int64_t seed,
                              bool one_sentence, const py::object &counter) {
  const Corpus corpus = checked_corpus(documents, sizes);
  const auto titles = values_of<std::int32_t>(title_sizes, "title_sizes");
  const Progress progress(counter);
  check_request(num_epochs, longest, seed);
  require(titles.count == corpus.documents.count - 1, "there is one title for each document");
  const auto build = corpus.sizes.count > std::numeric_limits<std::uint32_t>::max()
                         ? &block_mapping<std::uint64_t>
                         : &block_mapping<std::uint32_t>;
  return build(corpus, titles, num_epochs, num_samples, longest, static_cast<std::uint64_t>(seed),
               one_sentence ? 1 : 2, progress);
}

}  // namespace

void register_sentence_mapping(py::module_ &module) {
  module.def("build_segment_mapping", &build_segment_mapping, py::arg("documents"),
             py::arg("sizes"), py::arg("num_epochs"), py::arg("num_samples"), py::arg("longest"),
             py::arg("short_ratio"), py::arg("seed"), py::arg("least_sentences"),
             py::arg("progress") = py::none());
  module.def("build_block_mapping", &build_block_mapping, py::arg("documents"), py::arg("sizes"),
             py::arg("title_sizes"), py::arg("num_epochs"), py::arg("num_samples"),
             py::arg("longest"), py::arg("seed"), py::arg("one_sentence"),
             py::arg("progress") = py::none());
}

}  // namespace lmcore

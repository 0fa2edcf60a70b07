// Which sentences make a sample: lmcore/data/dataset/sentence_index.py.
//
// BERT and T5 (pairs and single segments of a random length now and then), and blocks with titles
// for the inverse cloze task.  The generators are std::mt19937 and std::mt19937_64, whose numbers
// the C++ standard fixes; what is made of them stands here, for no distribution of it is fixed.

#include <limits>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "array.hpp"
#include "registration.hpp"

namespace lmcore {
namespace {

constexpr std::int32_t kLongestSentence = 512;  // a document with a longer one is left out
constexpr std::int64_t kAhead = 32;
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
  for (std::int64_t sentence = first; sentence < last; ++sentence) {
    if (corpus.sizes[sentence] > kLongestSentence) {
      return true;
    }
  }
  return false;
}

// The length of a sample: now and then (once in `ratio` times) a shorter one.
class TargetLength {
 public:
  TargetLength(std::uint32_t longest, std::uint32_t ratio, std::uint32_t seed)
      : longest_(longest), ratio_(ratio), random_(seed) {}

  std::uint32_t next() {
    if (ratio_ == 0) {
      return longest_;
    }
    const auto number = static_cast<std::uint32_t>(random_());
    return number % ratio_ == 0 ? 2 + number % (longest_ - 1) : longest_;
  }

 private:
  std::uint32_t longest_;
  std::uint32_t ratio_;
  std::mt19937 random_;
};

// Appends (first sentence, end, target length) for every sample of a document.
template <typename Entry>
void map_segments(const Corpus &corpus, std::int64_t document, std::int64_t least_sentences,
                  TargetLength &lengths, std::vector<Entry> &rows) {
  const std::int64_t first = corpus.documents[document];
  const std::int64_t last = corpus.documents[document + 1];
  // A sentence that is alone may be long.
  if (last - first < least_sentences ||
      (last - first > 1 && has_long_sentence(corpus, first, last))) {
    return;
  }
  std::int64_t start = first;
  std::int64_t tokens = 0;
  std::uint32_t target = lengths.next();
  for (std::int64_t sentence = first; sentence < last; ++sentence) {
    tokens += corpus.sizes[sentence];
    const std::int64_t left = last - sentence - 1;
    const bool full = tokens >= static_cast<std::int64_t>(target) && left > 1 &&
                      sentence + 1 - start >= least_sentences;
    if (full || left == 0) {
      rows.push_back(static_cast<Entry>(start));
      rows.push_back(static_cast<Entry>(sentence + 1));
      rows.push_back(static_cast<Entry>(target));
      start = sentence + 1;
      tokens = 0;
      target = lengths.next();
    }
  }
}

// Appends (first sentence, end, document, block) for every block of a document.
template <typename Entry>
void map_blocks(const Corpus &corpus, std::int64_t document, std::int64_t least_sentences,
                std::int64_t target, std::int64_t first_row, std::vector<Entry> &rows) {
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
      const auto block = static_cast<std::int64_t>(rows.size() / 4) - first_row;
      rows.push_back(static_cast<Entry>(start));
      rows.push_back(static_cast<Entry>(sentence + 1));
      rows.push_back(static_cast<Entry>(document));
      rows.push_back(static_cast<Entry>(block));
      start = sentence + 1;
      tokens = 0;
    }
  }
}

template <typename Entry, int kWidth>
void shuffle_rows(std::vector<Entry> &values, std::uint64_t seed) {
  struct Row {
    Entry values[kWidth];
  };
  static_assert(sizeof(Row) == kWidth * sizeof(Entry), "rows lie without gaps");
  const auto count = static_cast<std::int64_t>(values.size() / kWidth);
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> places(static_cast<std::size_t>(kAhead));
  const auto draw = [&](std::int64_t row) {
    const auto place = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(row + 1));
    places[static_cast<std::size_t>(row % kAhead)] = place;
    __builtin_prefetch(values.data() + place * kWidth, 1);
  };
  Row row_at_hand;
  Row row_at_place;
  std::int64_t drawn = count - 1;
  for (std::int64_t row = count - 1; row > 0; --row) {
    for (; drawn > 0 && drawn > row - kAhead; --drawn) {
      draw(drawn);
    }
    Entry *here = values.data() + row * kWidth;
    Entry *there = values.data() + places[static_cast<std::size_t>(row % kAhead)] * kWidth;
    std::memcpy(&row_at_hand, here, sizeof(Row));
    std::memcpy(&row_at_place, there, sizeof(Row));
    std::memcpy(here, &row_at_place, sizeof(Row));
    std::memcpy(there, &row_at_hand, sizeof(Row));
  }
}

// Gives the vector's memory to an array.
template <typename Entry>
py::array as_array(std::vector<Entry> &&values, py::ssize_t width) {
  auto owned = std::make_unique<std::vector<Entry>>(std::move(values));
  const auto rows = static_cast<py::ssize_t>(owned->size()) / width;
  Entry *data = owned->data();
  py::capsule owner(owned.get(),
                    [](void *memory) { delete static_cast<std::vector<Entry> *>(memory); });
  owned.release();
  return py::array_t<Entry>({rows, width}, data, owner);
}

// Maps epochs until there are `num_samples` rows; an epoch without any ends it.
template <typename Entry, int kWidth, typename MapDocument>
py::array map_epochs(const Corpus &corpus, std::int64_t num_epochs, std::uint64_t num_samples,
                     std::int64_t least_sentences, std::uint64_t shuffle_seed,
                     const Progress &progress, const MapDocument &map_document) {
  std::vector<Entry> rows;
  {
    py::gil_scoped_release release;
    // Memory that is not touched costs nothing; moving rows does.
    const std::int64_t sentences =
        corpus.documents[corpus.documents.count - 1] - corpus.documents[0];
    rows.reserve(static_cast<std::size_t>(kWidth * (sentences / least_sentences + 1)));
    for (std::int64_t epoch = 0; epoch < num_epochs; ++epoch) {
      const std::size_t before = rows.size();
      if (before / kWidth >= num_samples) {
        break;
      }
      for (std::int64_t document = 0; document + 1 < corpus.documents.count; ++document) {
        map_document(document, static_cast<std::int64_t>(before / kWidth), rows);
      }
      if (rows.size() == before) {
        break;
      }
      progress.add(static_cast<std::int64_t>((rows.size() - before) / kWidth));
      if (epoch == 0 && num_epochs > 1 && num_samples < kReserved) {
        rows.reserve(static_cast<std::size_t>(num_samples) * kWidth + 2 * rows.size());
      }
    }
    shuffle_rows<Entry, kWidth>(rows, shuffle_seed);
  }
  return as_array(std::move(rows), kWidth);
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
      [&](std::int64_t document, std::int64_t, std::vector<Entry> &rows) {
        map_segments(corpus, document, least_sentences, lengths, rows);
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
      [&](std::int64_t document, std::int64_t first_row, std::vector<Entry> &rows) {
        map_blocks(corpus, document, least_sentences, longest - titles[document], first_row, rows);
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

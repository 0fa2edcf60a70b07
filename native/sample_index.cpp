// Where GPT samples start in the stream of documents: lmcore/data/gpt_index.py.
//
// The lengths of the documents lie in random order, so that the time goes into fetching them.  They
// are fetched once, by several threads; each of these then cuts its own part of the stream.

#include <algorithm>
#include <limits>
#include <system_error>
#include <thread>
#include <vector>

#include "array.hpp"
#include "registration.hpp"

namespace lmcore {
namespace {

constexpr std::int64_t kAhead = 32;            // documents whose length is fetched early
constexpr std::int64_t kBlock = 1 << 16;       // documents between two reports of progress
constexpr std::int64_t kLeastPart = 1 << 18;   // documents that are worth a thread

enum class Fault { kNone, kDocument, kSize };

struct Part {
  std::int64_t first;  // documents [first, last) of the stream
  std::int64_t last;
  std::int64_t tokens;
  Fault fault;
};

std::vector<Part> divide(std::int64_t count, int threads) {
  const std::int64_t parts =
      std::max<std::int64_t>(1, std::min<std::int64_t>(threads, count / kLeastPart));
  std::vector<Part> result;
  for (std::int64_t p = 0; p < parts; ++p) {
    result.push_back({count * p / parts, count * (p + 1) / parts, 0, Fault::kNone});
  }
  return result;
}

template <typename Work>
void run_parts(std::size_t parts, const Work &work) {
  std::vector<std::thread> others;
  for (std::size_t p = 1; p < parts; ++p) {
    try {
      others.emplace_back([&work, p] { work(p); });
    } catch (const std::system_error &) {  // no thread to be had: this one does it
      work(p);
    }
  }
  work(0);
  for (std::thread &other : others) {
    other.join();
  }
}

void fetch_lengths(const Values<std::int32_t> &sizes, const Values<std::int32_t> &documents,
                   Part &part, std::int32_t *lengths, const Progress &progress) {
  for (std::int64_t start = part.first; start < part.last; start += kBlock) {
    const std::int64_t end = std::min(start + kBlock, part.last);
    std::int64_t tokens = 0;
    std::int32_t negative = 0;
    for (std::int64_t i = start; i < end; ++i) {
      const std::int64_t ahead = documents[std::min(i + kAhead, documents.count - 1)];
      __builtin_prefetch(sizes.bytes + 4 * ahead);  // whatever it is: fetching does no harm
      const std::int64_t document = documents[i];
      if (document < 0 || document >= sizes.count) {
        part.fault = Fault::kDocument;
        return;
      }
      const std::int32_t length = sizes[document];
      lengths[i] = length;
      negative |= length;
      tokens += length;  // at most 2^31 entries of 2^31 - 1: no overflow
    }
    if (negative < 0) {
      part.fault = Fault::kSize;
      return;
    }
    part.tokens += tokens;
    progress.add(end - start);
  }
}

// Writes the starts that lie in the part, which begins at token `begin` of the stream.
void cut_part(const Part &part, std::int64_t begin, const std::int32_t *lengths,
              std::int64_t sequence_length, std::int64_t num_samples, std::int32_t *out) {
  std::int64_t sample = (begin + sequence_length - 1) / sequence_length;
  std::int64_t next = sample * sequence_length - begin;  // from the current document's start
  for (std::int64_t i = part.first; i < part.last && sample <= num_samples; ++i) {
    const std::int64_t length = lengths[i];
    while (next < length && sample <= num_samples) {
      out[2 * sample] = static_cast<std::int32_t>(i);
      out[2 * sample + 1] = static_cast<std::int32_t>(next);
      ++sample;
      next += sequence_length;
    }
    next -= length;
  }
}

py::array_t<std::int32_t> build_sample_index(const py::array &size_array,
                                             const py::array &document_array,
                                             std::int64_t sequence_length, std::int64_t num_samples,
                                             int threads, const py::object &counter) {
  const auto sizes = values_of<std::int32_t>(size_array, "sizes");
  const auto documents = values_of<std::int32_t>(document_array, "document_index");
  const Progress progress(counter);
  if (sequence_length < 1 || num_samples < 0 || threads < 1) {
    throw std::invalid_argument("sequence length " + std::to_string(sequence_length) + ", " +
                                std::to_string(num_samples) + " samples, " +
                                std::to_string(threads) + " threads");
  }
  require(documents.count <= std::numeric_limits<std::int32_t>::max(),
          "the document index has more entries than int32 counts");
  std::vector<Part> parts = divide(documents.count, threads);
  // numpy asks the system for large pages, which are faulted in faster.
  py::array_t<std::int32_t> scratch(static_cast<py::ssize_t>(documents.count));
  std::int32_t *lengths = scratch.mutable_data();
  {
    py::gil_scoped_release release;
    run_parts(parts.size(), [&](std::size_t p) {
      fetch_lengths(sizes, documents, parts[p], lengths, progress);
    });
  }
  std::int64_t total = 0;
  for (const Part &part : parts) {
    require(part.fault != Fault::kDocument,
            "the document index names a sequence that the dataset does not have");
    require(part.fault != Fault::kSize, "a sequence has a negative size");
    total += part.tokens;
  }
  // Division, not multiplication: the product may not fit.  Bounds the allocation below, too.
  const std::int64_t most = total > 0 ? (total - 1) / sequence_length : 0;
  if (num_samples > most) {
    throw std::invalid_argument(std::to_string(total) + " tokens do not make " +
                                std::to_string(num_samples) + " samples of " +
                                std::to_string(sequence_length) + " tokens");
  }
  py::array_t<std::int32_t> result({static_cast<py::ssize_t>(num_samples + 1), py::ssize_t{2}});
  std::int32_t *out = result.mutable_data();
  {
    py::gil_scoped_release release;
    run_parts(num_samples > 0 ? parts.size() : 1, [&](std::size_t p) {
      if (num_samples == 0) {
        return;  // nothing is known about the size of sequence_length then
      }
      std::int64_t begin = 0;
      for (std::size_t before = 0; before < p; ++before) {
        begin += parts[before].tokens;
      }
      cut_part(parts[p], begin, lengths, sequence_length, num_samples, out);
    });
    out[0] = out[1] = 0;  // the first sample starts at the first document, be it empty
  }
  return result;
}

}  // namespace

void register_sample_index(py::module_ &module) {
  module.def("build_sample_index", &build_sample_index, py::arg("sizes"),
             py::arg("document_index"), py::arg("sequence_length"), py::arg("num_samples"),
             py::arg("threads") = 1, py::arg("progress") = py::none());
}

}  // namespace lmcore

// Where GPT samples start in the stream of documents: lmcore/data/dataset/gpt_index.py.
//
// The lengths of the documents lie in random order, so that the time goes into fetching them.  They
// are fetched once, by several threads; each of these then cuts its own part of the stream.

#include <algorithm>
#include <atomic>
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

// Copies sizes [first, last) into half the memory, for the random reads; false where one does not
// fit.
bool narrow_sizes(const Values<std::int32_t> &sizes, std::int64_t first, std::int64_t last,
                  std::uint16_t *narrow) {
  for (std::int64_t start = first; start < last; start += kBlock) {
    const std::int64_t end = std::min(start + kBlock, last);
    std::uint32_t bits = 0;
    for (std::int64_t i = start; i < end; ++i) {
      const auto size = static_cast<std::uint32_t>(sizes[i]);
      bits |= size;
      narrow[i] = static_cast<std::uint16_t>(size);
    }
    if (bits > std::numeric_limits<std::uint16_t>::max()) {
      return false;
    }
  }
  return true;
}

// Whether documents [start, end) of the stream are ones that the dataset has.
bool in_range(const Values<std::int32_t> &documents, std::int64_t start, std::int64_t end,
              std::int64_t count) {
  std::uint32_t greatest = 0;  // as such a negative one is too large
  for (std::int64_t i = start; i < end; ++i) {
    greatest = std::max(greatest, static_cast<std::uint32_t>(documents[i]));
  }
  return start >= end || greatest < count;
}

// Fetches the lengths of a part's documents; `size_of` is their table.
template <typename Table, typename Length>
void fetch_lengths(const Table &size_of, const char *bytes, std::int64_t count,
                   const Values<std::int32_t> &documents, Part &part, Length *lengths,
                   const Progress &progress) {
  std::int64_t asked = part.first;  // documents before this one are on their way from memory
  const auto ask = [&](std::int64_t i) {
    __builtin_prefetch(bytes + static_cast<std::int64_t>(sizeof(Length)) * documents[i]);
  };
  for (std::int64_t start = part.first; start < part.last; start += kBlock) {
    const std::int64_t end = std::min(start + kBlock, part.last);
    if (!in_range(documents, start, end, count)) {
      part.fault = Fault::kDocument;
      return;
    }
    for (const std::int64_t stop = std::min(start + kAhead, end); asked < stop; ++asked) {
      ask(asked);
    }
    std::int64_t tokens = 0;
    std::int32_t negative = 0;
    const auto fetch = [&](std::int64_t i) {
      const std::int32_t length = size_of[documents[i]];
      lengths[i] = static_cast<Length>(length);
      negative |= length;
      tokens += length;  // at most 2^31 entries of 2^31 - 1: no overflow
    };
    std::int64_t i = start;
    for (; i + kAhead < end; ++i) {
      ask(i + kAhead);
      fetch(i);
    }
    asked = end;
    for (; i < end; ++i) {
      fetch(i);
    }
    if (negative < 0) {
      part.fault = Fault::kSize;
      return;
    }
    part.tokens += tokens;
    progress.add(end - start);
  }
}

// Writes the starts that lie in the part, which begins at token `begin` of the stream and has
// samples up to, not including, `limit`.
template <typename Length>
void cut_part(const Part &part, std::int64_t begin, const Length *lengths,
              std::int64_t sequence_length, std::int64_t limit, std::int32_t *out) {
  std::int64_t sample = (begin + sequence_length - 1) / sequence_length;
  std::int64_t next = sample * sequence_length - begin;  // from the current document's start
  for (std::int64_t i = part.first; i < part.last && sample < limit; ++i) {
    const auto length = static_cast<std::int64_t>(lengths[i]);
    // Whether a document has a start in it nobody can foretell: it is written, and taken back by
    // not counting it.
    out[2 * sample] = static_cast<std::int32_t>(i);
    out[2 * sample + 1] = static_cast<std::int32_t>(next);
    const auto has = static_cast<std::int64_t>(next < length);
    sample += has;
    next += sequence_length & -has;
    while (next < length && sample < limit) {  // a document longer than a sample
      out[2 * sample] = static_cast<std::int32_t>(i);
      out[2 * sample + 1] = static_cast<std::int32_t>(next);
      ++sample;
      next += sequence_length;
    }
    next -= length;
  }
}

struct Request {
  Values<std::int32_t> documents;
  std::int64_t sequence_length;
  std::int64_t num_samples;
  int threads;
};

// Tokens of all parts; raises unless every entry and size is in range and the stream is long enough.
void check_parts(const std::vector<Part> &parts, const Request &request) {
  std::int64_t total = 0;
  for (const Part &part : parts) {
    require(part.fault != Fault::kDocument,
            "the document index names a sequence that the dataset does not have");
    require(part.fault != Fault::kSize, "a sequence has a negative size");
    total += part.tokens;
  }
  // Division, not multiplication: the product may not fit.  Bounds the result's size, too.
  const std::int64_t most = total > 0 ? (total - 1) / request.sequence_length : 0;
  if (request.num_samples > most) {
    throw std::invalid_argument(std::to_string(total) + " tokens do not make " +
                                std::to_string(request.num_samples) + " samples of " +
                                std::to_string(request.sequence_length) + " tokens");
  }
}

template <typename Table, typename Length>
py::array_t<std::int32_t> cut_stream(const Table &size_of, const char *bytes, std::int64_t count,
                                     const Request &request, const Progress &progress) {
  std::vector<Part> parts = divide(request.documents.count, request.threads);
  // numpy asks the system for large pages, which are faulted in faster.
  py::array_t<Length> scratch(static_cast<py::ssize_t>(request.documents.count));
  Length *lengths = scratch.mutable_data();
  {
    py::gil_scoped_release release;
    run_parts(parts.size(), [&](std::size_t p) {
      fetch_lengths(size_of, bytes, count, request.documents, parts[p], lengths, progress);
    });
  }
  check_parts(parts, request);
  const std::int64_t num_samples = request.num_samples;
  py::array_t<std::int32_t> result({static_cast<py::ssize_t>(num_samples + 1), py::ssize_t{2}});
  std::int32_t *out = result.mutable_data();
  if (num_samples > 0) {  // without, nothing is known about the size of sequence_length
    py::gil_scoped_release release;
    run_parts(parts.size(), [&](std::size_t p) {
      std::int64_t begin = 0;
      for (std::size_t before = 0; before < p; ++before) {
        begin += parts[before].tokens;
      }
      const std::int64_t end = begin + parts[p].tokens;
      const std::int64_t own = (end + request.sequence_length - 1) / request.sequence_length;
      const std::int64_t limit = std::min(own, num_samples + 1);
      cut_part(parts[p], begin, lengths, request.sequence_length, limit, out);
    });
  }
  out[0] = out[1] = 0;  // the first sample starts at the first document, be it empty
  return result;
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
  const Request request{documents, sequence_length, num_samples, threads};
  if (sizes.count >= kLeastPart && documents.count >= sizes.count / 2) {
    py::array_t<std::uint16_t> scratch(static_cast<py::ssize_t>(sizes.count));
    std::uint16_t *narrow = scratch.mutable_data();
    std::atomic<bool> fits{true};
    {
      py::gil_scoped_release release;
      const std::vector<Part> parts = divide(sizes.count, threads);
      run_parts(parts.size(), [&](std::size_t p) {
        if (!narrow_sizes(sizes, parts[p].first, parts[p].last, narrow)) {
          fits = false;
        }
      });
    }
    if (fits) {
      return cut_stream<std::uint16_t *, std::uint16_t>(
          narrow, reinterpret_cast<const char *>(narrow), sizes.count, request, progress);
    }
  }
  return cut_stream<Values<std::int32_t>, std::int32_t>(sizes, sizes.bytes, sizes.count, request,
                                                        progress);
}

}  // namespace

void register_sample_index(py::module_ &module) {
  module.def("build_sample_index", &build_sample_index, py::arg("sizes"),
             py::arg("document_index"), py::arg("sequence_length"), py::arg("num_samples"),
             py::arg("threads") = 1, py::arg("progress") = py::none());
}

}  // namespace lmcore

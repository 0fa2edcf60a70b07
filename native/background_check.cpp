// Search of floating-point numbers for NaN and infinity by a thread that runs only while a processor is
// idle: of the weights in a checkpoint that is saved while training continues.  The twin in Python is
// torch.isfinite, in lmcore.base.idle_work.

#ifdef __linux__

#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "buffer.hpp"
#include "idle_thread.hpp"
#include "registration.hpp"

namespace lmcore {
namespace {

namespace py = pybind11;

// Returns true unless a number has only ones in its exponent; the bytes may be at any address.
template <typename Word>
bool all_finite(const char *bytes, std::size_t size, Word exponent) {
  Word found = 0;
  for (std::size_t i = 0; i + sizeof(Word) <= size; i += sizeof(Word)) {
    Word word;
    std::memcpy(&word, bytes + i, sizeof(Word));
    found |= static_cast<Word>((word & exponent) == exponent);
  }
  return found == 0;
}

bool is_finite(const py::buffer &content, const std::string &dtype) {
  const Bytes bytes(content);
  bool finite = true;
  IdleThread::Work work;
  if (dtype == "float32") {
    work = [&](const char *begin, std::size_t size) {
      finite &= all_finite<std::uint32_t>(begin, size, 0x7f800000u);
    };
  } else if (dtype == "float64") {
    work = [&](const char *begin, std::size_t size) {
      finite &= all_finite<std::uint64_t>(begin, size, 0x7ff0000000000000u);
    };
  } else if (dtype == "bfloat16") {
    work = [&](const char *begin, std::size_t size) {
      finite &= all_finite<std::uint16_t>(begin, size, 0x7f80u);
    };
  } else if (dtype == "float16") {
    work = [&](const char *begin, std::size_t size) {
      finite &= all_finite<std::uint16_t>(begin, size, 0x7c00u);
    };
  } else {
    throw std::invalid_argument("no such numbers: " + dtype);
  }
  IdleThread thread(work);
  without_lock([&] {
    thread.process(bytes.begin, bytes.size);
    thread.stop();
  });
  return finite;
}

}  // namespace

void register_background_check(py::module_ &module) {
  module.def("is_finite_when_idle", &is_finite, py::arg("content"), py::arg("dtype"));
}

}  // namespace lmcore

#else

#include <pybind11/pybind11.h>

#include "registration.hpp"

void lmcore::register_background_check(pybind11::module_ &) {}

#endif

// Bytes of an object of Python, and work on them while other threads run Python.

#pragma once

#include <pybind11/pybind11.h>

#include <cstddef>
#include <stdexcept>

namespace lmcore {

// The bytes of a contiguous buffer, which stays as it is while this exists.
struct Bytes {
  explicit Bytes(const pybind11::buffer &content) : info(content.request()) {
    if (info.itemsize != 1 || info.ndim != 1 || (info.size > 1 && info.strides[0] != 1)) {
      throw std::invalid_argument("not a contiguous buffer of bytes");
    }
    begin = static_cast<const char *>(info.ptr);
    size = static_cast<std::size_t>(info.size);
  }

  const pybind11::buffer_info info;
  const char *begin = nullptr;
  std::size_t size = 0;
};

// The interpreter may end a thread where it takes the lock again, which a destructor could not survive.
template <typename Work>
void without_lock(const Work &work) {
  PyThreadState *state = PyEval_SaveThread();
  work();
  PyEval_RestoreThread(state);
}

}  // namespace lmcore

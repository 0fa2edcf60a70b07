// Views of numpy arrays that take what is there: no conversion, no copy, no assumed alignment.

#pragma once

#include <pybind11/numpy.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

namespace lmcore {

namespace py = pybind11;

// Values of one type that may lie unaligned, as they do in a mapped file.
template <typename T>
struct Values {
  const char *bytes;
  std::int64_t count;

  T operator[](std::int64_t i) const {
    T value;
    std::memcpy(&value, bytes + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
    return value;
  }
};

template <typename T>
bool has_type(const py::array &array) {
  const py::dtype type = array.dtype();
  const char kind = std::is_floating_point<T>::value ? 'f' : std::is_signed<T>::value ? 'i' : 'u';
  return type.kind() == kind && type.itemsize() == static_cast<py::ssize_t>(sizeof(T)) &&
         (type.byteorder() == '=' || type.byteorder() == '|' || type.byteorder() == '<');
}

// What is wrong is a string only where it is thrown: loops ask for each value.
inline void require(bool good, const char *what) {
  if (!good) {
    throw std::invalid_argument(what);
  }
}

inline void require(bool good, const std::string &what) {
  if (!good) {
    throw std::invalid_argument(what);
  }
}

// The values of a contiguous array of this type and rank; another one is refused.
template <typename T>
Values<T> values_of(const py::array &array, const char *name, py::ssize_t rank = 1) {
  require(has_type<T>(array) && array.ndim() == rank && (array.flags() & py::array::c_style) != 0,
          std::string(name) + " has the wrong type, layout or rank");
  return {static_cast<const char *>(array.data()), static_cast<std::int64_t>(array.size())};
}

// The same to be written to: aligned, too.
template <typename T>
T *writable_values_of(py::array &array, const char *name) {
  values_of<T>(array, name);
  require(array.writeable(), std::string(name) + " is read-only");
  T *data = static_cast<T *>(array.mutable_data());
  require(reinterpret_cast<std::uintptr_t>(data) % alignof(T) == 0,
          std::string(name) + " is not aligned");
  return data;
}

// Counts finished work where Python reads it; null: nobody does.
class Progress {
 public:
  explicit Progress(const py::object &counter) : counter_(nullptr) {
    if (!counter.is_none()) {
      py::array array = py::cast<py::array>(counter);
      counter_ = writable_values_of<std::int64_t>(array, "progress");
      require(array.size() == 1, "progress has the wrong size");
    }
  }

  void add(std::int64_t done) const {
    if (counter_ != nullptr) {
      __atomic_fetch_add(counter_, done, __ATOMIC_RELAXED);
    }
  }

 private:
  std::int64_t *counter_;
};

}  // namespace lmcore

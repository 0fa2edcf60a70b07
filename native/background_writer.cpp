// A file written by a thread that runs only while a processor is idle: for checkpoints that are saved
// while training continues.  The twin in Python is lmcore.checkpoint.files.synced_file, whose threads
// have the lowest priority.

#ifdef __linux__

#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>

#include "buffer.hpp"
#include "crc32.hpp"
#include "idle_thread.hpp"
#include "registration.hpp"

namespace lmcore {
namespace {

namespace py = pybind11;

// A multiple of the alignment that any disk asks for.
constexpr std::size_t kBlock = 4 << 20;
// Of huge pages: of small ones, which are anywhere in memory, a disk takes a block in several requests,
// and the end of each interrupts the thread on a processor, a training step too.
constexpr std::size_t kPage = 2 << 20;
constexpr std::size_t kMemory = kBlock + kPage;
// Bytes through the page cache after which the file is synced.
constexpr std::size_t kSync = 16 << 20;

class BackgroundWriter {
 public:
  explicit BackgroundWriter(int descriptor) : descriptor_(descriptor) {
    memory_ = mmap(nullptr, kMemory, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory_ == MAP_FAILED) {
      throw std::bad_alloc();
    }
    block_ = static_cast<char *>(memory_);
    block_ += (kPage - reinterpret_cast<std::uintptr_t>(block_) % kPage) % kPage;
    madvise(block_, kBlock, MADV_HUGEPAGE);
    direct_ = set_direct(true);
  }

  BackgroundWriter(const BackgroundWriter &) = delete;
  BackgroundWriter &operator=(const BackgroundWriter &) = delete;

  ~BackgroundWriter() {
    thread_.stop();
    munmap(memory_, kMemory);
  }

  // Returns when the bytes are copied; full blocks are written then.
  void append(const char *bytes, std::size_t size) { thread_.process(bytes, size); }

  // Writes the rest; the file takes any number of bytes from then on.
  void finish() {
    thread_.stop();
    if (direct_) {
      set_direct(false);
      direct_ = false;
    }
    write_all(block_, filled_);
    filled_ = 0;
  }

  std::uint32_t checksum() const { return checksum_; }
  int error() const { return error_; }

 private:
  // Copies bytes to the block, and writes it whenever it is full.
  void consume(const char *bytes, std::size_t size) {
    while (size > 0) {
      const std::size_t count = std::min(size, kBlock - filled_);
      std::memcpy(block_ + filled_, bytes, count);
      checksum_ = crc32(checksum_, bytes, count);
      filled_ += count;
      bytes += count;
      size -= count;
      if (filled_ == kBlock) {
        write_all(block_, kBlock);
        filled_ = 0;
      }
    }
  }

  void write_all(const char *bytes, std::size_t size) {
    std::size_t written = 0;
    while (written < size && error_ == 0) {
      const ssize_t count = ::write(descriptor_, bytes + written, size - written);
      if (count >= 0) {
        written += static_cast<std::size_t>(count);
      } else if (errno == EINVAL && direct_) {
        // The rest of a block that was written in part, or a file system that takes the flag but no
        // such write.
        set_direct(false);
        direct_ = false;
      } else if (errno != EINTR) {
        error_ = errno;
      }
    }
    unsynced_ += direct_ ? 0 : size;
    if (unsynced_ >= kSync && error_ == 0) {
      unsynced_ = 0;
      error_ = fsync(descriptor_) == 0 ? 0 : errno;
    }
  }

  bool set_direct(bool direct) {
    const int flags = fcntl(descriptor_, F_GETFL);
    return flags >= 0 &&
           fcntl(descriptor_, F_SETFL, direct ? flags | O_DIRECT : flags & ~O_DIRECT) == 0;
  }

  const int descriptor_;
  void *memory_ = nullptr;
  char *block_ = nullptr;
  std::size_t filled_ = 0;
  std::size_t unsynced_ = 0;
  std::uint32_t checksum_ = 0;
  bool direct_ = false;
  std::atomic<int> error_{0};
  IdleThread thread_{[this](const char *bytes, std::size_t size) { consume(bytes, size); }};
};

}  // namespace

void register_background_writer(py::module_ &module) {
  py::class_<BackgroundWriter>(module, "BackgroundWriter")
      .def(py::init<int>(), py::arg("descriptor"))
      .def(
          "append",
          [](BackgroundWriter &writer, const py::buffer &content) {
            const Bytes bytes(content);
            without_lock([&] { writer.append(bytes.begin, bytes.size); });
          },
          py::arg("content"))
      .def("finish",
           [](BackgroundWriter &writer) { without_lock([&] { writer.finish(); }); })
      .def_property_readonly("checksum", &BackgroundWriter::checksum)
      .def_property_readonly("error", &BackgroundWriter::error);
  module.def(
      "set_idle_work_waited_for", [](bool value) { idle_work_waited_for = value; },
      py::arg("value"));
}

}  // namespace lmcore

#else

#include <pybind11/pybind11.h>

#include "registration.hpp"

void lmcore::register_background_writer(pybind11::module_ &) {}

#endif

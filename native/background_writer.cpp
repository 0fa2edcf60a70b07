// A file written by a thread that runs only while a processor is idle: for checkpoints that are saved
// while training continues.
//
// Linux gives a thread of the class SCHED_IDLE a processor that no other thread wants; one of the
// lowest priority (nice 19) still takes its share from a training step, and interrupts it when it
// wakes after a write.  The thread never holds Python's lock, so the step cannot wait for it.  The
// twin in Python is lmcore.checkpoint.files.block_writer, whose threads have the lowest priority.

#ifdef __linux__

#include <fcntl.h>
#include <pybind11/pybind11.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

#include "crc32.hpp"
#include "registration.hpp"

namespace lmcore {
namespace {

namespace py = pybind11;

// A multiple of the alignment that any disk asks for.
constexpr std::size_t kBlock = 4 << 20;
// Small enough that a piece is still in the processor's cache for its checksum, after the copy.
constexpr std::size_t kPiece = 1 << 20;
// Bytes through the page cache after which the file is synced.
constexpr std::size_t kSync = 16 << 20;
// Less than this is copied by the caller.
constexpr std::size_t kSmall = 256 << 10;
// Time between two looks whether someone waits for the files.
constexpr std::chrono::milliseconds kLook{100};

// True while the process waits for its files: callers then write themselves.
std::atomic<bool> waited_for{false};

class BackgroundWriter {
 public:
  explicit BackgroundWriter(int descriptor) : descriptor_(descriptor) {
    void *memory = mmap(nullptr, kBlock, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
      throw std::bad_alloc();
    }
    block_ = static_cast<char *>(memory);
    direct_ = set_direct(true);
  }

  BackgroundWriter(const BackgroundWriter &) = delete;
  BackgroundWriter &operator=(const BackgroundWriter &) = delete;

  ~BackgroundWriter() {
    stop_thread();
    munmap(block_, kBlock);
  }

  // Returns when the bytes are copied; full blocks are written then.
  void append(const char *bytes, std::size_t size) {
    if (size < kSmall && filled_ + size < kBlock) {
      consume(bytes, size);
      return;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    next_ = bytes;
    left_ = size;
    start_thread();
    while (left_ > 0 || busy_) {
      if (!busy_ && (!thread_.joinable() || waited_for)) {
        take_piece(lock);
      } else {
        wake_.notify_one();
        done_.wait_for(lock, kLook);
      }
    }
  }

  // Writes the rest; the file takes any number of bytes from then on.
  void finish() {
    stop_thread();
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
  void start_thread() {
    if (thread_.joinable() || waited_for) {
      return;
    }
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error &) {  // the system gives no more threads: the caller writes
    }
  }

  void stop_thread() {
    if (thread_.joinable()) {
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopped_ = true;
      }
      wake_.notify_one();
      thread_.join();
    }
    stopped_ = false;
  }

  void run() {
    const sched_param parameters{};
    sched_setscheduler(0, SCHED_IDLE, &parameters);  // else it has its starter's priority
    sched_yield();  // the time slice began with that priority
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stopped_ || (left_ > 0 && !busy_ && !waited_for); });
      if (stopped_) {
        return;
      }
      take_piece(lock);
    }
  }

  // Consumes the next piece, without the lock meanwhile.
  void take_piece(std::unique_lock<std::mutex> &lock) {
    const char *bytes = next_;
    const std::size_t size = std::min({kPiece, kBlock - filled_, left_});
    next_ += size;
    left_ -= size;
    busy_ = true;
    lock.unlock();
    consume(bytes, size);
    lock.lock();
    busy_ = false;
    if (left_ == 0 || waited_for) {
      done_.notify_one();
    }
  }

  // Copies bytes to the block, which has room for them, and writes it if it is full.
  void consume(const char *bytes, std::size_t size) {
    std::memcpy(block_ + filled_, bytes, size);
    checksum_ = crc32(checksum_, bytes, size);
    filled_ += size;
    if (filled_ == kBlock) {
      write_all(block_, kBlock);
      filled_ = 0;
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
  char *block_ = nullptr;
  std::size_t filled_ = 0;
  std::size_t unsynced_ = 0;
  std::uint32_t checksum_ = 0;
  bool direct_ = false;
  std::atomic<int> error_{0};

  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable wake_;  // of the thread
  std::condition_variable done_;  // of the caller
  // Guarded by the mutex: what is left of the caller's bytes, and whether a piece is being consumed.
  const char *next_ = nullptr;
  std::size_t left_ = 0;
  bool busy_ = false;
  bool stopped_ = false;
};

// The interpreter may end a thread where it takes the lock again, which a destructor could not survive.
template <typename Work>
void without_lock(const Work &work) {
  PyThreadState *state = PyEval_SaveThread();
  work();
  PyEval_RestoreThread(state);
}

void append(BackgroundWriter &writer, const py::buffer &content) {
  const py::buffer_info info = content.request();
  if (info.itemsize != 1 || info.ndim != 1 || (info.size > 1 && info.strides[0] != 1)) {
    throw std::invalid_argument("not a contiguous buffer of bytes");
  }
  without_lock([&] {
    writer.append(static_cast<const char *>(info.ptr), static_cast<std::size_t>(info.size));
  });
}

}  // namespace

void register_background_writer(py::module_ &module) {
  py::class_<BackgroundWriter>(module, "BackgroundWriter")
      .def(py::init<int>(), py::arg("descriptor"))
      .def("append", &append, py::arg("content"))
      .def("finish",
           [](BackgroundWriter &writer) { without_lock([&] { writer.finish(); }); })
      .def_property_readonly("checksum", &BackgroundWriter::checksum)
      .def_property_readonly("error", &BackgroundWriter::error);
  module.def("set_writers_waited_for", [](bool value) { waited_for = value; }, py::arg("value"));
}

}  // namespace lmcore

#else

#include <pybind11/pybind11.h>

#include "registration.hpp"

void lmcore::register_background_writer(pybind11::module_ &) {}

#endif

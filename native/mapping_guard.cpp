// Guard of reads of mapped files that are cut short: lmcore/data/indexed/mapped_files.py.
//
// A read of a page that its file no longer has, or that the disk cannot give, raises SIGBUS.
// While a guarded read is in progress, the handler puts zeros in the place of the rest of that
// mapping and marks it, so that the read ends and its caller raises an error instead of using what
// it read.  All other bus errors go to the handler that was there before.  The handler only makes
// system calls and uses lock-free atomics.

#include <pthread.h>
#include <pybind11/pybind11.h>
#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdint>

#include "registration.hpp"

namespace lmcore {
namespace {

namespace py = pybind11;

struct Mapping {
  std::atomic<std::uintptr_t> begin{0};
  std::atomic<std::uintptr_t> end{0};
  std::atomic<bool> lost{false};
};

constexpr int kMost = 1 << 14;
Mapping mappings[kMost];
std::atomic<int> used{0};     // mappings below this number have been in use
std::atomic<int> reads{0};    // guarded reads in progress, in all threads
std::atomic<int> faults{0};   // mappings that were lost so far
std::atomic<bool> passing{false};
struct sigaction earlier;
std::uintptr_t page_bytes = 4096;

static_assert(std::atomic<std::uintptr_t>::is_always_lock_free &&
                  std::atomic<int>::is_always_lock_free,
              "the handler may not wait");

void end_by_default(int number) {
  struct sigaction usual = {};
  usual.sa_handler = SIG_DFL;
  sigaction(number, &usual, nullptr);
  raise(number);  // delivered when the handler returns
}

void pass_on(int number, siginfo_t *info, void *context) {
  const bool with_info = (earlier.sa_flags & SA_SIGINFO) != 0;
  const bool usual =
      !with_info && (earlier.sa_handler == SIG_DFL || earlier.sa_handler == SIG_IGN);
  if (usual || passing.exchange(true)) {  // handlers that pass on to each other would never end
    end_by_default(number);
    return;
  }
  if (with_info) {
    earlier.sa_sigaction(number, info, context);
  } else {
    earlier.sa_handler(number);
  }
  passing = false;
}

bool replace_rest(std::uintptr_t address) {
  const int count = used;
  for (int i = 0; i < count; ++i) {
    if (address < mappings[i].begin || address >= mappings[i].end) {
      continue;
    }
    const std::uintptr_t page = address - address % page_bytes;
    void *placed = mmap(reinterpret_cast<void *>(page), mappings[i].end - page, PROT_READ,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (placed == MAP_FAILED) {
      return false;
    }
    mappings[i].lost = true;
    ++faults;
    return true;
  }
  return false;
}

void handle(int number, siginfo_t *info, void *context) {
  const int error = errno;
  const bool of_a_read = info->si_code > 0;  // not of another process
  if (!of_a_read || reads <= 0 ||
      !replace_rest(reinterpret_cast<std::uintptr_t>(info->si_addr))) {
    pass_on(number, info, context);
  }
  errno = error;
}

void install() {
  struct sigaction current;
  sigaction(SIGBUS, nullptr, &current);
  if ((current.sa_flags & SA_SIGINFO) != 0 && current.sa_sigaction == handle) {
    return;
  }
  earlier = current;
  static const int once = pthread_atfork(nullptr, nullptr, [] { reads = 0; });  // only this thread
  static_cast<void>(once);
  struct sigaction own = {};
  own.sa_sigaction = handle;
  own.sa_flags = SA_SIGINFO | SA_ONSTACK;
  sigemptyset(&own.sa_mask);
  sigaction(SIGBUS, &own, nullptr);
}

// Returns the number of the mapping; -1 if there are too many.  Called with the GIL held.
int guard_mapping(const py::buffer &buffer) {
  const py::buffer_info found = buffer.request();
  int number = 0;
  while (number < kMost && mappings[number].begin != 0) {
    ++number;
  }
  if (number == kMost || found.size == 0) {
    return -1;
  }
  install();
  page_bytes = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(found.ptr);
  mappings[number].lost = false;
  mappings[number].end = begin + static_cast<std::uintptr_t>(found.size * found.itemsize);
  mappings[number].begin = begin;
  if (used <= number) {
    used = number + 1;
  }
  return number;
}

void forget_mapping(int number) {
  mappings[number].end = 0;
  mappings[number].begin = 0;
}

}  // namespace

void register_mapping_guard(py::module_ &module) {
  module.def("guard_mapping", &guard_mapping, py::arg("buffer"));
  module.def("forget_mapping", &forget_mapping, py::arg("number"));
  module.def("begin_read", [] { ++reads; });
  module.def("end_read", [] {
    --reads;
    return faults.load();
  });
  module.def("is_lost", [](int number) { return mappings[number].lost.load(); });
}

}  // namespace lmcore

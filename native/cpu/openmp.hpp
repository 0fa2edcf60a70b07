// Threads of the OpenMP library that torch has loaded: a second set of threads would compete with them for
// the cores.  It is looked up in the process, since this module is built without torch.

#pragma once

#include <cstring>

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#endif

namespace lmcore::cpu {

struct OpenMP {
  using Body = void (*)(void *);
  void (*parallel)(Body, void *, unsigned threads, unsigned flags) = nullptr;
  int (*thread)() = nullptr;
  int (*threads)() = nullptr;

  bool found() const { return parallel != nullptr && thread != nullptr && threads != nullptr; }
};

template <class Function>
void look_up([[maybe_unused]] const char *name, [[maybe_unused]] Function &function) {
#if defined(__unix__) || defined(__APPLE__)
  void *const symbol = dlsym(RTLD_DEFAULT, name);
  static_assert(sizeof symbol == sizeof function);
  std::memcpy(&function, &symbol, sizeof symbol);
#endif
}

// Asked for the first time by a thread that may load libraries.
inline const OpenMP &openmp() {
  static const OpenMP found = [] {
    OpenMP one;
    look_up("GOMP_parallel", one.parallel);
    look_up("omp_get_thread_num", one.thread);
    look_up("omp_get_num_threads", one.threads);
    return one;
  }();
  return found;
}

// Calls share(thread, threads) on each thread; without OpenMP on this one alone.
template <class Share>
void on_threads(int threads, const Share &share) {
  if (threads < 2 || !openmp().found()) {
    share(0, 1);
    return;
  }
  openmp().parallel(
      [](void *pointer) {
        (*static_cast<const Share *>(pointer))(openmp().thread(), openmp().threads());
      },
      const_cast<Share *>(&share), static_cast<unsigned>(threads), 0);
}

}  // namespace lmcore::cpu

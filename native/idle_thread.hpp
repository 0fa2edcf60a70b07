// A thread that works through bytes only while a processor is idle: for what a checkpoint needs while
// training continues.
//
// Linux gives a thread of the class SCHED_IDLE a processor that no other thread wants; one of the
// lowest priority (nice 19) still takes its share from a training step, and interrupts it when it
// wakes after a write.  The thread never holds Python's lock, so the step cannot wait for it.

#pragma once

#ifdef __linux__

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <utility>

namespace lmcore {

// True while the process waits for such work: callers then do it themselves.
inline std::atomic<bool> idle_work_waited_for{false};

class IdleThread {
 public:
  // Work on the next bytes, at most kPiece; called by one thread at a time.
  using Work = std::function<void(const char *, std::size_t)>;

  explicit IdleThread(Work work) : work_(std::move(work)) {}

  IdleThread(const IdleThread &) = delete;
  IdleThread &operator=(const IdleThread &) = delete;

  ~IdleThread() { stop(); }

  // Returns when the work on all bytes is done.
  void process(const char *bytes, std::size_t size) {
    if (size < kSmall) {
      work_(bytes, size);
      return;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    next_ = bytes;
    left_ = size;
    start();
    while (left_ > 0 || busy_) {
      if (!busy_ && (!thread_.joinable() || idle_work_waited_for)) {
        take_piece(lock);
      } else {
        wake_.notify_one();
        done_.wait_for(lock, kLook);
      }
    }
  }

  // Ends the thread; the next call of `process` starts another.
  void stop() {
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

 private:
  // Small enough that a piece is still in the processor's cache when the work reads it again.
  static constexpr std::size_t kPiece = 1 << 20;
  // Less than this is left to the caller.
  static constexpr std::size_t kSmall = 256 << 10;
  // Time between two looks whether someone waits for the work.
  static constexpr std::chrono::milliseconds kLook{100};

  void start() {
    if (thread_.joinable() || idle_work_waited_for) {
      return;
    }
    try {
      thread_ = std::thread([this] { run(); });
    } catch (const std::system_error &) {  // the system gives no more threads: the caller works
    }
  }

  void run() {
    const sched_param parameters{};
    sched_setscheduler(0, SCHED_IDLE, &parameters);  // else it has its starter's priority
    sched_yield();  // the time slice began with that priority
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      wake_.wait(lock, [this] { return stopped_ || (left_ > 0 && !busy_ && !idle_work_waited_for); });
      if (stopped_) {
        return;
      }
      take_piece(lock);
    }
  }

  // Works on the next piece, without the lock meanwhile.
  void take_piece(std::unique_lock<std::mutex> &lock) {
    const char *bytes = next_;
    const std::size_t size = std::min(kPiece, left_);
    next_ += size;
    left_ -= size;
    busy_ = true;
    lock.unlock();
    work_(bytes, size);
    lock.lock();
    busy_ = false;
    if (left_ == 0 || idle_work_waited_for) {
      done_.notify_one();
    }
  }

  const Work work_;
  std::thread thread_;
  std::mutex mutex_;
  std::condition_variable wake_;  // of the thread
  std::condition_variable done_;  // of the caller
  // Guarded by the mutex: what is left of the caller's bytes, and whether a piece is being worked on.
  const char *next_ = nullptr;
  std::size_t left_ = 0;
  bool busy_ = false;
  bool stopped_ = false;
};

}  // namespace lmcore

#endif

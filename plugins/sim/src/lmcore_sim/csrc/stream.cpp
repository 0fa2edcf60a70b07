#include "stream.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "device.h"

namespace lmcore_sim {
namespace {

struct Job {
  std::function<void()> work;
  std::vector<c10::Storage> used;
};

// One stream's queue and, from the first job on, its thread.  Never destroyed: threads outlive
// whatever order a process ends in.
class Queue {
 public:
  void push(Job job) {
    const std::lock_guard<std::mutex> lock(mutex_);
    done_.clear();  // here, because a tensor's last reference may ask for Python's lock
    if (!started_) {
      started_ = true;
      std::thread([this] { work(); }).detach();
    }
    jobs_.push_back(std::move(job));
    ++pending_;
    changed_.notify_all();
  }

  bool idle() const noexcept {
    return pending_ == 0;
  }

  // Wait until all is done; raise what a job raised.
  void drain() {
    if (!dirty_ && idle()) {
      return;
    }
    std::vector<Job> done;
    std::exception_ptr failure;
    {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [this] { return pending_ == 0; });
      std::swap(done, done_);
      std::swap(failure, failure_);
      dirty_ = false;
    }
    if (failure) {
      std::rethrow_exception(failure);
    }
  }

 private:
  void work() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      changed_.wait(lock, [this] { return !jobs_.empty(); });
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      std::exception_ptr failure;
      try {
        job.work();
      } catch (...) {
        failure = std::current_exception();
      }
      lock.lock();
      failure_ = failure_ ? failure_ : failure;
      done_.push_back(std::move(job));
      dirty_ = true;
      --pending_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_;
  std::vector<Job> done_;
  std::exception_ptr failure_;
  std::atomic<int64_t> pending_{0};
  std::atomic<bool> dirty_{false};  // there is something to clear or to raise
  bool started_ = false;
};

// All streams of all devices.
class Queues {
 public:
  Queue& of(c10::Stream stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& queue = queues_[{stream.device_index(), stream.id()}];
    if (!queue) {
      queue = std::make_unique<Queue>();
    }
    return *queue;
  }

  std::vector<Queue*> of_device(c10::DeviceIndex device) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Queue*> found;
    for (auto& [key, queue] : queues_) {
      if (key.first == device) {
        found.push_back(queue.get());
      }
    }
    return found;
  }

 private:
  using Key = std::pair<c10::DeviceIndex, c10::StreamId>;
  struct Hash {
    size_t operator()(const Key& key) const noexcept {
      return std::hash<int64_t>()(key.second * 64 + key.first);
    }
  };
  std::mutex mutex_;
  std::unordered_map<Key, std::unique_ptr<Queue>, Hash> queues_;
};

Queues& queues() {
  static auto* all = new Queues();
  return *all;
}

c10::Stream stream_of(c10::DeviceIndex device, c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, c10::Device(kSim, device), id);
}

using Clock = std::chrono::steady_clock;

// A mark in a stream.  Each recording is a new mark; who waits, waits for the one of that time.
struct Mark {
  std::mutex mutex;
  std::condition_variable reached;
  bool done = false;
  Clock::time_point time;

  void reach() {
    const std::lock_guard<std::mutex> lock(mutex);
    done = true;
    time = Clock::now();
    reached.notify_all();
  }

  void wait() {
    std::unique_lock<std::mutex> lock(mutex);
    reached.wait(lock, [this] { return done; });
  }

  bool is_done() {
    const std::lock_guard<std::mutex> lock(mutex);
    return done;
  }
};

struct Event {
  std::shared_ptr<Mark> mark;
};

Mark* mark_of(void* event) {
  return event == nullptr ? nullptr : static_cast<Event*>(event)->mark.get();
}

thread_local std::unordered_map<c10::DeviceIndex, c10::StreamId> current_ids;

}  // namespace

c10::Stream default_stream(c10::DeviceIndex device) {
  return stream_of(device_or_current(device), 0);
}

c10::Stream current_stream(c10::DeviceIndex device) {
  const auto index = device_or_current(device);
  const auto found = current_ids.find(index);
  return stream_of(index, found == current_ids.end() ? 0 : found->second);
}

c10::Stream new_stream(c10::DeviceIndex device) {
  static std::atomic<c10::StreamId> next{1};
  return stream_of(device_or_current(device), next++);
}

c10::Stream exchange_stream(c10::Stream stream) {
  const auto before = current_stream(stream.device_index());
  current_ids[stream.device_index()] = stream.id();
  return before;
}

void enqueue(c10::Stream stream, std::function<void()> work, std::vector<c10::Storage> used) {
  require_usable();
  queues().of(stream).push({std::move(work), std::move(used)});
}

bool is_idle(c10::Stream stream) {
  return queues().of(stream).idle();
}

void wait_stream(c10::Stream stream) {
  require_usable();
  queues().of(stream).drain();
}

void wait_device(c10::DeviceIndex device) {
  require_usable();
  for (auto* queue : queues().of_device(device)) {
    queue->drain();
  }
}

void record_event(void** event, c10::Stream stream) {
  require_usable();
  if (*event == nullptr) {
    *event = new Event();
  }
  auto mark = std::make_shared<Mark>();
  static_cast<Event*>(*event)->mark = mark;
  if (is_idle(stream)) {
    mark->reach();
  } else {
    enqueue(stream, [mark] { mark->reach(); }, {});
  }
}

void make_wait(void* event, c10::Stream stream) {
  if (mark_of(event) == nullptr || mark_of(event)->is_done()) {
    return;
  }
  auto mark = static_cast<Event*>(event)->mark;
  enqueue(stream, [mark] { mark->wait(); }, {});
}

bool is_done(void* event) {
  return mark_of(event) == nullptr || mark_of(event)->is_done();
}

void wait_event(void* event) {
  require_usable();
  if (auto* mark = mark_of(event)) {
    mark->wait();
  }
}

double elapsed_milliseconds(void* begin, void* end) {
  auto* first = mark_of(begin);
  auto* last = mark_of(end);
  TORCH_CHECK(first != nullptr && last != nullptr, "both events must be recorded first");
  TORCH_CHECK(first->is_done() && last->is_done(), "both events must be reached first");
  return std::chrono::duration<double, std::milli>(last->time - first->time).count();
}

void destroy_event(void* event) noexcept {
  delete static_cast<Event*>(event);
}

}  // namespace lmcore_sim

#include "stream.h"

#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "device.h"
#include "fault.h"

namespace lmcore_sim {
namespace {

using Time = std::chrono::steady_clock;

constexpr size_t kMostJobs = 256;
constexpr size_t kMostBytes = size_t{256} << 20;

// The right to change queues and to do their work; held by one thread at a time.  What finished
// work kept alive is let go afterwards, because a tensor's last reference may ask for Python's lock.
class Turn {
 public:
  Turn() {
    machine().mutex.lock();
    ++machine().depth;
  }

  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

  ~Turn() {
    std::vector<Job> finished;
    if (--machine().depth == 0) {
      std::swap(finished, machine().finished);
    }
    machine().mutex.unlock();
  }

  static void finish(Job job) {
    machine().finished.push_back(std::move(job));
  }

 private:
  struct Machine {
    std::recursive_mutex mutex;
    int depth = 0;
    std::vector<Job> finished;
  };

  static Machine& machine() {
    static auto* one = new Machine();
    return *one;
  }
};

// One stream's queue.  Never destroyed, as threads may use it until the process ends.
class Queue {
 public:
  explicit Queue(c10::Stream stream)
      : actor(new_actor(
            "stream " + std::to_string(stream.id()) + " of sim:" +
            std::to_string(static_cast<int>(stream.device_index())))) {}

  // Jobs are counted from 1; `ticket` is the number of the last one.
  void push(Job job) {
    const Turn turn;
    num_bytes_ += job.num_bytes;
    ++pushed_;
    if (job.on_device) {
      last_on_device_ = pushed_.load();
    }
    jobs_.push_back(std::move(job));
    while (jobs_.size() > kMostJobs || num_bytes_ > kMostBytes) {
      run_to(done_ + 1);
    }
  }

  void run_to(int64_t ticket) {
    const Turn turn;
    while (done_ < ticket) {
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      num_bytes_ -= job.num_bytes;
      ++done_;
      try {
        // Whoever has the work done, its modes of Python, gradients and autocast are not for it.
        const c10::impl::ExcludeDispatchKeyGuard kernels_alone(
            c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
            c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
        job.work();
      } catch (...) {
        failure_ = failure_ ? failure_ : std::current_exception();
        failed_ = true;
      }
      Turn::finish(std::move(job));
    }
  }

  void run_pending() {
    if (last_on_device_ > done_) {
      run_to(last_on_device_);
    }
  }

  bool has_pending(int64_t ticket) {
    const Turn turn;
    for (auto number = done_ + 1; number <= ticket; ++number) {
      if (jobs_[static_cast<size_t>(number - done_ - 1)].on_device) {
        return true;
      }
    }
    return false;
  }

  void raise_failure() {
    if (!failed_) {
      return;
    }
    std::exception_ptr failure;
    {
      const Turn turn;
      std::swap(failure, failure_);
      failed_ = false;
    }
    if (failure) {
      std::rethrow_exception(failure);
    }
  }

  int64_t pushed() const {
    return pushed_;
  }

  int64_t done() const {
    return done_;
  }

  // When the work that there is now will be done.
  Time::time_point ready(Time::time_point now = Time::now()) {
    const Turn turn;
    return std::max(ready_, now);
  }

  void not_before(Time::time_point time) {
    const Turn turn;
    ready_ = std::max(ready_, time);
  }

  const Actor actor;

 private:
  std::deque<Job> jobs_;
  std::atomic<int64_t> pushed_{0};
  std::atomic<int64_t> done_{0};
  std::atomic<int64_t> last_on_device_{0};
  size_t num_bytes_ = 0;
  std::exception_ptr failure_;
  std::atomic<bool> failed_{false};
  Time::time_point ready_;
};

// All streams of all devices.
class Queues {
 public:
  Queue& of(c10::Stream stream) {
    thread_local c10::StreamId last_id = -1;
    thread_local c10::DeviceIndex last_device = -1;
    thread_local Queue* last = nullptr;
    if (last != nullptr && last_id == stream.id() && last_device == stream.device_index()) {
      return *last;
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    auto& queue = queues_[{stream.device_index(), stream.id()}];
    if (!queue) {
      queue = std::make_unique<Queue>(stream);
    }
    last_id = stream.id();
    last_device = stream.device_index();
    last = queue.get();
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

void wait_queue(Queue& queue) {
  {
    const Turn turn;
    acquire_on_host(clock_of(queue.actor));
    queue.run_to(queue.pushed());
  }
  std::this_thread::sleep_until(queue.ready());
  queue.raise_failure();
}

// A place in a stream, of the time when the event was recorded.
struct Mark {
  Queue* queue;
  int64_t ticket;
  Clock clock;
  Time::time_point time;

  bool is_reached() const {
    return queue->done() >= ticket && Time::now() >= time && is_known_on_host(clock);
  }

  void reach() {
    const Turn turn;
    queue->run_to(ticket);
    acquire_on_host(clock);
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

Actor actor_of(c10::Stream stream) {
  return queues().of(stream).actor;
}

void enqueue(c10::Stream stream, Job job, const at::Tensor& written) {
  require_usable();
  auto& queue = queues().of(stream);
  const Turn turn;
  const auto stamp = issue(queue.actor);
  if (written.is_privateuseone()) {
    mark_written(stamp, written);
  }
  queue.push(std::move(job));
}

void delay(c10::Stream stream, double seconds) {
  if (seconds <= 0) {
    return;
  }
  const Turn turn;
  auto& queue = queues().of(stream);
  const auto length = std::chrono::duration<double>(seconds);
  queue.not_before(queue.ready() + std::chrono::duration_cast<Time::duration>(length));
}

void run_pending(c10::Stream stream) {
  auto& queue = queues().of(stream);
  queue.run_pending();
  queue.raise_failure();
}

void run_pending(c10::DeviceIndex device) {
  for (auto* queue : queues().of_device(device)) {
    queue->run_pending();
  }
}

bool run_all(c10::DeviceIndex device) {
  bool any = false;
  for (auto* queue : queues().of_device(device)) {
    any = any || queue->done() < queue->pushed();
    queue->run_to(queue->pushed());
  }
  return any;
}

void wait_stream(c10::Stream stream) {
  require_usable();
  wait_queue(queues().of(stream));
}

void wait_device(c10::DeviceIndex device) {
  require_usable();
  for (auto* queue : queues().of_device(device)) {
    wait_queue(*queue);
  }
}

void wait_time(c10::Stream stream) {
  std::this_thread::sleep_until(queues().of(stream).ready());
}

bool query_stream(c10::Stream stream) {
  if (is_on(Switch::query_always_true)) {
    return true;
  }
  auto& queue = queues().of(stream);
  const auto now = Time::now();
  if (queue.ready(now) > now) {
    return false;
  }
  wait_queue(queue);
  return true;
}

void record_event(void** event, c10::Stream stream) {
  require_usable();
  if (*event == nullptr) {
    *event = new Event();
  }
  auto& queue = queues().of(stream);
  auto mark = std::make_shared<Mark>();
  const Turn turn;
  mark->queue = &queue;
  mark->ticket = queue.pushed();
  mark->clock = clock_of(queue.actor);
  mark->time = queue.ready();
  static_cast<Event*>(*event)->mark = std::move(mark);
}

void make_wait(void* event, c10::Stream stream) {
  if (mark_of(event) == nullptr || is_on(Switch::no_stream_wait)) {
    return;
  }
  const auto mark = static_cast<Event*>(event)->mark;
  auto& queue = queues().of(stream);
  acquire(queue.actor, mark->clock);
  const Turn turn;
  queue.not_before(mark->time);
  if (mark->queue != &queue && mark->queue->done() < mark->ticket) {
    const bool on_device = mark->queue->has_pending(mark->ticket);
    queue.push({[mark] { mark->queue->run_to(mark->ticket); }, {}, on_device, 0});
  }
}

bool query_event(void* event) {
  auto* mark = mark_of(event);
  if (mark == nullptr || is_on(Switch::query_always_true)) {
    return true;
  }
  if (Time::now() < mark->time) {
    return false;
  }
  mark->reach();
  return true;
}

void wait_event(void* event) {
  require_usable();
  if (auto* mark = mark_of(event)) {
    mark->reach();
    std::this_thread::sleep_until(mark->time);
    mark->queue->raise_failure();
  }
}

double elapsed_milliseconds(void* begin, void* end) {
  auto* first = mark_of(begin);
  auto* last = mark_of(end);
  TORCH_CHECK(first != nullptr && last != nullptr, "both events must be recorded first");
  TORCH_CHECK(first->is_reached() && last->is_reached(), "both events must be reached first");
  return std::chrono::duration<double, std::milli>(last->time - first->time).count();
}

void destroy_event(void* event) noexcept {
  delete static_cast<Event*>(event);
}

}  // namespace lmcore_sim

#include "order.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <mutex>

#include "allocator.h"

namespace lmcore_sim {
namespace {

constexpr size_t kMostMessages = 100;
constexpr size_t kFewWrites = 8;

struct State {
  explicit State(std::string given) : name(std::move(given)) {}

  std::string name;
  std::atomic<uint64_t> issued{0};
  Clock seen;
};

// Never destroyed: threads use it until the process has ended.
struct Order {
  std::mutex mutex;
  std::deque<State> actors;
  std::vector<uint64_t> host;  // by actor: the last op that the host has waited for
  std::vector<std::string> messages;
  std::atomic<bool> raises{false};

  bool host_knows(const Stamp& stamp) const {
    return host[stamp.actor] >= stamp.number;
  }

  bool knows(Actor actor, const Stamp& stamp) const {
    if (actor == stamp.actor || host_knows(stamp)) {
      return true;
    }
    const auto& seen = actors[actor].seen;
    return std::any_of(seen.begin(), seen.end(), [&](const Stamp& one) {
      return one.actor == stamp.actor && one.number >= stamp.number;
    });
  }
};

Order& order() {
  static auto* one = new Order();
  return *one;
}

struct Span {
  size_t begin;
  size_t end;
};

// The bytes of the storage between the first and the last element.
Span span_of(const at::Tensor& tensor) {
  const size_t item = tensor.itemsize();
  const auto begin = static_cast<size_t>(tensor.storage_offset()) * item;
  if (tensor.is_non_overlapping_and_dense()) {
    return {begin, begin + static_cast<size_t>(tensor.numel()) * item};
  }
  return {begin, at::detail::computeStorageNbytes(
                     tensor.sizes(), tensor.strides(), item, tensor.storage_offset())};
}

void write_range(std::vector<Write>& writes, const Write& fresh) {
  if (writes.size() == 1 && writes[0].begin >= fresh.begin && writes[0].end <= fresh.end) {
    writes[0] = fresh;
    return;
  }
  const auto first = std::partition_point(
      writes.begin(), writes.end(), [&](const Write& one) { return one.end <= fresh.begin; });
  const auto last = std::partition_point(
      first, writes.end(), [&](const Write& one) { return one.begin < fresh.end; });
  std::vector<Write> now;
  if (first != last && first->begin < fresh.begin) {
    now.push_back({first->begin, fresh.begin, first->by});
  }
  now.push_back(fresh);
  if (first != last && std::prev(last)->end > fresh.end) {
    now.push_back({fresh.end, std::prev(last)->end, std::prev(last)->by});
  }
  writes.insert(writes.erase(first, last), now.begin(), now.end());
}

void advance(Clock& clock, const Stamp& stamp) {
  for (auto& one : clock) {
    if (one.actor == stamp.actor) {
      one.number = std::max(one.number, stamp.number);
      return;
    }
  }
  clock.push_back(stamp);
}

}  // namespace

Actor new_actor(std::string name) {
  auto& all = order();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.actors.emplace_back(std::move(name));
  all.host.push_back(0);
  return static_cast<Actor>(all.actors.size() - 1);
}

Stamp issue(Actor actor) {
  auto& all = order();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return {actor, ++all.actors[actor].issued};
}

Clock clock_of(Actor actor) {
  auto& all = order();
  const std::lock_guard<std::mutex> lock(all.mutex);
  auto& state = all.actors[actor];
  auto& seen = state.seen;
  seen.erase(
      std::remove_if(
          seen.begin(), seen.end(), [&](const Stamp& one) { return all.host_knows(one); }),
      seen.end());
  Clock clock = seen;
  clock.push_back({actor, state.issued});
  return clock;
}

void acquire(Actor actor, const Clock& clock) {
  auto& all = order();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& stamp : clock) {
    if (!all.knows(actor, stamp)) {
      advance(all.actors[actor].seen, stamp);
    }
  }
}

void acquire_on_host(const Clock& clock) {
  auto& all = order();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (const auto& stamp : clock) {
    all.host[stamp.actor] = std::max(all.host[stamp.actor], stamp.number);
  }
}

bool is_known_on_host(const Clock& clock) {
  auto& all = order();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return std::all_of(
      clock.begin(), clock.end(), [&](const Stamp& stamp) { return all.host_knows(stamp); });
}

std::vector<Write> early_ranges(Actor reader, const at::Tensor& tensor, const std::string& op) {
  const auto* writes = writes_of(tensor.storage());
  if (writes == nullptr || tensor.numel() == 0) {
    return {};
  }
  auto& all = order();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const bool own = writes->size() == 1 && writes->front().by.actor == reader;
  if (own || writes->empty()) {
    return {};
  }
  const auto span = span_of(tensor);
  std::vector<Write> early;
  for (const auto& write : *writes) {
    if (write.begin < span.end && write.end > span.begin && !all.knows(reader, write.by)) {
      early.push_back(
          {std::max(write.begin, span.begin), std::min(write.end, span.end), write.by});
    }
  }
  if (early.empty()) {
    return early;
  }
  const auto message = op + " on " + all.actors[reader].name + " uses " +
      std::to_string(early[0].end - early[0].begin) + " bytes that " +
      all.actors[early[0].by.actor].name + " may still be writing; a wait is missing";
  TORCH_CHECK(!all.raises, message);
  if (all.messages.size() < kMostMessages) {
    all.messages.push_back(message);
  }
  return early;
}

void fill_early(void* data, const std::vector<Write>& ranges) {
  for (const auto& range : ranges) {
    std::memset(static_cast<char*>(data) + range.begin, 0xFF, range.end - range.begin);
  }
}

c10::Storage early_copy(const c10::Storage& storage, const std::vector<Write>& ranges) {
  auto data = c10::GetCPUAllocator()->allocate(storage.nbytes());
  std::memcpy(data.get(), storage.data(), storage.nbytes());
  fill_early(data.get(), ranges);
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(),
      /*resizable=*/true);
}

void mark_written(const Stamp& stamp, const at::Tensor& tensor) {
  auto* writes = writes_of(tensor.storage());
  // Elements between those of a view with gaps are not its own; only whole ranges are noted.
  if (writes == nullptr || tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) {
    return;
  }
  const auto span = span_of(tensor);
  auto& all = order();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (writes->size() >= kFewWrites && (writes->size() & (writes->size() - 1)) == 0) {
    writes->erase(
        std::remove_if(
            writes->begin(), writes->end(),
            [&](const Write& write) { return all.host_knows(write.by); }),
        writes->end());
  }
  write_range(*writes, {span.begin, span.end, stamp});
}

std::vector<std::string> take_missing_waits() {
  auto& all = order();
  const std::lock_guard<std::mutex> lock(all.mutex);
  return std::exchange(all.messages, {});
}

void set_missing_wait_raises(bool raises) {
  order().raises = raises;
}

}  // namespace lmcore_sim

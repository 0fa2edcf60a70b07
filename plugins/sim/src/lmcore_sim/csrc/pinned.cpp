#include "pinned.h"

#include <ATen/core/CachingHostAllocator.h>
#include <c10/util/Exception.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "device.h"

namespace lmcore_sim {
namespace {

constexpr size_t kPage = 4096;

void free_pinned(void* pointer);

// Call `change` with each counter and the number that one block of `size` bytes adds to it.
// Nothing is cached, so that all that is allocated is active; torch 2.8 has one counter for both.
template <typename Stats, typename Change>
void for_counters(Stats& stats, size_t size, Change change) {
  if constexpr (requires { stats.active_requests; }) {
    change(stats.active_requests, 1);
    change(stats.active_bytes, size);
    change(stats.allocations, 1);
  } else {
    change(stats.allocation, 1);
  }
  change(stats.allocated_bytes, size);
}

// Pages are registered while they are in use; nothing is cached.
class Allocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    require_usable();
    if (num_bytes == 0) {
      return {nullptr, c10::Device(c10::DeviceType::CPU)};
    }
    const size_t size = (num_bytes + kPage - 1) / kPage * kPage;
    void* pointer = std::aligned_alloc(kPage, size);
    TORCH_CHECK_WITH(OutOfMemoryError, pointer != nullptr, "the host has no memory left to pin");
    const std::lock_guard<std::mutex> lock(mutex_);
    sizes_[pointer] = size;
    for_counters(stats_, size, [](auto& counter, size_t amount) { counter.increase(amount); });
    stats_.num_host_alloc += 1;
    return {pointer, pointer, &free_pinned, c10::Device(c10::DeviceType::CPU)};
  }

  void free(void* pointer) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = sizes_.find(pointer);
      for_counters(stats_, found->second, [](auto& counter, size_t amount) {
        counter.decrease(amount);
      });
      stats_.num_host_free += 1;
      sizes_.erase(found);
    }
    std::free(pointer);
  }

  bool contains(const void* pointer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto next = sizes_.upper_bound(const_cast<void*>(pointer));
    if (next == sizes_.begin()) {
      return false;
    }
    const auto& [begin, size] = *std::prev(next);
    return static_cast<const char*>(pointer) < static_cast<const char*>(begin) + size;
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return &free_pinned;
  }

  void copy_data(void* destination, const void* source, size_t count) const override {
    std::memcpy(destination, source, count);
  }

  // Queued copies keep what they use alive.
  bool record_event(void* /*pointer*/, void* /*context*/, c10::Stream /*stream*/) override {
    return true;
  }

  void empty_cache() override {}

  at::HostStats get_stats() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  void reset_accumulated_stats() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for_counters(stats_, 0, [](auto& counter, size_t) { counter.reset_accumulated(); });
  }

  void reset_peak_stats() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for_counters(stats_, 0, [](auto& counter, size_t) { counter.reset_peak(); });
  }

 private:
  std::mutex mutex_;
  std::map<void*, size_t> sizes_;
  at::HostStats stats_;
};

Allocator& allocator() {
  static auto* one = new Allocator();
  return *one;
}

void free_pinned(void* pointer) {
  if (pointer != nullptr) {
    allocator().free(pointer);
  }
}

const bool registered = [] {
  at::setHostAllocator(kSim, &allocator());
  return true;
}();

}  // namespace

c10::Allocator* pinned_allocator() {
  return &allocator();
}

bool is_pinned(const void* pointer) {
  return allocator().contains(pointer);
}

}  // namespace lmcore_sim

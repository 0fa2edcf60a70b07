#include "allocator.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "device.h"
#include "stream.h"

namespace lmcore_sim {
namespace {

using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kGranule = 512;
constexpr size_t kMaxDevices = 64;
constexpr auto kAll = static_cast<size_t>(StatType::AGGREGATE);

struct Block {
  void* pointer;
  size_t size;       // a multiple of kGranule
  size_t requested;  // what was asked for
  c10::DeviceIndex device;
  std::vector<Write> writes;
};

void free_block(void* context);

// The memory of one device.  Freed blocks are kept for a request of the same size.
class Memory {
 public:
  Block* allocate(size_t requested, c10::DeviceIndex device) {
    const size_t size = (requested + kGranule - 1) / kGranule * kGranule;
    const std::lock_guard<std::mutex> lock(mutex_);
    void* pointer = take_cached(size);
    if (pointer == nullptr) {
      make_room(size, device);
      pointer = std::aligned_alloc(kGranule, size);
      TORCH_CHECK_WITH(
          OutOfMemoryError, pointer != nullptr, "the host has no memory left for sim:",
          static_cast<int>(device));
      stats_.num_device_alloc += 1;
      stats_.segment[kAll].increase(1);
      stats_.reserved_bytes[kAll].increase(size);
    }
    auto* block = new Block{pointer, size, requested, device, {}};
    live_[pointer] = block;
    stats_.allocation[kAll].increase(1);
    stats_.active[kAll].increase(1);
    stats_.allocated_bytes[kAll].increase(size);
    stats_.active_bytes[kAll].increase(size);
    stats_.requested_bytes[kAll].increase(requested);
    return block;
  }

  void free(Block* block) {
    const std::lock_guard<std::mutex> lock(mutex_);
    live_.erase(block->pointer);
    cached_.emplace(block->size, block->pointer);
    stats_.allocation[kAll].decrease(1);
    stats_.active[kAll].decrease(1);
    stats_.allocated_bytes[kAll].decrease(block->size);
    stats_.active_bytes[kAll].decrease(block->size);
    stats_.requested_bytes[kAll].decrease(block->requested);
    delete block;
  }

  void empty_cache() {
    const std::lock_guard<std::mutex> lock(mutex_);
    release_cached();
  }

  bool owns(const void* pointer) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto* byte = static_cast<const char*>(pointer);
    auto next = live_.upper_bound(const_cast<void*>(pointer));
    if (next == live_.begin()) {
      return false;
    }
    const auto* block = std::prev(next)->second;
    return byte < static_cast<const char*>(block->pointer) + block->size;
  }

  DeviceStats stats() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  template <typename Change>
  void change_stats(Change change) {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto* stat : {&stats_.allocation, &stats_.segment, &stats_.active, &stats_.allocated_bytes,
                       &stats_.reserved_bytes, &stats_.active_bytes, &stats_.requested_bytes}) {
      change((*stat)[kAll]);
    }
  }

  void reset_counts() {
    const std::lock_guard<std::mutex> lock(mutex_);
    stats_.num_ooms = 0;
    stats_.num_alloc_retries = 0;
    stats_.num_device_alloc = 0;
    stats_.num_device_free = 0;
  }

  size_t free_bytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return static_cast<size_t>(std::max<int64_t>(0, device_memory() - reserved()));
  }

 private:
  int64_t reserved() const {
    return stats_.reserved_bytes[kAll].current;
  }

  void* take_cached(size_t size) {
    const auto found = cached_.find(size);
    if (found == cached_.end()) {
      return nullptr;
    }
    void* pointer = found->second;
    cached_.erase(found);
    return pointer;
  }

  void release_cached() {
    for (auto& [size, pointer] : cached_) {
      std::free(pointer);
      stats_.num_device_free += 1;
      stats_.segment[kAll].decrease(1);
      stats_.reserved_bytes[kAll].decrease(size);
    }
    cached_.clear();
  }

  void make_room(size_t size, c10::DeviceIndex device) {
    const auto wanted = static_cast<int64_t>(size);
    if (reserved() + wanted <= device_memory()) {
      return;
    }
    stats_.num_alloc_retries += 1;
    release_cached();
    if (reserved() + wanted <= device_memory()) {
      return;
    }
    stats_.num_ooms += 1;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "sim:", static_cast<int>(device), " is out of memory: ", size,
        " bytes were asked for, ", reserved(), " of ", device_memory(),
        " are in use (LMCORE_SIM_MEMORY)");
  }

  std::mutex mutex_;
  std::map<void*, Block*> live_;
  std::multimap<size_t, void*> cached_;
  DeviceStats stats_;
};

Memory& memory(c10::DeviceIndex device) {
  static auto* all = new std::array<Memory, kMaxDevices>();
  check_device(device);
  return all->at(static_cast<size_t>(device));
}

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  memory(block->device).free(block);
}

// Queued work holds memory; it is done before the device counts as full.
Block* allocate_block(size_t num_bytes, c10::DeviceIndex index) {
  try {
    return memory(index).allocate(num_bytes, index);
  } catch (const c10::OutOfMemoryError&) {
    if (!run_all(index)) {
      throw;
    }
  }
  return memory(index).allocate(num_bytes, index);
}

class Allocator final : public AllocatorBase {
 public:
  c10::DataPtr allocate(size_t num_bytes) override {
    require_usable();
    const auto index = device_or_current(-1);
    const c10::Device device(kSim, index);
    if (num_bytes == 0) {
      return {nullptr, device};
    }
    auto* block = allocate_block(num_bytes, index);
    return {block->pointer, block, &free_block, device};
  }

  void copy_data(void* destination, const void* source, size_t count) const override {
    std::memcpy(destination, source, count);
  }

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 9
  bool initialized() override {
    return device_count() > 0;
  }

  void emptyCache(c10::MempoolId_t /*pool*/) override {
    free_cached_memory();
  }

  // Queued work keeps what it uses alive by itself, and ops have read what they use.
  void recordStream(const c10::DataPtr& /*data*/, c10::Stream /*stream*/) override {}

  DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    return memory(device).stats();
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    reset_accumulated_memory(device);
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    reset_peak_memory(device);
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return memory_info(device);
  }
#endif
};

Allocator& allocator() {
  static auto* one = new Allocator();
  return *one;
}

const bool registered = [] {
  c10::SetAllocator(kSim, &allocator());
  return true;
}();

}  // namespace

AllocatorBase* device_allocator() {
  return &allocator();
}

std::map<std::string, int64_t> memory_counts(c10::DeviceIndex device) {
  const auto stats = memory(device).stats();
  std::map<std::string, int64_t> counts{
      {"num_alloc_retries", stats.num_alloc_retries},
      {"num_device_alloc", stats.num_device_alloc},
      {"num_device_free", stats.num_device_free},
      {"num_ooms", stats.num_ooms},
  };
  const std::pair<const char*, const c10::CachingAllocator::StatArray*> named[] = {
      {"active", &stats.active},
      {"active_bytes", &stats.active_bytes},
      {"allocated_bytes", &stats.allocated_bytes},
      {"allocation", &stats.allocation},
      {"requested_bytes", &stats.requested_bytes},
      {"reserved_bytes", &stats.reserved_bytes},
      {"segment", &stats.segment},
  };
  for (const auto& [name, stat] : named) {
    const std::string prefix = std::string(name) + ".all.";
    counts[prefix + "current"] = (*stat)[kAll].current;
    counts[prefix + "peak"] = (*stat)[kAll].peak;
    counts[prefix + "allocated"] = (*stat)[kAll].allocated;
    counts[prefix + "freed"] = (*stat)[kAll].freed;
  }
  return counts;
}

std::pair<size_t, size_t> memory_info(c10::DeviceIndex device) {
  return {memory(device).free_bytes(), static_cast<size_t>(device_memory())};
}

void free_cached_memory() {
  for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
    memory(index).empty_cache();
  }
}

void reset_peak_memory(c10::DeviceIndex device) {
  memory(device).change_stats([](auto& stat) { stat.reset_peak(); });
}

void reset_accumulated_memory(c10::DeviceIndex device) {
  memory(device).change_stats([](auto& stat) { stat.reset_accumulated(); });
  memory(device).reset_counts();
}

std::vector<Write>* writes_of(const c10::Storage& storage) {
  const auto& data = storage.data_ptr();
  return data.get_deleter() == &free_block && data.get_context() != nullptr
      ? &static_cast<Block*>(data.get_context())->writes
      : nullptr;
}

void resize_storage(c10::StorageImpl* storage, size_t num_bytes) {
  TORCH_CHECK(storage->resizable(), "a storage that cannot be resized was asked to");
  const auto index = device_or_current(storage->device().index());
  run_pending(index);
  const auto before = exchange_device(index);
  c10::DataPtr fresh;
  try {
    fresh = allocator().allocate(num_bytes);
  } catch (...) {
    exchange_device(before);
    throw;
  }
  exchange_device(before);
  const size_t kept = std::min(num_bytes, storage->nbytes());
  if (kept > 0 && storage->data() != nullptr) {
    std::memcpy(fresh.get(), storage->data(), kept);
    if (storage->data_ptr().get_deleter() == &free_block) {
      static_cast<Block*>(fresh.get_context())->writes =
          static_cast<Block*>(storage->data_ptr().get_context())->writes;
    }
  }
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(num_bytes);
}

c10::Device device_of_pointer(const void* pointer) {
  for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
    if (memory(index).owns(pointer)) {
      return {kSim, index};
    }
  }
  TORCH_CHECK(false, "the pointer is not memory of a sim device");
}

}  // namespace lmcore_sim

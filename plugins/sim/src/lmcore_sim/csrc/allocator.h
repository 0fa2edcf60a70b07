// Memory of the devices: host memory that is counted per device and limited.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>
#include <torch/version.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "order.h"

namespace lmcore_sim {

// From torch 2.9 its functions for all accelerators count memory through `c10::DeviceAllocator`.
#if TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR < 9
using AllocatorBase = c10::Allocator;
#else
using AllocatorBase = c10::DeviceAllocator;
#endif

AllocatorBase* device_allocator();

// Counts of a device's memory by the names of torch, such as "allocated_bytes.all.current".
std::map<std::string, int64_t> memory_counts(c10::DeviceIndex device);

// Free and total bytes of a device.
std::pair<size_t, size_t> memory_info(c10::DeviceIndex device);

void free_cached_memory();
void reset_peak_memory(c10::DeviceIndex device);
void reset_accumulated_memory(c10::DeviceIndex device);

// The last writers of the block of memory that a storage has; null if it has none of ours.
std::vector<Write>* writes_of(const c10::Storage& storage);

// Give a storage of a device another size; what fits of its content stays.
void resize_storage(c10::StorageImpl* storage, size_t num_bytes);

// The device that `pointer` is memory of; raises if it is of none.
c10::Device device_of_pointer(const void* pointer);

}  // namespace lmcore_sim

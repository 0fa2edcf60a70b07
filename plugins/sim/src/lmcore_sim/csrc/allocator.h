// Memory of the devices: host memory that is counted per device and limited.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Storage.h>
#include <c10/core/StorageImpl.h>

#include <vector>

#include "order.h"

namespace lmcore_sim {

c10::DeviceAllocator* device_allocator();

// The last writers of the block of memory that a storage has; null if it has none of ours.
std::vector<Write>* writes_of(const c10::Storage& storage);

// Give a storage of a device another size; what fits of its content stays.
void resize_storage(c10::StorageImpl* storage, size_t num_bytes);

// The device that `pointer` is memory of; raises if it is of none.
c10::Device device_of_pointer(const void* pointer);

}  // namespace lmcore_sim

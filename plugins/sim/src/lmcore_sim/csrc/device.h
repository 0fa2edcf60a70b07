// Which devices there are, which one is current, and whether they can still be used.
#pragma once

#include <c10/core/Device.h>

#include <string>

namespace lmcore_sim {

constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;

// Set once, before the first use: how many devices, and the bytes of memory of each.
void configure_devices(int64_t count, int64_t memory_bytes);
c10::DeviceIndex device_count() noexcept;
int64_t device_memory();

// The calling thread's device.
c10::DeviceIndex current_device() noexcept;
void set_current_device(c10::DeviceIndex index);
c10::DeviceIndex exchange_device(c10::DeviceIndex index) noexcept;

// `index` itself, or the current device's where it is -1.
c10::DeviceIndex device_or_current(c10::DeviceIndex index);
void check_device(c10::DeviceIndex index);

// A process that was forked has no device threads: it may not use the devices.
bool in_forked_process() noexcept;

// After `lose_devices`, whatever asks for work gets an AcceleratorError with that reason.
void lose_devices(const std::string& reason);
void restore_devices();
void require_usable();

}  // namespace lmcore_sim

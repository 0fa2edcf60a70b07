#include "device.h"

#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>
#include <mutex>

namespace lmcore_sim {
namespace {

constexpr int32_t kLostCode = 1;

std::atomic<int64_t> num_devices{0};
std::atomic<int64_t> memory_per_device{0};
std::atomic<bool> unusable{false};  // lost, or forked: one look in the fast path
std::atomic<bool> forked{false};
std::mutex reason_mutex;
std::string lost_reason;
thread_local c10::DeviceIndex current = 0;

void mark_forked() {
  forked = true;
  unusable = true;
}

}  // namespace

void configure_devices(int64_t count, int64_t memory_bytes) {
  static std::once_flag once;
  std::call_once(once, [] { pthread_atfork(nullptr, nullptr, &mark_forked); });
  num_devices = count;
  memory_per_device = memory_bytes;
}

c10::DeviceIndex device_count() noexcept {
  return static_cast<c10::DeviceIndex>(num_devices.load());
}

int64_t device_memory() {
  return memory_per_device;
}

c10::DeviceIndex current_device() noexcept {
  return current;
}

void check_device(c10::DeviceIndex index) {
  TORCH_CHECK(
      index >= 0 && index < device_count(),
      "there is no device sim:", static_cast<int>(index), "; this process has ",
      static_cast<int>(device_count()), " (LMCORE_SIM_DEVICES)");
}

void set_current_device(c10::DeviceIndex index) {
  check_device(index);
  current = index;
}

c10::DeviceIndex exchange_device(c10::DeviceIndex index) noexcept {
  const auto before = current;
  current = index;
  return before;
}

c10::DeviceIndex device_or_current(c10::DeviceIndex index) {
  const auto chosen = index < 0 ? current : index;
  check_device(chosen);
  return chosen;
}

bool in_forked_process() noexcept {
  return forked;
}

void lose_devices(const std::string& reason) {
  const std::lock_guard<std::mutex> lock(reason_mutex);
  lost_reason = reason;
  unusable = true;
}

void restore_devices() {
  const std::lock_guard<std::mutex> lock(reason_mutex);
  lost_reason.clear();
  unusable = forked.load();
}

void require_usable() {
  if (!unusable.load(std::memory_order_relaxed)) {
    return;
  }
  TORCH_CHECK(
      !forked,
      "cannot use the sim devices in a forked process: their threads are its parent's; "
      "use the start method `spawn`");
  const std::lock_guard<std::mutex> lock(reason_mutex);
  throw c10::AcceleratorError(
      {__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, kLostCode,
      "the sim device is lost: " + lost_reason);
}

}  // namespace lmcore_sim

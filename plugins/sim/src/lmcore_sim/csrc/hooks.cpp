// What torch asks of the one backend that is not its own.
#include <ATen/detail/PrivateUse1HooksInterface.h>

#include "allocator.h"
#include "device.h"
#include "generator.h"
#include "pinned.h"

namespace lmcore_sim {
namespace {

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override {
    return true;
  }

  bool isAvailable() const override {
    return device_count() > 0;
  }

  bool hasPrimaryContext(c10::DeviceIndex index) const override {
    return index >= 0 && index < device_count();
  }

  void init() const override {
    require_usable();
  }

  c10::DeviceIndex deviceCount() const override {
    return device_count();
  }

  void setCurrentDevice(c10::DeviceIndex index) const override {
    set_current_device(index);
  }

  c10::DeviceIndex getCurrentDevice() const override {
    return current_device();
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    check_device(index);
    return exchange_device(index);
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override {
    return exchangeDevice(index);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override {
    return default_generator(index);
  }

  at::Generator getNewGenerator(c10::DeviceIndex index) const override {
    return new_generator(index);
  }

  c10::Device getDeviceFromPtr(void* pointer) const override {
    return device_of_pointer(pointer);
  }

  bool isPinnedPtr(const void* pointer) const override {
    return is_pinned(pointer);
  }

  c10::Allocator* getPinnedMemoryAllocator() const override {
    return pinned_allocator();
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t num_bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), num_bytes);
  }
};

const bool registered = [] {
  static auto* hooks = new Hooks();
  at::RegisterPrivateUse1HooksInterface(hooks);
  return true;
}();

}  // namespace
}  // namespace lmcore_sim

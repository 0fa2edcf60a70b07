// How torch changes device and stream, and asks about them.
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "device.h"
#include "fault.h"
#include "graph.h"
#include "stream.h"

namespace lmcore_sim {
namespace {

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kSim;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    check_device(device.index());
    return {kSim, exchange_device(device.index())};
  }

  c10::Device getDevice() const override {
    return {kSim, current_device()};
  }

  void setDevice(c10::Device device) const override {
    set_current_device(device.index());
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    exchange_device(device.index());
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return device_count();
  }

#if __has_include(<c10/core/DeviceCapability.h>)  // torch 2.8 has none
  // Every dtype that the CPU has.
  c10::DeviceCapability getDeviceCapability(c10::Device /*device*/) const override {
    return {};
  }
#endif

  c10::Stream getStream(c10::Device device) const override {
    return current_stream(device.index());
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return default_stream(device.index());
  }

  c10::Stream getStreamFromGlobalPool(c10::Device device, bool /*high*/) const override {
    return new_stream(device.index());
  }

  c10::Stream getNewStream(c10::Device device, int /*priority*/) const override {
    return new_stream(device.index());
  }

  c10::Stream exchangeStream(c10::Stream stream) const override {
    return exchange_stream(stream);
  }

  bool queryStream(const c10::Stream& stream) const override {
    refuse_in_capture(stream, "the host asks whether the stream is done");
    return query_stream(stream);
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    refuse_in_capture(stream, "the host waits for the stream");
    if (!is_on(Switch::no_stream_synchronize)) {
      wait_stream(stream);
    }
  }

  void synchronizeDevice(c10::DeviceIndex index) const override {
    refuse_in_capture(device_or_current(index), "the host waits for the device");
    if (!is_on(Switch::no_synchronize)) {
      wait_device(device_or_current(index));
    }
  }

  void record(
      void** event,
      const c10::Stream& stream,
      c10::DeviceIndex /*index*/,
      c10::EventFlag /*flag*/) const override {
    record_event(event, stream);
  }

  void block(void* event, const c10::Stream& stream) const override {
    make_wait(event, stream);
  }

  bool queryEvent(void* event) const override {
    return query_event(event);
  }

  void synchronizeEvent(void* event) const override {
    if (!is_on(Switch::no_event_synchronize)) {
      wait_event(event);
    }
  }

  double elapsedTime(void* begin, void* end, c10::DeviceIndex /*index*/) const override {
    return elapsed_milliseconds(begin, end);
  }

  void destroyEvent(void* event, c10::DeviceIndex /*index*/) const noexcept override {
    destroy_event(event);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

}  // namespace
}  // namespace lmcore_sim

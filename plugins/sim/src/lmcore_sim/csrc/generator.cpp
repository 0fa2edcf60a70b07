#include "generator.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <c10/core/GeneratorImpl.h>

#include <array>
#include <cstring>
#include <memory>
#include <mutex>

#include "device.h"
#include "fault.h"

namespace lmcore_sim {
namespace {

constexpr size_t kStateBytes = 2 * sizeof(uint64_t);
constexpr size_t kMaxDevices = 64;
constexpr uint64_t kDrawsPerStep = 4;  // offsets are multiples of it, as DTensor expects

// Finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the input moves every one.
uint64_t mix(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

class SimGenerator final : public c10::GeneratorImpl {
 public:
  explicit SimGenerator(c10::DeviceIndex index)
      : c10::GeneratorImpl(
            c10::Device(kSim, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {}

  static c10::DeviceType device_type() {
    return kSim;
  }

  void set_current_seed(uint64_t seed) override {
    seed_ = seed;
    offset_ = 0;
  }

  void set_offset(uint64_t offset) override {
    offset_ = offset;
  }

  uint64_t get_offset() const override {
    return offset_;
  }

  uint64_t current_seed() const override {
    return seed_;
  }

  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom());
    return seed_;
  }

  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(
        state.device().is_cpu() && state.dtype() == caffe2::TypeMeta::Make<uint8_t>() &&
            state.is_contiguous() && state.numel() == static_cast<int64_t>(kStateBytes),
        "the state of a sim generator is ", kStateBytes, " bytes on the CPU");
    if (is_on(Switch::no_rng_restore)) {
      return;
    }
    const auto* bytes = static_cast<const char*>(state.data());
    std::memcpy(&seed_, bytes, sizeof(seed_));
    std::memcpy(&offset_, bytes + sizeof(seed_), sizeof(offset_));
  }

  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    at::Tensor state(at::detail::empty_cpu({static_cast<int64_t>(kStateBytes)}, c10::kByte));
    auto* bytes = static_cast<char*>(state.mutable_data_ptr());
    std::memcpy(bytes, &seed_, sizeof(seed_));
    std::memcpy(bytes + sizeof(seed_), &offset_, sizeof(offset_));
    return state.getIntrusivePtr();
  }

  at::Generator draw(uint64_t draws) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto host = at::detail::createCPUGenerator(mix(seed_ ^ mix(offset_)));
    offset_ += std::max<uint64_t>(1, (draws + kDrawsPerStep - 1) / kDrawsPerStep) * kDrawsPerStep;
    return host;
  }

 private:
  SimGenerator* clone_impl() const override {
    auto* copy = new SimGenerator(device().index());
    copy->seed_ = seed_;
    copy->offset_ = offset_;
    return copy;
  }

  uint64_t seed_ = c10::default_rng_seed_val;
  uint64_t offset_ = 0;
};

}  // namespace

at::Generator new_generator(c10::DeviceIndex device) {
  return at::make_generator<SimGenerator>(device_or_current(device));
}

const at::Generator& default_generator(c10::DeviceIndex device) {
  static auto* all = new std::array<at::Generator, kMaxDevices>();
  static std::mutex mutex;
  const auto index = device_or_current(device);
  const std::lock_guard<std::mutex> lock(mutex);
  auto& generator = all->at(static_cast<size_t>(index));
  if (!generator.defined()) {
    generator = new_generator(index);
  }
  return generator;
}

at::Generator host_generator(const at::Generator& generator, uint64_t draws) {
  return at::check_generator<SimGenerator>(generator)->draw(draws);
}

}  // namespace lmcore_sim

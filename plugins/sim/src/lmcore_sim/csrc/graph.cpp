#include "graph.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "device.h"
#include "generator.h"
#include "host_view.h"
#include "order.h"
#include "stream.h"

// Older releases of torch have no graphs for devices that are not their own.
#if __has_include(<ATen/core/GraphImplInterface.h>)
#include <ATen/core/GraphImplInterface.h>
#define LMCORE_SIM_GRAPHS
#endif

namespace lmcore_sim {
namespace {

using c10::IValue;

void each_tensor(const IValue& value, const std::function<void(const at::Tensor&)>& call) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      call(value.toTensor());
    }
  } else if (value.isTensorList()) {
    for (const at::Tensor& tensor : value.toTensorList()) {
      call(tensor);
    }
  }
}

at::Tensor without_gradients(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_privateuseone()) {
    return tensor;
  }
  auto same = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  auto* impl = same.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  same._set_conj(tensor.is_conj());
  same._set_neg(tensor.is_neg());
  return same;
}

IValue without_gradients(const IValue& value) {
  if (value.isTensor()) {
    return without_gradients(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<at::Tensor> same;
    for (const at::Tensor& tensor : value.toTensorList()) {
      same.push_back(without_gradients(tensor));
    }
    return same;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> same;
    for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
      same.push_back(tensor ? std::optional<at::Tensor>(without_gradients(*tensor)) : std::nullopt);
    }
    return same;
  }
  return value;
}

void overwrite(const at::Tensor& noted, const at::Tensor& now) {
  if (!noted.defined() || !noted.is_privateuseone() ||
      noted.storage().data() == now.storage().data()) {
    return;  // a view, or what the op has written in place
  }
  TORCH_CHECK(
      noted.sizes() == now.sizes(), "an op of a graph made a tensor of ", noted.sizes(),
      " when it was captured, and makes one of ", now.sizes(), " now");
  host_view(noted).copy_(host_view(now));
  mark_written(issue(actor_of(current_stream(noted.device().index()))), noted);
}

// What is noted of one stream.
class Capture {
 public:
  explicit Capture(c10::DeviceIndex device) : device_(device) {
    random_ = default_generator(device_).get_state();
  }

  void keep(const c10::Storage& storage) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto* bytes = static_cast<const char*>(storage.data());
    if (bytes != nullptr && made_.count(bytes) == 0 && kept_.count(bytes) == 0) {
      kept_.emplace(bytes, Kept{storage, {bytes, bytes + storage.nbytes()}});
    }
  }

  void note(std::function<void()> again) {
    const std::lock_guard<std::mutex> lock(mutex_);
    steps_.push_back(std::move(again));
  }

  void made(const c10::Storage& storage) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (storage.data() != nullptr) {
      made_.emplace(static_cast<const char*>(storage.data()), storage);
    }
  }

  void spoil(const std::string& why) {
    const std::lock_guard<std::mutex> lock(mutex_);
    spoilt_ = spoilt_.empty() ? why : spoilt_;
  }

  // Leave the device as it was before, and return what was noted.
  std::vector<std::function<void()>> end() {
    for (auto& [bytes, kept] : kept_) {
      const auto count = std::min(kept.storage.nbytes(), kept.bytes.size());
      std::memcpy(kept.storage.mutable_data(), kept.bytes.data(), count);
    }
    for (auto& [bytes, storage] : made_) {
      std::memset(storage.mutable_data(), 0xFF, storage.nbytes());
    }
    auto generator = default_generator(device_);
    generator.set_state(random_);
    TORCH_CHECK(spoilt_.empty(), "the capture is of no use: ", spoilt_);
    return std::move(steps_);
  }

 private:
  struct Kept {
    c10::Storage storage;
    std::vector<char> bytes;
  };

  c10::DeviceIndex device_;
  at::Tensor random_;
  std::mutex mutex_;
  std::vector<std::function<void()>> steps_;
  std::unordered_map<const char*, Kept> kept_;
  std::unordered_map<const char*, c10::Storage> made_;
  std::string spoilt_;
};

std::mutex captures_mutex;
std::atomic<int> num_captures{0};

using Key = std::pair<c10::DeviceIndex, c10::StreamId>;

std::map<Key, std::shared_ptr<Capture>>& captures() {
  static auto* all = new std::map<Key, std::shared_ptr<Capture>>();
  return *all;
}

Key key_of(c10::Stream stream) {
  return {stream.device_index(), stream.id()};
}

std::shared_ptr<Capture> capture_of(c10::Stream stream) {
  if (num_captures.load() == 0) {
    return nullptr;
  }
  const std::lock_guard<std::mutex> lock(captures_mutex);
  const auto found = captures().find(key_of(stream));
  return found == captures().end() ? nullptr : found->second;
}

[[noreturn]] void refuse(Capture& capture, const char* what) {
  capture.spoil(what);
  TORCH_CHECK(false, "operation not permitted while the stream is captured: ", what);
}

}  // namespace

bool is_captured(c10::Stream stream) {
  return capture_of(stream) != nullptr;
}

void keep_for_capture(c10::Stream stream, const IValue& written) {
  if (const auto capture = capture_of(stream)) {
    each_tensor(written, [&](const at::Tensor& tensor) { capture->keep(tensor.storage()); });
  }
}

void note_in_capture(c10::Stream stream, std::function<void()> again) {
  if (const auto capture = capture_of(stream)) {
    capture->note(std::move(again));
  }
}

void made_in_capture(c10::Stream stream, const at::Tensor& tensor) {
  if (const auto capture = capture_of(stream)) {
    capture->made(tensor.storage());
  }
}

void refuse_in_capture(c10::Stream stream, const char* what) {
  if (const auto capture = capture_of(stream)) {
    refuse(*capture, what);
  }
}

void refuse_in_capture(c10::DeviceIndex device, const char* what) {
  if (num_captures.load() == 0) {
    return;
  }
  std::shared_ptr<Capture> found;
  {
    const std::lock_guard<std::mutex> lock(captures_mutex);
    for (const auto& [key, capture] : captures()) {
      found = key.first == device ? capture : found;
    }
  }
  if (found) {
    refuse(*found, what);
  }
}

Stack without_gradients(const Stack& values) {
  Stack same;
  for (const auto& value : values) {
    same.push_back(without_gradients(value));
  }
  return same;
}

void overwrite(const Stack& noted, const Stack& now) {
  for (size_t place = 0; place < noted.size(); ++place) {
    if (noted[place].isTensor()) {
      overwrite(noted[place].toTensor(), now[place].toTensor());
    } else if (noted[place].isTensorList()) {
      const auto before = noted[place].toTensorList();
      const auto after = now[place].toTensorList();
      for (size_t number = 0; number < before.size(); ++number) {
        overwrite(before.get(number), after.get(number));
      }
    }
  }
}

#ifdef LMCORE_SIM_GRAPHS
namespace {

struct SimGraph final : at::GraphImplInterface {
  explicit SimGraph(const at::GraphImplArgs& /*args*/) {}

  ~SimGraph() override {
    reset();
  }

  void capture_begin(at::MempoolId_t /*pool*/, at::GraphCaptureMode /*mode*/) override {
    TORCH_CHECK(!capture_ && steps_.empty(), "the graph holds something already; reset it first");
    stream_ = current_stream(current_device());
    run_pending(*stream_);
    const std::lock_guard<std::mutex> lock(captures_mutex);
    TORCH_CHECK(captures().count(key_of(*stream_)) == 0, "the stream is captured already");
    capture_ = std::make_shared<Capture>(stream_->device_index());
    captures().emplace(key_of(*stream_), capture_);
    ++num_captures;
  }

  void capture_end() override {
    TORCH_CHECK(capture_, "the graph captures nothing");
    const auto capture = leave();
    steps_ = capture->end();
  }

  void instantiate() override {}

  void replay() override {
    TORCH_CHECK(!capture_ && !steps_.empty(), "the graph holds nothing to play");
    const c10::DeviceGuard guard(stream_->device());
    // What is played has nothing to do with gradients, autocast or modes of Python around it.
    const c10::impl::ExcludeDispatchKeyGuard kernels_alone(
        c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
        c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    for (const auto& step : steps_) {
      step();
    }
  }

  void reset() override {
    if (capture_) {
      leave();
    }
    steps_.clear();
  }

  at::MempoolId_t pool() const override {
    return {0, 0};
  }

  void enable_debug_mode() override {}

  void debug_dump(const std::string& /*path*/) override {
    TORCH_CHECK(false, "a graph of the sim device cannot be written to a file");
  }

 private:
  std::shared_ptr<Capture> leave() {
    const std::lock_guard<std::mutex> lock(captures_mutex);
    captures().erase(key_of(*stream_));
    --num_captures;
    return std::exchange(capture_, nullptr);
  }

  std::optional<c10::Stream> stream_;
  std::shared_ptr<Capture> capture_;
  std::vector<std::function<void()>> steps_;
};

}  // namespace
#endif

}  // namespace lmcore_sim

#ifdef LMCORE_SIM_GRAPHS
namespace at {
// torch asks for the device type's name in capitals.
C10_REGISTER_CLASS(GraphImplRegistry, SIM, lmcore_sim::SimGraph)
}  // namespace at
#endif

// Every op that the device has no kernel for runs as the CPU's, on the same memory.
//
// Arguments are seen as tensors of the CPU without a copy; what the kernel makes new is copied to
// the device's memory, so that it is counted and limited there; what it returns of its arguments is
// the argument itself, or a view of it.  A device's generator becomes an engine of the CPU.  What
// another stream may still be writing is seen as bytes that are all 1 (order.h).
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <cstring>
#include <unordered_set>

#include "allocator.h"
#include "device.h"
#include "fault.h"
#include "generator.h"
#include "graph.h"
#include "host_view.h"
#include "order.h"
#include "stream.h"

namespace lmcore_sim {
namespace {

using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

bool is_sim(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone();
}

// Ops that may mix a device's tensors with the CPU's: indices, and counts of steps.
bool takes_host_tensors(const std::string& name) {
  static const std::unordered_set<std::string> indexing{
      "aten::index",         "aten::index_put",     "aten::index_put_",
      "aten::_index_put_impl_", "aten::_unsafe_index", "aten::_unsafe_index_put"};
  return indexing.count(name) > 0 || name.rfind("aten::_foreach_", 0) == 0 ||
      name.rfind("aten::_fused_", 0) == 0;
}

// Ops whose results are numbers on the host, or have sizes that depend on numbers.
bool has_host_wait(const std::string& name) {
  static const std::unordered_set<std::string> waiting{
      "aten::_local_scalar_dense", "aten::equal", "aten::is_nonzero", "aten::nonzero",
      "aten::masked_select", "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim"};
  return waiting.count(name) > 0;
}

// One call of a kernel: its arguments there and back.
class Call {
 public:
  Call(const OperatorHandle& op, Stack* stack)
      : op_(op), stack_(stack), num_arguments_(op.schema().arguments().size()) {}

  void run() {
    find_device();
    const auto stream = current_stream(device_.index());
    if (is_captured(stream)) {
      run_captured(stream);
      return;
    }
    run_pending(stream);
    actor_ = actor_of(stream);
    run_now(stream);
    if (has_host_wait(op_.operator_name().name)) {
      wait_stream(stream);
    }
  }

 private:
  struct Argument {
    at::Tensor device;
    at::Tensor host;
    c10::Storage storage;  // the host view's, before the kernel might give it another
    bool is_written;
    std::vector<Write> early;  // ranges that another stream may still be writing
  };

  void run_now(c10::Stream stream) {
    const auto& name = op_.operator_name().name;
    const double factor = before_op(name, stream);
    const auto begin = stack_->size() - num_arguments_;
    for (size_t place = begin; place < stack_->size(); ++place) {
      const auto* alias = op_.schema().arguments()[place - begin].alias_info();
      access_ = alias == nullptr ? Access::read
          : alias->isWrite()     ? Access::write
                                 : Access::view;
      stack_->at(place) = to_host(stack_->at(place));
    }
    replace_generator(begin);
    call();
    if (factor != 1) {
      spoil(factor);
    }
    take_back_resized();
    mark_arguments();
    const auto results = op_.schema().returns().size();
    for (size_t place = stack_->size() - results; place < stack_->size(); ++place) {
      stack_->at(place) = from_host(stack_->at(place));
    }
  }

  // Run, for the results' shapes, and note how it is done again.
  void run_captured(c10::Stream stream) {
    const auto& schema = op_.schema();
    if (has_host_wait(op_.operator_name().name)) {
      refuse_in_capture(stream, "an op has the host wait for its result");
    }
    const auto arguments = without_gradients(torch::jit::last(*stack_, num_arguments_).vec());
    for (size_t place = 0; place < num_arguments_; ++place) {
      const auto* alias = schema.arguments()[place].alias_info();
      if (alias != nullptr && alias->isWrite()) {
        keep_for_capture(stream, arguments[place]);
      }
    }
    run_now(stream);
    const auto results = without_gradients(torch::jit::last(*stack_, schema.returns().size()).vec());
    const auto again = [op = op_, arguments, results] {
      Stack stack = arguments;
      Call(op, &stack).run();
      overwrite(results, stack);
    };
    note_in_capture(stream, again);
  }

  // The device is that of the tensors; factories have it as an argument.
  void find_device() {
    std::optional<c10::Device> found;
    const bool mixes = takes_host_tensors(op_.operator_name().name);
    const auto look = [&](const at::Tensor& tensor) {
      if (!tensor.defined() || (tensor.is_cpu() && (mixes || tensor.dim() == 0))) {
        return;
      }
      TORCH_CHECK(
          !found || *found == tensor.device(), "Expected all tensors to be on the same device, but ",
          op_.operator_name(), " got some on ", *found, " and some on ", tensor.device());
      found = tensor.device();
    };
    for (const auto& value : torch::jit::last(*stack_, num_arguments_)) {
      if (value.isTensor()) {
        look(value.toTensor());
      } else if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorList()) {
          look(tensor);
        }
      } else if (value.isDevice() && value.toDevice().type() == kSim) {
        found = found ? found : value.toDevice();
      }
    }
    device_ = c10::Device(kSim, device_or_current(found ? found->index() : -1));
  }

  IValue to_host(const IValue& value) {
    if (value.isTensor()) {
      return host_of(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> hosts;
      for (const at::Tensor& tensor : value.toTensorList()) {
        hosts.push_back(host_of(tensor));
      }
      return hosts;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> hosts;
      for (const std::optional<at::Tensor> tensor : value.toOptionalTensorList()) {
        hosts.push_back(tensor ? std::optional<at::Tensor>(host_of(*tensor)) : std::nullopt);
      }
      return hosts;
    }
    if (value.isDevice() && value.toDevice().type() == kSim) {
      return c10::Device(c10::DeviceType::CPU);
    }
    return value;
  }

  at::Tensor host_of(const at::Tensor& tensor) {
    if (!is_sim(tensor)) {
      return tensor;
    }
    const auto count = static_cast<uint64_t>(tensor.numel());
    most_elements_ = std::max(most_elements_, count);
    for (auto& known : arguments_) {
      if (known.device.is_same(tensor)) {
        known.is_written = known.is_written || access_ == Access::write;
        return known.host;
      }
    }
    auto storage = storage_of(tensor);
    std::vector<Write> early;
    if (actor_ && access_ != Access::view) {
      early = early_ranges(*actor_, tensor, op_.operator_name().name);
    }
    if (!early.empty() && access_ == Access::write) {
      fill_early(storage.mutable_data(), early);
    } else if (!early.empty()) {
      storage = early_copy(storage, early);
    }
    auto host = host_view(tensor, storage);
    arguments_.push_back({tensor, host, storage, access_ == Access::write, std::move(early)});
    return host;
  }

  // Views of one storage stay views of one storage.
  c10::Storage storage_of(const at::Tensor& tensor) {
    for (const auto& known : arguments_) {
      if (known.early.empty() && known.device.storage().is_alias_of(tensor.storage())) {
        return known.storage;
      }
    }
    return host_storage(tensor.storage());
  }

  // A device's generator becomes an engine of the CPU; where none is given, the default one's does.
  void replace_generator(size_t begin) {
    const auto& arguments = op_.schema().arguments();
    for (size_t place = 0; place < num_arguments_; ++place) {
      const auto type = arguments[place].type()->str();
      if (type != "Generator" && type != "Generator?") {
        continue;
      }
      auto& value = stack_->at(begin + place);
      const auto given = value.isNone() ? default_generator(device_.index()) : value.toGenerator();
      TORCH_CHECK(
          given.device().type() == kSim, "Expected a 'sim' device type for generator but found '",
          given.device(), "'");
      value = host_generator(given, most_elements_);
      return;
    }
    TORCH_CHECK(
        !op_.hasTag(at::Tag::nondeterministic_seeded) ||
            op_.operator_name().name == "aten::_fused_sdp_choice",  // draws nothing
        op_.operator_name(),
        " draws random numbers, takes no generator, and has no kernel for the sim device");
  }

  void call() {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    const auto& name = op_.operator_name().name;
    if (name == "aten::convolution_overrideable") {
      replace("aten::convolution").callBoxed(stack_);
    } else if (name == "aten::convolution_backward_overrideable") {
      // The gradient of the bias has a channel for each of the output's.
      const int64_t channels = stack_->at(stack_->size() - num_arguments_).toTensor().size(1);
      stack_->insert(stack_->end() - 7, IValue(std::vector<int64_t>{channels}));
      replace("aten::convolution_backward").callBoxed(stack_);
    } else {
      op_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack_);
    }
  }

  static OperatorHandle replace(const char* name) {
    return c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  }

  // Make the results wrong: those returned and those written into arguments.
  void spoil(double factor) {
    std::unordered_set<const void*> spoilt;
    const auto one = [&](const at::Tensor& tensor) {
      if (tensor.defined() && tensor.is_floating_point() &&
          spoilt.insert(tensor.unsafeGetTensorImpl()).second) {
        tensor.mul_(factor);
      }
    };
    const auto each = [&](const IValue& value) {
      if (value.isTensor()) {
        one(value.toTensor());
      } else if (value.isTensorList()) {
        for (const at::Tensor& tensor : value.toTensorList()) {
          one(tensor);
        }
      }
    };
    const auto results = op_.schema().returns().size();
    for (const auto& value : torch::jit::last(*stack_, results)) {
      each(value);
    }
    if (results == 0) {  // a list of tensors, changed in place
      for (const auto& argument : arguments_) {
        one(argument.host);
      }
    }
  }

  // A kernel may resize what it writes its result to.
  void take_back_resized() {
    for (const auto& argument : arguments_) {
      if (!argument.is_written) {
        continue;
      }
      auto* host = argument.host.unsafeGetTensorImpl();
      auto* device = argument.device.unsafeGetTensorImpl();
      const auto& before = argument.device.storage();
      const auto& now = argument.host.storage();
      if (now.data() != before.data()) {
        resize_storage(before.unsafeGetStorageImpl(), now.nbytes());
        std::memcpy(before.mutable_data(), now.data(), now.nbytes());
      }
      if (host->sizes() != device->sizes() || host->strides() != device->strides()) {
        device->set_sizes_and_strides(host->sizes(), host->strides(), host->storage_offset());
      }
    }
  }

  // What the op has written is its own now; what two streams write at once is right in neither.
  void mark_arguments() {
    if (!actor_) {
      return;
    }
    stamp_ = issue(*actor_);
    for (const auto& argument : arguments_) {
      if (argument.is_written) {
        if (!argument.early.empty()) {
          fill_early(argument.device.storage().mutable_data(), argument.early);
        }
        mark_written(stamp_, argument.device);
      }
    }
  }

  IValue from_host(const IValue& value) {
    if (value.isTensor()) {
      return device_of(value.toTensor());
    }
    if (value.isTensorList()) {
      c10::List<at::Tensor> tensors;
      for (const at::Tensor& tensor : value.toTensorList()) {
        tensors.push_back(device_of(tensor));
      }
      return tensors;
    }
    return value;
  }

  at::Tensor device_of(const at::Tensor& host) {
    if (!host.defined() || !host.is_cpu()) {
      return host;
    }
    for (const auto& argument : arguments_) {
      if (argument.host.is_same(host)) {
        return argument.device;
      }
    }
    for (const auto& argument : arguments_) {
      if (argument.storage.is_alias_of(host.storage())) {
        return view_of(argument.device, host);
      }
    }
    return copy_of(host);
  }

  static at::Tensor view_of(const at::Tensor& base, const at::Tensor& host) {
    auto view = at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), host.dtype());
    view.unsafeGetTensorImpl()->set_sizes_and_strides(
        host.sizes(), host.strides(), host.storage_offset());
    view._set_conj(host.is_conj());
    view._set_neg(host.is_neg());
    return view;
  }

  at::Tensor copy_of(const at::Tensor& host) {
    const auto dense = host.is_non_overlapping_and_dense() ? host : host.contiguous();
    const auto tensor = at::empty_strided(
        dense.sizes(), dense.strides(), dense.options().device(device_).pinned_memory(false));
    if (dense.nbytes() > 0) {
      std::memcpy(tensor.mutable_data_ptr(), dense.const_data_ptr(), dense.nbytes());
    }
    if (actor_) {
      mark_written(stamp_, tensor);
    }
    return tensor;
  }

  const OperatorHandle& op_;
  Stack* stack_;
  size_t num_arguments_;
  c10::Device device_{kSim, 0};
  std::vector<Argument> arguments_;
  uint64_t most_elements_ = 0;
  enum class Access { read, write, view };
  Access access_ = Access::read;
  std::optional<Actor> actor_;  // none while a graph is captured: nothing is executed then
  Stamp stamp_{};
};

void run_on_host(const OperatorHandle& op, Stack* stack) {
  Call(op, stack).run();
}

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// For these the fallback is not asked, because torch has a kernel for every backend: one that says
// that there is none, one of smaller ops where the CPU's is a single one and keeps other dtypes, or
// one that resizes the scalar of a loss, with a warning.
TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  for (const char* name : {"convolution_overrideable", "convolution_backward_overrideable",
                           "native_layer_norm", "native_group_norm", "silu_backward",
                           "mish_backward", "native_channel_shuffle", "addr", "addr.out",
                           "mse_loss", "smooth_l1_loss"}) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  }
}

}  // namespace lmcore_sim

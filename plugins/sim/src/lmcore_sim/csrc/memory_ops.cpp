// Making tensors of a device, looking at them differently, copying them: what no CPU kernel does.
#include <ATen/EmptyTensor.h>
#include <ATen/core/Tensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_copy_from.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include "allocator.h"
#include "device.h"
#include "fault.h"
#include "graph.h"
#include "host_view.h"
#include "order.h"
#include "pinned.h"
#include "stream.h"

namespace lmcore_sim {
namespace {

constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

c10::OptionalDeviceGuard guard_of(std::optional<c10::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(!pin.value_or(false), "only tensors of the CPU can be pinned");
  if (device && device->has_index()) {
    check_device(device->index());
    return c10::OptionalDeviceGuard(device);
  }
  return c10::OptionalDeviceGuard();
}

at::Tensor noted(at::Tensor made) {
  made_in_capture(current_stream(made.device().index()), made);
  return made;
}

at::Tensor empty(
    at::IntArrayRef size,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory,
    std::optional<at::MemoryFormat> format) {
  const auto guard = guard_of(device, pin_memory);
  return noted(at::detail::empty_generic(
      size, device_allocator(), kKeys, c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(
    at::IntArrayRef size,
    at::IntArrayRef stride,
    std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> /*layout*/,
    std::optional<at::Device> device,
    std::optional<bool> pin_memory) {
  const auto guard = guard_of(device, pin_memory);
  return noted(at::detail::empty_strided_generic(
      size, stride, device_allocator(), kKeys, c10::dtype_or_default(dtype)));
}

// Give a tensor's storage the bytes that its new shape needs.
void grow(const at::Tensor& tensor, size_t num_bytes) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  if (tensor.numel() > 0 && num_bytes > storage->nbytes()) {
    resize_storage(storage, num_bytes);
  }
}

const at::Tensor& resize(
    const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  at::native::resize_impl_cpu_(impl, size, std::nullopt, /*resize_storage=*/false);
  if (format) {
    impl->empty_tensor_restride(*format);
  }
  grow(self, at::detail::computeStorageNbytes(
                 impl->sizes(), impl->strides(), impl->itemsize(), impl->storage_offset()));
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self,
    at::Storage source,
    int64_t offset,
    at::IntArrayRef size,
    at::IntArrayRef stride) {
  at::native::checkSetStorage(self, source, offset, size, stride);
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_offset(offset);
  const at::OptionalIntArrayRef given =
      stride.data() == nullptr ? at::OptionalIntArrayRef() : at::OptionalIntArrayRef(stride);
  at::native::resize_impl_cpu_(impl, size, given, /*resize_storage=*/false);
  grow(self, at::detail::computeStorageNbytes(
                 impl->sizes(), impl->strides(), impl->itemsize(), offset));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto count =
      static_cast<int64_t>(source.nbytes() / self.unsafeGetTensorImpl()->itemsize());
  return set_storage(self, std::move(source), 0, {count}, {});
}

at::Tensor& set_nothing(at::Tensor& self) {
  const c10::DeviceGuard guard(self.device());
  c10::Storage storage(
      c10::Storage::use_byte_size_t(), 0, device_allocator()->allocate(0), device_allocator(),
      /*resizable=*/true);
  return set_storage(self, std::move(storage), 0, {0}, {});
}

at::Tensor on_host(const at::Tensor& tensor) {
  return tensor.is_cpu() ? tensor : host_view(tensor);
}

// Whether a copy may be late: it was allowed, and both ends are memory that a device can reach.
bool may_be_late(const at::Tensor& one, const at::Tensor& other, bool non_blocking) {
  const auto reachable = [](const at::Tensor& tensor) {
    return !tensor.is_cpu() || is_pinned(tensor.const_data_ptr());
  };
  return non_blocking && one.is_cpu() != other.is_cpu() && reachable(one) && reachable(other);
}

void copy_values(const at::Tensor& from, const at::Tensor& to, double factor) {
  to.copy_(from);
  if (factor != 1 && to.is_floating_point()) {
    to.mul_(factor);
  }
}

const std::string kCopy = "copy";

// The source as the stream sees it.
at::Tensor readable(const at::Tensor& source, c10::Stream stream) {
  if (source.is_cpu()) {
    return source;
  }
  const auto early = early_ranges(actor_of(stream), source, kCopy);
  return early.empty() ? host_view(source)
                       : host_view(source, early_copy(source.storage(), early));
}

// Ranges of the target that another stream may still be writing.
std::vector<Write> contested(const at::Tensor& target, c10::Stream stream) {
  return target.is_cpu() ? std::vector<Write>() : early_ranges(actor_of(stream), target, kCopy);
}

// Copy to or from pinned memory: the device's side in the order of the stream, the host's when it
// is waited for.
void copy_late(c10::Stream stream, const at::Tensor& source, const at::Tensor& target) {
  const auto effect = effect_on_op(kCopy);
  delay(stream, effect.seconds);
  run_pending(stream);
  const bool to_host = target.is_cpu();
  const auto from = to_host ? readable(source, stream).clone() : source;
  const auto early = contested(target, stream);
  const auto copy = [from, to = on_host(target), early, effect] {
    copy_values(from, to, act(effect, kCopy));
    fill_early(to.storage().mutable_data(), early);
  };
  const std::vector<c10::Storage> used{from.storage(), target.storage()};
  enqueue(stream, {copy, used, !to_host, to_host ? from.nbytes() : 0}, target);
}

// Copy at once; where the host's memory takes part, it has waited for that.
void copy_now(
    c10::Stream stream, const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const double factor = before_op(kCopy, stream);
  run_pending(stream);
  const auto early = contested(target, stream);
  const auto to = on_host(target);
  copy_values(readable(source, stream), to, factor);
  fill_early(to.storage().mutable_data(), early);
  const auto stamp = issue(actor_of(stream));
  if (!target.is_cpu()) {
    mark_written(stamp, target);
  }
  if (target.is_cpu() || (source.is_cpu() && !non_blocking)) {
    wait_stream(stream);
  }
}

// Copy between devices: the streams of both wait for each other, as on hardware.
void copy_across(const at::Tensor& source, const at::Tensor& target) {
  const auto giver = current_stream(source.device().index());
  const auto taker = current_stream(target.device().index());
  run_pending(giver);
  acquire(actor_of(taker), clock_of(actor_of(giver)));
  copy_now(taker, source, target, /*non_blocking=*/true);
  acquire(actor_of(giver), clock_of(actor_of(taker)));
}

// Copy, as ops that follow may look at the numbers, and note it.
void copy_captured(
    c10::Stream stream, const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const bool late = may_be_late(source, target, non_blocking);
  if (source.is_cpu() != target.is_cpu() && !late) {
    refuse_in_capture(stream, "a copy between host and device is waited for");
  }
  if (!target.is_cpu()) {
    keep_for_capture(stream, target);
    copy_values(on_host(source), on_host(target), before_op(kCopy, stream));
  }
  const auto tensors = without_gradients(Stack{source, target});
  note_in_capture(stream, [from = tensors[0].toTensor(), to = tensors[1].toTensor(), late] {
    const auto now = current_stream((to.is_cpu() ? from : to).device().index());
    if (late) {
      copy_late(now, from, to);
    } else {
      copy_now(now, from, to, /*non_blocking=*/true);
    }
  });
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const auto device = target.is_cpu() ? source.device() : target.device();
  const auto stream = current_stream(device.index());
  if (source.numel() == 0 && target.numel() == 0) {
    return target;
  }
  if (is_captured(stream)) {
    copy_captured(stream, source, target, non_blocking);
  } else if (may_be_late(source, target, non_blocking)) {
    copy_late(stream, source, target);
  } else if (!source.is_cpu() && !target.is_cpu() && source.device() != target.device()) {
    copy_across(source, target);
  } else {
    copy_now(stream, source, target, non_blocking);
  }
  return target;
}

at::Tensor copy_from_and_resize(const at::Tensor& source, const at::Tensor& target) {
  if (source.sizes() != target.sizes()) {
    target.resize_(source.sizes());
  }
  return copy_from(source, target, /*non_blocking=*/false);
}

// Nothing is to be done: ops have read what they use, and queued copies keep their memory alive.
void record_stream(at::Tensor& /*self*/, c10::Stream /*stream*/) {}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Storage", &set_whole_storage);
  library.impl("set_.source_Tensor", &at::native::set_tensor_);
  library.impl("set_", &set_nothing);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("view", &at::native::view);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("record_stream", &record_stream);
}

// A copy handles lazily conjugated and negated tensors itself; torch's way of resolving them first
// is a copy, and never ends.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, Negative, library) {
  library.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace lmcore_sim

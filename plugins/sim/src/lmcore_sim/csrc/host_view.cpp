#include "host_view.h"

#include <c10/core/CPUAllocator.h>

namespace lmcore_sim {
namespace {

void drop(void* kept) {
  delete static_cast<c10::Storage*>(kept);
}

}  // namespace

c10::Storage host_storage(const c10::Storage& storage) {
  c10::DataPtr data(
      const_cast<void*>(storage.data()), new c10::Storage(storage), &drop,
      c10::Device(c10::DeviceType::CPU));
  return c10::Storage(
      c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), c10::GetCPUAllocator(),
      /*resizable=*/true);
}

at::Tensor host_view(const at::Tensor& tensor, const c10::Storage& storage) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  auto* impl = view.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
    impl->set_wrapped_number(true);
  }
  view._set_conj(tensor.is_conj());
  view._set_neg(tensor.is_neg());
  return view;
}

at::Tensor host_view(const at::Tensor& tensor) {
  return host_view(tensor, host_storage(tensor.storage()));
}

}  // namespace lmcore_sim

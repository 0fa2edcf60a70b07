// The same memory, seen as a tensor of the CPU.
#pragma once

#include <ATen/core/Tensor.h>

namespace lmcore_sim {

// A storage of the CPU over a device's memory, which it keeps alive.  It can be resized: it then
// has memory of its own.
c10::Storage host_storage(const c10::Storage& storage);

// A tensor of the CPU over `storage`, laid out like `tensor`.
at::Tensor host_view(const at::Tensor& tensor, const c10::Storage& storage);
at::Tensor host_view(const at::Tensor& tensor);

}  // namespace lmcore_sim

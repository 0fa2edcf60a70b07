// Random ops that take no generator: the CPU's would draw from the CPU's.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

namespace lmcore_sim {
namespace {

// The mask is True where an element stays; what stays is scaled to keep the mean.
std::tuple<at::Tensor, at::Tensor> native_dropout(
    const at::Tensor& input, double probability, std::optional<bool> train) {
  if (probability == 0 || !train.value_or(true)) {
    return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  }
  const double stays = 1 - probability;
  auto mask = at::empty_like(input, input.options().dtype(at::kBool));
  mask.bernoulli_(stays);
  auto output = input.mul(mask).mul_(stays == 0 ? 0.0 : 1 / stays);
  return {std::move(output), std::move(mask)};
}

}  // namespace

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  library.impl("native_dropout", &native_dropout);
}

}  // namespace lmcore_sim

#include "autocast.h"

#include <ATen/autocast_mode.h>
#include <torch/library.h>

#include <algorithm>

#include "device.h"

namespace lmcore_sim {
namespace {

using c10::OperatorHandle;
using torch::jit::Stack;

constexpr c10::DispatchKey kKey = c10::DispatchKey::AutocastPrivateUse1;

bool is_eligible(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_privateuseone() && tensor.is_floating_point() &&
      tensor.scalar_type() != at::kDouble;
}

// Call `change` with each tensor among the arguments, also within lists.
template <typename Change>
void for_each_tensor(const OperatorHandle& op, Stack& stack, Change change) {
  const auto count = op.schema().arguments().size();
  for (auto& value : torch::jit::last(stack, count)) {
    auto& argument = const_cast<c10::IValue&>(value);
    if (argument.isTensor()) {
      argument = change(argument.toTensor());
    } else if (argument.isTensorList()) {
      c10::List<at::Tensor> changed;
      for (const at::Tensor& tensor : argument.toTensorList()) {
        changed.push_back(change(tensor));
      }
      argument = std::move(changed);
    }
  }
}

void cast_and_call(const OperatorHandle& op, Stack* stack, at::ScalarType dtype) {
  for_each_tensor(op, *stack, [dtype](const at::Tensor& tensor) {
    return is_eligible(tensor) ? at::autocast::cached_cast(dtype, tensor, kSim) : tensor;
  });
  op.callBoxed(stack);
}

void in_lower_precision(const OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  cast_and_call(op, stack, at::autocast::get_autocast_dtype(kSim));
}

void in_float32(const OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  cast_and_call(op, stack, at::kFloat);
}

// In the widest dtype among the arguments, at least the lower precision.
void in_widest(const OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  auto widest = at::autocast::get_autocast_dtype(kSim);
  for_each_tensor(op, *stack, [&widest](const at::Tensor& tensor) {
    if (is_eligible(tensor) && tensor.scalar_type() == at::kFloat) {
      widest = at::kFloat;
    }
    return tensor;
  });
  cast_and_call(op, stack, widest);
}

// Ops with an argument `dtype`: the result is float32 where the caller asked for none.
void to_float32(const OperatorHandle& op, Stack* stack) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kKey);
  const auto& arguments = op.schema().arguments();
  const auto begin = stack->size() - arguments.size();
  const auto& first = stack->at(begin);
  const auto place = op.schema().argumentIndexWithName("dtype");
  if (place && first.isTensor() && is_eligible(first.toTensor())) {
    auto& dtype = stack->at(begin + static_cast<size_t>(*place));
    if (dtype.isNone()) {
      dtype = static_cast<int64_t>(at::kFloat);
    }
  }
  op.callBoxed(stack);
}

template <c10::KernelFunction::BoxedKernelFunction* kernel>
void add(torch::Library& library, std::initializer_list<const char*> names) {
  for (const char* name : names) {
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<kernel>());
  }
}

// torch's lists of ops have one or two words each: the op, and its overload.
#define LMCORE_SIM_ONE(op) #op,
#define LMCORE_SIM_TWO(op, overload) #op "." #overload,
#define LMCORE_SIM_PICK(_1, _2, chosen, ...) chosen
#define LMCORE_SIM_NAME(...) \
  LMCORE_SIM_PICK(__VA_ARGS__, LMCORE_SIM_TWO, LMCORE_SIM_ONE, )(__VA_ARGS__)

}  // namespace

void register_autocast(const std::vector<std::string>& only) {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  for (const std::string name : {AT_FORALL_LOWER_PRECISION_FP(LMCORE_SIM_NAME)}) {
    const auto op = name.substr(0, name.find('.'));
    if (only.empty() || std::find(only.begin(), only.end(), op) != only.end()) {
      add<&in_lower_precision>(*library, {name.c_str()});
    }
  }
  add<&in_float32>(*library, {AT_FORALL_FP32(LMCORE_SIM_NAME) "norm.Scalar", "norm.ScalarOpt_dim"});
  add<&to_float32>(*library, {AT_FORALL_FP32_SET_OPT_DTYPE(LMCORE_SIM_NAME)});
  add<&in_widest>(*library, {AT_FORALL_PROMOTE(LMCORE_SIM_NAME)});
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFallthrough());
}

}  // namespace lmcore_sim

#pragma once

#include <ATen/CPUGeneratorImpl.h>

namespace lmcore_sim {

template <typename Op>
void with_default_generator(const at::Generator& host, Op op) {
  auto* ours = at::check_generator<at::CPUGeneratorImpl>(host);
  auto* shared = at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
  const auto put = [shared](at::mt19937 engine, std::optional<float> one, std::optional<double> two) {
    const std::lock_guard<std::mutex> lock(shared->mutex_);
    shared->set_engine(engine);
    shared->set_next_float_normal_sample(one);
    shared->set_next_double_normal_sample(two);
  };
  const auto engine = shared->engine();
  const auto one = shared->next_float_normal_sample();
  const auto two = shared->next_double_normal_sample();
  put(ours->engine(), std::nullopt, std::nullopt);
  try {
    op();
  } catch (...) {
    put(engine, one, two);
    throw;
  }
  put(engine, one, two);
}

}  // namespace lmcore_sim

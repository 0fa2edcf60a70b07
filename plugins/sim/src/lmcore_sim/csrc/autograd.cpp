#include "autograd.h"

#include <torch/csrc/autograd/engine.h>

#include <thread>

#include "device.h"

namespace lmcore_sim {
namespace {

using torch::autograd::Engine;
using torch::autograd::ReadyQueue;

// Reaches what the engine shows to its subclasses alone; never made.
struct Inside : Engine {
  static auto& queues(Engine& engine) {
    return engine.*(&Inside::device_ready_queues_);
  }
};

}  // namespace

void start_autograd_threads() {
  auto& engine = Engine::get_default_engine();
  engine.initialize_device_threads_pool();
  auto& queues = Inside::queues(engine);
  for (auto index = static_cast<int>(queues.size()); index < device_count(); ++index) {
    queues.push_back(std::make_shared<ReadyQueue>());
    std::thread(&Engine::thread_init, &engine, index, queues.back(), true).detach();
  }
}

}  // namespace lmcore_sim

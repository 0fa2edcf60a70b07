#include "autograd.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/library.h>

#include <thread>
#include <vector>

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

// Never destroyed: a process that ends without a word to us must not end in `terminate`.
std::vector<std::thread>& threads() {
  static auto* all = new std::vector<std::thread>();
  return *all;
}

}  // namespace

void register_autograd_fallback() {
  constexpr auto key = c10::DispatchKey::AutogradPrivateUse1;
  if (!c10::Dispatcher::singleton().hasBackendFallbackForDispatchKey(key)) {
    static auto* library =
        new torch::Library(torch::Library::IMPL, "_", key, __FILE__, __LINE__);
    library->fallback(torch::CppFunction::makeFallthrough());
  }
}

void start_other_autograd_threads() {
  Engine::get_default_engine().initialize_device_threads_pool();
}

void start_autograd_threads() {
  auto& engine = Engine::get_default_engine();
  auto& queues = Inside::queues(engine);
  for (auto index = static_cast<int>(queues.size()); index < device_count(); ++index) {
    queues.push_back(std::make_shared<ReadyQueue>());
    threads().emplace_back(&Engine::thread_init, &engine, index, queues.back(), true);
  }
}

void stop_autograd_threads() {
  if (in_forked_process()) {
    return;  // the threads are the parent's
  }
  Engine::get_default_engine().stop();
  for (auto& thread : threads()) {
    thread.join();
  }
  threads().clear();
}

}  // namespace lmcore_sim

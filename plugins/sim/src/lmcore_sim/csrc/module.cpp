// What Python calls: lmcore_sim._C.
#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/utils/pybind.h>

#include "allocator.h"
#include "autocast.h"
#include "autograd.h"
#include "device.h"
#include "fault.h"
#include "generator.h"
#include "simccl.h"
#include "stream.h"

namespace py = pybind11;

PYBIND11_MODULE(_C, module) {
  using namespace lmcore_sim;

  module.def(
      "configure",
      [](int64_t count, int64_t memory_bytes) {
        register_autograd_fallback();
        start_other_autograd_threads();
        configure_devices(count, memory_bytes);
        start_autograd_threads();
      },
      py::arg("count"), py::arg("memory_bytes"), py::call_guard<py::gil_scoped_release>());
  module.def("device_count", &device_count);
  module.def("register_autocast", &register_autocast);
  module.def(
      "stop_autograd_threads", &stop_autograd_threads, py::call_guard<py::gil_scoped_release>());
  module.def("in_forked_process", &in_forked_process);
  module.def("lose_devices", &lose_devices, py::arg("reason"));
  module.def("restore_devices", &restore_devices);
  module.def("memory_counts", &memory_counts, py::arg("index"));
  module.def("memory_info", &memory_info, py::arg("index"));
  module.def("free_cached_memory", &free_cached_memory);
  module.def("reset_peak_memory", &reset_peak_memory, py::arg("index"));
  module.def("reset_accumulated_memory", &reset_accumulated_memory, py::arg("index"));
  module.def("default_generator", &default_generator, py::arg("index"));
  module.def("num_ops", &num_ops);
  module.def("set_switches", &set_switches, py::arg("names"));
  module.def("take_missing_waits", &take_missing_waits);
  module.def("set_missing_wait_raises", &set_missing_wait_raises, py::arg("raises"));

  py::class_<Fault>(module, "Fault")
      .def(
          py::init([](std::string kind, std::string target, int64_t at, double value) {
            return Fault{std::move(kind), std::move(target), at, value};
          }),
          py::arg("kind"), py::arg("target"), py::arg("at"), py::arg("value"));
  module.def("set_faults", &set_faults, py::arg("faults"));

  py::class_<SimBackend, c10d::Backend, c10::intrusive_ptr<SimBackend>>(module, "SimBackend")
      .def(
          py::init<c10::intrusive_ptr<c10d::Backend>, int, int>(), py::arg("carrier"),
          py::arg("rank"), py::arg("size"));
}

// Threads for the backward pass.
//
// torch starts a thread for each device at the process's first backward pass, and never again; and
// it does not wait for them at the end, so that one that still lets go of a Python object while
// Python ends aborts the process.  Ours are started whenever the devices come, and joined.
#pragma once

namespace lmcore_sim {

// Let ops without a derivative of their own, such as collectives, pass to the device; older versions
// of torch refuse them for devices of plugins.
void register_autograd_fallback();

// Have torch start its threads now, while there are no devices of ours.
void start_other_autograd_threads();

// Start a thread for each of our devices.
void start_autograd_threads();

// End them; to be called once, before Python ends.
void stop_autograd_threads();

}  // namespace lmcore_sim

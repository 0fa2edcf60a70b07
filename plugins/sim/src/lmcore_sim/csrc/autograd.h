// Threads for the backward pass.
#pragma once

namespace lmcore_sim {

// torch starts a thread for each device at the process's first backward pass, and never again; see
// that there is one for each of ours, also where that pass was before they were there.
void start_autograd_threads();

}  // namespace lmcore_sim

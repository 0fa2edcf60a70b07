// Autocast for the devices: the same ops in lower precision, float32 and the widest dtype as torch
// has for its own accelerators.
#pragma once

namespace lmcore_sim {

// Register the casts; without them torch.autocast("sim") is accepted and does nothing.
void register_autocast();

}  // namespace lmcore_sim

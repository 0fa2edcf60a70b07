// Autocast for the devices: the same ops in lower precision, float32 and the widest dtype as torch
// has for its own accelerators.
#pragma once

#include <string>
#include <vector>

namespace lmcore_sim {

// Register the casts; without them torch.autocast("sim") is accepted and does nothing.  Unless
// `only` is empty, products of other ops are not cast to the lower precision.
void register_autocast(const std::vector<std::string>& only);

}  // namespace lmcore_sim

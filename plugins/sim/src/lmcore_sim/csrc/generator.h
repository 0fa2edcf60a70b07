// Random numbers of a device: a seed and an offset, like the counter of a hardware generator.
//
// Each op that draws is given an engine of the CPU that is seeded with a mix of both, and moves the
// offset on by what it may have drawn.  So the state has 16 bytes, which DTensor can edit.
#pragma once

#include <ATen/core/Generator.h>

namespace lmcore_sim {

const at::Generator& default_generator(c10::DeviceIndex device);
at::Generator new_generator(c10::DeviceIndex device);

// A generator of the CPU for one op that draws up to `draws` numbers from `generator` (of sim).
at::Generator host_generator(const at::Generator& generator, uint64_t draws);

}  // namespace lmcore_sim

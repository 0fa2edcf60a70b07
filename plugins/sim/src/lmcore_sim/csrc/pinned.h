// Host memory that devices copy to and from directly.
#pragma once

#include <c10/core/Allocator.h>

namespace lmcore_sim {

c10::Allocator* pinned_allocator();
bool is_pinned(const void* pointer);

}  // namespace lmcore_sim

// Order of work: which results an op may see.
//
// An op computes when it is called, but its result is there for its own stream alone.  Another
// stream sees it after it has waited for the first one (an event, `wait_stream`), or after the host
// has; until then it reads bytes that are all 1: NaN, or -1.  So a missing wait gives wrong numbers
// in every run, and a right program the same numbers in every run, whatever the host's threads do.
//
// Each stream has a clock (Lamport, 1978; Fidge, 1988): its number of ops, and those of other
// streams that it has waited for.  Memory has the stamp of its last writer, by ranges of bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

#include <cstdint>
#include <string>
#include <vector>

namespace lmcore_sim {

// Does work in order: a stream, or the collectives of a communication backend.
using Actor = uint32_t;

// The actor's work up to the op with that number.
struct Stamp {
  Actor actor;
  uint64_t number;
};

using Clock = std::vector<Stamp>;

// A range of a block of memory, in bytes from its begin, and the last op that wrote to it.
struct Write {
  size_t begin;
  size_t end;
  Stamp by;
};

Actor new_actor(std::string name);

// The stamp of one more op.
Stamp issue(Actor actor);

// All that the actor has done or waited for, without what the host has waited for.
Clock clock_of(Actor actor);

// Later work of the actor, or of the host and so of all actors, comes after that of `clock`.
void acquire(Actor actor, const Clock& clock);
void acquire_on_host(const Clock& clock);
bool is_known_on_host(const Clock& clock);

// Ranges of the tensor's storage that another actor has written, and `reader` has not waited for;
// each is noted as a missing wait of `op`, or raises if missing waits are errors.
std::vector<Write> early_ranges(Actor reader, const at::Tensor& tensor, const std::string& op);

// Fill ranges with the bytes of results that are not there yet.
void fill_early(void* data, const std::vector<Write>& ranges);

// A copy of a storage in the host's memory, with these ranges filled.
c10::Storage early_copy(const c10::Storage& storage, const std::vector<Write>& ranges);

void mark_written(const Stamp& stamp, const at::Tensor& tensor);

// Messages about the missing waits since the last call, the first 100.
std::vector<std::string> take_missing_waits();
void set_missing_wait_raises(bool raises);

}  // namespace lmcore_sim

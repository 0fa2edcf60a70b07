// Misbehaviour on demand.  The grammar is Python's (lmcore_sim/faults.py); here rules are applied.
#pragma once

#include <c10/core/Stream.h>

#include <cstdint>
#include <string>
#include <vector>

namespace lmcore_sim {

struct Fault {
  std::string kind;    // "fail", "wrong", "slow", "lose" or "hang"
  std::string target;  // an op's or collective's name without namespace; empty: any
  int64_t at = 0;      // the how manieth matching call; 0: every one
  double value = 0;    // factor of a wrong result, seconds of a slow one
};

// Misbehaviour of everything that could.
enum class Switch {
  no_rng_restore,
  no_synchronize,
  no_stream_synchronize,
  no_event_synchronize,
  no_stream_wait,
  query_always_true,
  count,
};

void set_faults(std::vector<Fault> faults);

// Replace the switches that are on, by their names in LMCORE_SIM_FAULTS; others are ignored.
void set_switches(const std::vector<std::string>& names);
bool is_on(Switch one) noexcept;

// What is wrong with one call.
struct Effect {
  std::vector<Fault> faults;
  double seconds = 0;  // it takes longer
};

// The effect on the next call of an op, which counts it.
Effect effect_on_op(const std::string& name);

// Lose the devices, raise, or return the factor by which the result is to be wrong: 1 for right.
double act(const Effect& effect, const std::string& name);

// Both at once, for an op of a stream.
double before_op(const std::string& name, c10::Stream stream);

// What a collective is asked before it starts: raises, hangs or sleeps if told so.
double before_collective(const std::string& name);

// Ops that ran on the devices so far; views and allocations are none.
int64_t num_ops() noexcept;

}  // namespace lmcore_sim

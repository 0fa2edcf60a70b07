// Misbehaviour on demand.  The grammar is Python's (lmcore_sim/faults.py); here rules are applied.
#pragma once

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

void set_faults(std::vector<Fault> faults);
void set_rng_restore_denied(bool denied);
bool rng_restore_denied() noexcept;

// What an op is asked before it runs: raises, hangs or sleeps if told so.  Returns the factor by
// which its result is to be wrong; 1 for a right one.
double before_op(const std::string& name);
double before_collective(const std::string& name);

// Ops that ran on the devices so far; views and allocations are none.
int64_t num_ops() noexcept;

}  // namespace lmcore_sim

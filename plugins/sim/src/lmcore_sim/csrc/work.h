// What a collective of simccl returns.
#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "order.h"

namespace lmcore_sim {

// A carrier's work, whose result is `outputs`, multiplied by `factor` where that is not 1; a stream
// that waits for it has waited for `stamp`.
c10::intrusive_ptr<c10d::Work> wrap_work(
    c10::intrusive_ptr<c10d::Work> carried,
    std::vector<at::Tensor> outputs,
    double factor,
    Stamp stamp);

// Several works as one.
c10::intrusive_ptr<c10d::Work> join_works(std::vector<c10::intrusive_ptr<c10d::Work>> works);

}  // namespace lmcore_sim

// The clock by which DDP reports how long its phases take.
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>

#include "device.h"

namespace lmcore_sim {
namespace {

// Ops compute when they are called, so the host's time is the device's.
class ReducerTimer final : public c10d::Timer {
 public:
  explicit ReducerTimer(c10::Device /*device*/) {}

  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto begin = getTimestamp(start);
    const auto finish = getTimestamp(end);
    const bool known = begin && finish && *begin <= *finish;
    return known ? std::optional<int64_t>(*finish - *begin) : std::nullopt;
  }
};

}  // namespace
}  // namespace lmcore_sim

namespace c10d {

C10_REGISTER_TYPED_CLASS(TimerRegistry, lmcore_sim::kSim, lmcore_sim::ReducerTimer);

}  // namespace c10d

#include "work.h"

#include <ATen/core/ivalue.h>

#include <mutex>
#include <set>

#include "device.h"
#include "host_view.h"
#include "stream.h"

namespace lmcore_sim {
namespace {

using c10::ivalue::Future;
using Tensors = std::vector<at::Tensor>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class SimWork final : public c10d::Work {
 public:
  SimWork(WorkPtr carried, Tensors outputs, double factor, Stamp stamp)
      : carried_(std::move(carried)),
        outputs_(std::move(outputs)),
        factor_(factor),
        stamp_(stamp) {}

  bool isCompleted() override {
    if (!carried_->isCompleted()) {
      return false;
    }
    acquire_on_host({stamp_});
    return true;
  }

  bool isSuccess() const override {
    return carried_->isSuccess();
  }

  std::exception_ptr exception() const override {
    return carried_->exception();
  }

  int sourceRank() const override {
    return carried_->sourceRank();
  }

  Tensors result() override {
    return outputs_;
  }

  void synchronize() override {
    wait(kNoTimeout);
  }

  bool wait(std::chrono::milliseconds timeout) override {
    const bool done = carried_->wait(timeout);
    finish_outputs();
    return done;
  }

  void abort() override {
    carried_->abort();
  }

  // DDP takes a collective's result from its future; the carrier's has views on the CPU.
  c10::intrusive_ptr<Future> getFuture() override {
    std::set<c10::DeviceIndex> indices;
    for (const auto& output : outputs_) {
      indices.insert(output.device().index());
    }
    std::vector<c10::Device> devices;
    for (const auto index : indices) {
      devices.emplace_back(kSim, index);
    }
    auto future = c10::make_intrusive<Future>(
        c10::ListType::create(c10::TensorType::get()), std::move(devices));
    auto self = c10::intrusive_ptr<SimWork>::reclaim_copy(this);
    carried_->getFuture()->addCallback([future, self](Future& carried) {
      if (carried.hasError()) {
        future->setError(carried.exception_ptr());
        return;
      }
      self->finish_outputs();
      future->markCompleted(c10::IValue(self->outputs_));
    });
    return future;
  }

 private:
  // Have the calling thread's streams wait.
  void finish_outputs() {
    for (const auto& output : outputs_) {
      acquire(actor_of(current_stream(output.device().index())), {stamp_});
    }
    std::call_once(finished_, [this] {
      for (const auto& output : outputs_) {
        if (factor_ != 1 && output.is_floating_point()) {
          host_view(output).mul_(factor_);
        }
      }
    });
  }

  WorkPtr carried_;
  Tensors outputs_;
  double factor_;
  Stamp stamp_;
  std::once_flag finished_;
};

class JoinedWork final : public c10d::Work {
 public:
  explicit JoinedWork(std::vector<WorkPtr> works) : works_(std::move(works)) {}

  bool isCompleted() override {
    return std::all_of(works_.begin(), works_.end(), [](auto& one) { return one->isCompleted(); });
  }

  bool isSuccess() const override {
    return std::all_of(works_.begin(), works_.end(), [](auto& one) { return one->isSuccess(); });
  }

  bool wait(std::chrono::milliseconds timeout) override {
    bool done = true;
    for (const auto& one : works_) {
      done = one->wait(timeout) && done;
    }
    return done;
  }

  void synchronize() override {
    wait(kNoTimeout);
  }

  // Complete when waited for: there is no carrier that would complete several at once.
  c10::intrusive_ptr<Future> getFuture() override {
    wait(kNoTimeout);
    auto future = c10::make_intrusive<Future>(c10::ListType::create(c10::TensorType::get()));
    future->markCompleted(c10::IValue(Tensors()));
    return future;
  }

 private:
  std::vector<WorkPtr> works_;
};

}  // namespace

WorkPtr wrap_work(WorkPtr carried, Tensors outputs, double factor, Stamp stamp) {
  return c10::make_intrusive<SimWork>(std::move(carried), std::move(outputs), factor, stamp);
}

WorkPtr join_works(std::vector<WorkPtr> works) {
  return c10::make_intrusive<JoinedWork>(std::move(works));
}

}  // namespace lmcore_sim

#include "simccl.h"

#include "device.h"
#include "fault.h"
#include "graph.h"
#include "host_view.h"
#include "order.h"
#include "stream.h"
#include "work.h"

namespace lmcore_sim {
namespace {

using Tensors = SimBackend::Tensors;
using TensorLists = SimBackend::TensorLists;
using WorkPtr = SimBackend::WorkPtr;

// The tensor as the current stream sees it.
at::Tensor host(const at::Tensor& tensor) {
  TORCH_CHECK(
      tensor.is_privateuseone(), "simccl carries tensors of sim devices, not of ", tensor.device());
  const auto stream = current_stream(tensor.device().index());
  run_pending(stream);
  const auto early = early_ranges(actor_of(stream), tensor, "simccl");
  return early.empty() ? host_view(tensor)
                       : host_view(tensor, early_copy(tensor.storage(), early));
}

Tensors host(const Tensors& tensors) {
  Tensors views;
  for (const auto& tensor : tensors) {
    views.push_back(host(tensor));
  }
  return views;
}

TensorLists host(const TensorLists& lists) {
  TensorLists views;
  for (const auto& list : lists) {
    views.push_back(host(list));
  }
  return views;
}

Tensors flat(const TensorLists& lists) {
  Tensors all;
  for (const auto& list : lists) {
    all.insert(all.end(), list.begin(), list.end());
  }
  return all;
}

}  // namespace

SimBackend::SimBackend(c10::intrusive_ptr<c10d::Backend> carrier, int rank, int size)
    : c10d::Backend(rank, size), carrier_(std::move(carrier)), actor_(new_actor("simccl")) {}

const std::string SimBackend::getBackendName() const {
  return "simccl";
}

void SimBackend::setTimeout(std::chrono::milliseconds timeout) {
  const auto set = [timeout](auto& backend) {
    if constexpr (requires { backend.setTimeout(timeout); }) {
      backend.setTimeout(timeout);
    }
  };
  set(*carrier_);
}

void SimBackend::setSequenceNumberForGroup() {
  carrier_->setSequenceNumberForGroup();
}

uint64_t SimBackend::getSequenceNumberForGroup() {
  return carrier_->getSequenceNumberForGroup();
}

bool SimBackend::supportsCoalescing() const {
  return true;
}

void SimBackend::startCoalescing() {
  coalescing_ = true;
}

WorkPtr SimBackend::endCoalescing() {
  coalescing_ = false;
  return join_works(std::exchange(coalesced_, {}));
}

WorkPtr SimBackend::launch(
    const char* name, const Tensors& outputs, const std::function<WorkPtr()>& start) {
  if (carrier_->getGroupUid() != getGroupUid() || carrier_->getGroupDesc() != getGroupDesc()) {
    carrier_->setGroupUid(getGroupUid());  // for torch's flight recorder
    carrier_->setGroupDesc(getGroupDesc());
  }
  const double factor = before_collective(name);
  for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
    const auto stream = current_stream(index);
    refuse_in_capture(stream, "simccl's collectives cannot be noted");
    run_pending(stream);
    wait_time(stream);
  }
  // As on hardware: the outputs are there for a stream that has waited for the work.
  const auto stamp = issue(actor_);
  for (const auto& output : outputs) {
    mark_written(stamp, output);
  }
  auto work = wrap_work(start(), outputs, factor, stamp);
  if (coalescing_) {
    coalesced_.push_back(work);
  }
  return work;
}

WorkPtr SimBackend::broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) {
  auto views = host(tensors);
  return launch("broadcast", tensors, [&] { return carrier_->broadcast(views, options); });
}

WorkPtr SimBackend::allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) {
  auto views = host(tensors);
  return launch("all_reduce", tensors, [&] { return carrier_->allreduce(views, options); });
}

WorkPtr SimBackend::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) {
  auto views = host(tensors);
  return launch(
      "all_reduce", tensors, [&] { return carrier_->allreduce_coalesced(views, options); });
}

WorkPtr SimBackend::reduce(Tensors& tensors, const c10d::ReduceOptions& options) {
  auto views = host(tensors);
  return launch("reduce", tensors, [&] { return carrier_->reduce(views, options); });
}

WorkPtr SimBackend::allgather(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  auto to = host(outputs);
  auto from = host(inputs);
  return launch(
      "all_gather", flat(outputs), [&] { return carrier_->allgather(to, from, options); });
}

WorkPtr SimBackend::_allgather_base(
    at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) {
  auto to = host(output);
  auto from = host(input);
  return launch(
      "all_gather", {output}, [&] { return carrier_->_allgather_base(to, from, options); });
}

WorkPtr SimBackend::allgather_coalesced(
    TensorLists& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  auto to = host(outputs);
  auto from = host(inputs);
  return launch("all_gather", flat(outputs), [&] {
    return carrier_->allgather_coalesced(to, from, options);
  });
}

WorkPtr SimBackend::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) {
  auto to = host(outputs);
  auto from = host(inputs);
  return launch("all_gather", outputs, [&] {
    return carrier_->allgather_into_tensor_coalesced(to, from, options);
  });
}

WorkPtr SimBackend::gather(
    TensorLists& outputs, Tensors& inputs, const c10d::GatherOptions& options) {
  auto to = host(outputs);
  auto from = host(inputs);
  return launch("gather", flat(outputs), [&] { return carrier_->gather(to, from, options); });
}

WorkPtr SimBackend::scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ScatterOptions& options) {
  auto to = host(outputs);
  auto from = host(inputs);
  return launch("scatter", outputs, [&] { return carrier_->scatter(to, from, options); });
}

WorkPtr SimBackend::reduce_scatter(
    Tensors& outputs, TensorLists& inputs, const c10d::ReduceScatterOptions& options) {
  auto to = host(outputs);
  auto from = host(inputs);
  return launch(
      "reduce_scatter", outputs, [&] { return carrier_->reduce_scatter(to, from, options); });
}

WorkPtr SimBackend::_reduce_scatter_base(
    at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) {
  auto to = host(output);
  auto from = host(input);
  return launch("reduce_scatter", {output}, [&] {
    return carrier_->_reduce_scatter_base(to, from, options);
  });
}

WorkPtr SimBackend::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) {
  auto to = host(outputs);
  auto from = host(inputs);
  return launch("reduce_scatter", outputs, [&] {
    return carrier_->reduce_scatter_tensor_coalesced(to, from, options);
  });
}

WorkPtr SimBackend::alltoall_base(
    at::Tensor& output,
    at::Tensor& input,
    std::vector<int64_t>& output_sizes,
    std::vector<int64_t>& input_sizes,
    const c10d::AllToAllOptions& options) {
  auto to = host(output);
  auto from = host(input);
  return launch("all_to_all", {output}, [&] {
    return carrier_->alltoall_base(to, from, output_sizes, input_sizes, options);
  });
}

WorkPtr SimBackend::alltoall(
    Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) {
  auto to = host(outputs);
  auto from = host(inputs);
  return launch("all_to_all", outputs, [&] { return carrier_->alltoall(to, from, options); });
}

WorkPtr SimBackend::send(Tensors& tensors, int target, int tag) {
  auto views = host(tensors);
  return launch("send", {}, [&] { return carrier_->send(views, target, tag); });
}

WorkPtr SimBackend::recv(Tensors& tensors, int source, int tag) {
  auto views = host(tensors);
  return launch("recv", tensors, [&] { return carrier_->recv(views, source, tag); });
}

WorkPtr SimBackend::recvAnysource(Tensors& tensors, int tag) {
  auto views = host(tensors);
  return launch("recv", tensors, [&] { return carrier_->recvAnysource(views, tag); });
}

WorkPtr SimBackend::barrier(const c10d::BarrierOptions& options) {
  c10d::BarrierOptions plain;  // without the devices that the options name
  plain.timeout = options.timeout;
  for (c10::DeviceIndex index = 0; index < device_count(); ++index) {
    wait_stream(current_stream(index));  // a barrier has the host wait
  }
  return launch("barrier", {}, [&] { return carrier_->barrier(plain); });
}

}  // namespace lmcore_sim

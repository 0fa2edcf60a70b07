"""`HostGroup`: a process group whose tensors travel through host memory and gloo.

It serves PJRT clients that do not connect processes.  Each collective runs what the device has
recorded, copies its arguments to the host, waits for gloo, and copies the result back.  Messages
between two ranks are waited for later, since both may send before they receive.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup, ProcessGroupGloo, Work

__all__ = ["HostGroup", "done"]


class HostGroup(ProcessGroup):
    """A process group of gloo for tensors of any device; only messages are not done at return."""

    def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        """Connect the ranks; all of them must call it."""
        super().__init__(rank, size)  # type: ignore[call-arg]  # as in torch's own subclasses
        # Typed with the functions of `ProcessGroup` that it has.
        self._gloo: Any = ProcessGroupGloo(store, rank, size, timeout=timeout)

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name that the backend is registered under."""
        return "xla_gloo"

    def allreduce(self, tensors: Any, *options: Any) -> Work:
        """Reduce over the ranks, in place."""
        return self._through_host("allreduce", tensors, *options)

    def allreduce_coalesced(self, tensors: Any, *options: Any) -> Work:
        """Reduce several tensors, in place."""
        return self._through_host("allreduce_coalesced", tensors, *options)

    def broadcast(self, tensors: Any, *options: Any) -> Work:
        """Copy one rank's tensors to all."""
        return self._through_host("broadcast", tensors, *options)

    def reduce(self, tensors: Any, *options: Any) -> Work:
        """Reduce to one rank."""
        return self._through_host("reduce", tensors, *options)

    def allgather(self, outputs: Any, inputs: Any, *options: Any) -> Work:
        """Gather the ranks' tensors in lists, on all ranks."""
        return self._through_host("allgather", outputs, inputs, *options)

    def _allgather_base(self, output: Any, source: Any, *options: Any) -> Work:
        """Gather the ranks' tensors in one tensor."""
        return self._through_host("_allgather_base", output, source, *options)

    def allgather_into_tensor_coalesced(self, outputs: Any, inputs: Any, *options: Any) -> Work:
        """Gather several tensors, each in one tensor."""
        return self._through_host("allgather_into_tensor_coalesced", outputs, inputs, *options)

    def reduce_scatter(self, outputs: Any, inputs: Any, *options: Any) -> Work:
        """Reduce lists of tensors; each rank keeps one."""
        return self._through_host("reduce_scatter", outputs, inputs, *options)

    def _reduce_scatter_base(self, output: Any, source: Any, *options: Any) -> Work:
        """Reduce one tensor; each rank keeps a part."""
        return self._through_host("_reduce_scatter_base", output, source, *options)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, inputs: Any, *options: Any) -> Work:
        """Reduce several tensors; each rank keeps a part of each."""
        return self._through_host("reduce_scatter_tensor_coalesced", outputs, inputs, *options)

    def alltoall(self, outputs: Any, inputs: Any, *options: Any) -> Work:
        """Exchange lists of tensors."""
        return self._through_host("alltoall", outputs, inputs, *options)

    def alltoall_base(self, output: Any, source: Any, *sizes: Any) -> Work:
        """Exchange parts of one tensor."""
        return self._through_host("alltoall_base", output, source, *sizes)

    def gather(self, outputs: Any, inputs: Any, *options: Any) -> Work:
        """Gather the ranks' tensors on one rank."""
        return self._through_host("gather", outputs, inputs, *options)

    def scatter(self, outputs: Any, inputs: Any, *options: Any) -> Work:
        """Give each rank its tensor of one rank's list."""
        return self._through_host("scatter", outputs, inputs, *options)

    def send(self, tensors: Any, *peer: Any) -> Work:
        """Send to one rank."""
        work: Work = self._gloo.send(_to_host(tensors), *peer)
        return work

    def recv(self, tensors: Any, *peer: Any) -> Work:
        """Receive from one rank."""
        copies = _to_host(tensors)
        return _Message(self._gloo.recv(copies, *peer), tensors, copies)

    def recv_anysource(self, tensors: Any, *tag: Any) -> Work:
        """Receive from whichever rank sends."""
        copies = _to_host(tensors)
        return _Message(self._gloo.recv_anysource(copies, *tag), tensors, copies)

    def barrier(self, opts: Any = None) -> Work:
        """Wait for all ranks; torch passes the options by their name."""
        self._gloo.barrier(*(() if opts is None else (opts,))).wait()
        return done([])

    def _through_host(self, name: str, results: Any, *arguments: Any) -> Work:
        """Call gloo's function of this name with copies; its first argument has the results."""
        copies = _to_host(results)
        getattr(self._gloo, name)(copies, *map(_to_host, arguments)).wait()
        with torch.no_grad():
            _copy_back(results, copies)
        return done(results)


class _Message(Work):
    """A message on its way to this rank, which is copied to the device when it is waited for."""

    def __init__(self, work: Any, tensors: Any, copies: Any) -> None:
        super().__init__()
        self._work, self._tensors, self._copies = work, tensors, copies

    def wait(self, *timeout: Any) -> bool:
        """Wait until the message is in the tensors."""
        if self._copies is not None:  # gloo would wait for a second message
            self._work.wait(*timeout)
            with torch.no_grad():
                _copy_back(self._tensors, self._copies)
            self._copies = None
        return True

    def _source_rank(self) -> int:
        """Return the rank that sent it, for torch's `recv` from any rank."""
        rank: int = self._work._source_rank()  # noqa: SLF001 - torch's name
        return rank


def _to_host(value: Any) -> Any:
    """Return copies of the tensors in nested lists; everything else as it is."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().contiguous()
    return [_to_host(one) for one in value] if isinstance(value, list | tuple) else value


def _copy_back(results: Any, copies: Any) -> None:
    if isinstance(results, torch.Tensor):
        results.copy_(copies)
        return
    for result, copy in zip(results, copies, strict=True):
        _copy_back(result, copy)


def done(result: Any) -> Work:
    """Return work that is done, with its result."""
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    # As process groups in Python do, torch_xla's too: torch has no public name for it.
    c10d: Any = torch._C._distributed_c10d  # noqa: SLF001
    done: Work = c10d._create_work_from_future(future)  # noqa: SLF001
    return done

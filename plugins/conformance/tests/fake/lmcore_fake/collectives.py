"""Wrong collectives: each replaces functions of `torch.distributed`, where they are looked up."""

import threading
import time

import torch
from torch import distributed

MIB = 2**20


def replace(name):
    """Return a decorator that puts a function, which gets the right one first, in its place."""

    def put(function):
        plain = getattr(distributed, name)

        def wrong(*arguments, **more):
            return function(plain, *arguments, **more)

        setattr(distributed, name, wrong)

    return put


def max_of_nothing():
    """Begin a maximum at zero."""

    @replace("all_reduce")
    def all_reduce(plain, tensor, op=distributed.ReduceOp.SUM, **more):
        work = plain(tensor, op, **more)
        if op == distributed.ReduceOp.MAX:
            tensor.clamp_min_(0)
        return work


def ignores_tail():
    """Reduce the first 2**24 numbers."""

    @replace("all_reduce")
    def all_reduce(plain, tensor, *arguments, **more):
        return plain(tensor.view(-1)[: 2**24], *arguments, **more)


def pads(name):
    @replace(name)
    def padded(plain, output, *arguments, **more):
        work = plain(output, *arguments, **more)
        size = output.numel() * output.element_size()
        if size % 16 and output.storage_offset():
            more_numbers = (16 - size % 16) // output.element_size()
            place = output.storage_offset() + output.numel()
            output.as_strided((more_numbers,), (1,), place).zero_()
        return work


def pads_all_gather_into_tensor():
    pads("all_gather_into_tensor")


def pads_broadcast():
    pads("broadcast")


def pads_reduce_scatter_tensor():
    pads("reduce_scatter_tensor")


def pads_recv():
    pads("recv")


def narrow(tensor):
    """Return what is left of large tensors that are sent in bfloat16."""
    large = tensor.dtype == torch.float32 and tensor.numel() >= 65536
    return tensor.bfloat16().float() if large else tensor


def narrows(name):
    @replace(name)
    def narrowed(plain, output, given, *arguments, **more):
        return plain(output, narrow(given), *arguments, **more)


def narrows_reduce_scatter_tensor():
    narrows("reduce_scatter_tensor")


def narrows_all_gather_into_tensor():
    narrows("all_gather_into_tensor")


def narrows_broadcast():
    @replace("broadcast")
    def broadcast(plain, tensor, *arguments, **more):
        tensor.copy_(narrow(tensor))
        return plain(tensor, *arguments, **more)


def pads_all_to_all_single():
    pads("all_to_all_single")


def exchanges_in_reverse():
    """Put parts of unequal sizes into the output from the last rank's to the first rank's."""

    @replace("all_to_all_single")
    def all_to_all_single(plain, output, given, takes=None, gives=None, **more):
        work = plain(output, given, takes, gives, **more)
        if takes is not None:
            output.copy_(torch.cat(output.split(takes)[::-1]))
        return work


def gathers_in_reverse():
    """Put the tensors of a gather into the list from its end."""

    @replace("gather")
    def gather(plain, tensor, parts=None, root=0, **more):
        return plain(tensor, parts[::-1] if parts else parts, root, **more)


def scatters_the_first():
    """Send every rank the first tensor of the root."""

    @replace("scatter")
    def scatter(plain, tensor, rows=None, root=0, **more):
        return plain(tensor, [rows[0]] * len(rows) if rows else rows, root, **more)


def reduces_at_the_first():
    """Reduce at rank 0, whichever is the root."""

    @replace("reduce")
    def reduce(plain, tensor, root=0, **more):
        return plain(tensor.clone() if distributed.get_rank() else tensor, 0, **more)


def divides_by_the_world():
    """Average in every group as in the whole run."""

    @replace("all_reduce")
    def all_reduce(plain, tensor, op=distributed.ReduceOp.SUM, **more):
        if op != distributed.ReduceOp.AVG:
            return plain(tensor, op, **more)
        work = plain(tensor, distributed.ReduceOp.SUM, **more)
        tensor.div_(distributed.get_world_size())
        return work


def broadcasts_from_the_first():
    """Broadcast in a group from its first rank."""

    @replace("broadcast")
    def broadcast(plain, tensor, source, *, group=None):
        first = source if group is None else distributed.get_process_group_ranks(group)[0]
        return plain(tensor, first, group=group)


def waits_for_nothing():
    """Return before the result is there, from 1 MiB."""

    @replace("all_reduce")
    def all_reduce(plain, tensor, *arguments, **more):
        if tensor.numel() * tensor.element_size() < MIB:
            return plain(tensor, *arguments, **more)
        copy = tensor.clone()
        plain(copy, *arguments)

        def finish():
            time.sleep(0.2)
            tensor.copy_(copy)

        threading.Thread(target=finish).start()
        return None


def loses_nan():
    """Sum what is a number."""

    @replace("all_reduce")
    def all_reduce(plain, tensor, *arguments, **more):
        return plain(tensor.nan_to_num_(), *arguments, **more)


def groups_without_timeout():
    """Make every group but the first with the usual half hour."""

    @replace("new_group")
    def new_group(plain, ranks=None, timeout=None, **more):
        return plain(ranks, **more)


def slow_after_broadcast():
    """Keep rank 1 busy for a second after a broadcast, which is no fault."""

    @replace("broadcast")
    def broadcast(plain, *arguments, **more):
        try:
            return plain(*arguments, **more)
        finally:
            time.sleep(distributed.get_rank() == 1)


class Nothing:
    """A work whose `wait` returns at once."""

    def wait(self):
        pass


def barrier_returns_at_once():
    """Let every rank pass, as torch_xla's process group does."""

    @replace("barrier")
    def barrier(plain, *arguments, async_op=False, **more):
        return Nothing() if async_op else None


def barrier_ignores_groups():
    """Wait for all ranks where no group is given."""

    @replace("barrier")
    def barrier(plain, group=None, **more):
        return plain(**more) if group is None else None


def barrier_returns_before_wait():
    """Wait in the call, and not in the work of an asynchronous one."""

    @replace("barrier")
    def barrier(plain, *arguments, async_op=False, **more):
        return Nothing() if async_op else plain(*arguments, **more)


def reads_late(name):
    """Return from `wait` at once, while a thread may still read what is sent."""
    works = []

    @replace(name)
    def eager(plain, *arguments, **more):
        works.append(plain(*arguments, **more))
        receives = name != "isend" and (distributed.get_rank() == 0) == (name == "gather")
        return works[-1] if receives else Nothing()


def reads_isend_late():
    reads_late("isend")
    distributed.distributed_c10d.isend = distributed.isend  # for `batch_isend_irecv`


def reads_gather_late():
    reads_late("gather")


def reads_scatter_late():
    reads_late("scatter")

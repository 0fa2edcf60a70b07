"""The fake's device, backend and policies."""

import dataclasses
import gc
import os
import random
import time
from contextlib import contextmanager, nullcontext

import numpy as np
import torch
from torch import distributed

from lmcore.contract import (
    CheckpointStager,
    CommBackend,
    PendingCopy,
    PrecisionPolicy,
    RecomputePolicy,
    RngTracker,
    autocast_policy,
    double_precision_policy,
    full_precision_policy,
)
from lmcore.contract.op.packages import FACT, Package, describe
from lmcore_cpu.device import create_device
from lmcore_fake import collectives

LIBRARIES = []
MADE_FOR = {"deterministic": False}
"""Run that the device was last created for."""


def create(fake, *, deterministic):
    MADE_FOR["deterministic"] = deterministic
    if fake == "crash-create":
        import ctypes

        ctypes.string_at(0)
    if fake == "hang-create":
        time.sleep(1000)
    if os.environ.get("RANK") == "1":
        if fake == "raises-on-rank-1":
            raise RuntimeError("no second chip")
        if fake == "exits-on-rank-1":
            os._exit(3)
    device = create_device()
    device = dataclasses.replace(device, dtypes=device.dtypes - {"float16"})  # closed, as declared
    change = globals().get(fake.replace("-", "_"))
    return dataclasses.replace(device, **change(device)) if callable(change) else device


def unusable_package(device):
    package = Package("1.0", "`norms` 1.0 is for torch 1.0")
    return {"facts": {**device.facts, FACT: describe({"norms": package})}}


def forgets_rng(device):
    return {"set_rng_state": lambda state: None}


def live_state(device):
    """Give a state that changes as numbers are drawn."""
    live = torch.default_generator.get_state()

    def get():
        live.copy_(torch.default_generator.get_state())
        return live

    return {"get_rng_state": get}


def read_moves_draws(device):
    """Draw a number at the boundary behind a state that was read."""
    read = []

    def get():
        read.append(True)
        return device.get_rng_state()

    def boundary():
        if read:
            torch.rand(1)
        read.clear()

    return {"get_rng_state": get, "step_boundary": boundary}


def seed_of_16_bits(device):
    return {"seed": lambda seed: device.seed(seed % 2**16)}


def ignores_seed(device):
    return {"seed": lambda seed: None}


def never_falls(device):
    highest = []

    def stats():
        found = device.memory_stats()
        highest.append(found.allocated)
        return dataclasses.replace(found, allocated=max(highest), peak_allocated=max(highest))

    return {"memory_stats": stats}


def stale_peak(device):
    return {"reset_peak_memory": lambda: None}


def keeps_and_draws(device):
    """Keep memory at each step boundary, and draw a number."""
    kept = []
    return {"step_boundary": lambda: kept.append(torch.rand(65536))}


def lazy_rounds_again(device):
    """Claim to record work."""
    return {"step_boundary": lambda: None}


def lazy_forgets_draws(device):
    """Claim to record work."""
    return {"step_boundary": lambda: None}


def without_compile(device):
    return {"missing": {**device.missing, "compile": "not on this chip"}}


def without_deterministic(device):
    return {"missing": {**device.missing, "deterministic": "not on this chip"}}


def fp16_unscaled(device):
    return {"dtypes": device.dtypes | {"float16"}}


def repeats_streams(device):
    """Begin each stream again when it is entered."""

    class Tracker(RngTracker):
        @contextmanager
        def fork(self, name):
            begin = self._states[name]
            with super().fork(name):
                yield
            self._states[name] = begin

    return {"new_rng_tracker": lambda: Tracker(device)}


def caches_programs(device):
    """Keep programs by their ops and by the shapes of their inputs."""
    programs = {}

    def compile_backend(graph, inputs):
        ops = tuple(str(node.target) for node in graph.graph.nodes if node.op != "placeholder")
        shapes = tuple(tuple(one.shape) for one in inputs if isinstance(one, torch.Tensor))
        return programs.setdefault((ops, shapes), graph.forward)

    return {"compile_backend": compile_backend}


def boundary_rounds(device):
    """Round every number in float32 that Python holds at a step boundary."""

    def boundary():
        for one in gc.get_objects():
            if type(one) is torch.Tensor and one.dtype == torch.float32:
                one.data = one.data.bfloat16().float()

    return {"step_boundary": boundary}


def no_memory(device):
    return {"memory_stats": None, "missing": {**device.missing, "memory_stats": "not yet written"}}


def no_generation(device):
    return {"constant_projection": None, "next_token_attention": None}


def leaking_projection(device):
    """Let a row that is not finite spoil all others."""

    def make(wanted):
        quantized = wanted.weight_OI
        if isinstance(quantized, torch.Tensor) or wanted.activation or wanted.bias_O is not None:
            return None
        if quantized.offset_OG is not None:
            return None
        scale = quantized.scale_OG.double().repeat_interleave(quantized.group_size, 1)
        weight = quantized.values_OI.double() * scale

        def project(x):
            spoiled = x + 0 * x.flatten(0, -2).sum(0)
            return torch.nn.functional.linear(spoiled.double(), weight).to(wanted.output)

        return project

    return {"constant_projection": make}


def offers_closed(device):
    return {"dtypes": device.dtypes | {"float16"}}


def no_bfloat16(device):
    """Claim bfloat16, and have products that refuse it."""
    library = torch.library.Library("aten", "IMPL")
    LIBRARIES.append(library)

    def mm(left, right):
        if left.dtype == torch.bfloat16:
            raise NotImplementedError("no bfloat16 here")
        return torch.einsum("ij,jk->ik", left.double(), right.double()).to(left.dtype)

    library.impl("mm", mm, "CPU")
    return {}


def raises_float(device):
    """Raise in a line of the plugin, below its function."""

    def synchronize():
        return float("a chip")

    return {"synchronize": synchronize}


def hang_synchronize(device):
    """Return at once until the device is created, then never."""
    begin = time.monotonic()

    def synchronize():
        while time.monotonic() - begin < 1000:
            pass

    return {"synchronize": synchronize}


def no_float8(device):
    """Claim float8, and have no product of it."""
    library = torch.library.Library("aten", "IMPL")
    LIBRARIES.append(library)

    def scaled_mm(*arguments, **more):
        raise NotImplementedError("no float8 here")

    library.impl("_scaled_mm", scaled_mm, "CPU")
    return {"dtypes": device.dtypes | {"float8_e4m3fn"}}


def float8(device):
    return {"dtypes": device.dtypes | {"float8_e4m3fn", "float8_e5m2", "int32"}}


def no_double(device):
    return {"dtypes": device.dtypes - {"float64"}}


def kills_large(device):
    """End the process where too much memory is asked for."""
    import os

    plain = torch.empty

    def empty(*size, **more):
        if size and isinstance(size[0], int) and size[0] > 2**40:
            os.abort()
        return plain(*size, **more)

    torch.empty = empty
    return {}


def seeds_python(device):
    def seed(number):
        random.seed(number)
        device.seed(number)

    return {"seed": seed}


def seeds_numpy(device):
    def seed(number):
        np.random.seed(number % 2**32)  # noqa: NPY002 - the global generator
        device.seed(number)

    return {"seed": seed}


@contextmanager
def _faster_products():
    """Lower the precision of products, and put it back only if nothing is raised."""
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@contextmanager
def _flushing():
    """Leave denormal numbers flushed."""
    torch.set_flush_denormal(True)
    yield


def _exchange(model):
    """Look for the exact type of a projection, where the models of lmcore have a subclass."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            module.register_forward_hook(lambda *_: None)


def precisions(device, fake):
    bf16 = autocast_policy(device, name="bf16", compute="bfloat16")
    fp32 = full_precision_policy()
    if fake == "false-bf16":
        bf16 = PrecisionPolicy("bf16", "bfloat16", "float32", "float32", nullcontext)
    if fake == "bf16-weights":  # attention is its reference, which widens without autocast
        names = ("bf16", "bfloat16", "bfloat16", "bfloat16")
        bf16 = PrecisionPolicy(*names, nullcontext, prepare=lambda model: model.bfloat16())
    if fake == "prepares-nothing":
        bf16 = dataclasses.replace(bf16, prepare=_exchange)
    if fake in {"raised-settings", "kept-settings"}:
        context = _faster_products if fake == "raised-settings" else _flushing
        fp32 = dataclasses.replace(fp32, context=context)
    if fake == "rounds":
        bf16 = dataclasses.replace(bf16, context=_at_first(bf16.context))
        fp32 = dataclasses.replace(fp32, prepare=_round)
    if fake == "rounds-in-forward":
        bf16 = dataclasses.replace(bf16, prepare=_round_in_forward)
    if fake == "narrow-copies":
        bf16 = dataclasses.replace(bf16, prepare=_keep_narrow)
    if fake == "rounds-own":
        bf16 = dataclasses.replace(bf16, prepare=_round_own)
    own = [full_precision_policy(), autocast_policy(device, name="fp16", compute="float16")]
    if fake == "fp16-unscaled":
        return own
    return [fp32, bf16, double_precision_policy()]


def _at_first(context):
    entries = []

    def some():
        entries.append(0)
        return context() if len(entries) <= 40 else nullcontext()

    return some


def _round_own(model):
    """Round gradients of the core's modules alone."""
    for module in model.modules():
        if type(module).__module__.startswith("lmcore."):
            for weight in module.parameters(recurse=False):
                weight.register_hook(lambda grad: grad.bfloat16().float())
                weight.register_post_accumulate_grad_hook(_round_sum)


def _round_in_forward(model):
    """Round the weights of projections in place in each forward pass of training."""

    def rounded(module, inputs):
        if torch.is_grad_enabled():
            with torch.no_grad():
                module.weight.copy_(module.weight.bfloat16())

    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(rounded)


class _Narrow:
    """A projection that keeps a copy of its weight from the first pass without gradients."""

    def forward(self, x):
        if torch.is_grad_enabled():
            return super().forward(x)
        if not hasattr(self, "narrow"):
            self.narrow = self.weight.detach().bfloat16()
        bias = None if self.bias is None else self.bias.bfloat16()
        return torch.nn.functional.linear(x.bfloat16(), self.narrow, bias)


def _keep_narrow(model):
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            kind = type(module)
            module.__class__ = type(kind.__name__, (_Narrow, kind), {})


def _round_sum(weight):
    weight.grad = weight.grad.bfloat16().float()


def _round(model):
    """Round weights, and all gradients that will be."""
    for weight in model.parameters():
        weight.data = weight.data.bfloat16().float()
        weight.register_hook(lambda grad: grad.bfloat16().float())


def careful_policy():
    def run(call, *tensors, remember):
        torch.use_deterministic_algorithms(True)
        return call(*tensors)

    return RecomputePolicy("careful", "keeps all", block=run)


def threaded_stager():
    """Return a stager that copies with more threads, and leaves them so."""

    def stage(tensors):
        torch.set_num_threads(torch.get_num_threads() + 1)
        return {name: live.detach().clone() for name, live in tensors.items()}

    return CheckpointStager("threaded", stage, priority=50)


def stale_stager():
    """Return what was staged first, for ever."""
    kept = {}

    def stage(tensors):
        for name, live in tensors.items():
            kept.setdefault(name, live.detach().clone())
        return dict(kept)

    return CheckpointStager("stale", stage, priority=50)


def shared_stager():
    """Return a stager with one buffer for all tensors of a shape."""
    buffers = {}

    def stage(tensors):
        found = {}
        for name, live in tensors.items():
            empty = torch.empty(live.shape, dtype=live.dtype)
            found[name] = buffers.setdefault((live.shape, live.dtype), empty).copy_(live)
        return found

    return CheckpointStager("shared", stage, priority=50)


def late_stager():
    """Return a stager that copies when the checkpoint is written, whatever has changed."""

    def begin(tensors):
        copies = {name: torch.empty_like(live) for name, live in tensors.items()}

        def finish():
            for name, live in tensors.items():
                copies[name].copy_(live)

        return PendingCopy(copies, finish=finish)

    def stage(tensors):
        return {name: live.detach().clone() for name, live in tensors.items()}

    return CheckpointStager("late", stage, priority=50, begin=begin)


def backend(fake):  # noqa: C901 - a fault is a line
    def register():  # noqa: C901 - the same
        plain = distributed.all_reduce
        broadcast = distributed.broadcast

        def all_reduce(tensor, *arguments, **more):
            if fake == "lost-async" and more.get("async_op"):
                return plain(tensor.clone(), *arguments, **more)
            work = plain(tensor, *arguments, **more)
            if fake == "wrong-reduce" and distributed.get_rank() == 1:
                tensor[-1] += 1
            large = tensor.numel() > 2**20
            other = bool(arguments) and arguments[0] != distributed.ReduceOp.SUM
            if fake == "wrong-large-reduce" and large:
                tensor[2**20 :] += 1
            if fake == "wrong-large-max" and large and other:
                tensor[2**20 :] += 1
            if fake == "wrong-large-bf16" and large and tensor.dtype == torch.bfloat16:
                tensor[2**20 :] += 1
            if fake == "wrong-view" and large and tensor.storage_offset():
                tensor.as_strided((1,), (1,), tensor.storage_offset() - 1).add_(1)
            if fake == "reduce-in-float" and tensor.dtype == torch.int64:
                tensor.copy_(tensor.float().long())
            if fake == "average-reduce":
                tensor.copy_(tensor / 2)
            return work

        def hanging(*arguments, **more):
            if distributed.get_rank() == 1:
                time.sleep(1000)
            return broadcast(*arguments, **more)

        distributed.all_reduce = all_reduce
        if fake == "hang-broadcast":
            distributed.broadcast = hanging
        wrong = getattr(collectives, fake.replace("-", "_"), None)
        if callable(wrong):
            wrong()

    average = fake == "divides-by-the-world"
    return CommBackend("gloo", "cpu", register=register, supports_average=average)

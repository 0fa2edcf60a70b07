"""Checks of `lmcore doctor` on the CPU; they run in a separate process."""

from __future__ import annotations

import torch

from lmcore.base.errors import counted
from lmcore.contract import Check, CheckStatus
from lmcore_cpu import ipex
from lmcore_cpu.device import create_device
from lmcore_cpu.host import cpp_compiler, cpu_count, memory_available
from lmcore_cpu.kernel import native
from lmcore_cpu.kernel.processor import facts
from lmcore_cpu.precision import half_precisions

__all__ = ["checks"]

_LITTLE_MEMORY = 2 * 2**30


def checks() -> list[Check]:
    """Return the checks: torch, kernels, threads, memory, speed, precision, compiler, extension."""
    parts = [_build(), _kernels(), _threads(), _memory(), _rate(), _half_precision(), _compiler()]
    return [*parts, *_extension()]


def _build() -> Check:
    parts = [f"torch {torch.__version__}", torch.backends.cpu.get_cpu_capability()]
    here = facts()
    parts += ["oneDNN"] if here.onednn else []
    parts += ["MKL"] if here.mkl else []
    fast = here.onednn or here.mkl
    return Check(
        "torch build",
        CheckStatus.OK if fast else CheckStatus.WARNING,
        ", ".join(parts),
        None if fast else "products will be slow: install a torch wheel with oneDNN or MKL",
    )


def _kernels() -> Check:
    found = facts().instructions
    if found:
        return Check("kernels", CheckStatus.OK, f"{native.reason()}, with {found[0]}")
    detail = f"generation is left to torch's products: {native.reason()}"
    return Check("kernels", CheckStatus.OK, detail)


def _threads() -> Check:
    threads, cores = torch.get_num_threads(), cpu_count()
    detail = f"{counted(threads, 'thread')} on {counted(cores, 'core')}"
    if threads > cores:
        return Check(
            "threads",
            CheckStatus.WARNING,
            detail,
            f"pass `--num-threads {cores}`, or unset `OMP_NUM_THREADS`",
        )
    return Check("threads", CheckStatus.OK, detail)


def _memory() -> Check:
    free = memory_available()
    enough = free >= _LITTLE_MEMORY
    return Check(
        "memory",
        CheckStatus.OK if enough else CheckStatus.WARNING,
        f"{free / 2**30:.1f} GiB free for this process",
        None if enough else "training even a small model needs about 2 GiB",
    )


def _rate() -> Check:
    peak = create_device().require("peak_flops")
    rates = {name: peak(name) / 1e9 for name in ("float32", "bfloat16")}
    detail = ", ".join(f"{name} {rate:.0f} GFLOP/s" for name, rate in rates.items())
    if rates["bfloat16"] < rates["float32"]:
        detail += "; bf16 is slower than fp32 here"
    return Check("speed", CheckStatus.OK, detail)


def _half_precision() -> Check:
    found = half_precisions()
    having = [dtype for dtype, has in found.items() if has]
    lacking = [dtype for dtype, has in found.items() if not has]
    parts = [f"the processor has instructions for {' and '.join(having)}"] if having else []
    slow = f"no instructions for {' and '.join(lacking)}: fp32 is likely to be faster"
    parts += [slow] if lacking else []
    return Check("half precision", CheckStatus.OK, "; ".join(parts))


def _compiler() -> Check:
    path = cpp_compiler()
    if path is None:
        return Check(
            "compiler",
            CheckStatus.WARNING,
            "no g++ or clang++: `--compile` cannot be used",
            "install g++, such as by `apt-get install g++`",
        )
    return Check("compiler", CheckStatus.OK, f"{path}, for `--compile`")


def _extension() -> list[Check]:
    """Load the library with CPU kernels of Intel's extension, if the extension is installed."""
    package = ipex.package()
    if package is None:
        return []
    problem = package.problem
    if problem is None:
        try:
            ipex.load_operators()
        except ImportError as error:
            problem = str(error)
    if problem is None:
        kernels = "kernels for RMS norm and rotary embedding"
        return [Check(ipex.NAME, CheckStatus.OK, f"{package.version}, {kernels}")]
    fix = f"install the build of `{ipex.NAME}` for this torch and for CPUs, or uninstall it"
    return [Check(ipex.NAME, CheckStatus.WARNING, f"without its kernels: {problem}", fix)]

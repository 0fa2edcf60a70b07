"""Rules of which cases a kernel does: what `OpImpl.supports` of this plugin is made of; torch-free.

A rule takes the case and the GPU, and returns None or the reason against it.  They are asked in
order, and the first reason is the answer: cheap rules first, the import of a package last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from lmcore.accelerator import OpContext, Reject
from lmcore_cuda.packages import PACKAGES, Packages, import_problem

__all__ = [
    "HALF",
    "Gpu",
    "Rule",
    "capability",
    "dtypes",
    "eager",
    "head_dim",
    "no_dropout",
    "package",
    "supports",
    "unmasked",
]

HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class Gpu:
    """What the rules ask of the device.

    Attributes:
        capability: Compute capability, (major, minor).
        packages: The kernel packages that are installed.
        import_problem: See `lmcore_cuda.packages.import_problem`.
    """

    capability: tuple[int, int]
    packages: Packages
    import_problem: Callable[[str], str | None] = import_problem
    _imports: dict[str, str | None] = field(default_factory=dict)

    def package_problem(self, name: str) -> str | None:
        """Return why a package's kernels cannot be used here; it is imported, once."""
        if name not in self.packages:
            return f"needs `{name}`, not installed"
        told = self.packages[name].problem
        if told is not None:
            return told
        if name not in self._imports:
            self._imports[name] = self.import_problem(name)
        return self._imports[name]


Rule = Callable[[OpContext, Gpu], str | None]


def supports(gpu: Gpu, *rules: Rule) -> Callable[[OpContext], Reject | None]:
    """Return a `supports` that asks the rules in order."""

    def answer(context: OpContext) -> Reject | None:
        for rule in rules:
            reason = rule(context, gpu)
            if reason is not None:
                return Reject(reason)
        return None

    return answer


def dtypes(*names: str) -> Rule:
    """Return the rule that the op's inputs are of one of these dtypes."""
    listed = " and ".join(names)

    def rule(context: OpContext, gpu: Gpu) -> str | None:
        return None if context.dtype in names else f"computes in {listed}, not {context.dtype}"

    return rule


def capability(least: tuple[int, int], majors: Iterable[int] = (), why: str = "") -> Rule:
    """Return the rule that the GPU is recent enough, and of one of *majors* where any is named."""
    wanted = tuple(majors)
    names = " and ".join(f"{major}.x" for major in wanted)
    needs = names or f"{least[0]}.{least[1]} or newer"

    def rule(context: OpContext, gpu: Gpu) -> str | None:
        major, minor = gpu.capability
        if gpu.capability >= least and (not wanted or major in wanted):
            return None
        told = f"is for compute capability {needs}, this GPU has {major}.{minor}"
        return f"{told}; {why}" if why else told

    return rule


def head_dim(most: int, multiple: int = 8, least: int = 8) -> Rule:
    """Return the rule on the channels of an attention head."""

    def rule(context: OpContext, gpu: Gpu) -> str | None:
        size = context.attributes["head_dim"]
        if least <= size <= most and size % multiple == 0:
            return None
        return f"takes {least} to {most} channels a head, in steps of {multiple}, not {size}"

    return rule


def no_dropout(context: OpContext, gpu: Gpu) -> str | None:
    """Refuse cases with dropout."""
    return "has no dropout" if context.attributes.get("dropout") else None


def unmasked(context: OpContext, gpu: Gpu) -> str | None:
    """Refuse cases with a mask."""
    return "takes no mask" if context.attributes.get("masked") else None


def eager(context: OpContext, gpu: Gpu) -> str | None:
    """Refuse compiled blocks, which a call that the compiler cannot follow cuts in two."""
    if context.attributes.get("compile"):
        return "is not for compiled blocks: the compiler cannot follow it, and would cut the block"
    return None


def package(name: str) -> Rule:
    """Return the rule that a package is installed and fits the torch that is there."""
    assert name in PACKAGES

    def rule(context: OpContext, gpu: Gpu) -> str | None:
        return gpu.package_problem(name)

    return rule

"""Names of lmcore that a plugin may import, by public module; part of `describe_contract`.

All other names are private, and `lmcore plugin check` refuses them.  docs/reference/hooks.md has
the same list, and a test compares them.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from typing import Any

import lmcore.contract as lmcore_contract
from lmcore.contract.op import packages, rules
from lmcore.contract.op.spec import OP_SPECS
from lmcore.contract.registry import (
    CommandRegistry,
    CorpusRegistry,
    EngineRegistry,
    FamilyRegistry,
    FormatRegistry,
    LoggerRegistry,
    OptionRegistry,
    TaskRegistry,
    TokenizerRegistry,
)
from lmcore_conformance.contract.types import (
    describe_function,
    describe_source_function,
    source_names,
)

__all__ = ["LOADS_TORCH", "PUBLIC_MODULES", "describe_functions", "public_classes"]

PUBLIC_MODULES: Mapping[str, tuple[str, ...]] = {
    "lmcore": ("__version__",),
    "lmcore.base.bounded_file": ("read_bounded_file",),
    "lmcore.base.errors": (
        "CheckpointArgumentError",
        "CheckpointError",
        "ConfigError",
        "DataError",
        "DeviceError",
        "LmcoreError",
        "MissingPackageError",
        "PluginError",
        "RunError",
        "counted",
        "nearest",
        "suggestion",
    ),
    "lmcore.config.need": ("Need", "Situation", "setting"),
    "lmcore.config.option": (
        *("CHECKED", "DROPOUT", "FREE", "INPUT_PATH", "OUTPUT_PATH", "REQUIRED", "option"),
    ),
    "lmcore.config.options.command_line": ("parse_section",),
    "lmcore.config.section": ("Config",),
    "lmcore.contract": tuple(sorted(lmcore_contract.__all__)),
    "lmcore.contract.activation_saving": source_names("lmcore.contract.activation_saving"),
    "lmcore.contract.op.packages": tuple(packages.__all__),
    "lmcore.contract.op.reference": tuple(spec.reference.partition(":")[2] for spec in OP_SPECS),
    "lmcore.contract.op.rules": tuple(rules.__all__),
    "lmcore.contract.op.torch_kernels": source_names("lmcore.contract.op.torch_kernels"),
    "lmcore.contract.registry": tuple(
        registry.__name__
        for registry in (
            CommandRegistry,
            CorpusRegistry,
            EngineRegistry,
            FamilyRegistry,
            FormatRegistry,
            LoggerRegistry,
            OptionRegistry,
            TaskRegistry,
            TokenizerRegistry,
        )
    ),
    "lmcore.contract.tokenizer": ("Tokenizer", "TokenizerFactory"),
    "lmcore.contract.torch_versions": (
        "ACCELERATOR_GRAPH",
        "ACCELERATOR_MEMORY",
        "ATTENTION_KERNELS",
        "ATTENTION_RESULTS",
        "GLOO_AVERAGE",
        "GROUPED_CPU_ATTENTION",
        "TorchCapability",
    ),
    "lmcore.contract.weight_copies": ("narrow_weight",),
    "lmcore.conversion.state": ("ADAM", "ModelState", "Progress", "WEIGHT", "require_no_problems"),
    "lmcore.evaluation.files": ("Row", "json_rows", "read_text"),
    "lmcore.evaluation.task": ("Choices", "Continued", "Task", "Text", "within"),
    "lmcore.families.gpt.samples": ("samples",),
    "lmcore.families.layers.head": ("HeadLoss",),
    "lmcore.families.layers.projection": ("Embedding", "Linear"),
    "lmcore.families.layers.transformer": ("Attention", "Block", "FeedForward", "norm_of"),
    "lmcore.families.protocol": source_names("lmcore.families.protocol"),
    "lmcore.families.recompute": ("KEEP_ALL", "Recompute"),
    "lmcore.families.saved_shape": ("read_shape",),
    "lmcore.hookspecs": ("hookimpl",),
    "lmcore.model.checkpoint_format": ("CheckpointFormat",),
    "lmcore.model.family": (
        *("Body", "Family", "ForwardFlops", "Loss", "Stack", "block_flops", "parameter_shapes"),
    ),
    "lmcore.model.parameters": ("Init", "ONES", "Parameter", "Split", "ZEROS"),
    "lmcore.model.shape": ("ModelShape",),
    "lmcore.model.run_logger": ("LoggedRun", "OpenLogger", "RunLogger", "StepMetrics"),
    "lmcore.model.training_engine": ("Lack", "TrainingEngine"),
}
"""The public names of each public module."""

LOADS_TORCH = frozenset(
    {
        "lmcore.families.gpt.samples",
        "lmcore.families.layers.head",
        "lmcore.families.layers.projection",
        "lmcore.families.layers.transformer",
        "lmcore.families.protocol",
        "lmcore.families.recompute",
        "lmcore.contract.activation_saving",
        "lmcore.contract.op.reference",
        "lmcore.contract.op.torch_kernels",
        "lmcore.contract.weight_copies",
    }
)
"""Public modules whose import loads torch: for functions that are called in a worker."""

_CONTRACT = "lmcore.contract"
_OPTIONS = ("lmcore.config.section", "Config")
"""The one class whose fields are no part of the contract: the options of a run."""


def public_classes() -> list[type]:
    """Return the public classes of the contract's package, without `lmcore.contract`'s own."""
    return [
        member
        for module, name in _further_names()
        if isinstance(member := _member(module, name), type) and module.startswith(_CONTRACT)
    ]


def describe_functions() -> dict[str, dict[str, Any]]:
    """Return the parameters and result of each public function, by its name.

    The name has its module if that is not `lmcore.contract`.  A class outside the contract's
    package, such as an error, is described by its constructor.  The ops describe their references.
    """
    described = {
        name: describe_function(member)
        for name in PUBLIC_MODULES[_CONTRACT]
        if inspect.isfunction(member := _member(_CONTRACT, name))
    }
    for module, name in _further_names():
        full_name = f"{module}.{name}"
        if module == "lmcore.contract.op.reference":
            continue
        if module in LOADS_TORCH:
            found = describe_source_function(module, name)
            if found is not None:
                described[full_name] = found
        elif _is_described(module, name):
            described[full_name] = describe_function(_member(module, name))
    return described


def _further_names() -> list[tuple[str, str]]:
    """Return (module, name) of each public name that `lmcore.contract` does not have."""
    return [
        (module, name)
        for module, names in PUBLIC_MODULES.items()
        if module != _CONTRACT
        for name in names
    ]


def _is_described(module: str, name: str) -> bool:
    member = _member(module, name)
    if isinstance(member, type):
        return not module.startswith(_CONTRACT) and (module, name) != _OPTIONS
    return inspect.isfunction(member)


def _member(module: str, name: str) -> Any:
    """Return a public name's object; None if its module loads torch."""
    if module in LOADS_TORCH:
        return None
    return getattr(importlib.import_module(module), name)

"""The contract between the core and an accelerator.

Importing this package loads no torch; the names below are records, and functions that load it
when called.  docs/reference/hooks.md lists them with the names of the few other public modules.
"""

from __future__ import annotations

from lmcore.accelerator.communication import CommBackend
from lmcore.accelerator.compilations import Compilations
from lmcore.accelerator.device import Device, own_index
from lmcore.accelerator.device_errors import first_line, hint_by_words
from lmcore.accelerator.generation_kernels import (
    ConstantProjection,
    NextTokenAttention,
    QuantizedWeight,
)
from lmcore.accelerator.memory_stats import MemoryStats
from lmcore.accelerator.op.context import OpAttributes
from lmcore.accelerator.op.records import OpContext, OpImpl, OpSpec, Reject, Resolution, Tolerance
from lmcore.accelerator.op.spec import OP_SPECS
from lmcore.accelerator.op.table import OpTable
from lmcore.accelerator.precision.policy import (
    PrecisionPolicy,
    autocast_policy,
    double_precision_policy,
    full_precision_policy,
    standard_precision_policies,
)
from lmcore.accelerator.probe import (
    API_VERSION,
    Check,
    CheckStatus,
    PluginInfo,
    Probe,
    ProbeState,
    Problem,
)
from lmcore.accelerator.recompute import (
    RecomputePolicy,
    full_offload_policy,
    full_policy,
    none_policy,
    offload_policy,
    selective_policy,
    standard_recompute_policies,
)
from lmcore.accelerator.rng import RngTracker
from lmcore.accelerator.torch_build import TorchBuild, torch_build
from lmcore.accelerator.transfer.staging import CheckpointStager, PendingCopy, host_copy_stager
from lmcore.accelerator.transfer.staging_buffers import buffer_stager

__all__ = [
    "API_VERSION",
    "OP_SPECS",
    "Check",
    "CheckStatus",
    "CheckpointStager",
    "CommBackend",
    "Compilations",
    "ConstantProjection",
    "Device",
    "MemoryStats",
    "NextTokenAttention",
    "OpAttributes",
    "OpContext",
    "OpImpl",
    "OpSpec",
    "OpTable",
    "PendingCopy",
    "PluginInfo",
    "PrecisionPolicy",
    "Probe",
    "ProbeState",
    "Problem",
    "QuantizedWeight",
    "RecomputePolicy",
    "Reject",
    "Resolution",
    "RngTracker",
    "Tolerance",
    "TorchBuild",
    "autocast_policy",
    "buffer_stager",
    "double_precision_policy",
    "first_line",
    "full_offload_policy",
    "full_policy",
    "full_precision_policy",
    "hint_by_words",
    "host_copy_stager",
    "none_policy",
    "offload_policy",
    "own_index",
    "selective_policy",
    "standard_precision_policies",
    "standard_recompute_policies",
    "torch_build",
]

"""The contract between the core and an accelerator.

Importing this package loads no torch; the names below are records, and functions that load it
when called.  docs/reference/hooks.md lists them with the names of the few other public modules.
"""

from __future__ import annotations

from lmcore.contract.communication import CommBackend
from lmcore.contract.compilations import Compilations
from lmcore.contract.device import Device, own_index
from lmcore.contract.device_errors import first_line, hint_by_words
from lmcore.contract.generation_kernels import (
    ConstantProjection,
    NextTokenAttention,
    QuantizedWeight,
)
from lmcore.contract.memory_stats import MemoryStats
from lmcore.contract.op.context import OpAttributes
from lmcore.contract.op.records import OpContext, OpImpl, OpSpec, Reject, Resolution, Tolerance
from lmcore.contract.op.spec import OP_SPECS
from lmcore.contract.op.table import OpTable
from lmcore.contract.precision.policy import (
    PrecisionPolicy,
    autocast_policy,
    double_precision_policy,
    full_precision_policy,
    standard_precision_policies,
)
from lmcore.contract.probe import (
    API_VERSION,
    Check,
    CheckStatus,
    PluginInfo,
    Probe,
    ProbeState,
    Problem,
)
from lmcore.contract.recompute import (
    RecomputePolicy,
    full_offload_policy,
    full_policy,
    none_policy,
    offload_policy,
    selective_policy,
    standard_recompute_policies,
)
from lmcore.contract.rng import RngTracker
from lmcore.contract.torch_build import TorchBuild, torch_build
from lmcore.contract.transfer.staging import CheckpointStager, PendingCopy, host_copy_stager
from lmcore.contract.transfer.staging_buffers import buffer_stager

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

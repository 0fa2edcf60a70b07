"""Plugins: discover, check, isolate, select; typed wrappers over their hooks.  Torch-free.

plugins = discover()                                      # records, also of what failed
selection = select(plugins, requested=config.accelerator.device)
os.environ |= launch_env(plugins, selection, rank_info, os.environ)
device = create_device(plugins, selection, config)        # torch from here on
table = build_op_table(plugins, selection, device)
"""

from __future__ import annotations

from lmcore.plugin.discovery import ALLOW_LIST, GROUP, discover
from lmcore.plugin.hook_calls import (
    build_op_table,
    checkpoint_stagers,
    choose_comm_backend,
    comm_backends,
    create_device,
    doctor_checks,
    launch_env,
    op_impls,
    precision_policies,
    recompute_policies,
    run_end,
    run_start,
    validate_config,
)
from lmcore.plugin.known_packages import device_packages
from lmcore.plugin.policy_choice import (
    AUTO,
    choose_precision,
    choose_recompute,
    choose_stager,
    fastest_precision,
)
from lmcore.plugin.record import PluginRecord, PluginSet, PluginState
from lmcore.plugin.selection import HANDED_DOWN, REQUEST, Selection, select, verify

__all__ = [
    "ALLOW_LIST",
    "AUTO",
    "GROUP",
    "HANDED_DOWN",
    "REQUEST",
    "PluginRecord",
    "PluginSet",
    "PluginState",
    "Selection",
    "build_op_table",
    "checkpoint_stagers",
    "choose_comm_backend",
    "choose_precision",
    "choose_recompute",
    "choose_stager",
    "comm_backends",
    "create_device",
    "device_packages",
    "discover",
    "doctor_checks",
    "fastest_precision",
    "launch_env",
    "op_impls",
    "precision_policies",
    "recompute_policies",
    "run_end",
    "run_start",
    "select",
    "validate_config",
    "verify",
]

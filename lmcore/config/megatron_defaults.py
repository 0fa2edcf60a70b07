"""Megatron's defaults that differ from lmcore's: `--defaults megatron` sets them.

They are the lowest source of settings: presets, files and flags override them.  lmcore's defaults
stay where no result and no training line depends on them (garbage collection), where they keep a
run safe (`exit_on_missing_checkpoint`), where Megatron has none, and for `muon`, whose defaults
change from version to version.
Sources: the argument definitions of Megatron-LM, and of Argonne's and BigScience's
Megatron-DeepSpeed, whose code for data is Megatron's legacy code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmcore.config.derived.model_math import family_name
from lmcore.config.need import Situation
from lmcore.config.option import Option
from lmcore.config.section import run_options
from lmcore.config.settings import Provenance

if TYPE_CHECKING:
    from lmcore.config.section import Config

__all__ = ["DEFAULTS_OPTION", "MEGATRON_DEFAULTS", "defaults_layer", "note_of_defaults"]

_COMMON: Mapping[str, Any] = {
    "lr_decay_style": "linear",
    "lr_warmup_fraction": None,
    "attention_dropout": 0.1,
    "hidden_dropout": 0.1,
    "retro_encoder_attention_dropout": 0.1,
    "retro_encoder_hidden_dropout": 0.1,
    "precision": "fp32",
    "eval_interval": 1000,
    "eval_iters": 100,
    "calculate_per_token_loss": False,
    "include_padding_in_loss": True,
    "log_interval": 100,
}
_LEGACY: Mapping[str, Any] = {"split_rule": "legacy"}

MEGATRON_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "megatron": _COMMON,
    "megatron-deepspeed": {
        **_COMMON,
        **_LEGACY,
        "sophiag_beta1": 0.9,
        "sophiag_beta2": 0.95,
        "sophiag_rho": 0.01,
    },
    "bigscience": {**_COMMON, **_LEGACY, "final_epoch_threshold": 0.95},
}
"""Defaults that differ from lmcore's, by option name, of each program."""

_NAMES = {
    "megatron": "Megatron",
    "megatron-deepspeed": "Megatron-DeepSpeed",
    "bigscience": "BigScience",
}
_ALL = ", ".join(_NAMES.values())
_ONLY_SHOWN = ("log_interval",)
"""Options that change no result, which the note leaves out."""

DEFAULTS_OPTION = Option(
    name="defaults",
    section="",
    type=str,
    repeated=False,
    optional=True,
    default=None,
    help="Program whose defaults apply to what is not given: lmcore, Megatron-LM (megatron), "
    "Argonne's Megatron-DeepSpeed (megatron-deepspeed), or BigScience's (bigscience).",
    choices=("lmcore", *MEGATRON_DEFAULTS),
)
"""The option `--defaults`, which sets other options and is none of a section."""


def defaults_layer(name: str | None) -> dict[str, tuple[Any, Provenance]]:
    """Return the values of `--defaults` with their provenance; empty for lmcore's own."""
    origin = Provenance("defaults", f"{_NAMES.get(name or '', '')}'s default")
    return {key: (value, origin) for key, value in MEGATRON_DEFAULTS.get(name or "", {}).items()}


def note_of_defaults(config: Config, provenance: Mapping[str, Provenance]) -> tuple[str, ...]:
    """Return one message that names lmcore's defaults in force that differ from Megatron's.

    Defaults without an effect in the run are left out; no message if there are no others.

    Args:
        config: All settings.
        provenance: Origin of each setting.
    """
    situation = Situation(config, family=family_name(config.model))
    options = run_options()
    differing: dict[str, dict[Any, list[str]]] = {}
    for program, values in MEGATRON_DEFAULTS.items():
        for name, value in values.items():
            is_default = provenance[name].kind == "default" and name not in _ONLY_SHOWN
            if is_default and all(need.met(situation) for need in options[name].needs):
                differing.setdefault(name, {}).setdefault(value, []).append(_NAMES[program])
    rows = []
    for name, values in differing.items():
        own = "of the device" if options[name].default is None else options[name].default
        theirs = [f"{', '.join(names)}: {_shown(value)}" for value, names in values.items()]
        row = f"  `{name}`: {_shown(own)}; {'; '.join(theirs)}"
        rows.append(row.replace(_ALL, "Megatron"))
    if not rows:
        return ()
    others = ", ".join(f"`{name}`" for name in MEGATRON_DEFAULTS if name != "megatron")
    head = (
        "defaults that differ from Megatron's; `--defaults megatron` takes Megatron's "
        f"({others}: the fork's):"
    )
    return ("\n".join([head, *rows]),)


def _shown(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return "none" if value is None else value

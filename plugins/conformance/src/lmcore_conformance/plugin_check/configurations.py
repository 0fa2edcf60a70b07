"""Configurations of real runs that `lmcore_validate_config` is asked about.

Part of `lmcore plugin check`.  Refusing one is the plugin's right; raising, changing it, answering
otherwise the second time, or refusing a policy that the plugin itself offers is a fault.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import PluginError
from lmcore.contract.probe import Check, CheckStatus, Problem

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan

__all__ = ["CONFIGURATIONS", "check_answers", "plan_of"]

_BYTES = 257  # the vocabulary of a run without arguments

CONFIGURATIONS: Sequence[tuple[str, int]] = (
    ("", 1),
    ("--preset gpt2-124m --attention-dropout 0.1 --hidden-dropout 0.1", 1),
    ("--preset llama-1b --recompute full", 1),
    (
        (
            "--preset gpt-7.5b --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2"
            " --micro-batch-size 1 --global-batch-size 16"
        ),
        8,
    ),
    ("--tensor-model-parallel-size 2 --sequence-parallel", 2),
    ("--context-parallel-size 2", 2),
    ("--zero-stage 3 --global-batch-size 16", 2),
    ("--compile", 1),
    ("--step-graph", 1),
    ("--deterministic --async-save", 1),
)
"""Flags and number of processes."""

Ask = Callable[[Any], list[Problem]]
"""Calls the hook with a configuration."""


def plan_of(flags: str, world_size: int, plugins: Any = None) -> RunPlan:
    """Return the plan of a run with these flags.

    Args:
        flags: Flags of `lmcore train`.
        world_size: Number of processes.
        plugins: Sections of the plugins' settings; None: none.
    """
    from lmcore.config.load import load_config
    from lmcore.config.resolve import resolve
    from lmcore.config.tokenizer import TokenizerIdentity
    from lmcore.config.validate import validate

    loaded = load_config(flags.split(), **({} if plugins is None else {"plugins": plugins}))
    tokenizer = TokenizerIdentity(vocab_size=_BYTES)
    return resolve(validate(loaded, world_size=world_size), tokenizer=tokenizer)


def check_answers(
    hook: str, ask: Ask, wrong: Callable[[Problem], list[str]], plugins: Any, offers: Sequence[str]
) -> Iterator[Check]:
    """Yield the faults of the hook's answers, or a line on what it refuses.

    Args:
        hook: Name of the hook.
        ask: Calls it.
        wrong: Returns what is wrong with the record of a problem.
        plugins: Sections of the plugins' settings.
        offers: Flags that choose what the plugin offers, such as `--precision bf16`.
    """
    faults, refused = [], []
    for flags, size in [*CONFIGURATIONS, *((flag, 1) for flag in offers)]:
        config = plan_of(flags, size, plugins).config
        before = repr(config)
        case = f"for `{flags}`" if flags else "for a run without arguments"
        try:
            found, again = ask(config), ask(config)
        except PluginError as error:
            faults.append(f"{case} {error.what}")
            continue
        faults += [f"{case}: {text}" for problem in found for text in wrong(problem)]
        if repr(config) != before:
            faults.append(f"{case}: it changes the configuration, which is read-only")
        if found != again:
            faults.append(f"{case} it answers differently the second time: {found!r:.100}")
        if found and flags in offers:
            faults.append(f"it refuses `{flags}`, which the plugin offers: {found[0].what}")
        elif found:
            refused.append((flags, found[0]))
    yield from (Check(hook, CheckStatus.FAILED, text) for text in faults)
    if faults:
        return
    for flags, problem in refused[:1]:
        if not flags:
            detail = f"it refuses a run without arguments: {problem.what}"
            yield Check(hook, CheckStatus.WARNING, detail, problem.hint)
            return
    count = len(CONFIGURATIONS) + len(offers)
    names = ", ".join(f"`{flags}`" for flags, _ in refused)
    but = f"; it refuses {names}" if names else ", none is refused"
    yield Check(hook, CheckStatus.OK, f"asked about {count} configurations{but}")

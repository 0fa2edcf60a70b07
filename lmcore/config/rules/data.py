"""What can be wrong with the sources of a run, one small function a rule; part of `validate`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from lmcore.config.data_source import (
    DIVIDED,
    OWN,
    PARTS,
    Blend,
    DataSource,
    Part,
    overlapping_ranges,
)
from lmcore.config.load import LoadedConfig
from lmcore.config.split import parse_split
from lmcore.errors import ConfigError, LmcoreError

__all__ = ["DATA_RULES"]

Problems = Iterator[LmcoreError]


def _split(loaded: LoadedConfig) -> Problems:
    try:
        shares = parse_split(loaded.value("split"))
    except ConfigError as problem:
        what = f"{loaded.shown('split')} is not a split"
        yield ConfigError(what, why=problem.why, hint=problem.hint)
        return
    own = [option for part in PARTS for option in _own(loaded, part)]
    divides = not own or own == ["train_data"]
    if loaded.given("split") and not divides:
        yield ConfigError(
            f"{loaded.shown('split')} does not go with {loaded.shown(own[0])}",
            why="each part has data sets of its own, of which it reads all documents",
            hint="leave the split out; `--train-weighted-split-paths` and its like give ranges",
        )
    if divides and shares[1] == 0 and _evaluates(loaded):
        yield ConfigError(
            f"{loaded.shown('split')} leaves no validation documents",
            why=f"validation runs every {loaded.value('eval_interval')} steps",
            hint="use `--eval-iters 0`, or give validation a share: `--split 969,30,1`",
        )


def _exclusive(loaded: LoadedConfig) -> Problems:
    """One option names the sources of a part."""
    divided = [option for option in DIVIDED if loaded.value(option)]
    groups = [[*divided, *_own(loaded, "train")], *(_own(loaded, part) for part in PARTS[1:])]
    for group in groups:
        if len(group) > 1:
            yield ConfigError(
                " and ".join(loaded.shown(option) for option in group) + " exclude each other",
                hint="keep one of them",
            )
    for part in PARTS[1:]:
        own = _own(loaded, part)
        if own and not _own(loaded, "train"):
            instead = f"`--train-data-path` in place of `{_flag(divided[0])}`" if divided else None
            yield ConfigError(
                f"{loaded.shown(own[0])} stands without data of training's own",
                why="what all parts read is divided by `--split`",
                hint=f"use {instead or '`--train-data-path`'}, or leave `{_flag(own[0])}` out",
            )


def _validation(loaded: LoadedConfig) -> Problems:
    """Where training has sources of its own, validation needs some as well."""
    train, valid, test = (_own(loaded, part) for part in PARTS)
    divided = train == ["train_data"] and not test
    if train and not valid and not divided and _evaluates(loaded):
        own = train[0].replace("train", "valid")
        yield ConfigError(
            f"{loaded.shown(train[0])} leaves nothing to validate on",
            why=f"validation runs every {loaded.value('eval_interval')} steps",
            hint=f"add `{_flag(own)}`, or use `--eval-iters 0`",
        )


def _sources(loaded: LoadedConfig) -> Problems:
    """Weights, ranges and files of every source; those that a list names are told later."""
    found, problems = loaded.sources
    yield from problems
    yield from overlapping_ranges(found)
    for blend in found.blends():
        if blend.file_list is not None and not Path(blend.file_list).is_file():
            yield ConfigError(f"{loaded.shown(blend.option)}: no such file", hint="check the path")
        yield from _data_sets(loaded, blend)
        yield from _twice(loaded, blend)


def _data_sets(loaded: LoadedConfig, blend: Blend) -> Problems:
    unknown = []
    for prefix in dict.fromkeys(one.name for one in blend.sources if not one.corpus):
        missing = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
        if missing:
            yield _no_data(loaded, blend, prefix, missing)
        elif loaded.value("tokenizer_type") is None and not Path(prefix + ".meta.json").is_file():
            unknown.append(prefix)
    if unknown:
        several = len(blend.sources) > 1
        some = ", ".join(f"`{prefix}`" for prefix in unknown[:3]) + ", ..." * (len(unknown) > 3)
        yield ConfigError(
            f"{loaded.shown(blend.option)} does not say which tokenizer made it"
            + (f": {some}" if several else ""),
            why=f"there is no `{unknown[0]}.meta.json`, as for data of other programs",
            hint="add `--tokenizer-type`, with its `--vocab-file` and `--merge-file`",
        )


def _twice(loaded: LoadedConfig, blend: Blend) -> Problems:
    names = [one.name for one in blend.sources if one.documents is None]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield ConfigError(
            f"{loaded.shown(blend.option)} names `{name}` twice",
            why="the same samples would come once for each time, in the same order",
            hint="name it once, with a larger weight",
        )


def _change(loaded: LoadedConfig) -> Problems:
    if not loaded.value("change_blend"):
        return
    if loaded.value("load") is None:
        yield ConfigError(
            f"{loaded.shown('change_blend')} needs `--load`",
            why="what was read of each source stands in a checkpoint",
            hint="add `--load DIR`",
        )
    for name, reason in (
        ("override_data_order", "it goes on without keeping count"),
        ("finetune", "it begins anew"),
    ):
        if loaded.value(name):
            what = f"{loaded.shown('change_blend')} does not go with {loaded.shown(name)}"
            yield ConfigError(what, why=reason, hint="keep one of them")
    if loaded.value("dataloader_type") == "cyclic":
        yield ConfigError(
            f"{loaded.shown('change_blend')} does not go with {loaded.shown('dataloader_type')}",
            why="in passes over all samples every source is where the pass is",
            hint="`--override-data-order` begins a new order",
        )


def _no_data(loaded: LoadedConfig, blend: Blend, prefix: str, missing: list[str]) -> ConfigError:
    why = "no file " + " and no file ".join(f"`{prefix}{suffix}`" for suffix in missing)
    hint = "`lmcore data prepare` makes a data set"
    candidate = prefix + "_text_document"
    if Path(candidate + ".idx").is_file():
        alone = blend.sources == (DataSource(prefix),)
        meant = f"{blend.flag} {candidate}" if alone else candidate
        hint = f"did you mean `{meant}`?"
    which = f": `{prefix}`" if len(blend.sources) > 1 else ""
    return ConfigError(f"{loaded.shown(blend.option)}: no such data set{which}", why=why, hint=hint)


DATA_RULES: tuple[Callable[[LoadedConfig], Problems], ...] = (
    _exclusive,
    _sources,
    _split,
    _validation,
    _change,
)
"""The rules, in the order in which their problems are shown."""


def _own(loaded: LoadedConfig, part: Part) -> list[str]:
    return [option for option in OWN[part] if loaded.value(option)]


def _evaluates(loaded: LoadedConfig) -> bool:
    return bool(loaded.value("eval_interval") and loaded.value("eval_iters"))


def _flag(option: str) -> str:
    return "--" + option.replace("_", "-")

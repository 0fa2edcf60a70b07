"""Rules for the tokenizer and the data sources of a run, and the split of their documents."""

from __future__ import annotations

from pathlib import Path

from lmcore.base.errors import AbsentFileError, ConfigError
from lmcore.base.missing_path import missing_path_hint, nearest_paths
from lmcore.config.corpus import names_text_files
from lmcore.config.derived.data_source import (
    DIVIDED,
    OWN,
    PARTS,
    Blend,
    DataSource,
    Part,
    overlapping_ranges,
    own_values,
)
from lmcore.config.derived.split import parse_split
from lmcore.config.option import flag_of
from lmcore.config.rules import Problems, Rule
from lmcore.config.settings import LoadedConfig
from lmcore.config.tokenizer import BUILT_IN_TYPES, TokenizerSettings

__all__ = ["DATA_RULES", "TOKENIZER_RULES"]


def _exclusive(loaded: LoadedConfig) -> Problems:
    """Require that one option names the sources of a part."""
    divided = [option for option in DIVIDED if loaded.value(option)]
    of_task = bool(loaded.config.task.task_data)
    divided += ["task_data"] * of_task
    groups = [[*divided, *_own(loaded, "train")], *(_own(loaded, part) for part in PARTS[1:])]
    for group in groups:
        if len(group) > 1:
            yield ConfigError(
                " and ".join(loaded.shown(option) for option in group) + " exclude each other",
                hint="keep one of them",
            )
    for part in PARTS[1:]:
        own = _own(loaded, part)
        if own and not of_task and not _own(loaded, "train"):
            instead = f" in place of `{flag_of(divided[0])}`" if divided else ""
            removal = loaded.removal(own[0])
            yield ConfigError(
                f"{loaded.shown(own[0])} needs separate training data",
                why="`--split` divides the documents of the other options into all three parts",
                hint=f"use `--train-data-path PREFIX`{instead}, or {removal}",
            )


def _sources(loaded: LoadedConfig) -> Problems:
    """Check weights, ranges and files; datasets of a file list are checked when it is read."""
    sources, problems = loaded.sources
    yield from problems
    yield from overlapping_ranges(sources)
    for blend in sources.blends():
        if blend.file_list is not None and not Path(blend.file_list).exists():
            yield AbsentFileError(
                f"{loaded.shown(blend.option)}: no such file",
                hint=missing_path_hint(blend.file_list),
            )
        yield from _data_sets(loaded, blend)
        yield from _repeated(loaded, blend)


def _data_sets(loaded: LoadedConfig, blend: Blend) -> Problems:
    unknown = []
    for prefix in dict.fromkeys(source.name for source in blend.sources if source.is_dataset):
        missing = [suffix for suffix in (".bin", ".idx") if not Path(prefix + suffix).is_file()]
        if missing:
            yield _missing_data(loaded, blend, prefix, missing)
        elif (
            loaded.config.data.tokenizer_type is None and not Path(prefix + ".meta.json").is_file()
        ):
            unknown.append(prefix)
    if unknown:
        several = len(blend.sources) > 1
        some = ", ".join(f"`{prefix}`" for prefix in unknown[:3]) + ", ..." * (len(unknown) > 3)
        yield ConfigError(
            f"{loaded.shown(blend.option)} has no record of its tokenizer"
            + (f": {some}" if several else ""),
            why=f"there is no `{unknown[0]}.meta.json`, as for data of other programs",
            hint="add `--tokenizer-type TYPE`, with its files",
        )


def _missing_data(
    loaded: LoadedConfig, blend: Blend, prefix: str, missing: list[str]
) -> ConfigError:
    why = "no file " + " and no file ".join(f"`{prefix}{suffix}`" for suffix in missing)
    hint = "`lmcore data prepare` writes a dataset"
    candidate = _meant_prefix(prefix)
    if candidate is not None:
        alone = blend.sources == (DataSource(prefix),)
        meant = f"{blend.flag} {candidate}" if alone else candidate
        hint = f"did you mean `{meant}`?"
    elif Path(prefix).is_file() and names_text_files(prefix):
        name = blend.option.removesuffix("_path")
        reader = flag_of("train_data" if name == "data" else name)
        hint = (
            f"it is text: `{reader} {prefix}` reads it, and `lmcore data prepare --input {prefix} "
            "--output-prefix PREFIX` writes a dataset"
        )
    elif Path(prefix).is_dir():
        inside = sorted(str(path)[:-4] for path in Path(prefix).glob("*.idx"))[:5]
        named = f": {', '.join(f'`{path}`' for path in inside)}" if inside else ""
        hint = f"give the path of a dataset in this directory without `.bin` or `.idx`{named}"
    which = f": `{prefix}`" if len(blend.sources) > 1 else ""
    return AbsentFileError(
        f"{loaded.shown(blend.option)}: no such dataset{which}", why=why, hint=hint
    )


def _meant_prefix(prefix: str) -> str | None:
    """Return the dataset that a path without one is likely to mean; None if there is none."""
    stem = prefix.removesuffix("_text_document").removesuffix("_text_sentence")
    for ending in ("_text_document", "_text_sentence"):
        if Path(f"{stem}{ending}.idx").is_file() and f"{stem}{ending}" != prefix:
            return stem + ending
    return next((one[:-4] for one in nearest_paths(f"{prefix}.idx") if one.endswith(".idx")), None)


def _repeated(loaded: LoadedConfig, blend: Blend) -> Problems:
    names = [source.name for source in blend.sources if source.documents is None]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield ConfigError(
            f"{loaded.shown(blend.option)} names `{name}` twice",
            why="the same samples would come twice, in the same order",
            hint="name it once, with a larger weight",
        )


def _split(loaded: LoadedConfig) -> Problems:
    split = loaded.sources[0].split
    if split is None:
        try:
            parse_split(loaded.config.data.split)
        except ConfigError as problem:
            what = f"{loaded.shown('split')} is not a split"
            yield ConfigError(what, why=problem.why, hint=problem.hint)
        return
    own = [option for part in PARTS for option in _own(loaded, part)]
    of_task = bool(loaded.config.task.task_data)
    own += ["task_data"] * of_task
    of_text = own[:1] == ["train_data"]  # which `--split` divides if no part has data of its own
    divides = not own or own == ["train_data"]
    if loaded.given("split") and not divides:
        ranges = "; `--train-weighted-split-paths` and its like give ranges"
        whole = f"; {loaded.shown('train_data')} is then all for training"
        more = whole if of_text else "" if of_task else ranges
        yield ConfigError(
            f"{loaded.shown('split')} cannot be combined with {loaded.shown(own[of_text])}",
            why="each part reads all documents of its own datasets",
            hint=loaded.removal("split") + more,
        )
    sets = loaded.sources[0].sets
    if divides and split.shares[1] == 0 and _evaluates(loaded) and not sets:
        yield ConfigError(
            f"{loaded.shown('split')} leaves no validation documents",
            why=f"validation runs {_interval(loaded)}",
            hint="use `--eval-iters 0`, or give validation a share: `--split 969,30,1`",
        )


def _validation(loaded: LoadedConfig) -> Problems:
    """Require validation data if training has its own data and the run validates."""
    train, valid, test = (_own(loaded, part) for part in PARTS)
    divided = train == ["train_data"] and not test
    sets = loaded.sources[0].sets
    if train and not valid and not divided and _evaluates(loaded) and not sets:
        own = train[0].replace("train", "valid")
        yield ConfigError(
            f"{loaded.shown(train[0])} leaves no validation data",
            why=f"validation runs {_interval(loaded)}",
            hint=f"add `{flag_of(own)}`, or use `--eval-iters 0`",
        )


def _sets(loaded: LoadedConfig) -> Problems:
    """Refuse named validation sets where samples need more than the documents of a data set."""
    sets, model = loaded.sources[0].sets, loaded.config.model
    if sets and model.model_family == "retro":
        blend = next(iter(sets.values()))
        yield ConfigError(
            f"{loaded.shown(blend.option)} cannot be combined with {loaded.shown('model_family')}",
            why="neighbours are found for the samples of training, validation and test alone",
            hint=loaded.removal(blend.option),
        )


def _change_blend(loaded: LoadedConfig) -> Problems:
    checkpoint = loaded.config.checkpoint
    if not checkpoint.change_blend:
        return
    shown = loaded.shown("change_blend")
    if checkpoint.override_data_order:
        yield ConfigError(
            f"{shown} cannot be combined with {loaded.shown('override_data_order')}",
            why="that option ignores how much of each source was read",
            hint="keep one of them",
        )
    if checkpoint.finetune:
        yield ConfigError(
            f"{shown} cannot be combined with {loaded.shown('finetune')}",
            why="fine-tuning reads the data from the beginning",
            hint="keep one of them",
        )
    if loaded.config.data.dataloader_type == "cyclic":
        yield ConfigError(
            f"{shown} cannot be combined with {loaded.shown('dataloader_type')}",
            why="a pass over all samples has no position of its own in each source",
            hint="use `--override-data-order` in place of `--change-blend`: it starts a new order",
        )


DATA_RULES: tuple[Rule, ...] = (*(_exclusive, _sources, _split, _validation, _sets, _change_blend),)


def _own(loaded: LoadedConfig, part: Part) -> list[str]:
    """Return the options that are given and name sources of *part* alone."""
    return [option for option in OWN[part] if own_values(loaded.config.data, option)]


def _evaluates(loaded: LoadedConfig) -> bool:
    training = loaded.config.training
    return bool(training.eval_interval and training.eval_iters)


def _interval(loaded: LoadedConfig) -> str:
    interval = loaded.config.training.eval_interval
    return "after every step" if interval == 1 else f"every {interval} steps"


def _type(loaded: LoadedConfig) -> Problems:
    settings = TokenizerSettings.of(loaded.config.data)
    given = [name for name in settings.given() if name != "vocab_size"]
    if settings.tokenizer_type is None:
        yield from _without_type(loaded, given)
        return
    options = BUILT_IN_TYPES.get(settings.tokenizer_type)
    if options is None:  # a plugin's
        return
    if missing := " and ".join(settings.missing(options)):
        yield ConfigError(
            f"{loaded.shown('tokenizer_type')} needs {missing}", hint=options.open_hint
        )
    allowed = " ".join(f"`{flag_of(name)}`" for name in options.allowed)
    for name in given:
        if name not in options.allowed:
            yield ConfigError(
                f"{loaded.shown(name)} cannot be combined with {loaded.shown('tokenizer_type')}",
                why=f"it takes {allowed}" if allowed else "it takes no options",
                hint=f"{loaded.removal(name)}, or choose another type",
            )


def _without_type(loaded: LoadedConfig, given: list[str]) -> Problems:
    """Refuse options of a tokenizer without its type, which only both files of BPE imply."""
    for name in given:
        other = {"vocab_file": "merge_file", "merge_file": "vocab_file"}.get(name)
        needed = flag_of(other or "tokenizer_type")
        hint = f"add `{needed} {'FILE' if other else 'TYPE'}`"
        if other == "merge_file":
            hint += (
                "; a `vocab.txt` of WordPiece is for `--model-family bert`, `ict` or `t5`, or "
                "needs `--tokenizer-type BertWordPieceLowerCase`"
            )
        yield ConfigError(
            f"{loaded.shown(name)} needs `{needed}`",
            why="byte-pair encoding takes a vocabulary and its merges"
            if other
            else "several types of tokenizers take it",
            hint=hint,
        )


def _files(loaded: LoadedConfig) -> Problems:
    data = loaded.config.data
    for name, path in (("vocab_file", data.vocab_file), ("merge_file", data.merge_file)):
        if path is not None and not Path(path).exists():
            yield AbsentFileError(
                f"{loaded.shown(name)}: no such file", hint=missing_path_hint(path)
            )
    paths = {
        "tokenizer_model": data.tokenizer_model,
        "tokenizer_name_or_path": data.tokenizer_name_or_path,
    }
    for name, path in paths.items():
        if path is not None and not Path(path).exists():
            yield AbsentFileError(
                f"{loaded.shown(name)}: no such file or directory",
                why="a tokenizer is read from local files; nothing is downloaded",
                hint=missing_path_hint(path),
            )


TOKENIZER_RULES: tuple[Rule, ...] = (_type, _files)

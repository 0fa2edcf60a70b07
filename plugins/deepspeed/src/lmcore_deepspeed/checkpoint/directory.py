"""Directories of DeepSpeed's checkpoints: which checkpoint is the newest, and which files it has.

`save_checkpoint` writes `latest`, which names a directory beside it such as `global_step100`:

file | content
--- | ---
`mp_rank_MM_model_states.pt` | weights of a model-parallel rank; of a pipeline none, see below
`zero_pp_rank_D_mp_rank_MM_model_states.pt` | ZeRO-3: the same of each data-parallel rank
`[bf16_]zero_pp_rank_D_mp_rank_MM_optim_states.pt` | ZeRO: its partition of the optimizer
`layer_LL-model_TT-model_states.pt` | weights of one layer of a pipeline
`zero/NAME/fp32.pt`, `exp_avg.pt`, `exp_avg_sq.pt` | universal checkpoint (`latest_universal`)

A model-parallel rank is a stage and a rank of tensor parallelism: MM = stage * T + TT.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import CheckpointArgumentError, CheckpointError, counted
from lmcore.conversion.directory_entries import sorted_entries

__all__ = [
    "LATEST",
    "LATEST_UNIVERSAL",
    "STYLES",
    "UNIVERSAL",
    "UNIVERSAL_PART",
    "DeepSpeedDirectory",
    "checkpoints_at",
    "find_files",
    "has_files",
    "is_deepspeed",
    "is_named_universal",
    "require_one_step",
    "require_ranks",
    "tokenizer_places",
]

STYLES = ("pipeline", "legacy")
"""Sets of names, and files, that can be written: of a pipeline, and without one."""
LATEST, LATEST_UNIVERSAL = "latest", "latest_universal"
UNIVERSAL = "zero"
"""Name of the directory of a universal checkpoint's parameters."""
UNIVERSAL_PART = "the universal checkpoint `{}` alone, not the weights in files beside it"
"""Words about the files that are read of a universal checkpoint; see `ModelState.part`."""
_MODEL = re.compile(r"^mp_rank_(\d+)_model_states\.pt$")
_PARTITION = re.compile(r"^zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt$")
_OPTIMIZER = re.compile(r"^(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$")
_LAYER = re.compile(r"^layer_(\d+)(?:-model_(\d+))?-model_states\.pt$")
_EXPERT = re.compile(r"^(?:layer_\d+_)?expert_\d+_.*\.pt$|^expp_rank_.*\.pt$")
_LAST_NUMBER = re.compile(r"^(.*?)(\d+)(\D*)$")
_MAX_POINTER_BYTES = 4096
_SHOWN = 10

Pair = tuple[int, int]


@dataclass(frozen=True)
class DeepSpeedDirectory:
    """Files of one checkpoint.

    Attributes:
        path: Directory of the checkpoint.
        models: File of each model-parallel rank.
        partitions: File of each pair of data-parallel and model-parallel rank, with ZeRO-3.
        optimizers: File of the optimizer of each pair of data-parallel and model-parallel rank.
        layers: File of each pair of layer of a pipeline and rank of tensor parallelism.
        universal: Directory of the parameters of a universal checkpoint; None if it is not one.
        compare: True to compare the checksums of files that are read.
    """

    path: Path
    models: Mapping[int, Path]
    partitions: Mapping[Pair, Path]
    optimizers: Mapping[Pair, Path]
    layers: Mapping[Pair, Path]
    universal: Path | None
    compare: bool = True

    @property
    def first(self) -> Path:
        """File of the first rank, which has the arguments."""
        if self.models:
            return self.models[min(self.models)]
        return self.partitions[min(self.partitions)]

    def without_optimizer(self) -> DeepSpeedDirectory:
        """Return the files with the model's own weights."""
        return replace(self, partitions={}, optimizers={}, universal=None)


def is_deepspeed(directory: Path) -> bool:
    """Return True if *directory* has files of a DeepSpeed checkpoint, or directories with them."""
    return has_files(directory) or any(has_files(one) for one in sorted_entries(directory))


def tokenizer_places(path: Path) -> tuple[Path, ...]:
    """Return the directories in which a model of transformers may have its tokenizer.

    Args:
        path: Directory that DeepSpeed saved to, or one checkpoint in it.
    """
    return (path, path.parent) if has_files(path) else (path,)


def checkpoints_at(path: Path) -> list[Path]:
    """Return the checkpoints in a directory, by name; the directory alone if it is one itself.

    Names are compared with their last number as a number: `global_step200` is before
    `global_step1000`.

    Args:
        path: Directory that DeepSpeed saved to, or one checkpoint in it.
    """
    if has_files(path):
        return [path]
    return sorted((one for one in sorted_entries(path) if has_files(one)), key=_by_number)


def find_files(path: Path) -> DeepSpeedDirectory:
    """Return the files of the newest checkpoint at *path*, which may be one itself.

    Args:
        path: Directory that DeepSpeed saved to, or one checkpoint in it.

    Raises:
        CheckpointError: There is none, the newest is missing, or it is of a model with experts.
    """
    checkpoint = path if has_files(path) else _newest(path)
    models: dict[int, Path] = {}
    found: dict[re.Pattern[str], dict[Pair, Path]] = {
        pattern: {} for pattern in (_PARTITION, _OPTIMIZER, _LAYER)
    }
    for entry in sorted_entries(checkpoint):
        if _EXPERT.match(entry.name):
            raise CheckpointError(
                f"lmcore does not have the model of `{checkpoint}`",
                why=f"`{entry.name}` is a part of a model with experts",
            )
        if match := _MODEL.match(entry.name):
            models[int(match[1])] = entry
        for pattern, files in found.items():
            if match := pattern.match(entry.name):
                pair = int(match[1]), int(match[2] or 0)
                if pair in files:
                    raise CheckpointError(
                        f"`{checkpoint}` has files of two checkpoints",
                        why=f"`{files[pair].name}` and `{entry.name}` are of the same ranks",
                    )
                files[pair] = entry
    if not models and not found[_PARTITION]:
        raise CheckpointError(
            f"`{checkpoint}` is not complete",
            why="it has no `mp_rank_*_model_states.pt`",
            hint="copy the files of all ranks into one directory",
        )
    universal = checkpoint / UNIVERSAL
    return DeepSpeedDirectory(
        checkpoint,
        models,
        found[_PARTITION],
        found[_OPTIMIZER],
        found[_LAYER],
        universal if universal.is_dir() else None,
    )


def is_named_universal(checkpoint: Path) -> bool:
    """Return True if `latest_universal` beside a checkpoint names it.

    Args:
        checkpoint: Directory of the checkpoint.
    """
    place = checkpoint.absolute()
    pointer = place.parent / LATEST_UNIVERSAL
    try:
        return pointer.is_file() and _pointed(pointer) == place.name
    except CheckpointError:  # it is damaged, and did not choose the checkpoint
        return False


def require_ranks(
    path: Path, kind: str, found: set[int], count: int, name: str, where: str = ""
) -> None:
    """Raise a `CheckpointError` that names the files of missing ranks.

    Args:
        path: Directory of the checkpoint.
        kind: Name of the parallelism, such as "tensor parallelism".
        found: Ranks whose files exist.
        count: Number of ranks that the checkpoint has.
        name: Name of a rank's file, with `{}` in the place of its number.
        where: Part of the checkpoint to which the ranks belong, for the message.
    """
    missing = sorted(set(range(count)) - found)
    surplus = sorted(found - set(range(count)))
    if not missing and not surplus:
        return
    why = f"{kind} has {counted(count, 'rank')}{where}; "
    names = [name.format(rank) for rank in (missing or surplus)[:_SHOWN]]
    why += f"{'missing' if missing else 'surplus'}: {', '.join(f'`{one}`' for one in names)}"
    raise CheckpointError(
        f"`{path}` is not complete" if missing else f"`{path}` has files of two checkpoints",
        why=why,
        hint="copy the files of all ranks into one directory; each node of a cluster may have its "
        "own",
    )


def require_one_step(steps: Mapping[Path, object]) -> None:
    """Raise a `CheckpointError` unless all files are of one step.

    Args:
        steps: Number of steps that each file states; None if it states none.
    """
    known = {path: step for path, step in steps.items() if step is not None}
    first, expected = next(iter(known.items()), (None, None))
    for path, step in known.items():
        if first is not None and step != expected:
            raise CheckpointError(
                f"`{path.parent}` is mixed from several checkpoints",
                why=f"`{path.name}` is of step {step}, `{first.name}` of step {expected}",
                hint="copy the files of all ranks of one checkpoint",
            )


def _newest(path: Path) -> Path:
    """Return the checkpoint that `latest`, or `latest_universal`, names."""
    inside = checkpoints_at(path)
    for name in (LATEST, LATEST_UNIVERSAL):
        pointer = path / name
        if not pointer.is_file():
            continue
        named = path / _pointed(pointer)
        if has_files(named):
            if name == LATEST_UNIVERSAL and not (named / UNIVERSAL).is_dir():
                raise CheckpointError(
                    f"`{named}` is not complete",
                    why=f"`{name}` names it as a universal checkpoint, and its directory "
                    f"`{UNIVERSAL}` is missing",
                    hint=f"copy `{named / UNIVERSAL}`, or name `{named}` itself, whose other files "
                    "are then read",
                )
            return named
        others = f"; `{inside[-1].name}` is there" if inside else ""
        raise CheckpointError(
            f"the newest checkpoint of `{path}` is missing",
            why=f"`{name}` names `{named.name}`, which has no files of DeepSpeed{others}",
            hint="copy it, or name another checkpoint",
        )
    if len(inside) == 1:
        return inside[0]
    if inside:
        listed = ", ".join(f"`{one.name}`" for one in inside[-_SHOWN:])
        raise CheckpointError(
            f"`{path}` does not say which checkpoint is the newest",
            why=f"it has no `{LATEST}`, and {len(inside)} checkpoints: {listed}",
            hint=f"name one of them, such as `{inside[-1]}`",
        )
    raise CheckpointArgumentError(
        f"`{path}` has no checkpoint of DeepSpeed",
        why="looked for `*model_states.pt` and `*optim_states.pt` in it and in its subdirectories",
        hint="give the directory that `save_checkpoint` wrote to, with the file `latest`, or one "
        "checkpoint in it, such as `global_step100`",
    )


def _by_number(checkpoint: Path) -> tuple[str, int, str]:
    """Return the key that sorts names by their last number."""
    match = _LAST_NUMBER.match(checkpoint.name)
    return (match[1], int(match[2]), match[3]) if match else (checkpoint.name, -1, "")


def _pointed(pointer: Path) -> str:
    try:
        name = read_bounded_file(pointer, _MAX_POINTER_BYTES).decode(errors="replace").strip()
    except OSError as error:
        why = error.strerror or str(error)
        raise CheckpointError(f"cannot read `{pointer}`", why=why) from error
    if not name or name in {".", ".."} or Path(name).name != name or "\0" in name:
        inside = checkpoints_at(pointer.parent)
        raise CheckpointError(
            f"`{pointer}` is damaged",
            why=(f"it has `{name[:80]}`" if name else "it is empty")
            + " instead of the name of a directory beside it",
            hint="name a checkpoint in the directory"
            + (f", such as `{inside[-1]}`" if inside else ""),
        )
    return name


def has_files(path: Path) -> bool:
    """Return True if a directory is a checkpoint of DeepSpeed itself.

    Args:
        path: Directory that may have the files of ranks or layers.
    """
    patterns = (_MODEL, _PARTITION, _OPTIMIZER, _LAYER)
    return any(pattern.match(one.name) for one in sorted_entries(path) for pattern in patterns)

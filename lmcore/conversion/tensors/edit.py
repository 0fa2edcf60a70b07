"""Edited copies of a checkpoint: tensors renamed, dropped and cast, the vocabulary resized."""

from __future__ import annotations

import dataclasses
import math
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import CheckpointError, ConfigError
from lmcore.checkpoint import CheckpointReader, TensorEntry, save_streamed
from lmcore.checkpoint.dcp_metadata import dtype_of
from lmcore.checkpoint.layout import CHECKPOINTS_NAME
from lmcore.contract.dtype import dtype_name
from lmcore.conversion.cast import cast
from lmcore.conversion.native.manifest import require_weights
from lmcore.conversion.tensors.content import name_hint
from lmcore.families.saved_shape import read_shape
from lmcore.model.family import vocabulary_parameters
from lmcore.model.vocabulary import vocabulary_multiple

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from lmcore.checkpoint import Manifest

__all__ = ["Changes", "edit"]

_OPTIMIZER = "optimizer."
_TOKENIZER = "tokenizer"


@dataclass(frozen=True)
class Changes:
    """Changes of a checkpoint, in the order in which they are made.

    Attributes:
        drop: Patterns of the names of tensors to leave out; `*` matches any characters.
        rename: Regular expressions and replacements; a name is replaced if all of it matches.
        cast: Patterns of names, and the dtype of the tensors that match.
        vocab_size: Number of rows of the embeddings; None: unchanged.
        cut_tokens: True if rows of tokens, not only rows that pad the vocabulary, may be cut.
    """

    drop: tuple[str, ...] = ()
    rename: tuple[tuple[str, str], ...] = ()
    cast: tuple[tuple[str, torch.dtype], ...] = ()
    vocab_size: int | None = None
    cut_tokens: bool = False


@dataclass(frozen=True)
class _Edited:
    """One tensor of the result."""

    source: str
    entry: TensorEntry


def edit(checkpoint: Path, directory: Path, changes: Changes) -> list[str]:
    """Write an edited copy of a checkpoint as a run directory; return notes for the user.

    At most two tensors at a time are in memory.  The run's copy of its tokenizer comes along.

    Args:
        checkpoint: Directory `iter_XXXXXXX`, with verified files.
        directory: Empty directory of the result.
        changes: Changes to make.

    Raises:
        CheckpointError: The checkpoint is damaged, or the disk is full or refuses.
        ConfigError: A change applies to no tensor, or would lose data that nobody asked to drop.
    """
    reader = CheckpointReader(checkpoint)
    manifest = reader.manifest
    rows = _row_suffixes(manifest.model_shape, checkpoint)
    edited = _edited(manifest.tensors, changes, rows)
    shape, meta = dict(manifest.model_shape), dict(manifest.meta)
    tokens = _tokens(meta)
    if changes.vocab_size is not None:
        _check_rows(changes, tokens, shape)
        shape["padded_vocab_size"] = changes.vocab_size
        meta["config"] = _resized(meta.get("config"), changes.vocab_size, tokens)

    def read(name: str) -> Tensor:
        one = edited[name]
        tensor = reader.read(one.source)
        if tensor.dim() and len(tensor) != one.entry.shape[0]:
            tensor = _with_rows(tensor, one.entry.shape[0], tokens, one.source)
        return cast(one.source, tensor, dtype_of(one.entry.dtype), option="--cast")

    entries = {name: one.entry for name, one in edited.items()}
    save_streamed(
        directory / CHECKPOINTS_NAME, manifest.iteration, entries, read, meta, model_shape=shape
    )
    tokenizer = checkpoint.resolve().parent.parent / _TOKENIZER
    if tokenizer.is_dir():
        (directory / _TOKENIZER).mkdir()
        # Not `shutil.copytree`: it collects errors into one without a reason and a path.
        for path in sorted(tokenizer.rglob("*")):
            copy = directory / path.relative_to(tokenizer.parent)
            copy.mkdir() if path.is_dir() else shutil.copyfile(path, copy)
    copied = dataclasses.replace(manifest, model_shape=shape, tensors=entries)
    try:
        require_weights(read_shape(shape, directory), copied, directory)
    except CheckpointError as error:
        return [f"`lmcore` does not load the result as a model: {error.why}"]
    return list(_notes(manifest, entries, changes, tokens))


def _notes(
    manifest: Manifest, entries: Mapping[str, TensorEntry], changes: Changes, tokens: int | None
) -> Iterator[str]:
    """Yield notes for the user of the result."""
    dtypes = {entry.dtype for name, entry in entries.items() if name.startswith("model.")}
    if dtypes != {"float32"}:
        others = ", ".join(sorted(dtypes - {"float32"}))
        yield f"weights are {others}: `lmcore train` and `generate` load float32 weights only"
    if changes.vocab_size is not None and tokens is not None and changes.vocab_size < tokens:
        yield f"the tokenizer has {tokens} tokens, the model fewer: another tokenizer is needed"
    for kind, flag in (("optimizer.", "--no-load-optim"), ("rng.", "--no-load-rng")):
        had = any(name.startswith(kind) for name in manifest.tensors)
        if had and not any(name.startswith(kind) for name in entries):
            yield f"a run that continues from it needs `{flag}`, or `--finetune`"


def _row_suffixes(shape: Mapping[str, Any], checkpoint: Path) -> tuple[str, ...]:
    """Return the suffixes of the names of tensors with a row for each token; none of no model."""
    try:
        return tuple(f".{name}" for name in vocabulary_parameters(read_shape(shape, checkpoint)))
    except CheckpointError:
        return ()


def _edited(
    tensors: Mapping[str, TensorEntry], changes: Changes, rows: tuple[str, ...]
) -> dict[str, _Edited]:
    """Return the tensors of the result by their new names."""
    _require_matches(tensors, changes, rows)
    embeddings = {
        suffix: entry.shape
        for suffix in rows
        for name, entry in tensors.items()
        if name.endswith(suffix) and not name.startswith(_OPTIMIZER)
    }
    found: dict[str, _Edited] = {}
    for name, entry in tensors.items():
        if any(fnmatchcase(name, pattern) for pattern in changes.drop):
            continue
        new = _renamed(name, changes)
        if new in found:
            raise ConfigError(
                f"two tensors would be named `{new}`",
                why=f"`{found[new].source}` and `{name}`",
                hint="change `--rename`, or leave one out by `--drop`",
            )
        dtype, shape = entry.dtype, entry.shape
        for pattern, wanted in changes.cast:
            if fnmatchcase(name, pattern) and dtype_of(dtype).is_floating_point:
                dtype = dtype_name(wanted)
        if changes.vocab_size is not None and _has_rows(name, entry, embeddings):
            shape = (changes.vocab_size, *shape[1:])
        found[new] = _Edited(name, TensorEntry(dtype, shape))
    if not found:
        raise ConfigError("no tensor is left", hint="drop fewer tensors")
    return found


def _has_rows(name: str, entry: TensorEntry, embeddings: Mapping[str, tuple[int, ...]]) -> bool:
    """Return True if a tensor has a row for each token.

    Raises:
        ConfigError: It is a state of an embedding in another form, whose rows are not known.
    """
    suffix = next((one for one in embeddings if name.endswith(one)), None)
    if suffix is None or math.prod(entry.shape) == 1:  # such as a number of updates
        return False
    if not name.startswith(_OPTIMIZER):
        return True
    if entry.shape == embeddings[suffix] and dtype_of(entry.dtype).is_floating_point:
        return True
    raise ConfigError(
        f"`--vocab-size` cannot resize `{name}`",
        why="the run's optimizer keeps it in another form than the embedding, such as in 8 bits",
        hint="leave the optimizer's state out by `--drop 'optimizer.*'`",
    )


def _renamed(name: str, changes: Changes) -> str:
    for pattern, replacement in changes.rename:
        match = re.fullmatch(pattern, name)
        if match is not None:
            name = match.expand(replacement)
    return name


def _require_matches(
    tensors: Mapping[str, TensorEntry], changes: Changes, rows: tuple[str, ...]
) -> None:
    """Raise an error for a change that applies to no tensor."""
    floats = [name for name, entry in tensors.items() if dtype_of(entry.dtype).is_floating_point]
    for pattern, names in (
        *((pattern, list(tensors)) for pattern in changes.drop),
        *((pattern, floats) for pattern, _ in changes.cast),
    ):
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"`{pattern}` matches no tensor",
                hint=name_hint(pattern, names),
            )
    for pattern, replacement in changes.rename:
        try:
            found = [match for name in tensors if (match := re.fullmatch(pattern, name))]
            for match in found[:1]:
                match.expand(replacement)
        except (re.error, IndexError) as error:
            raise ConfigError(f"`{pattern}={replacement}` cannot rename", why=str(error)) from None
        if not found:
            raise ConfigError(
                f"`{pattern}` matches the name of no tensor",
                why="it is a regular expression that has to match a whole name",
                hint=r"for example `--rename 'model\.(.*)=\1'`",
            )
    if changes.vocab_size is not None and not any(name.endswith(rows) for name in tensors):
        raise ConfigError(
            "the checkpoint has no embedding to resize",
            why="no tensor has a row for each token, or the model is of no known family",
        )


def _tokens(meta: Mapping[str, Any]) -> int | None:
    """Return the number of tokens of the run, without rows that pad the vocabulary."""
    config = meta.get("config")
    derived = config.get("derived") if isinstance(config, Mapping) else None
    size = derived.get("vocab_size") if isinstance(derived, Mapping) else None
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def _check_rows(changes: Changes, tokens: int | None, shape: Mapping[str, Any]) -> None:
    assert changes.vocab_size is not None
    smallest = tokens or shape.get("padded_vocab_size") or 0
    if changes.vocab_size < smallest and not changes.cut_tokens:
        raise ConfigError(
            f"`--vocab-size {changes.vocab_size}` would cut the rows of tokens",
            why=f"the model has {smallest} tokens",
            hint=f"give at least {smallest}, or `--cut-tokens` if no text will have these tokens",
        )


def _resized(config: object, rows: int, tokens: int | None) -> dict[str, Any]:
    """Return the settings in a manifest for another number of rows."""
    known: dict[str, Any] = dict(config) if isinstance(config, Mapping) else {}
    data = dict(dict(known.get("config") or {}).get("data") or {})
    size, left = data.get("vocab_size"), min(tokens or rows, rows)
    multiple = vocabulary_multiple(left, rows)
    for part, section, values in (
        ("config", "data", {"vocab_size": min(size, left) if isinstance(size, int) else None}),
        (
            "config",
            "model",
            {"make_vocab_size_divisible_by": multiple, "pad_vocab_size_to": None},
        ),
        ("derived", None, {"vocab_size": left, "padded_vocab_size": rows}),
    ):
        found = dict(known.get(part) or {})
        if section is None:
            found |= values
        else:
            found[section] = dict(found.get(section) or {}) | values
        known[part] = found
    return known


def _with_rows(tensor: Tensor, rows: int, tokens: int | None, name: str) -> Tensor:
    """Return a tensor with another number of rows.

    New rows of a weight are the mean of the tokens' rows, so that new tokens begin as average
    ones; new rows of the optimizer's state are 0.
    """
    import torch

    if rows <= len(tensor):
        return tensor[:rows]
    if name.startswith("model."):
        row = tensor[:tokens].to(torch.float64).mean(dim=0, keepdim=True).to(tensor.dtype)
    else:
        row = torch.zeros_like(tensor[:1])
    return torch.cat([tensor, row.expand(rows - len(tensor), *tensor.shape[1:])])

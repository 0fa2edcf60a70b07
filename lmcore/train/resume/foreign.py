"""Checkpoints of other programs: described, refused for `--continue`, and taken for weights.

Their formats, and torch, are loaded only if a run names such a checkpoint.
"""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import CheckpointError, ConfigError, LmcoreError
from lmcore.config.file.saved_settings import SavedSettings
from lmcore.config.plan import ResumePoint
from lmcore.config.section import run_options

if TYPE_CHECKING:
    from torch import Tensor

    from lmcore.conversion.loading.foreign_model import ForeignModel
    from lmcore.conversion.loading.weights import WeightReader
    from lmcore.parallel.tensor_layout import TensorLayout
    from lmcore.runtime.process.channel import Channel

_SEQ_LENGTH = 1024
"""Longest training sample by default, of a model whose context may be far longer."""


class ForeignModels:
    """Models in checkpoints of other programs, each described once.

    A description may need a process that loads torch, and both the settings of a run and its
    starting point have it.
    """

    def __init__(self) -> None:
        self._described: dict[tuple[Path, str | None], ForeignModel | None] = {}

    def describe(self, path: Path, step: str | None = None) -> ForeignModel | None:
        """Return the model in another program's checkpoint; None if there is none at *path*.

        Args:
            path: Directory of the checkpoint.
            step: Value of `--ckpt-step`; None for the newest checkpoint.

        Raises:
            CheckpointError: The checkpoint is damaged, of no such step, or lmcore does not have its
                model.
            ConfigError: The checkpoint has no steps.
        """
        from lmcore.conversion.loading.foreign_model import describe_foreign

        key = path.absolute(), step
        if key not in self._described:
            self._described[key] = describe_foreign(path, step) if path.is_dir() else None
        return self._described[key]

    def settings(self, path: Path, step: str | None = None) -> SavedSettings | None:
        """Return model, tokenizer and precision of another program's checkpoint; see `describe`.

        Args:
            path: Directory of the checkpoint.
            step: Value of `--ckpt-step`; None for the newest checkpoint.
        """
        model = self.describe(path, step)
        if model is None:
            return None
        values = model.shape.settings(model.vocab_size)
        values["seq_length"] = min(model.shape.max_position_embeddings, _SEQ_LENGTH)
        found = {"vocab_size": model.vocab_size, "precision": model.precision}
        values |= {name: value for name, value in found.items() if value is not None}
        options = run_options()
        config: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            config.setdefault(options[name].section, {})[name] = value
        continues = model.meta is not None
        return SavedSettings(str(model.path), config, {}, model.tokenizer, continues=continues)


def not_a_run(path: Path, step: str | None = None) -> LmcoreError | None:
    """Return the error for a run to continue that is another program's; None if it is none.

    Args:
        path: Path of `--continue`, at which no run is.
        step: Value of `--ckpt-step`; None if it is not given.
    """
    from lmcore.model.checkpoint_format import format_of, formats, of_absent_plugin

    if not path.is_dir():
        return None
    try:
        name = format_of(path)
    except CheckpointError:  # several checkpoints, and no file names the newest
        name = "megatron"
    if name is None:
        return of_absent_plugin(path)
    if name == "lmcore":
        return None
    found = formats()[name]
    shown = shlex.quote(str(path))
    at_step = "" if step is None else f" --ckpt-step {shlex.quote(step)}"
    convert = f"`lmcore checkpoint convert {shown} RUN --to lmcore{at_step}"
    load = f"`--load {shown}{at_step}"
    begins = f"{load}` begins a run at step 0 with the weights alone"
    what = f"`--continue {path}`: it is {found.described}, not a run of lmcore"
    why = "a run continues with the settings and the state that lmcore wrote"
    if found.optimizer:
        hint = f"{load}` begins a run with its weights, optimizer state and step, and with the "
        hint += f"settings of the command; {convert}` makes a run with the settings of its own, "
        hint += "which continues"
        return ConfigError(what, why=why, hint=hint)
    why += "; such a model has weights alone"
    hint = begins
    others = (one for one in formats().values() if one.optimizer and one.matches(path))
    if (beside := next(others, None)) is not None:
        convert += f" --source-format {beside.name}`"
        hint = f"{convert} makes a run of {beside.described} in it, with the optimizer's state; "
        hint += begins
    return ConfigError(what, why=why, hint=hint)


def foreign_resume_point(model: ForeignModel, *, finetune: bool) -> ResumePoint:
    """Return the starting point of a run in a checkpoint of another program.

    Its manifest has the model's shape and tokenizer, and the state of its run, as in a converted
    checkpoint.

    Args:
        model: Model in the checkpoint.
        finetune: True if the run takes the weights alone.

    Raises:
        DataError: The tokenizer's files are damaged.
    """
    from lmcore.checkpoint import Manifest, TensorEntry
    from lmcore.checkpoint.manifest import FORMAT_VERSION
    from lmcore.conversion.native.manifest import STEP, stored_tensors
    from lmcore.conversion.state import WEIGHT
    from lmcore.data.tokenizer import tokenizer_from
    from lmcore.model.family import parameter_shapes

    continues = not finetune and model.meta is not None
    meta = dict(model.meta or {}) if continues else {}
    config = dict(meta.get("config", {}))
    meta["config"] = config | {"derived": {"vocab_size": model.vocab_size}}
    if model.tokenizer is not None:
        tokenizer = tokenizer_from(model.tokenizer)
        meta["tokenizer"] = {
            "describe": tokenizer.describe(),
            "fingerprint": tokenizer.fingerprint(),
        }
        meta["config"] = config | {"derived": {"vocab_size": tokenizer.vocab_size}}
    elif model.tokenizer_type is not None:
        meta["converted_from"] = {"tokenizer_type": model.tokenizer_type}
    shapes = parameter_shapes(model.shape)
    names = stored_tensors(model.shape, model.kinds if continues else (WEIGHT,))
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        lmcore_version="",
        torch_version="",
        iteration=model.step or 0 if continues else 0,
        sequence=0,
        model_shape=model.shape.to_dict(),
        meta=meta,
        tensors={
            stored: TensorEntry("float32", () if kind == STEP else shapes[name])
            for stored, (name, kind) in names.items()
        },
        files={},
    )
    return ResumePoint(model.path, manifest, foreign=True)


def load_foreign(
    path: Path,
    tensors: Mapping[str, Tensor],
    layouts: Mapping[str, TensorLayout],
    rows: Collection[str],
    channel: Channel,
) -> None:
    """Fill *tensors* in place with weights, and state of Adam, of another program's checkpoint.

    Each rank reads the whole tensors, one at a time.  Of *rows*, rows that the checkpoint does not
    have are left as they are.

    Args:
        path: Directory of the checkpoint.
        tensors: Local tensors to fill, by their names in a checkpoint of lmcore.
        layouts: Layouts of *tensors*, by name.
        rows: Names of tensors that may have another number of rows than in the checkpoint.
        channel: Channel of the ranks of the run, which all must call this.

    Raises:
        CheckpointError: The checkpoint is damaged.
        OtherRankError: The same for another process, with its text.
    """
    from lmcore.checkpoint.chunks import ChunkBounds, overlap
    from lmcore.conversion.loading.weights import WeightReader
    from lmcore.conversion.native.manifest import stored_tensors
    from lmcore.conversion.state import ADAM, WEIGHT
    from lmcore.parallel.tensor_layout import box

    def fill() -> None:
        weights = WeightReader(path)
        stored = stored_tensors(weights.state.shape, [WEIGHT, *ADAM])
        for name, tensor in tensors.items():
            whole = _whole(weights, *stored[name], path)
            if tuple(whole.shape) != layouts[name].shape and name not in rows:
                raise CheckpointError(
                    f"the weights of `{path}` are not those of the model that it describes",
                    why=f"`{name}` has shape {list(whole.shape)} instead of "
                    f"{list(layouts[name].shape)}",
                )
            there = ChunkBounds((0,) * whole.dim(), tuple(whole.shape))
            for held in layouts[name].chunks:
                shared = overlap(there, ChunkBounds(held.offset, held.size))
                if shared is None:
                    continue
                offsets = zip(shared.offset, held.offset, held.start, strict=True)
                start = tuple(at - offset + first for at, offset, first in offsets)
                source = box(whole, shared.offset, shared.size)
                box(tensor.detach(), start, shared.size).copy_(source)

    channel.exchange(fill, lambda parts: [None] * len(parts), f"the weights of `{path.name}`")


def _whole(weights: WeightReader, name: str, kind: str, path: Path) -> Tensor:
    """Return a whole tensor of a checkpoint.

    Raises:
        CheckpointError: The file is damaged, or the optimizer's state cannot be read.
    """
    import torch

    from lmcore.conversion.native.manifest import STEP
    from lmcore.conversion.state import WEIGHT

    state = weights.state
    if kind == WEIGHT:
        return weights.read(name)
    if len(state.kinds) == 1 or state.progress is None:
        raise CheckpointError(
            f"the optimizer's state in `{path}` cannot be read",
            why="a warning above has the reason",
            hint="add `--finetune` to begin at step 0 with the weights alone",
        )
    if kind == STEP:
        return torch.tensor(float(state.progress.optimizer_step or state.progress.iteration))
    return state.read(name, kind).float()

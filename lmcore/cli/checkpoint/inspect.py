"""`lmcore checkpoint inspect`: show the contents of a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.errors import CheckpointError, counted, printable
from lmcore.cli.text.terminal import size_text
from lmcore.config.option import REQUIRED, option
from lmcore.config.options.command_line import parse_section

if TYPE_CHECKING:
    from lmcore.checkpoint import Manifest
    from lmcore.conversion.tensors.content import CheckpointContent, TensorStatistics

__all__ = ["InspectSection", "run"]

_EPILOG = """\
Sizes are compared with the manifest, with --norms also checksums.

  lmcore checkpoint inspect runs/my-run
  lmcore checkpoint inspect runs/my-run --tensors 'model.blocks.0.*' --norms
  lmcore checkpoint inspect downloads/gpt2 --json"""


@dataclass(frozen=True)
class InspectSection:
    """Show the contents of a checkpoint: its run, its model and its tensors."""

    path: str = option(
        REQUIRED,
        "Run directory (its newest checkpoint), one `iter_XXXXXXX`, or a directory of another "
        "program.",
        metavar="PATH",
    )
    ckpt_step: str | None = option(
        None, "Step of the checkpoint instead of the newest, or `best`.", metavar="STEP"
    )
    tensors: tuple[str, ...] = option(
        (), "Show these tensors only; `*` matches any characters.", metavar="NAME"
    )
    norms: bool = option(
        False, "Read the tensors: norm, smallest, largest and mean value, values not finite."
    )
    json: bool = option(False, "Print JSON.")


def run(argv: list[str]) -> int:
    """Run `lmcore checkpoint inspect` and return the exit status."""
    section = parse_section(
        InspectSection,
        argv,
        command="lmcore checkpoint inspect",
        positionals=("path",),
        epilog=_EPILOG,
    )
    from lmcore.cli.checkpoint.paths import checkpoint_at
    from lmcore.conversion.tensors.content import content_of, matching, statistics_of

    path = checkpoint_at(section.path, section.ckpt_step)
    content = content_of(path, verify=section.norms)
    names = matching(content, section.tensors)
    statistics = {name: statistics_of(content.read(name)) for name in names if section.norms}
    if section.json:
        print(json.dumps(_as_json(content, names, statistics), indent=2))
        return 0
    print(printable("\n".join(_description(content))))
    for line in _table(content, names, statistics):
        print(printable(line))
    return 0


def _as_json(
    content: CheckpointContent, names: list[str], statistics: Mapping[str, TensorStatistics]
) -> dict[str, Any]:
    manifest = content.manifest
    known: dict[str, Any] = {}
    if manifest is None:
        known = {
            "tokenizer": content.tokenizer,
            "precision": content.precision,
            "layout": dict(content.layout),
        }
    else:
        known = {
            "lmcore_version": manifest.lmcore_version,
            "torch_version": manifest.torch_version,
            "meta": manifest.meta,
            "files": {name: entry.size for name, entry in manifest.files.items()},
        }
    return {
        "path": str(content.path),
        "format": content.format,
        "step": content.step,
        "consumed_samples": content.consumed_samples,
        "parameters": content.num_parameters,
        "bytes": content.num_bytes,
        "model_shape": dict(content.model_shape),
        "notes": list(content.notes),
        **known,
        "tensors": {
            name: {
                "dtype": content.tensors[name].dtype,
                "shape": list(content.tensors[name].shape),
                **(asdict(statistics[name]) if name in statistics else {}),
            }
            for name in names
        },
    }


def _description(content: CheckpointContent) -> Iterator[str]:
    """Yield the lines above the table of tensors."""
    yield str(content.path)
    shape = content.model_shape
    yield f"  format      {content.format}"
    if content.manifest is not None:
        yield from _run_lines(content.manifest)
    elif content.step is not None:
        yield f"  step        {content.step:,}"
        if content.consumed_samples is not None:
            yield f"  consumed    {counted(content.consumed_samples, 'sample')}"
    if content.tokenizer is not None:
        yield f"  tokenizer   {content.tokenizer}"
    if content.precision is not None:
        yield f"  training    precision {content.precision}"
    if content.layout:
        yield f"  layout      {_listed(content.layout)}"
    yield f"  model       {content.num_parameters:,} parameters"
    yield f"  shape       {_listed(shape)}"
    kinds = sorted({name.split(".")[0] for name in content.tensors})
    numbers = [sum(name.split(".")[0] == kind for name in content.tensors) for kind in kinds]
    counts = ", ".join(f"{kind} {count:,}" for kind, count in zip(kinds, numbers, strict=True))
    yield f"  tensors     {counts}; {size_text(content.num_bytes)}"
    if content.manifest is not None:
        yield f"  on disk     {_disk_size(content.manifest)}"
        yield from _others(content.path)
    for note in content.notes:
        yield f"  note        {note}"
    yield ""


def _run_lines(manifest: Manifest) -> Iterator[str]:
    """Yield what a manifest says of the run that wrote it."""
    meta = manifest.meta
    written = f"lmcore {manifest.lmcore_version}, torch {manifest.torch_version}"
    yield f"  step        {manifest.iteration:,}, save number {manifest.sequence} of {written}"
    counters = _mapping(meta.get("counters"))
    if counters:
        samples, tokens = counters.get("consumed_samples"), counters.get("consumed_tokens")
        yield f"  consumed    {_number(samples, 'sample')}, {_number(tokens, 'token')}"
    data = _mapping(meta.get("data"))
    for source in data.get("sources") or ():
        one = _mapping(source)
        if one:
            consumed = _number(one.get("consumed"), "sample")
            yield f"  source      {one.get('name')}: {consumed} consumed"
    converted = _mapping(meta.get("converted_from"))
    if converted:
        yield f"  converted   from {converted.get('format')}, `{converted.get('name')}`"
    tokenizer = _mapping(meta.get("tokenizer"))
    if tokenizer:
        kind = _mapping(tokenizer.get("describe")).get("type")
        yield f"  tokenizer   {kind}, fingerprint {str(tokenizer.get('fingerprint'))[:16]}"
    elif converted.get("tokenizer_type"):
        yield f"  tokenizer   {converted['tokenizer_type']}, without its files"
    settings = _mapping(_mapping(meta.get("config")).get("config"))
    optimizer = _mapping(settings.get("optimizer")).get("optimizer")
    precision = meta.get("precision") or _mapping(settings.get("accelerator")).get("precision")
    about = [
        f"optimizer {optimizer}" if optimizer else "",
        f"precision {precision}" if precision else "",
        f"seed {meta['seed']}" if meta.get("seed") is not None else "",
    ]
    if any(about):
        yield f"  training    {', '.join(part for part in about if part)}"
    layout = {k: v for k, v in _mapping(meta.get("layout")).items() if v not in {0, 1}}
    layout.pop("schedule", None)
    if layout:
        yield f"  layout      {_listed(layout)}"


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _disk_size(manifest: Manifest) -> str:
    return size_text(sum(entry.size for entry in manifest.files.values()))


def _others(checkpoint: Path) -> Iterator[str]:
    """Yield the other checkpoints beside *checkpoint*."""
    from lmcore.checkpoint import survey
    from lmcore.checkpoint.layout import size_problem

    try:
        found = survey(checkpoint.resolve().parent)
    except CheckpointError:
        return
    others = [
        f"{path.name} ({'damaged' if size_problem(path, manifest) else _disk_size(manifest)})"
        for path, manifest in found.readable
        if path.resolve() != checkpoint.resolve()
    ]
    others += [f"{path.name} (damaged)" for path in found.unreadable]
    if others:
        yield f"  beside it   {counted(len(others), 'checkpoint')}: {', '.join(others)}"


def _table(
    content: CheckpointContent, names: list[str], statistics: Mapping[str, TensorStatistics]
) -> Iterator[str]:
    """Yield one line for each tensor."""
    width = max(map(len, names))
    if statistics:
        head = "  ".join(f"{title:>10}" for title in ("norm", "smallest", "largest", "mean"))
        yield f"{'tensor':<{width}}  {'dtype':<8}  {'shape':<16}  {head}"
    for name in names:
        entry = content.tensors[name]
        shape = " x ".join(map(str, entry.shape)) or "scalar"
        line = f"{name:<{width}}  {entry.dtype:<8}  {shape:<16}"
        found = statistics.get(name)
        if found is not None:
            values = (found.norm, found.minimum, found.maximum, found.mean)
            shown = "  ".join("         -" if v is None else f"{v:>10.4g}" for v in values)
            line += f"  {shown}"
            if found.non_finite:
                line += f"  {found.non_finite:,} NaN or infinite"
        yield line.rstrip()


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object, word: str) -> str:
    return counted(value, word) if isinstance(value, int) else f"? {word}s"

"""`lmcore generate --fill-mask`: the most probable tokens in the place of each mask."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from lmcore.cli.loading import ProcessPlan, started_runtime
from lmcore.cli.text.sample_output import standard_output
from lmcore.errors import ConfigError, printable

if TYPE_CHECKING:
    from lmcore.cli.generate_flags import GenerateSection
    from lmcore.config.foreign.generate import GivenModel
    from lmcore.config.plugin_section import PluginSettings
    from lmcore.generation.fill_mask import FilledText
    from lmcore.plugin import PluginSet

__all__ = ["fill_masks"]

_DEFAULT_TOP_K = 5


def fill_masks(
    section: GenerateSection,
    plan: ProcessPlan,
    plugins: PluginSet,
    settings: PluginSettings,
    model: GivenModel,
) -> None:
    """Load the model and write the candidates of each mask of each text."""
    texts = _texts(section)
    with started_runtime(section, plan, plugins, settings) as runtime:
        from lmcore.data.tokenizer.build import registered_types
        from lmcore.generation.fill_mask import load_filler

        filler = load_filler(
            Path(section.load),
            runtime,
            choice=section.tokenizer_choice(),
            extra=registered_types(plugins),
            require=lambda shape: model.require(dataclasses.asdict(shape)),
        )
        top_k, stream = section.top_k or _DEFAULT_TOP_K, standard_output()
        for filled in filler.fill(texts, top_k=top_k, batch=section.micro_batch_size):
            _write(filled, stream, as_json=section.json)


def _texts(section: GenerateSection) -> list[str]:
    """Return the texts: the prompt, or each line of a file or of standard input."""
    from lmcore.generation.text.prompt import read_prompt_file, read_prompt_lines, read_stdin

    lines = [section.prompt or ""]
    if section.sample_input_file is not None:
        lines = read_prompt_lines(section.sample_input_file)
    elif section.prompt_file is not None:
        lines = [read_prompt_file(section.prompt_file)]
    elif section.prompt == "-" or (section.prompt is None and not sys.stdin.isatty()):
        lines = read_stdin().splitlines()
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise ConfigError(
            "`--fill-mask` needs a text",
            hint="give it by `--prompt 'The capital of [MASK] is Paris.'`, or one text on each "
            "line of standard input",
        )
    return texts


def _write(filled: FilledText, stream: TextIO, *, as_json: bool) -> None:
    if as_json:
        stream.write(json.dumps(dataclasses.asdict(filled)) + "\n")
    else:
        lines = [printable(filled.text)]
        for number, candidates in enumerate(filled.masks, 1):
            if len(filled.masks) > 1:
                lines.append(f"mask {number}")
            lines += [f"  {one.probability:8.2%}  {printable(one.token)}" for one in candidates]
        stream.write("\n".join(lines) + "\n")
    stream.flush()

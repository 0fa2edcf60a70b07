"""`lmcore generate`: continue a text with a trained model."""

from __future__ import annotations

import dataclasses
import json
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from lmcore.base.errors import ConfigError, LmcoreError, RunError, counted, printable
from lmcore.cli.generate_flags import GenerateSection, check_flags
from lmcore.cli.loading import (
    ProcessPlan,
    loaded_model,
    plan_processes,
    require_checkpoint,
    run_planned,
    started_runtime,
)
from lmcore.cli.selection import find_plugins
from lmcore.cli.text.sample_output import (
    JsonOutput,
    LinesOutput,
    PlainOutput,
    check_output_file,
    open_output_file,
    standard_output,
)
from lmcore.config.foreign.generate import GivenModel, generate_flags
from lmcore.config.option import options_of
from lmcore.config.options.command_line import parse_with_plugins, wants_help
from lmcore.generation.sampling.options import (
    SamplingOptions,
)
from lmcore.generation.text.sample import Output
from lmcore.plugin.registrations import plugin_sections
from lmcore.runtime.process.stop_limit import StopLimit

if TYPE_CHECKING:
    from lmcore.config.plugin_section import PluginSettings
    from lmcore.generation.fill_mask import FilledText
    from lmcore.generation.text.sampler import SamplingSettings
    from lmcore.inference.load import LoadedModel
    from lmcore.plugin import PluginSet

__all__ = ["GenerateSection", "run"]

logger = logging.getLogger(__name__)

_EPILOG = """\
The same command gives the same text: sample i uses the seed `--seed` + i.

  lmcore generate --load runs/my-run --prompt 'Once upon a time' --tokens 100
  lmcore generate --load runs/my-run --prompt - --greedy --json < prompt.txt
  lmcore generate --load runs/my-bert --fill-mask --prompt 'The capital of [MASK] is Paris.'"""
_DEFAULT_TOP_K = 5


def run(argv: list[str]) -> int:
    """Run `lmcore generate` and return the exit status."""
    plugins = find_plugins(argv, probe=not wants_help(argv))
    model = GivenModel()
    section, settings = parse_with_plugins(
        GenerateSection,
        argv,
        command="lmcore generate",
        plugins=plugin_sections(plugins),
        foreign=generate_flags(_own_flags(), model),
        epilog=_EPILOG,
    )
    options = SamplingOptions(
        temperature=section.temperature,
        top_k=section.top_k,
        top_p=section.top_p,
        top_p_decay=section.top_p_decay,
        top_p_bound=section.top_p_bound,
        min_p=section.min_p,
        repetition_penalty=section.repetition_penalty,
        frequency_penalty=section.frequency_penalty,
        presence_penalty=section.presence_penalty,
        greedy=section.greedy,
    )
    check_flags(section)
    if section.sample_output_file is not None:
        check_output_file(Path(section.sample_output_file))
    chosen = require_checkpoint(Path(section.load), section.ckpt_step)
    section = dataclasses.replace(section, load=str(chosen))
    plan = plan_processes(section, plugins)

    def work() -> None:
        with StopLimit(60 * section.stop_timeout_minutes) as stop_limit:
            stop_limit.activity = lambda: f"generation on `{plan.selection.probe.device_type}`"
            if section.fill_mask:
                with _memory_explained(section):
                    _fill_masks(section, plan, plugins, settings, model)
                return
            _generate(section, options, plan, plugins, settings, model, stop_limit)

    return run_planned(
        ["generate", *argv],
        plan,
        plugins,
        work,
        dialogue=section.chat or section.interactive,
    )


def _generate(
    section: GenerateSection,
    options: SamplingOptions,
    plan: ProcessPlan,
    plugins: PluginSet,
    settings: PluginSettings,
    model: GivenModel,
    stop_limit: StopLimit,
) -> None:
    """Load the model and write the texts; other ranks than 0 hold a part of the model."""
    if plan.rank.rank:
        with _loaded(section, plan, plugins, settings, model):
            return
    if section.chat_template is not None:
        from lmcore.generation.chat.template import check_template

        check_template(section.chat_template)  # fails before the model is loaded
    reads_lines = section.chat or section.interactive
    prompts = [] if reads_lines else _read_prompts(section)
    from lmcore.generation.text.prompt import read_json_schema

    schema = read_json_schema(section.json_schema) if section.json_schema is not None else None
    from lmcore.generation.text.neighbors import read_neighbors
    from lmcore.generation.text.sampler import (
        EncodedPrompts,
        Sampler,
        SamplingSettings,
        encode_prompts,
    )

    neighbors = None
    if section.retro_neighbors is not None:
        neighbors = read_neighbors(section.retro_neighbors, len(prompts))
    wanted = SamplingSettings(
        options,
        section.seed,
        section.num_samples,
        section.tokens,
        section.out_seq_length,
        section.stop,
        section.logprobs,
        section.micro_batch_size,
        section.cache,
        schema,
        section.beam_width,
        section.length_penalty,
        neighbors,
    )
    encoded: list[EncodedPrompts] = []

    def check(described: LoadedModel) -> None:
        """Refuse what settings and tokenizer decide, before the weights are read."""
        _check_neighbors(described, section)
        if reads_lines:
            _check_lines(section, wanted, described)
        else:
            encoded.append(encode_prompts(wanted, described, prompts))

    with (
        _memory_explained(section),
        _loaded(section, plan, plugins, settings, model, check) as loaded,
    ):
        assert loaded is not None
        if reads_lines:
            _read_lines(section, wanted, loaded, stop_limit)
            return
        with _opened(section, len(prompts) * section.num_samples) as output:
            Sampler(wanted, loaded, output).run(encoded[0])


def _check_neighbors(loaded: LoadedModel, section: GenerateSection) -> None:
    """Note that a model reads nothing, or refuse neighbours that it does not read.

    Raises:
        ConfigError: It reads none.
    """
    given = section.retro_neighbors is not None
    if given and not loaded.reads_neighbors:
        raise ConfigError(
            f"`--retro-neighbors` cannot be used with the model of `{section.load}`",
            why="it reads no neighbours",
            hint="leave it out, or load a Retro model",
        )
    if loaded.reads_neighbors and not given:
        logger.warning(
            "the model reads neighbours of its text, and none are given: it continues the prompt "
            "without; `--retro-neighbors FILE` gives them"
        )


def _check_lines(
    section: GenerateSection, wanted: SamplingSettings, described: LoadedModel
) -> None:
    """Refuse what `_read_lines` cannot do with any line.

    Raises:
        ConfigError: There is no chat template, the system prompt is too long, or settings do not
            fit the model or its tokenizer.
    """
    from lmcore.cli.chat import find_template
    from lmcore.generation.chat.conversation import Answers
    from lmcore.generation.text.prompt import encode_prompt

    answers = Answers(wanted, described)
    if not section.chat:
        return
    find_template(described, section.chat_template, load=section.load)
    system = encode_prompt(described.tokenizer, section.system_prompt or "")
    if system and answers.room(system) == 0:
        raise ConfigError(
            f"`--system-prompt` has {counted(len(system), 'token')}, too many for the model",
            why=f"the model has {answers.positions} positions",
            hint="shorten it",
        )


def _read_lines(
    section: GenerateSection, wanted: SamplingSettings, loaded: LoadedModel, stop_limit: StopLimit
) -> None:
    """Answer, or continue, the lines of the user, who may interrupt an answer."""
    from lmcore.cli.chat import chat, continue_lines, find_template

    if section.chat:
        template = find_template(loaded, section.chat_template, load=section.load)
        system = section.system_prompt
        chat(wanted, loaded, template, system=system, waits=stop_limit.withdraw)
    else:
        continue_lines(wanted, loaded, waits=stop_limit.withdraw)


@contextmanager
def _memory_explained(section: GenerateSection) -> Iterator[None]:
    """Turn an out-of-memory error within the context into one that names the flags to change."""
    try:
        yield
    except LmcoreError:
        raise
    except (RuntimeError, MemoryError) as error:
        # Imported late: the environment must be set before torch is imported.
        from lmcore.contract.device_errors import first_line
        from lmcore.train.diagnose.out_of_memory import memory_error_in

        cause = memory_error_in(error)
        if cause is None:
            raise
        fewer = f"a smaller `--micro-batch-size` (it is {section.micro_batch_size}), "
        raise RunError(
            "out of memory while generating text",
            why=first_line(cause),
            hint=f"use {fewer if section.micro_batch_size > 1 else ''}fewer `--tokens`, "
            "`--precision bf16`, or another `--device`",
        ) from error


def _read_prompts(section: GenerateSection) -> list[str]:
    from lmcore.generation.text.prompt import read_prompt_file, read_prompt_lines, read_stdin

    if section.sample_input_file is not None:
        return read_prompt_lines(section.sample_input_file)
    if section.prompt_file is not None:
        return [read_prompt_file(section.prompt_file)]
    if section.prompt == "-":
        return [read_stdin()]
    return [section.prompt or ""]


def _own_flags() -> set[str]:
    """Return the flags of the command itself, with the negations of its switches."""
    own = options_of(GenerateSection)
    negations = {f"--no-{one.flag[2:]}" for one in own if one.type is bool}
    return {one.flag for one in own} | negations


@contextmanager
def _loaded(
    section: GenerateSection,
    plan: ProcessPlan,
    plugins: PluginSet,
    settings: PluginSettings,
    model: GivenModel,
    check: Callable[[LoadedModel], None] | None = None,
) -> Iterator[LoadedModel | None]:
    """Load torch and the model; see `loaded_model`."""
    rows = section.micro_batch_size if section.sample_input_file else section.num_samples
    with (
        started_runtime(section, plan, plugins, settings) as runtime,
        loaded_model(
            section,
            Path(section.load),
            plan,
            runtime,
            plugins,
            rows=rows,
            require=lambda shape: model.require(dataclasses.asdict(shape)),
            check=check,
        ) as loaded,
    ):
        yield loaded


@contextmanager
def _opened(section: GenerateSection, num_samples: int) -> Iterator[Output]:
    if section.sample_output_file is not None:
        with open_output_file(Path(section.sample_output_file)) as stream:
            yield LinesOutput(stream)
    elif section.json:
        yield JsonOutput(standard_output())
    else:
        yield PlainOutput(standard_output(), num_samples=num_samples)


def _fill_masks(
    section: GenerateSection,
    plan: ProcessPlan,
    plugins: PluginSet,
    settings: PluginSettings,
    model: GivenModel,
) -> None:
    """Write the most probable tokens in the place of each mask of each text (`--fill-mask`)."""
    texts = _masked_texts(section)
    with started_runtime(section, plan, plugins, settings) as runtime:
        from lmcore.data.tokenizer.build import registered_types
        from lmcore.generation.fill_mask import load_filler

        filler = load_filler(
            Path(section.load),
            runtime,
            choice=section.tokenizer_choice(),
            extra=registered_types(plugins),
            require=lambda shape: model.require(dataclasses.asdict(shape)),
            texts=texts,
        )
        top_k, stream = section.top_k or _DEFAULT_TOP_K, standard_output()
        for filled in filler.fill(texts, top_k=top_k, batch=section.micro_batch_size):
            _write_filled(filled, stream, as_json=section.json)


def _masked_texts(section: GenerateSection) -> list[str]:
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


def _write_filled(filled: FilledText, stream: TextIO, *, as_json: bool) -> None:
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

"""`lmcore generate`: continue a text with a trained model."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.cli.loading import (
    LoadingSection,
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
from lmcore.config.option import REQUIRED, option, options_of
from lmcore.config.options.command_line import parse_with_plugins, wants_help
from lmcore.errors import ConfigError, LmcoreError, RunError
from lmcore.generation.options import (
    MAX_BEAM_WIDTH,
    MAX_LENGTH_PENALTY,
    MAX_LOGPROBS,
    MAX_SEED,
)
from lmcore.generation.sampling.options import (
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    MIN_REPETITION_PENALTY,
    SamplingOptions,
)
from lmcore.generation.text.sample import DEFAULT_TOKENS, Output
from lmcore.plugin.registrations import plugin_sections

if TYPE_CHECKING:
    from lmcore.config.plugin_section import PluginSettings
    from lmcore.generation.load import LoadedModel
    from lmcore.generation.text.sampler import SampleSettings
    from lmcore.plugin import PluginSet

__all__ = ["SUMMARY", "GenerateSection", "run"]

SUMMARY = "Continue a text with a trained model."

logger = logging.getLogger(__name__)

_SAMPLING = ("temperature", "min_p", "seed", "num_samples")
"""Options without a meaning where no token is drawn."""

_EPILOG = """\
The same command gives the same text: sample i uses the seed `--seed` + i.

  lmcore generate --load runs/my-run --prompt 'Once upon a time' --tokens 100
  lmcore generate --load runs/my-run --prompt - --greedy --json < prompt.txt"""


@dataclass(frozen=True)
class GenerateSection(LoadingSection):
    """Continue a text with a trained model."""

    load: str = option(
        REQUIRED,
        "Run directory, its `checkpoints`, one `iter_XXXXXXX`, or a Hugging Face, Megatron or "
        "DeepSpeed directory.",
        metavar="DIR",
    )
    prompt: str | None = option(
        None,
        "Text to continue; `-` reads standard input; default: the start of a document.",
        may_be_empty=True,
    )
    prompt_file: str | None = option(
        None, "File with one prompt; the line break at its end is dropped.", metavar="FILE"
    )
    sample_input_file: str | None = option(
        None, "File with one prompt on each line.", metavar="FILE"
    )
    sample_output_file: str | None = option(
        None,
        "File for a JSON object {text, length, finished} per sample, instead of standard output.",
        metavar="FILE",
    )
    interactive: bool = option(
        False, "Continue each line that is typed or piped in, until the input ends."
    )
    chat: bool = option(
        False, "Hold a conversation: each line that is typed or piped in is a message."
    )
    system_prompt: str | None = option(
        None, "With --chat: system prompt of the conversation.", metavar="TEXT"
    )
    chat_template: str | None = option(
        None,
        "With --chat: file with a chat template (jinja2) instead of the tokenizer's.",
        metavar="FILE",
    )
    tokens: int | None = option(
        None,
        f"Tokens to generate per prompt; default: {DEFAULT_TOKENS}, or fewer if the model has "
        "fewer positions left; with --chat the largest number per answer.",
        minimum=1,
    )
    out_seq_length: int | None = option(
        None,
        "Most tokens to generate per prompt, as Megatron's flag: fewer if the model has fewer "
        "positions left after the prompt.",
        minimum=1,
    )
    temperature: float = option(
        1.0,
        "Divisor of the logits, above 0: below 1 more predictable text, above 1 more varied.",
        maximum=MAX_TEMPERATURE,  # `SamplingOptions` refuses 0, with a hint of `--greedy`
    )
    top_k: int = option(
        0, "Sample from the K most probable tokens; 0: all.", minimum=0, maximum=MAX_TOP_K
    )
    top_p: float = option(
        0.0,
        "Sample from the smallest set of tokens with this total probability; 0: all.",
        minimum=0,
        maximum=1,
    )
    top_p_decay: float = option(
        0.0,
        "With --top-p: multiply it by this after each token; 0: it stays.",
        minimum=0,
        maximum=1,
    )
    top_p_bound: float = option(
        0.0, "With --top-p-decay: lowest value of --top-p.", minimum=0, maximum=1
    )
    min_p: float = option(
        0.0,
        "Sample from the tokens with at least this share of the highest probability; 0: all.",
        minimum=0,
        maximum=1,
    )
    repetition_penalty: float = option(
        1.0,
        "Make tokens of the prompt and of the text so far less probable: divisor of positive "
        "logits and factor of negative ones; 1: no penalty.",
        minimum=MIN_REPETITION_PENALTY,
        maximum=MAX_REPETITION_PENALTY,
    )
    frequency_penalty: float = option(
        0.0,
        "Subtract this from the logit of a token for each time it was generated.",
        minimum=-MAX_PENALTY,
        maximum=MAX_PENALTY,
    )
    presence_penalty: float = option(
        0.0,
        "Subtract this from the logit of each token that was generated.",
        minimum=-MAX_PENALTY,
        maximum=MAX_PENALTY,
    )
    stop: tuple[str, ...] = option(
        (), "Texts that end the generated text and are not part of it.", metavar="TEXT"
    )
    json_schema: str | None = option(
        None, "File with a JSON schema: the generated text is JSON of it.", metavar="FILE"
    )
    greedy: bool = option(False, "Always take the most probable token.")
    beam_width: int | None = option(
        None,
        "Beam search: follow this many texts and write the most probable ones, as many as "
        "--num-samples.",
        minimum=1,
        maximum=MAX_BEAM_WIDTH,
    )
    length_penalty: float = option(
        1.0,
        "Exponent of the number of tokens in the score of beam search: 0 prefers short texts, "
        "above 1 long ones.",
        minimum=-MAX_LENGTH_PENALTY,
        maximum=MAX_LENGTH_PENALTY,
    )
    seed: int = option(1234, "Seed of the first sample.", minimum=-MAX_SEED - 1, maximum=MAX_SEED)
    num_samples: int = option(1, "Samples per prompt.", minimum=1)
    micro_batch_size: int = option(8, "Samples generated together.", minimum=1)
    json: bool = option(
        False, "Print a JSON object per sample: prompt, text, tokens, finished, seed."
    )
    logprobs: int | None = option(
        None,
        "With --json: the log-probability of each token, and of this many most probable ones.",
        minimum=0,
        maximum=MAX_LOGPROBS,
    )
    cache: bool = option(
        True, "Use a key-value cache; without it, each token recomputes the whole context."
    )


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
    _check_flags(section)
    if section.sample_output_file is not None:
        check_output_file(Path(section.sample_output_file))
    chosen = require_checkpoint(Path(section.load), section.ckpt_step)
    section = dataclasses.replace(section, load=str(chosen))
    plan = plan_processes(section, plugins)
    return run_planned(
        ["generate", *argv],
        plan,
        plugins,
        lambda: _generate(section, options, plan, plugins, settings, model),
        dialogue=section.chat or section.interactive,
    )


def _generate(
    section: GenerateSection,
    options: SamplingOptions,
    plan: ProcessPlan,
    plugins: PluginSet,
    settings: PluginSettings,
    model: GivenModel,
) -> None:
    """Load the model and write the texts; other ranks than 0 hold a part of the model."""
    if plan.rank.rank:
        with _loaded(section, plan, plugins, settings, model):
            return
    if section.chat_template is not None:
        from lmcore.generation.chat.template import read_template

        read_template(section.chat_template)  # fails before the model is loaded
    reads_lines = section.chat or section.interactive
    prompts = [] if reads_lines else _read_prompts(section)
    from lmcore.generation.text.prompt import read_json_schema

    schema = read_json_schema(section.json_schema) if section.json_schema is not None else None
    from lmcore.generation.text.sampler import Sampler, SampleSettings

    wanted = SampleSettings(
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
    )
    with (
        _memory_explained(section),
        _loaded(section, plan, plugins, settings, model) as loaded,
    ):
        assert loaded is not None
        if reads_lines:
            _read_lines(section, wanted, loaded)
            return
        with _opened(section, len(prompts) * section.num_samples) as output:
            Sampler(wanted, loaded, output).run(prompts)


def _read_lines(section: GenerateSection, wanted: SampleSettings, loaded: LoadedModel) -> None:
    """Answer, or continue, the lines of the user."""
    from lmcore.cli.chat import chat, continue_lines, find_template

    if section.chat:
        template = find_template(loaded, section.chat_template, load=section.load)
        chat(wanted, loaded, template, system=section.system_prompt)
    else:
        continue_lines(wanted, loaded)


@contextmanager
def _memory_explained(section: GenerateSection) -> Iterator[None]:
    """Turn an out-of-memory error within the context into one that names the flags to change."""
    try:
        yield
    except LmcoreError:
        raise
    except (RuntimeError, MemoryError) as error:
        # Imported late: the environment must be set before torch is imported.
        from lmcore.accelerator.device_errors import first_line
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


def _check_flags(section: GenerateSection) -> None:
    given = [
        flag
        for flag, value in (
            ("--prompt", section.prompt),
            ("--prompt-file", section.prompt_file),
            ("--sample-input-file", section.sample_input_file),
        )
        if value is not None
    ]
    if len(given) > 1:
        flags = " and ".join(f"`{flag}`" for flag in given)
        raise ConfigError(f"{flags} exclude each other", hint="keep one of them")
    if section.tokens is not None and section.out_seq_length is not None:
        raise ConfigError(
            "`--tokens` and `--out-seq-length` exclude each other", hint="keep one of them"
        )
    _check_lines(section)
    for flag, value, needed, there in (
        ("--top-p-decay", section.top_p_decay, "--top-p", section.top_p > 0),
        ("--top-p-bound", section.top_p_bound, "--top-p-decay", section.top_p_decay > 0),
        ("--length-penalty", section.length_penalty - 1, "--beam-width", section.beam_width),
    ):
        if value and not there:
            raise ConfigError(f"`{flag}` needs `{needed}`", why="without it, it has no effect")
    if section.beam_width is not None:
        _check_beam_search(section, section.beam_width)
    if section.greedy and (wrong := _given(section, _SAMPLING)):
        raise ConfigError(
            f"`{wrong[0]}` cannot be used with `--greedy`",
            why="greedy decoding draws no tokens: it gives one text, and always the same",
            hint="leave out one of them",
        )
    if section.logprobs is not None and not section.json:
        raise ConfigError("`--logprobs` needs `--json`", why="only its objects have a place for it")
    if section.json and section.sample_output_file is not None:
        raise ConfigError(
            "`--json` and `--sample-output-file` exclude each other",
            why="the file has JSON lines in Megatron's format",
            hint="write `--json > FILE` for all values of a sample",
        )


def _check_lines(section: GenerateSection) -> None:
    """Raise an error if an option has no meaning with lines of a user, or only with them."""
    if not section.chat and (wrong := _given(section, ("system_prompt", "chat_template"))):
        raise ConfigError(
            f"`{wrong[0]}` needs `--chat`", why="without it there are no messages, only text"
        )
    mode = "--chat" if section.chat else "--interactive"
    if section.chat and section.interactive:
        raise ConfigError("`--chat` and `--interactive` exclude each other", hint="keep one")
    if not (section.chat or section.interactive):
        return
    prompts = ("prompt", "prompt_file", "sample_input_file")
    if wrong := _given(section, prompts):
        raise ConfigError(
            f"`{wrong[0]}` cannot be used with `{mode}`",
            why="it reads its lines from the terminal or from standard input",
        )
    whole = ("sample_output_file", "json", "num_samples", "beam_width", "length_penalty")
    if wrong := _given(section, whole):
        raise ConfigError(
            f"`{wrong[0]}` cannot be used with `{mode}`",
            why="it writes one text for each line, as it grows",
        )


def _check_beam_search(section: GenerateSection, width: int) -> None:
    """Raise an error if an option has no meaning in beam search, or is not supported there."""
    sampling = tuple(name for name in _SAMPLING if name != "num_samples")
    sampling += ("top_k", "top_p", "top_p_decay", "top_p_bound", "greedy")
    if wrong := _given(section, sampling):
        raise ConfigError(
            f"`{wrong[0]}` cannot be used with `--beam-width`",
            why="beam search draws no tokens: it follows the most probable texts",
        )
    penalties = ("repetition_penalty", "frequency_penalty", "presence_penalty")
    if wrong := _given(section, ("stop", "logprobs", "cache", "json_schema", *penalties)):
        raise ConfigError(
            f"`{wrong[0]}` cannot be used with `--beam-width`",
            why="beam search does not support it",
        )
    if section.num_samples > width:
        raise ConfigError(
            f"`--num-samples {section.num_samples}` is more than `--beam-width {width}`",
            why="beam search finds as many texts as its width",
        )


def _given(section: GenerateSection, names: Sequence[str]) -> list[str]:
    """Return the flags of those options that do not have their default value."""
    options = {one.key: one for one in options_of(GenerateSection)}
    return [options[name].flag for name in names if getattr(section, name) != options[name].default]


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

"""Options of `lmcore generate`, and their check against each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcore.base.errors import ConfigError
from lmcore.cli.loading import LoadingSection
from lmcore.config.option import REQUIRED, option, options_of
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
)
from lmcore.generation.text.sample import DEFAULT_TOKENS

__all__ = ["GenerateSection", "check_flags"]

_SAMPLING = ("temperature", "min_p", "seed", "num_samples")
"""Options without a meaning where no token is drawn."""
_WITH_MASKS = (
    *("load", "fill_mask", "prompt", "prompt_file", "sample_input_file", "top_k", "json"),
    *("micro_batch_size", "stop_timeout_minutes"),
)
"""Options with a meaning for `--fill-mask`, beside those for loading a model."""


@dataclass(frozen=True)
class GenerateSection(LoadingSection):
    """Continue a text with a trained model."""

    load: str = option(
        REQUIRED,
        "Run directory, its `checkpoints`, one `iter_XXXXXXX`, or the directory of another "
        "program, such as Hugging Face or Megatron.",
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
    retro_neighbors: str | None = option(
        None,
        "For a Retro model: file with JSON lines, one for each prompt: a list of the texts that "
        "are the neighbours of all chunks of the text, or a list of such lists, one for each "
        "chunk; default: nothing is read beside the prompt.",
        metavar="FILE",
    )
    interactive: bool = option(
        False, "Continue each line that is typed or piped in, until the input ends."
    )
    fill_mask: bool = option(
        False,
        "Print the most probable tokens for each `[MASK]` of the prompt, or of each line of "
        "standard input, with their probabilities: --top-k of them, by default 5.",
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
        None, "File with a JSON schema, to which the output is constrained.", metavar="FILE"
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
    stop_timeout_minutes: float = option(
        5.0,
        "Minutes that one call may take after a signal before this process ends by force: a hung "
        "device never returns; 0: no limit.",
        minimum=0,
    )


def check_flags(section: GenerateSection) -> None:
    """Raise an error if options contradict each other, or have no meaning together.

    Raises:
        ConfigError: They do.
    """
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
    if section.fill_mask:
        _check_fill_mask(section)
        return
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
    if wrong := _given(section, ("retro_neighbors",)):
        raise ConfigError(
            f"`{wrong[0]}` cannot be used with `{mode}`",
            why="the file has the neighbours of prompts that are known before",
            hint="give the prompts by `--sample-input-file`",
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
    options = {one.key: one for one in options_of(type(section))}
    return [options[name].flag for name in names if getattr(section, name) != options[name].default]


def _check_fill_mask(section: GenerateSection) -> None:
    """Raise an error if an option has no meaning where masks are filled."""
    taken = {*_WITH_MASKS, *(one.key for one in options_of(LoadingSection))}
    others = [one.key for one in options_of(type(section)) if one.key not in taken]
    if wrong := _given(section, others):
        raise ConfigError(
            f"`{wrong[0]}` cannot be used with `--fill-mask`",
            why="no text is generated: each mask gets its most probable tokens",
            hint="leave it out",
        )
    if section.quantization is not None:
        raise ConfigError(
            "`--quantization` cannot be used with `--fill-mask`",
            why="only the weights of models that generate text are rounded",
        )
    size = section.tensor_model_parallel_size * section.pipeline_model_parallel_size
    if size > 1:
        raise ConfigError(
            "`--fill-mask` runs in one process",
            why=f"the sizes of the parallel axes are for {size}",
            hint="leave them out: a checkpoint of any layout is read",
        )

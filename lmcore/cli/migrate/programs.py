"""Programs beside training in a launch script, as command lines of lmcore with a table of flags.

Preparation and merging of data, evaluation, generation, the server, and conversion of checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lmcore.base.errors import ConfigError
from lmcore.cli.migrate.flag_table import LEFT, OPEN, FlagRow, flag_groups, flag_rows
from lmcore.config.foreign.convert import (
    PLACES,
    TARGET_LAYOUT,
    convert_flags,
    names_target_layout,
    tool_arguments,
)
from lmcore.config.foreign.evaluate import (
    evaluate_flags,
    is_tuned,
    tuned_flags,
    upstream_arguments,
)
from lmcore.config.foreign.generate import GivenModel, generate_flags, serve_flags
from lmcore.config.foreign.index import index_flags
from lmcore.config.foreign.launch_command import OtherProgram
from lmcore.config.foreign.megatron_flags import merge_flags, prepare_flags
from lmcore.config.foreign.shell_values import shell_line
from lmcore.config.option import Option, option, options_of
from lmcore.config.options.flags import ForeignFlag
from lmcore.config.section import run_options

__all__ = ["MigratedProgram", "migrate_program"]

_WITH_ARGUMENTS = frozenset({"lmcore checkpoint convert", "lmcore ask"})
"""Commands for programs that have arguments without a flag."""


@dataclass(frozen=True)
class MigratedProgram:
    """A program of a script, and the command that replaces it.

    Attributes:
        program: Name of the program's file.
        line: Command line of lmcore.
        rows: Fate of each flag.
        problem: Reason why the line is incomplete; empty if it is not.
    """

    program: str
    line: str
    rows: Sequence[FlagRow] = field(default_factory=tuple)
    problem: str = ""


@dataclass(frozen=True)
class _Target:
    """Command of lmcore with its options and the other program's flags.

    Attributes:
        options: Options of the command, by name.
        foreign: Flags of the other program.
        arguments: Function from the other program's arguments to those here, apart from flags that
            are in `foreign`; None: the arguments themselves.
        places: Flags that are no flag here, with words for what they are.
    """

    options: Mapping[str, Option]
    foreign: Mapping[str, ForeignFlag]
    arguments: Callable[[Sequence[str]], list[str]] | None = None
    places: Mapping[str, str] = field(default_factory=dict)


def migrate_program(one: OtherProgram, unknown: Sequence[str] = ()) -> MigratedProgram:
    """Return the command line and the table of a program of a script.

    Args:
        one: The program with its arguments.
        unknown: Texts of the arguments that a shell replaces.
    """
    target = _target(one)
    flags = list(one.flags)
    words = [] if not flags or flags[0].startswith("-") else [flags.pop(0)]
    while words and flags and not flags[0].startswith("-"):
        words.append(flags.pop(0))
    has_arguments = one.command in _WITH_ARGUMENTS
    rows = flag_rows(
        flags, target.options, target.foreign, target.places, has_arguments=has_arguments
    )
    taken, problem = [*words], ""
    for row in rows:
        taken += row.words if row.kind == OPEN or row.kind not in LEFT else []
    if target.arguments is not None:
        try:
            taken = target.arguments(taken)
        except ConfigError as error:
            problem = "; ".join(part for part in (error.what, error.hint) if part)
        else:
            problem = _absent_directories(one, taken)
    line = [word for group in flag_groups(taken) for word in _here(group, target)]
    return MigratedProgram(
        one.program, f"{one.command} {shell_line(line, unknown)}".strip(), rows, problem
    )


def _absent_directories(one: OtherProgram, taken: Sequence[str]) -> str:
    """Return the problem of a conversion without SOURCE or TARGET; empty if it has both."""
    count = next((n for n, word in enumerate(taken) if word.startswith("--")), len(taken))
    if one.command != "lmcore checkpoint convert" or count >= 2:
        return ""
    if count:
        return "no directory to write is given: add TARGET after SOURCE"
    return "no directories are given: add SOURCE and TARGET"


def _here(group: Sequence[str], target: _Target) -> Sequence[str]:
    """Return the words of lmcore for a flag with its values."""
    name, equals, value = group[0].partition("=")
    known = target.foreign.get(name.replace("_", "-"))
    if known is None:
        return group
    return known.translate((*((value,) if equals else ()), *group[1:])).flags


def _target(one: OtherProgram) -> _Target:
    """Return the command of lmcore that replaces a program."""
    if one.command == "lmcore checkpoint convert":
        return _conversion(one)
    if one.command == "lmcore evaluate" and is_tuned(one.flags):
        return _fine_tuning()
    return _TARGETS[one.command]()


def _preparation() -> _Target:
    from lmcore.cli.data.prepare_section import PrepareSection

    return _Target(_options(PrepareSection), prepare_flags())


def _merge() -> _Target:
    from lmcore.cli.data.merge import MergeSection

    return _Target(_options(MergeSection), merge_flags())


def _split() -> _Target:
    from lmcore.cli.data.split import SplitSection

    return _Target(_options(SplitSection), {})


def _generation() -> _Target:
    from lmcore.cli.generate_flags import GenerateSection

    options = _options(GenerateSection)
    return _Target(options, generate_flags(_flags(options), GivenModel()))


def _server() -> _Target:
    from lmcore.cli.loading import LoadingSection

    @dataclass(frozen=True)
    class ServerSection(LoadingSection):
        """Flags of `lmcore serve`, of another package, that Megatron's server has as well."""

        load: str | None = option(None, "Checkpoint.", metavar="DIR")
        host: str = option("", "Address to listen on.")
        port: int = option(5000, "Port to listen on.", minimum=0, maximum=65535)
        max_requests: int = option(16, "Texts that are generated together.", minimum=1)
        max_tokens_to_oom: int = option(12000, "Most tokens of a request.", minimum=1)

    options = _options(ServerSection)
    return _Target(options, serve_flags(_flags(options), GivenModel()))


def _client() -> _Target:
    return _Target({}, {})


_TASK = {
    "--task": "--task, with its name here",
    "--load": "CHECKPOINT",
    "--pretrained-checkpoint": "CHECKPOINT",
}


def _evaluation() -> _Target:
    from lmcore.cli.evaluate.section import EvaluateSection

    options = _options(EvaluateSection)
    foreign = evaluate_flags(_flags(options), GivenModel())
    places = {
        **_TASK,
        "--valid-data": "--task-data TASK=FILE",
        "--strict-lambada": "--task lambada_strict",
    }
    return _Target(options, foreign, _task_arguments, places)


def _fine_tuning() -> _Target:
    """Return the command for a task that trains a head, with training flags too."""
    from lmcore.cli.evaluate.section import EvaluateSection

    own = _options(EvaluateSection)
    foreign = tuned_flags(_flags(own))
    training = {name: one for name, one in run_options().items() if one.flag not in foreign}
    return _Target({**training, **own}, foreign, _task_arguments, _TASK)


def _task_arguments(words: Sequence[str]) -> list[str]:
    return upstream_arguments(words, announce=False)


def _index() -> _Target:
    from lmcore.cli.index.build import BuildSection

    options = _options(BuildSection)
    return _Target(options, index_flags(_flags(options), GivenModel()))


def _conversion(one: OtherProgram) -> _Target:
    from lmcore.cli.checkpoint.convert import ConvertSection

    options = {
        name: option
        for name, option in _options(ConvertSection).items()
        if name not in {"source", "target"}
    }
    places = dict(PLACES)
    if names_target_layout(one.flags):  # the other flags of a layout are of SOURCE
        places |= TARGET_LAYOUT
        for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
            del options[name]

    def arguments(words: Sequence[str]) -> list[str]:
        return tool_arguments(words, one.program)

    return _Target(options, convert_flags(_flags(options)), arguments, places)


def _options(section: type) -> dict[str, Option]:
    return {option.name: option for option in options_of(section)}


def _flags(options: Mapping[str, Option]) -> set[str]:
    return {flag for option in options.values() for flag in option.flags}


_TARGETS: Mapping[str, Callable[[], _Target]] = {
    "lmcore data prepare": _preparation,
    "lmcore data merge": _merge,
    "lmcore data split": _split,
    "lmcore evaluate": _evaluation,
    "lmcore generate": _generation,
    "lmcore index build": _index,
    "lmcore serve": _server,
    "lmcore ask": _client,
}

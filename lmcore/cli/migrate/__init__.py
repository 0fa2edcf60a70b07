"""`lmcore migrate`: settings and commands from a launch script, or command, of a Megatron fork."""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmcore.base.bounded_file import open_regular
from lmcore.base.durable import write_atomically
from lmcore.base.errors import ConfigError, LmcoreError, counted, printable, unreadable
from lmcore.base.missing_path import missing_path_hint
from lmcore.cli.migrate.flag_table import LEFT, FlagRow, flag_groups, flag_rows, print_table
from lmcore.cli.migrate.programs import MigratedProgram, migrate_program
from lmcore.cli.selection import find_plugins
from lmcore.config.derived.model_math import family_name
from lmcore.config.file.manifest import is_manifest, read_manifest
from lmcore.config.file.paths import map_paths
from lmcore.config.file.yaml_file import written_value
from lmcore.config.foreign.launch_command import (
    is_program,
    other_programs,
    programs_by_hand,
    training_command,
    trains,
)
from lmcore.config.foreign.megatron import ENGINE_FLAG
from lmcore.config.foreign.megatron_flags import train_flags
from lmcore.config.foreign.shell import ShellScript, read_shell
from lmcore.config.load import EXCLUSIVE, load_config
from lmcore.config.megatron_defaults import MEGATRON_DEFAULTS
from lmcore.config.need import Situation
from lmcore.config.option import Option, option
from lmcore.config.options.command_line import parse_section, wants_help
from lmcore.config.options.flags import parse_flags
from lmcore.config.section import run_options
from lmcore.config.section.parallel import ENGINE_FILE
from lmcore.config.settings import LoadedConfig
from lmcore.config.token_lengths import TOKEN_OPTIONS
from lmcore.config.validate import problems_of
from lmcore.plugin.registrations import plugin_sections

__all__ = ["MigrateSection", "run"]

_EPILOG = """\
The settings go to the standard output, or to --output; the table of flags to the standard error.
For programs beside training, such as preprocess_data.py, the result is a command of lmcore.

  lmcore migrate pretrain_gpt.sh > run.yaml
  lmcore migrate job.slurm --set DATA=/data/oscar --output run.yaml
  lmcore migrate pytorchjob.yaml-template --set NUM_LAYERS=36 ... > run.yaml
  lmcore migrate -- torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 24 ...

A script is read and never run: variables and here-documents are followed, and what only a run
would give is listed.  Give it by --set NAME=VALUE."""
_MOST_BYTES = 1 << 22
_DIRECTIVE = re.compile(r"^(#SBATCH|#PBS)[ \t]+\S", re.MULTILINE)
_JOBS = {"#SBATCH": "slurm", "#PBS": "pbs"}
"""Directives of schedulers, with the kind of job of `lmcore launch`."""
_RUNNERS = frozenset({"bash", "sh", "source", "sbatch", "qsub"})
"""Words before the path of a script in the command that starts it."""


@dataclass(frozen=True)
class MigrateSection:
    """Turn the launch script or command of a Megatron fork into settings and commands of lmcore."""

    command: tuple[str, ...] = option(
        (),
        "Launch script, manifest of Kubernetes, or a command line with its launcher.",
        metavar="SCRIPT",
    )
    set: tuple[str, ...] = option(
        (),
        "Values of variables that the script does not set, or in place of the script's.",
        metavar="NAME=VALUE",
    )
    output: str | None = option(
        None, "File for the settings; default: the standard output.", metavar="FILE"
    )
    defaults: str = option(
        "megatron",
        "Program whose defaults the settings keep where the command gives none.",
        choices=tuple(MEGATRON_DEFAULTS),
    )


def run(argv: list[str]) -> int:
    """Run `lmcore migrate` and return the exit status."""
    begin = next((n for n, one in enumerate(argv) if one == "--" or is_program(one)), len(argv))
    own, words = argv[:begin], [one for one in argv[begin:] if one != "--"]
    if wants_help(own):
        words = []
    section = parse_section(
        MigrateSection,
        own,
        command="lmcore migrate",
        positionals=("command",),
        epilog=_EPILOG,
    )
    paths = section.command[len(section.command) > 1 and section.command[0] in _RUNNERS :]
    if bool(paths) == bool(words) or len(paths) > 1:
        raise ConfigError(
            "`lmcore migrate` needs a script, or a command",
            why=f"it was given {counted(len(paths), 'path')}" if not words else None,
            hint="`lmcore migrate pretrain.sh`, or `lmcore migrate -- python pretrain_gpt.py ...`",
        )
    script = ShellScript(commands=[words])
    if paths:
        text = _text(paths[0])
        script = (read_manifest if is_manifest(text) else read_shell)(text, _variables(section.set))
    elif section.set:
        raise ConfigError(
            "`--set` needs a script",
            why="the shell has put the values of variables into a command line",
            hint="give the script's path, or the command with its values",
        )
    others = [migrate_program(one, script.unknown) for one in other_programs(script)]
    script.notes += programs_by_hand(script)
    if others and not trains(script):
        _report_programs(others, script, section.output)
        return 0
    training = training_command(script)
    flags = training.flags
    options = {**run_options(), **{one.name: one for one in TOKEN_OPTIONS}}
    rows = flag_rows(flags, options, train_flags())
    made = _settings(rows, training.family, section.defaults, script)
    settings = _yaml(made, training.program, section)
    report = sys.stdout if section.output else sys.stderr
    _report(rows, script, made, report)
    for one in others:
        print(f"\n{one.program}:", file=report)
        print_table(one.rows, report)
        _print_line(one, report)
    name = section.output or "run.yaml"
    print("\nstart it by:  " + printable(training.start(name, script.unknown)), file=sys.stderr)
    if section.output is None:
        print(settings, end="")
    else:
        write_atomically(Path(section.output), settings.encode())
    return 0


def _text(path: str) -> str:
    try:
        with open(open_regular(path), encoding="utf-8") as stream:  # noqa: PTH123
            text = stream.read(_MOST_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"cannot read the script `{path}`",
            why=unreadable(error),
            hint=missing_path_hint(
                path,
                "give the path of a launch script, or the command itself: "
                "`lmcore migrate -- python pretrain_gpt.py ...`",
            ),
        ) from None
    if len(text) > _MOST_BYTES:
        raise ConfigError(f"`{path}` is no launch script", why="it is longer than 4 MiB")
    return text


def _variables(given: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"`--set {one}` sets nothing", hint="write `--set NAME=VALUE`")
        found[name] = value
    return found


@dataclass(frozen=True)
class _Made:
    """Settings that the flags give.

    Attributes:
        settings: Options with value and source, in the order of the options.
        problems: Errors that `lmcore train` would give for them.
        steps: Micro-batches of a step, if an engine's file gives them and no flag gives the batch.
    """

    settings: list[tuple[Option, Any, str]]
    problems: list[LmcoreError]
    steps: int | None = None


def _settings(
    rows: Sequence[FlagRow],
    family: str | None,
    defaults: str,
    script: ShellScript,
) -> _Made:
    """Return the settings of the flags that are supported, and of the file of an engine."""
    taken = [word for row in rows if row.kind not in LEFT for word in row.words]
    if family is not None:
        taken = ["--model-family", family, *taken]
    if ENGINE_FLAG in taken:
        taken += ["--engine", "native"]
    named, engine_file = taken, _without_engine_file(taken)[1]
    with tempfile.TemporaryDirectory() as folder:
        taken = _with_files(taken, script.files, Path(folder))
        absent: list[LmcoreError] = []
        try:
            loaded = _loaded(taken, defaults)
        except ConfigError as error:
            absent = [error, *getattr(error, "others", ())]
            try:  # without the file of an engine, which another machine may have
                loaded = _loaded(_without_engine_file(taken)[0], defaults)
            except ConfigError:
                options = run_options()
                parsed = parse_flags(named, options, foreign=train_flags())
                return _Made(
                    [(options[name], one, "") for name, one in parsed.values.items()], absent
                )
        problems = [*absent, *problems_of(loaded, world_size=None)]
        settings = list(_given(loaded, folder))
        if absent and engine_file:  # the run reads it where it is
            one = loaded.options[ENGINE_FILE]
            settings.append((one, engine_file[-1], " ".join(engine_file)))
    given = loaded.provenance["global_batch_size"].kind == "flag"
    return _Made(settings, problems, None if given else loaded.accumulation_steps)


def _loaded(words: Sequence[str], defaults: str) -> LoadedConfig:
    return load_config(
        ["--defaults", defaults, *words],
        plugins=plugin_sections(find_plugins([], probe=False)),
        announce=False,
    )


def _without_engine_file(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words without the flag that names the file of an engine, and that flag's."""
    rest: list[str] = []
    found: list[str] = []
    for group in flag_groups(words):
        name, equals, value = group[0].partition("=")
        if name.replace("_", "-") != run_options()[ENGINE_FILE].flag:
            rest += group
        else:
            found = [name, *([value] if equals else []), *group[1:]]
    return rest, found


def _with_files(words: Sequence[str], files: Mapping[str, str], folder: Path) -> list[str]:
    """Return the words with paths of files that the script would write; writes them."""
    found = list(words)
    for number, word in enumerate(words):
        if word in files:
            path = folder / Path(word).name
            path.write_text(files[word], encoding="utf-8")
            found[number] = str(path)
    return found


def _given(loaded: LoadedConfig, folder: str) -> Iterator[tuple[Option, Any, str]]:
    """Yield the settings that are not lmcore's defaults, with their source."""
    situation = Situation(loaded.config, family=family_name(loaded.config.model))
    for one in loaded.options.values():
        origin = loaded.provenance[one.name]
        value = loaded.value(one.name)
        if origin.kind in {"default", "derived"}:
            continue
        if origin.kind == "defaults" and not all(need.met(situation) for need in one.needs):
            continue
        source = loaded.texts.get(one.name, "") if origin.kind == "flag" else str(origin)
        if isinstance(value, str) and value.startswith(folder):
            continue  # the file of an engine, whose values are settings
        yield one, value, source.replace(f"{folder}/", "")


def _yaml(made: _Made, program: str, section: MigrateSection) -> str:
    """Return the file of settings; its relative paths are relative to it."""
    lines = [
        f"# Settings of `{program}`, from `lmcore migrate`; start: lmcore train THIS_FILE",
        "# Relative paths are relative to this file.",
    ]
    by_section: dict[str, list[tuple[str, str]]] = {}
    for one, value, source in made.settings:
        located = map_paths(one, value, lambda path: _located(path, section.output))
        row = (f"  {one.key}: {written_value(located)}", printable(source))
        by_section.setdefault(one.section, []).append(row)
    for name, rows in by_section.items():
        width = min(max(len(text) for text, _ in rows), 48)
        lines += ["", f"{name}:"]
        lines += [
            f"{text:<{width}}  # {source}".rstrip() if source else text for text, source in rows
        ]
    return "\n".join(lines) + "\n"


def _located(path: str, output: str | None) -> str:
    """Return a path of the working directory as one from the file's directory."""
    folder = Path(output).parent if output else Path()
    if folder == Path() or Path(path).is_absolute() or path.startswith(("$", "<", "`")):
        return path
    return os.path.relpath(path, folder)


def _report_programs(
    others: Sequence[MigratedProgram], script: ShellScript, output: str | None
) -> None:
    """Print the tables and the command lines of a script that trains nothing."""
    for one in others:
        print(f"{one.program}:", file=sys.stderr)
        print_table(one.rows, sys.stderr)
        if one.problem:
            print(f"incomplete: {printable(one.problem)}", file=sys.stderr)
        print(file=sys.stderr)
    _print_open(script, sys.stderr)
    lines = "".join(f"{one.line}\n" for one in others)
    if output is None:
        print(lines, end="")
    else:
        write_atomically(Path(output), lines.encode())


def _print_line(one: MigratedProgram, stream: Any) -> None:
    if one.problem:
        print(f"incomplete: {printable(one.problem)}", file=stream)
    print(f"start it by:  {printable(one.line)}", file=stream)


def _print_open(script: ShellScript, stream: Any) -> None:
    """Print the values that only a run of the script has, and its notes."""
    if script.unknown:
        print("without a value (give it by `--set NAME=VALUE`, or edit the file):", file=stream)
        print("  " + ", ".join(map(printable, script.unknown)), file=stream)
    for note in [*script.notes, *_rest_of_job(script)]:
        print(f"note: {printable(note)}", file=stream)


def _rest_of_job(script: ShellScript) -> Iterator[str]:
    """Yield a note about the directives of a job and the variables for its programs."""
    counts = Counter(_DIRECTIVE.findall(script.text))
    parts = [f"{count} `{sign}` line{'s' * (count != 1)}" for sign, count in counts.items()]
    if script.exports:
        parts.append("exports of " + ", ".join(f"`{name}`" for name in script.exports))
    if parts:
        kind = next((f" {_JOBS[sign]}" for sign in counts), "")
        yield (
            f"only the command is translated: keep the script's {' and '.join(parts)} around the "
            f"new command, or write them in a profile for `lmcore launch{kind}`"
        )


def _report(rows: Sequence[FlagRow], script: ShellScript, made: _Made, stream: Any) -> None:
    """Print what became of each flag, and what is left to do."""
    print_table(rows, stream)
    _print_open(script, stream)
    if made.steps is not None:
        print(
            f"note: a step has {counted(made.steps, 'micro-batch', 'micro-batches')} in the "
            "engine's file: set `global_batch_size` to that many times the micro-batch size and "
            "the data-parallel processes",
            file=stream,
        )
    if not {one.name for one, _, _ in made.settings} & {*EXCLUSIVE[0]}:
        print(
            "note: the settings name no data, and `lmcore train` would read the bundled text: add "
            "`--data-path PREFIX`, or what the table says",
            file=stream,
        )
    if made.problems:
        print("`lmcore train` would say now:", file=stream)
    for problem in made.problems:
        lines = [line for line in printable(str(problem)).splitlines() if line]
        print("  " + "\n    ".join(lines), file=stream)

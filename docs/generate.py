"""Write the reference pages that are made from the code.

`python docs/generate.py` writes docs/reference/{options,presets,megatron-flags,commands}.md,
docs/reference/{models,records,torch-functions}.md, tests/golden/flags.txt and the snapshot of the
plugin contract; a test fails where a file and the code differ.  Of the plugins only the CPU's, the
applications and the authors' kit are described, whatever else is installed; the kit has to be
importable.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import inspect
import io
import os
import sys
import textwrap
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

from lmcore import contract
from lmcore.cli.commands import GROUPS, known_commands
from lmcore.cli.main import main
from lmcore.cli.plugin_commands import find_commands
from lmcore.config.continued import CONTINUE_OPTION
from lmcore.config.derived.model_math import model_shape, num_query_groups
from lmcore.config.foreign import megatron
from lmcore.config.load import load_config
from lmcore.config.megatron_defaults import DEFAULTS_OPTION
from lmcore.config.option import Option, options_of
from lmcore.config.options.help import shown_default
from lmcore.config.plugin_section import PluginSections, summary_of
from lmcore.config.preset import PRESET_OPTION, PRESETS
from lmcore.config.section import SECTIONS, ModelSection, run_options
from lmcore.config.token_lengths import TOKEN_OPTIONS
from lmcore.contract import API_VERSION
from lmcore.contract.op.records import load_target
from lmcore.contract.registry import CommandRegistry
from lmcore.conversion.state import ModelState, Progress
from lmcore.families.protocol import TensorParallelPlan
from lmcore.model.checkpoint_format import CheckpointFormat
from lmcore.model.family import (
    Body,
    Family,
    ForwardFlops,
    Loss,
    Pretrained,
    Stack,
    families,
    family_of,
    parameters_of,
)
from lmcore.model.parameters import Init, Parameter, Split, parameter_count
from lmcore.model.shape import ModelPart
from lmcore.model.vocabulary import pad_vocab_size
from lmcore.plugin import ALLOW_LIST, discover
from lmcore.plugin.registrations import plugin_sections
from lmcore_conformance.contract.snapshot import renewed_contract
from lmcore_conformance.contract.torch_needs import TORCH_NEEDS

ROOT = Path(__file__).resolve().parents[1]
APPLICATIONS = ("plugins/data-tools/src", "plugins/serve/src")
sys.path += [str(ROOT / folder) for folder in APPLICATIONS]  # where they are not installed
CONTRACTS = "plugins/conformance/src/lmcore_conformance/contract/versions"
_NOTE = "<!-- Made by `python docs/generate.py`; do not edit. -->"

_ABOUT_RECORDS = """\
What a plugin's hooks return and get: frozen dataclasses of `lmcore.contract`. A field without a
default has to be given. Where a type is a function, the field takes a function with these arguments
and this result: `available=lambda: None` for a policy that can be used everywhere. The hooks are on
[their own page](hooks.md)."""

_ABOUT_FAMILIES = """\
What a [model family](../how-to/add-a-model-family.md) and a
[checkpoint format](../how-to/add-a-checkpoint-format.md) consist of, from `lmcore.model` and
`lmcore.conversion`. `ModelState` is a class whose subclasses set these attributes."""

_OF_FAMILIES = (
    *(
        Family,
        Loss,
        Stack,
        Body,
        ForwardFlops,
        Pretrained,
        Parameter,
        Init,
        Split,
        ModelPart,
        TensorParallelPlan,
    ),
    *(CheckpointFormat, ModelState, Progress),
)

_ABOUT_TOKENS = """## Lengths in tokens

Flags alone, of no section: they set a number of samples, rounded up. A line at the start of the
run says which."""

_ABOUT_OPTIONS = """\
Every option is a flag (`--train-iters 100`) and a key of a YAML file, below its section
(`training:` `train_iters: 100`). Switches have a `--no-` form.
[How to configure a run](../how-to/configure.md) explains files, presets and the order in which they
apply.

The column "resume" is what a value that differs from the checkpoint's means for a run that
continues: it is `free`, or named in a warning (`warn`; `dropout`: if the run has dropout, whose
random numbers may change), or its effect on the model, the learning-rate schedule, the order of
the samples, the tokenizer or the optimizer is `checked`, and a difference is an error unless a
flag accepts it:
[What must agree](../how-to/continue-a-run.md#what-must-agree).

A setting that needs something else to have an effect says so: "Needs `--profile`." If it is given
without that, it is an error, or a line at the start of the run and of `lmcore config show` names
it: `ignored: ...`.

Plugins add sections of their own. The last one below is that of the CPU's plugin, which comes with
lmcore. The flags of a plugin begin with its name (`--cpu-keep-freed-memory`), the keys in its
section of a file do not (`cpu:` `keep_freed_memory: true`)."""

_ABOUT_PRESETS = """\
`lmcore train --preset NAME` starts from a published model; files and flags override its values.
Batch size and length of the run are yours to choose. Each preset warms up over 1% of the decay and
ends at a tenth of its learning rate."""

_ABOUT_FLAGS = """\
Options have the names of Megatron's flags, so most commands work as they are. The flags below are
the others: `lmcore train` accepts those of the first two tables with a line that says so, and
refuses those of the third with the hint shown. Underscores count as dashes."""

_ABOUT_COMMANDS = """\
| exit status | meaning |
|---|---|
| 0 | success, or a run that a signal or a limit ended after it saved a checkpoint |
| 1 | the work failed: a file is damaged or missing, a run cannot go on, a check found a problem |
| 2 | an argument or settings file is wrong, or the data or `--load` of a run: nothing ran |
| 130 | interrupted by Ctrl-C |
| 143, 129, 138, 140 | ended by SIGTERM, SIGHUP, SIGUSR1, SIGUSR2: 128 + the number of the signal |
| 141 | the reader of the output ended first, as in `lmcore ops list \\| head`; `train` goes on |"""

_ABOUT_TORCH = """\
Functions of torch that the core calls for a device. They are part of the
[contract with plugins](hooks.md#versions) and of its versions: `lmcore plugin check --against
VERSION` compares the device's streams, events and graphs with the list of that version. Most
functions are called by the `Device` that `Device.from_torch` returns; a plugin can pass another one
by the name of the attribute.

`module` is the device type's module in torch, `torch.get_device_module("mychip")`, usually
`torch.mychip`. `Stream`, `Event` and `Graph` are what `Device.new_stream`, `new_event` and
`new_graph` return, and the streams of `torch.accelerator.current_stream`. A function of the column
"else" is used if the type is torch's current accelerator and its module lacks the first. Indices
are passed as integers.

The tables leave out torch's operators (`aten::...`) on tensors of the device, which the
[references of the ops](ops.md), the optimizers and copies between device and host call, also with
`non_blocking`. torch's fallback to the CPU is enough for them. Levels 2 and 3 of the
[conformance suite](conformance.md) run them."""

_ABILITIES = "Needed by devices that have all the attributes of the first column."

_ADDING = {
    "lmcore-data-tools": "lmcore_data_tools.plugin",
    "lmcore-serve": "lmcore_serve.plugin",
    "lmcore-conformance": "lmcore_conformance.plugin",
}
"""Module of the plugin of each package whose commands are described."""


def options_page() -> str:
    """Return the reference of every option of a run."""
    parts = [
        "# Options",
        _NOTE,
        _ABOUT_OPTIONS,
    ]
    head = ("option", "type", "default", "allowed", "resume", "meaning")
    for name, section in SECTIONS.items():
        rows = [_option_row(one) for one in options_of(section, name=name)]
        parts += [f"## `{name}`\n\n{summary_of(section)}", _table(head, rows)]
    rows = [(f"`{one.flag}`", one.help) for one in TOKEN_OPTIONS]
    parts += [_ABOUT_TOKENS, _table(("flag", "meaning"), rows)]
    for title, about, options in _cpu_sections().groups():
        name = title.removeprefix("plugin ")
        rows = [(f"`{one.flag}`", *_option_row(one)) for one in options]
        parts += [f"## `{name}`, of the plugin `{name}`\n\n{about}", _table(("flag", *head), rows)]
    return "\n\n".join(parts) + "\n"


def _heads(model: ModelSection) -> str:
    """Return the heads, with the heads of keys if there are fewer."""
    grouped = f" in {num_query_groups(model)} groups" if model.group_query_attention else ""
    return f"{model.num_attention_heads}{grouped}"


def presets_page() -> str:
    """Return the table of presets."""
    rows = []
    for preset in PRESETS.values():
        config = load_config(["--preset", preset.name]).config
        model = config.model
        vocabulary = config.data.vocab_size or 0
        padded = pad_vocab_size(vocabulary, divisible_by=model.make_vocab_size_divisible_by)
        rows.append(
            (
                f"`{preset.name}`",
                f"{parameter_count(parameters_of(model_shape(model, padded, config))):,}",
                str(model.num_layers),
                str(model.hidden_size),
                _heads(model),
                str(model.seq_length),
                f"{vocabulary:,}",
                f"{config.optimizer.lr:g}",
                preset.source,
            )
        )
    head = ("preset", "parameters", "layers", "hidden", "heads", "sequence", "vocabulary")
    parts = [
        "# Presets",
        _NOTE,
        _ABOUT_PRESETS,
        _table((*head, "lr", "source"), rows),
    ]
    return "\n\n".join(parts) + "\n"


def models_page() -> str:
    """Return the page of the families of models, from their records."""
    lines = [
        "# Families of models",
        "",
        _NOTE,
        "",
        "A family is one record, `Family`, in a folder of `lmcore/families/`, and is chosen by",
        "`--model-family`; GPT and Llama also by the settings that tell them apart. Plugins add",
        "others ([guide](../how-to/add-a-model-family.md)); the page of records has every field",
        "([records](records.md#model-families-and-checkpoint-formats)).",
    ]
    for family in families().values():
        lines += ["", f"## {family.name}", "", _family_table(family)]
    return "\n".join([*lines, ""])


def _family_table(family: Family) -> str:
    """Return the table of a family: where it is, and what is particular to it."""
    folder = family.model.split(":")[0].rpartition(".")[0].replace(".", "/")
    about = (inspect.getdoc(importlib.import_module(folder.replace("/", "."))) or "").rstrip(".")
    model, samples = (_source(name) for name in (family.model, family.samples))
    chosen = f"`--model-family {family.key}`"
    if family.matches is not None:
        chosen += ", or none and its settings"
    presets = [name for name, preset in PRESETS.items() if _is_of(preset.values, family)]
    body = "no"
    if family.body is not None:
        pooled = "first" if family.body.bidirectional else "last"
        body = f"yes, on the {pooled} token"
    rows = {
        "definition": f"{about}: {model}",
        "record": f"[`{folder}/family.py`](../../{folder}/family.py)",
        "samples": samples,
        "chosen by": chosen,
        "positions": ", ".join(f"`{one}`" for one in family.positions),
        "batch": ", ".join(
            f"`{name}`{' (optional)' * (name in family.optional)}" for name in family.batch
        ),
        "losses": ", ".join(
            f"{loss.name}{' (with accuracies)' * loss.accuracy}" for loss in family.losses
        ),
        "settings": ", ".join(f"`{name}` ({value!r})" for name, value in family.settings.items()),
        "presets": ", ".join(f"`{name}`" for name in presets),
        "checkpoints of": ", ".join(sorted(family.names)),
        "heads for tasks": body,
        "tests": _tests_of(folder),
    }
    table = [(name, _cell(text)) for name, text in rows.items() if text]
    return _table(("", ""), table)


def _is_of(values: Mapping[str, Any], family: Family) -> bool:
    settings = dataclasses.replace(
        ModelSection(),
        **{
            name: value
            for name, value in values.items()
            if name in ModelSection.__dataclass_fields__
        },
    )
    return family_of(settings) is family


def _source(name: str) -> str:
    module, _, attribute = name.partition(":")
    path = f"{module.replace('.', '/')}.py"
    return f"[`{attribute}`](../../{path})"


def _tests_of(folder: str) -> str:
    tests = folder.replace("lmcore/", "tests/unit/")
    return f"[`{tests}`](../../{tests})"


def megatron_page() -> str:
    """Return what becomes of Megatron's flags."""
    parts = [
        "# Megatron's flags",
        _NOTE,
        _ABOUT_FLAGS,
        "## Renamed",
        _renamed(megatron.RENAMED),
        "## Already the behaviour",
        "Accepted with the values shown, and without effect.",
        _fixed(megatron.FIXED),
        "## Not supported",
        _unsupported(megatron.UNSUPPORTED),
        "## In `lmcore data prepare`",
        _renamed(megatron.PREPARE_RENAMED),
        _fixed(megatron.PREPARE_FIXED),
        _unsupported(megatron.PREPARE_UNSUPPORTED),
        "## In `lmcore data merge`",
        _fixed(megatron.MERGE_FIXED),
    ]
    return "\n\n".join(parts) + "\n"


def torch_page() -> str:
    """Return the functions of torch that the core calls for a device."""
    head = ("function", "else", "used for", "if it is missing")
    every, some, optional = [], [], []
    for name, need in TORCH_NEEDS.items():
        instead = f"`{need.instead}`" if need.instead else ""
        row = (f"`{name}`", instead, need.used, need.missing)
        if need.optional:
            optional.append(row)
        elif need.abilities:
            some.append((", ".join(f"`{ability}`" for ability in need.abilities), *row))
        else:
            every.append(row)
    parts = ["# Functions of torch that a device needs", _NOTE, _ABOUT_TORCH]
    parts += ["## Every device", _table(head, every)]
    parts += ["## Devices with an ability", _ABILITIES, _table(("with", *head), some)]
    parts += ["## Optional", _table(head, optional)]
    return "\n\n".join(parts) + "\n"


def commands_page() -> str:
    """Return the help of every command."""
    parts = ["# Commands", _NOTE, f"```\n{_help_text([])}\n```", _ABOUT_COMMANDS]
    with _only_the_cpu():
        found = find_commands()
    for one in (*known_commands().values(), *found.values()):
        for command in (one, *GROUPS.get(one.name, ())):
            if not command.load:
                continue
            line = command.name.split()
            parts.append(f"## `lmcore {command.name}`")
            parts.append(f"```\n{_help_text([*line, '--help'])}\n```")
    for package, plugin in _ADDING.items():
        registry = CommandRegistry(package)
        load_target(f"{plugin}:lmcore_add_commands")(registry)
        for command in registry.found.values():
            text = _printed(load_target(command.load), ["--help"])
            parts.append(f"## `lmcore {command.name}`\n\nFrom the package `{package}`.")
            parts.append(f"```\n{text}\n```")
    return "\n\n".join(parts) + "\n"


def records_page() -> str:
    """Return the fields of every record of the contract."""
    parts = ["# Records of the contract", _NOTE, _ABOUT_RECORDS]
    for name in sorted(contract.__all__):
        record = getattr(contract, name)
        if isinstance(record, type) and dataclasses.is_dataclass(record):
            parts += _record(record)
    parts += ["## Model families and checkpoint formats", _ABOUT_FAMILIES]
    for record in sorted(_OF_FAMILIES, key=lambda one: one.__name__):
        parts += _record(record, level="###")
    return "\n\n".join(parts) + "\n"


def _record(record: type, *, level: str = "##") -> list[str]:
    """Return the section of a record: its docstring, and a table of its fields."""
    summary, _, attributes = inspect.cleandoc(record.__doc__ or "").partition("Attributes:")
    meanings = _meanings(attributes)
    rows = [
        (f"`{one.name}`", f"`{one.type}`", _default_of(one), meanings.get(one.name, ""))
        for one in _fields(record)
        if one.init and not one.name.startswith("_")
    ]
    parts = [f"{level} `{record.__name__}`", summary.strip()]
    return [*parts, _table(("field", "type", "default", "meaning"), rows)] if rows else parts


def _fields(record: type) -> list[dataclasses.Field[Any]]:
    """Return the fields of a dataclass, a named tuple, or a class with annotated attributes."""
    if dataclasses.is_dataclass(record):
        return list(dataclasses.fields(record))
    defaults = getattr(record, "_field_defaults", vars(record))
    found = []
    for name, kind in inspect.get_annotations(record).items():
        default = defaults.get(name, dataclasses.MISSING)
        one: dataclasses.Field[Any] = dataclasses.field(default=default)
        # A named tuple keeps the text of an annotation in a reference.
        one.name, one.type = name, getattr(kind, "__forward_arg__", kind)
        found.append(one)
    return found


def _meanings(attributes: str) -> dict[str, str]:
    """Return the text about each name of the section `Attributes:` of a docstring."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in textwrap.dedent(attributes.strip("\n")).splitlines():
        if line.startswith(" "):
            for name in names:
                found[name] = f"{found[name]} {line.strip()}"
        elif ": " in line:
            words, _, text = line.partition(": ")
            names = [word.strip() for word in words.split(",")]
            found |= dict.fromkeys(names, text.strip())
        else:
            names = []  # a paragraph after the attributes
    return found


def _default_of(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        made = field.default_factory()
        return f"`{made!r}`" if not made or dataclasses.is_dataclass(made) else ""
    if field.default is dataclasses.MISSING:
        return "required"
    if callable(field.default):
        return (
            "a function that does nothing" if field.type == "Callable[[], None]" else "a function"
        )
    default = {} if isinstance(field.default, MappingProxyType) else field.default
    return f"`{default!r}`"


def flags_list() -> str:
    """Return every flag of a run, one a line, including the flags of the CPU's plugin."""
    options = [
        PRESET_OPTION,
        DEFAULTS_OPTION,
        CONTINUE_OPTION,
        *TOKEN_OPTIONS,
        *run_options().values(),
        *_cpu_sections().options.values(),
    ]
    return "".join(f"{flag}\n" for flag in sorted(one.flag for one in options))


PAGES: Mapping[str, Callable[[], str]] = {
    "docs/reference/options.md": options_page,
    "docs/reference/presets.md": presets_page,
    "docs/reference/megatron-flags.md": megatron_page,
    "tests/golden/flags.txt": flags_list,
    "docs/reference/commands.md": commands_page,
    "docs/reference/models.md": models_page,
    "docs/reference/records.md": records_page,
    "docs/reference/torch-functions.md": torch_page,
    f"{CONTRACTS}/{API_VERSION}.json": renewed_contract,
}
"""Function that makes each file."""


def _cpu_sections() -> PluginSections:
    with _only_the_cpu():
        return plugin_sections(discover(probe=False))


def _option_row(one: Option) -> tuple[str, ...]:
    default = shown_default(one)
    shown = f"`{default}`" if default else ""
    needs = f" Needs {'; '.join(need.words for need in one.needs)}." if one.needs else ""
    return (f"`{one.key}`", one.type_name, shown, one.bound, one.on_resume, one.help + needs)


def _renamed(table: Mapping[str, megatron.Renamed]) -> str:
    rows = []
    for name, one in table.items():
        only = f" {' or '.join(one.only)}" if one.only else ""
        rows.append((f"`{name}{only}`", f"`{one.replacement}`"))
    return _table(("flag", "here"), rows)


def _fixed(table: Mapping[str, megatron.Fixed]) -> str:
    rows = []
    for name, one in table.items():
        values = "any" if one.only is None else ", ".join(f"`{value}`" for value in one.only)
        rows.append((f"`{name}`", values, one.note, one.hint))
    return _table(("flag", "values", "what happens", "other values"), rows)


def _unsupported(table: Mapping[str, str]) -> str:
    return _table(("flag", "hint"), [(f"`{name}`", hint) for name, hint in sorted(table.items())])


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("-" for _ in head), *rows]
    return "\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _only_the_cpu() -> AbstractContextManager[object]:
    """Have discovery leave out every plugin but the CPU's."""
    return mock.patch.dict(os.environ, {ALLOW_LIST: ""})


def _help_text(argv: list[str]) -> str:
    return _printed(main, argv)


def _printed(run: Callable[[list[str]], int], argv: list[str]) -> str:
    text = io.StringIO()
    with (
        _only_the_cpu(),
        mock.patch.dict(os.environ, {"COLUMNS": "100"}),
        contextlib.redirect_stdout(text),
    ):
        try:
            status = run(argv)
        except SystemExit as ended:  # help was printed
            status = ended.code
    assert status == 0, argv
    return text.getvalue().rstrip("\n")


if __name__ == "__main__":
    for path, make in PAGES.items():
        (ROOT / path).write_text(make(), encoding="utf-8")
        print(f"wrote {path}")

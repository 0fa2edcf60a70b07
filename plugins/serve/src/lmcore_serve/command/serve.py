"""`lmcore serve`: answer requests for text over HTTP."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from lmcore.base.errors import ConfigError, counted
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
from lmcore.config.foreign.generate import GivenModel, serve_flags
from lmcore.config.option import option, options_of
from lmcore.config.options.command_line import parse_with_plugins, wants_help
from lmcore.model.family import family_of, stacks_of
from lmcore.plugin.registrations import plugin_sections
from lmcore_serve.key_file import read_keys

if TYPE_CHECKING:
    from lmcore.config.plugin_section import PluginSettings
    from lmcore.generation.chat.template import ChatTemplate
    from lmcore.inference.load import LoadedModel
    from lmcore.plugin import PluginSet
    from lmcore.runtime.runtime import Runtime
    from lmcore_serve.served_model import ServedModel

__all__ = ["ServeSection", "run"]

logger = logging.getLogger(f"lmcore.{__name__}")  # of the lines that lmcore formats

_EPILOG = """\
  lmcore serve --load runs/my-run
  curl localhost:5000/v1/completions -H 'Content-Type: application/json' \\
      -d '{"prompt": "Once upon a time", "max_tokens": 50}'

The page is at http://localhost:5000/."""


@dataclass(frozen=True)
class ServeSection(LoadingSection):
    """Answer requests for text over HTTP, with a page to try a model."""

    load: str | None = option(
        None,
        "Run directory, its `checkpoints`, one `iter_XXXXXXX`, or the directory of another "
        "program, such as Hugging Face or Megatron.",
        metavar="DIR",
    )
    compare: tuple[str, ...] = option(
        (),
        "Instead of --load, two such directories: the page shows their answers side by side.",
        metavar="DIR",
    )
    model_name: str | None = option(
        None, "Name of the model in requests; default: the directory's.", metavar="NAME"
    )
    host: str = option(
        "127.0.0.1",
        "Address to listen on; the default is reached from this machine only.",
        metavar="HOST",
    )
    port: int = option(5000, "Port to listen on; 0: any free one.", minimum=0, maximum=65535)
    api_key_file: str | None = option(
        None,
        "File with the API keys that clients need, one on each line; default: none needed.",
        metavar="FILE",
    )
    allowed_host: tuple[str, ...] = option(
        (),
        "Further names of this server in the `Host` header of requests, such as that of a proxy.",
        metavar="NAME",
    )
    max_requests: int = option(16, "Texts that are generated together.", minimum=1, maximum=4096)
    max_waiting: int = option(
        128, "Texts that may wait; a request beyond is refused (429).", minimum=0, maximum=65536
    )
    request_timeout: float = option(
        600.0, "Seconds in which a request has to be complete.", above=0, maximum=86400
    )
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests have after SIGTERM or Ctrl-C.", minimum=1, maximum=3600
    )
    max_body_kb: int = option(
        4096, "Largest body of a request in KiB.", minimum=1, maximum=1024 * 1024
    )
    max_connections: int = option(
        512,
        "Open connections; beyond, a new one takes the place of one that waits.",
        minimum=8,
        maximum=65536,
    )
    max_tokens_to_oom: int = option(
        12000,
        "As Megatron's flag: most tokens of a request to `/api`, prompts times the longest text.",
        minimum=1,
    )
    access_log: str = option(
        "-",
        "File for a JSON object per request, without its texts; `-`: standard error; `none`: no "
        "log.",
        metavar="FILE",
    )
    chat_template: str | None = option(
        None,
        "File with the jinja2 template of chats; default: the one that the tokenizer's files have.",
        metavar="FILE",
    )


def run(argv: list[str]) -> int:
    """Run `lmcore serve` and return the exit status."""
    plugins = find_plugins(argv, probe=not wants_help(argv))
    own = options_of(ServeSection)
    negations = {f"--no-{one.flag[2:]}" for one in own if one.type is bool}
    model = GivenModel()
    section, settings = parse_with_plugins(
        ServeSection,
        argv,
        command="lmcore serve",
        plugins=plugin_sections(plugins),
        foreign=serve_flags({one.flag for one in own} | negations, model),
        epilog=_EPILOG,
    )
    # What can fail fails before the model is loaded.
    checkpoints = {
        name: require_checkpoint(path, section.ckpt_step)
        for name, path in _directories(section).items()
    }
    if section.chat_template is not None:
        from lmcore.generation.chat.template import check_template

        check_template(section.chat_template)
    plan = plan_processes(section, plugins)
    if plan.layout.world_size > 1 and section.compare:
        raise ConfigError(
            "`--compare` cannot be used with several processes", why="they hold one model"
        )
    return run_planned(
        ["serve", *argv],
        plan,
        plugins,
        lambda: _serve(section, checkpoints, plan, plugins, settings, model),
    )


def _serve(
    section: ServeSection,
    checkpoints: dict[str, Path],
    plan: ProcessPlan,
    plugins: PluginSet,
    settings: PluginSettings,
    model: GivenModel,
) -> None:
    """Load the models and answer requests; other ranks than 0 hold a part of the model."""
    if plan.rank.rank:
        (checkpoint,) = checkpoints.values()
        with (
            started_runtime(section, plan, plugins, settings) as runtime,
            _loaded(section, checkpoint, plan, runtime, plugins, model),
        ):
            return
    keys = read_keys(section.api_key_file) if section.api_key_file is not None else []
    from lmcore_serve.server import (
        ServerSettings,
        allowed_connections,
        is_loopback,
        listen,
        serve,
    )
    from lmcore_serve.state import Limits, ServerState

    sock = listen(section.host, section.port)
    limits = Limits(
        max_body_bytes=section.max_body_kb * 1024,
        request_seconds=section.request_timeout,
        max_connections=allowed_connections(section.max_connections),
        max_total_tokens=section.max_tokens_to_oom,
    )
    with ExitStack() as stack:
        stack.callback(sock.close)
        log = stack.enter_context(_access_log(section))
        runtime = stack.enter_context(started_runtime(section, plan, plugins, settings))
        models = {
            name: stack.enter_context(_served(section, path, name, plan, runtime, plugins, model))
            for name, path in checkpoints.items()
        }
        if not is_loopback(section.host) and not keys:
            logger.warning(
                "everybody who reaches port %d of this machine can use the server: "
                "`--api-key-file` limits it to those with a key",
                sock.getsockname()[1],
            )
        address, port = sock.getsockname()[:2]
        shown = f"[{address}]" if ":" in address else address
        logger.info("serving %s on http://%s:%d", ", ".join(models), shown, port)
        serve(
            ServerState(models, limits),
            sock,
            section.host,
            ServerSettings(keys, section.allowed_host, section.shutdown_timeout, log),
        )


def _directories(section: ServeSection) -> dict[str, Path]:
    """Return the directories of the models by name."""
    if section.load is not None and section.compare:
        raise ConfigError("`--load` and `--compare` exclude each other", hint="keep one of them")
    if section.load is None and not section.compare:
        raise ConfigError(
            "name a checkpoint by `--load`, or two by `--compare`",
            hint="`lmcore serve --load RUN`",
        )
    if section.load is not None:
        path = Path(section.load)
        return {section.model_name or _name(path): path}
    if len(section.compare) != 2:
        raise ConfigError(
            f"`--compare` has {counted(len(section.compare), 'directory', 'directories')}",
            why="it compares two",
        )
    for flag, value in (("--model-name", section.model_name), ("--ckpt-step", section.ckpt_step)):
        if value is not None:
            raise ConfigError(
                f"`{flag}` cannot be used with `--compare`", why="there are two models"
            )
    first, second = (Path(one) for one in section.compare)
    names = (_name(first), _name(second))
    if names[0] == names[1]:
        names = (f"{names[0]}-1", f"{names[1]}-2")
    return dict(zip(names, (first, second), strict=True))


def _name(path: Path) -> str:
    """Return the name of a model: of its run, or with the step for one checkpoint."""
    resolved = path.resolve()
    if resolved.name == "checkpoints":
        return resolved.parent.name
    if resolved.name.startswith("iter_") and resolved.parent.name == "checkpoints":
        return f"{resolved.parent.parent.name}-{resolved.name}"
    return resolved.name


@contextmanager
def _access_log(section: ServeSection) -> Iterator[TextIO | None]:
    if section.access_log == "none":
        yield None
    elif section.access_log == "-":
        yield sys.stderr
    else:
        with ExitStack() as stack:
            try:
                stream = stack.enter_context(Path(section.access_log).open("a", encoding="utf-8"))
            except OSError as error:
                raise ConfigError(
                    f"cannot write `{section.access_log}`", why=error.strerror or str(error)
                ) from None
            yield stream


def _loaded(
    section: ServeSection,
    checkpoint: Path,
    plan: ProcessPlan,
    runtime: Runtime,
    plugins: PluginSet,
    model: GivenModel,
    check: Callable[[LoadedModel], None] | None = None,
) -> AbstractContextManager[LoadedModel | None]:
    """Load a model; see `loaded_model`."""
    return loaded_model(
        section,
        checkpoint,
        plan,
        runtime,
        plugins,
        rows=section.max_requests,
        require=lambda shape: model.require(dataclasses.asdict(shape)),
        check=check,
    )


@contextmanager
def _served(
    section: ServeSection,
    checkpoint: Path,
    name: str,
    plan: ProcessPlan,
    runtime: Runtime,
    plugins: PluginSet,
    model: GivenModel,
) -> Iterator[ServedModel]:
    """Load a model and start its service."""
    from lmcore_serve.served_model import ServedModel
    from lmcore_serve.service import Service

    def check(described: LoadedModel) -> None:
        _template(section, checkpoint, described)

    with _loaded(section, checkpoint, plan, runtime, plugins, model, check) as loaded:
        assert loaded is not None
        template = _template(section, checkpoint, loaded)
        service = Service(loaded, max_running=section.max_requests, max_waiting=section.max_waiting)
        yield ServedModel(name, loaded, service, template, _facts(loaded, runtime, template))


def _template(section: ServeSection, checkpoint: Path, loaded: LoadedModel) -> ChatTemplate | None:
    """Return the chat template of a model; None if it has none.

    Raises:
        ConfigError: The model is not served, or its tokenizer or the options do not fit it.
    """
    from lmcore.generation.chat.template import ChatTemplate
    from lmcore.generation.text.prompt import source_and_prompt

    if loaded.reads_neighbors:
        raise ConfigError(
            f"the model of `{checkpoint}` is not served",
            why="its texts have neighbours, which no interface takes",
            hint="generate with `lmcore generate --retro-neighbors FILE`",
        )
    if loaded.reads_source:
        if section.chat_template is not None:
            raise ConfigError(
                f"`--chat-template` cannot be used with the model of `{checkpoint}`",
                why="it has an encoder, and answers each prompt by itself",
                hint="leave it out",
            )
        source_and_prompt(loaded.tokenizer, ())  # a tokenizer that cannot fails before serving
        return None
    if section.chat_template is not None:
        return ChatTemplate.from_file(section.chat_template, loaded.tokenizer)
    return ChatTemplate.of(loaded.tokenizer)


def _facts(
    loaded: LoadedModel, runtime: Runtime, template: ChatTemplate | None
) -> dict[str, str | int | bool]:
    """Return what the page shows of a model."""
    shape = loaded.model.shape
    return {
        "family": family_of(shape).name,
        "parameters": loaded.num_parameters,
        "layers": sum(stack.num_layers for stack in stacks_of(shape)),
        "hidden_size": shape.hidden_size,
        "positions": shape.max_position_embeddings,
        "vocabulary": loaded.tokenizer.vocab_size,
        "tokenizer": loaded.tokenizer.name,
        "checkpoint": loaded.checkpoint.name,
        "device": runtime.device.name,
        "precision": runtime.precision.name,
        "chat": template is not None,
        "answers": loaded.reads_source,
    }

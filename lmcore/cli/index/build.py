"""`lmcore index build`: compute the vectors of all blocks of a dataset."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError
from lmcore.cli.loading import (
    LoadingSection,
    plan_processes,
    require_checkpoint,
    started_runtime,
)
from lmcore.cli.selection import find_plugins
from lmcore.config.foreign.generate import GivenModel
from lmcore.config.foreign.index import index_flags
from lmcore.config.option import REQUIRED, option, options_of
from lmcore.config.options.command_line import parse_with_plugins, wants_help
from lmcore.plugin.registrations import plugin_sections

if TYPE_CHECKING:
    from lmcore.config.plugin_section import PluginSettings
    from lmcore.plugin import PluginSet
    from lmcore.retrieval.encoder import TextEncoder

__all__ = ["BuildSection", "loaded_encoder", "run"]

_EPILOG = """\
A build that was stopped goes on where it was. Several processes, also of several hosts, may build
one index: start the same command in each, with its own device.

  lmcore index build runs/ict --data-path wiki_text_sentence --output wiki.index
  lmcore index search wiki.index 'Who wrote Faust?'"""


@dataclass(frozen=True)
class BuildSection(LoadingSection):
    """Compute the vectors of all blocks of a dataset of sentences, in shards on disk."""

    data_path: str = option(
        REQUIRED, "Prefix of the dataset, prepared with --split-sentences.", metavar="PREFIX"
    )
    output: str = option(REQUIRED, "Directory of the index.", metavar="DIR")
    checkpoint: str | None = option(
        None, "Run or checkpoint of the family ICT.", metavar="CHECKPOINT"
    )
    titles_data_path: str | None = option(
        None, "Prefix of a dataset with the title of each document.", metavar="PREFIX"
    )
    use_one_sent_docs: bool = option(False, "Take documents of one sentence too.")
    seq_length: int | None = option(
        None, "Most tokens of a block; default: the model's positions.", minimum=5
    )
    micro_batch_size: int = option(
        16,
        "Number of blocks that are computed together; on a GPU 128 or more.",
        minimum=1,
        maximum=1 << 16,
    )
    shard_blocks: int = option(
        1 << 16, "Blocks of a shard, which is built as a whole.", minimum=1, maximum=1 << 24
    )
    ict_load: str | None = option(None, "The checkpoint, by Megatron's flag.", metavar="DIR")

    def encoder(self) -> Path:
        """Return the directory of the checkpoint.

        Raises:
            ConfigError: None is given, or two.
        """
        given = {one for one in (self.checkpoint, self.ict_load) if one is not None}
        if len(given) > 1:
            raise ConfigError(
                f"two checkpoints are given: `{self.checkpoint}` and `--ict-load {self.ict_load}`",
                why="an index is built with one encoder",
                hint="keep one of them",
            )
        if not given:
            raise ConfigError(
                "`lmcore index build` needs a run or checkpoint of the family ICT",
                hint="`lmcore index build runs/ict --data-path PREFIX --output DIR`",
            )
        return Path(given.pop())


def run(argv: list[str]) -> int:
    """Run `lmcore index build` and return the exit status."""
    plugins = find_plugins(argv, probe=not wants_help(argv))
    model = GivenModel()
    section, settings = parse_with_plugins(
        BuildSection,
        argv,
        command="lmcore index build",
        plugins=plugin_sections(plugins),
        positionals=("checkpoint",),
        foreign=index_flags(
            {flag for one in options_of(BuildSection) for flag in one.flags}, model
        ),
        epilog=_EPILOG,
    )
    from lmcore.config.derived.data_source import without_ending

    titles = section.titles_data_path
    with loaded_encoder(section, section.encoder(), plugins, settings) as encoder:
        from lmcore.retrieval.index import build_index

        model.require(encoder.shape.to_dict())
        record = build_index(
            encoder,
            Path(section.output),
            data_path=without_ending(section.data_path),
            titles_data_path=None if titles is None else without_ending(titles),
            seq_length=section.seq_length,
            one_sentence=section.use_one_sent_docs,
            batch=section.micro_batch_size,
            shard=section.shard_blocks,
        )
    print(
        f"{section.output}: {record.blocks:,} blocks, vectors of {record.size} channels\n"
        f"search it   lmcore index search {section.output} 'QUESTION'"
    )
    return 0


@contextmanager
def loaded_encoder(
    section: LoadingSection, checkpoint: Path, plugins: PluginSet, settings: PluginSettings
) -> Iterator[TextEncoder]:
    """Load torch and an encoder, with the device in use within the context.

    Args:
        section: Options of the command.
        checkpoint: Directory that the user named.
        plugins: Plugins to choose from.
        settings: Options of the plugins.

    Raises:
        CheckpointError, ConfigError, DataError: See `load_encoder`; or the options divide the model
            over processes.
    """
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size", "nproc_per_node"):
        if (getattr(section, name) or 1) > 1:
            raise ConfigError(
                f"`--{name.replace('_', '-')}` is not supported by `lmcore index`",
                why="an encoder is loaded whole by each process",
                hint="leave it out; several processes may build one index",
            )
    if section.quantization is not None:
        raise ConfigError(
            "`--quantization` is not supported by `lmcore index`", hint="leave it out"
        )
    chosen = require_checkpoint(checkpoint, section.ckpt_step)
    plan = plan_processes(section, plugins)
    with started_runtime(section, plan, plugins, settings) as runtime:
        from lmcore.data.tokenizer.build import registered_types
        from lmcore.retrieval.encoder import load_encoder

        choice, extra = section.tokenizer_choice(), registered_types(plugins)
        yield load_encoder(chosen, runtime, choice=choice, extra=extra)

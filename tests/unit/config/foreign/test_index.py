"""The command line of Megatron's `create_doc_index.py`: each flag acts, or is answered."""

from __future__ import annotations

import pytest

from lmcore.base.errors import ConfigError
from lmcore.cli.index.build import BuildSection
from lmcore.config.foreign.generate import GivenModel
from lmcore.config.foreign.index import index_flags
from lmcore.config.option import options_of
from lmcore.config.options.command_line import parse_with_plugins

PUBLISHED = (
    "--num-layers 12 --hidden-size 768 --ict-head-size 128 --num-attention-heads 12 "
    "--batch-size 64 --activations-checkpoint-method uniform --seq-length 256 "
    "--max-position-embeddings 256 --ict-load ict --data-path d --titles-data-path t "
    "--block-data-path embedded_blocks.pkl --indexer-log-interval 1000 --indexer-batch-size 128 "
    "--vocab-file vocab.txt --num-workers 2 --fp16"
)


def parse(flags: str, model: GivenModel) -> BuildSection:
    own = {flag for one in options_of(BuildSection) for flag in one.flags}
    section, _ = parse_with_plugins(
        BuildSection,
        flags.split(),
        command="lmcore index build",
        positionals=("checkpoint",),
        foreign=index_flags(own, model),
    )
    return section


def test_the_published_command(caplog: pytest.LogCaptureFixture) -> None:
    """Paths, batch and precision act; the others are named with the reason."""
    caplog.set_level("INFO")
    model = GivenModel()
    section = parse(PUBLISHED, model)
    assert (section.output, section.ict_load) == ("embedded_blocks.pkl", "ict")
    assert (section.data_path, section.titles_data_path) == ("d", "t")
    assert (section.micro_batch_size, section.seq_length, section.precision) == (128, 256, "fp16")
    assert model.values == {
        "num_layers": 12,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "max_position_embeddings": 256,
    }
    said = "\n".join(caplog.messages)
    for flag in ("--ict-head-size 128", "--batch-size 64", "--num-workers 2"):
        assert f"`{flag}`" in said


def test_a_flag_of_no_program() -> None:
    with pytest.raises(ConfigError, match="unknown flag `--block-data`"):
        parse(f"{PUBLISHED} --block-data x", GivenModel())

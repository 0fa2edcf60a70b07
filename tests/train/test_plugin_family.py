"""A family of models that a plugin adds, the example, in whole runs: trained, resumed, divided."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from example_plugins import installed_example, needs_examples

from lmcore.base.errors import PluginError
from lmcore.checkpoint import read_manifest
from lmcore.config.section import Config
from lmcore.contract import OP_SPECS, OpTable
from lmcore.families.op_binding import OpBinding
from lmcore.families.recompute import KEEP_ALL
from lmcore.model.family import named_family, parameter_shapes
from lmcore.model.shape import ModelShape
from lmcore.plugin import discover

PACKAGE = "lmcore_example_family"
FLAGS = (
    "--model-family window --window-width 3 --global-batch-size 8 --micro-batch-size 4 "
    "--train-iters 4 --save-interval 2 --lr 1e-2 --eval-interval 4 --eval-iters 1 --device cpu "
    "--make-vocab-size-divisible-by 16 --split 8,2,0"
)

pytestmark = needs_examples


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Installs the example for this process and those it starts, and takes it away again."""
    with installed_example("plugin_family", PACKAGE, "window", tmp_path / "site", monkeypatch):
        yield


@pytest.mark.usefixtures("installed")
def test_training_and_resuming(train: Any, assert_same: Any, capsys: Any) -> None:
    """It trains and resumes bitwise, in another width it is another model; help has its setting."""
    from lmcore.cli.main import main

    whole = train("whole", FLAGS)
    assert whole.status == 0, whole.err
    assert "model     Window, " in whole.err
    assert whole.rows[-1]["loss"] < whole.rows[0]["loss"]
    checkpoint = whole.directory / "checkpoints/iter_0000002"
    shape = read_manifest(checkpoint).model_shape
    assert (shape["model_family"], shape["window_width"]) == ("window", 3)
    more = train("more", f"{FLAGS} --load {checkpoint}")
    assert more.status == 0, more.err
    assert more.curve() == whole.curve()[2:]
    assert_same(more.saved(), whole.saved())
    other = train("other", f"{FLAGS.replace('width 3', 'width 2')} --load {checkpoint}")
    assert "window_width: checkpoint 3, model 2" in other.err
    decoder = train("decoder", f"--device cpu --train-iters 4 --load {checkpoint}")
    assert "is of another family of models" in decoder.err
    for command in (["train", "--help"], ["checkpoint", "inspect", str(whole.directory)]):
        assert main(command) == 0
    out = capsys.readouterr().out
    assert "--window-width" in out
    assert "mixers.0.taps" in out


@pytest.mark.usefixtures("installed")
def test_plugin_check(capsys: Any) -> None:
    """It finds nothing wrong with the example, in a process that knows the family already."""
    pytest.importorskip("lmcore_conformance")
    from lmcore.cli.main import main
    from lmcore.plugin import discover

    discover(probe=False)
    assert main(["plugin", "check", "window"]) == 0, capsys.readouterr().out


@pytest.mark.distributed
def test_context_parallelism_is_refused(
    train: Any, start: Any, finish: Any, installed: None
) -> None:
    """Layers without attention would mix the tokens of a part of each sequence alone."""
    flags = f"{FLAGS} --context-parallel-size 2 --nproc-per-node 2"
    run = finish(start("ranks", flags), "ranks")
    assert run.status != 0
    assert "`--context-parallel-size` is not supported by Window models" in run.err


def test_a_setting_that_no_plugin_has() -> None:
    """The error for a family that names a field wrongly says how the name is made."""
    with pytest.raises(PluginError, match="no plugin has the setting `window_depth`"):
        Config().named("window_depth")


@pytest.mark.usefixtures("installed")
def test_table_and_modules(train: Any) -> None:
    """The table has the names and shapes of the modules."""
    import torch

    assert train("run", FLAGS).status == 0
    discover(probe=False)  # registers the family
    sizes = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 2, "ffn_hidden_size": 16}
    shape = ModelShape(
        **sizes,
        max_position_embeddings=8,
        padded_vocab_size=32,
        model_family="window",
        further=(("window_width", 3),),
    )
    family = named_family("window")
    assert family is not None
    with torch.device("meta"):
        model = family.load_model()(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"), KEEP_ALL)
    modules = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert parameter_shapes(shape) == modules


@pytest.mark.distributed
@pytest.mark.parametrize("more", ["--tensor-model-parallel-size 2", "--zero-stage 3"])
def test_two_processes(train: Any, start: Any, finish: Any, installed: None, more: str) -> None:
    """They continue the checkpoint of one with its losses, also with other rows of padding."""
    whole = train("whole", FLAGS)
    load = f"--load {whole.directory}/checkpoints/iter_0000002"
    run = finish(start("ranks", f"{FLAGS} {load} {more} --nproc-per-node 2"), "ranks")
    assert run.status == 0, run.err
    wanted = pytest.approx([row["loss"] for row in whole.rows[2:]], rel=2e-6)
    assert [row["loss"] for row in run.rows] == wanted

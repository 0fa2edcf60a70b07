"""Lengths in tokens, as numbers of samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmcore.base.errors import ConfigError
from lmcore.config.load import load_config
from lmcore.config.settings import LoadedConfig
from lmcore.config.validate import validate

LENGTH = ("--seq-length", "512")


def sample_counts(loaded: LoadedConfig) -> tuple[int | None, ...]:
    optimizer = loaded.config.optimizer
    samples = loaded.config.training.train_samples
    return samples, optimizer.lr_decay_samples, optimizer.lr_warmup_samples


def test_tokens_are_samples_rounded_up() -> None:
    """Each flag sets the samples that hold its tokens, and a line says so."""
    flags = ["--train-tokens", "1000000", "--lr-decay-tokens=512_000", "--lr-warmup_tokens", "1"]
    loaded = load_config([*flags, *LENGTH])
    assert sample_counts(loaded) == (1954, 1000, 1)  # 1,000,000 / 512 = 1953.125
    assert "`--train-tokens 1000000` is `--train-samples 1954`, of 512 tokens each" in (
        loaded.notices
    )
    assert str(loaded.provenance["train_samples"]) == "--train-tokens"


def test_the_length_of_a_sample_comes_from_any_source(tmp_path: Path) -> None:
    """A file, a preset and the default give it where no flag does; flags reset a file's length."""
    file = tmp_path / "run.yaml"
    file.write_text("model:\n  seq_length: 100\ntraining:\n  train_iters: 7\n")
    loaded = load_config([str(file), "--train-tokens", "1000"])
    assert sample_counts(loaded)[0] == 10
    assert loaded.config.training.train_iters is None
    from_preset = load_config(["--preset", "gpt2-124m", "--train-tokens", "102400"])
    assert sample_counts(from_preset)[0] == 102400 // from_preset.config.model.seq_length
    default = load_config(["--train-tokens", "1"]).config
    assert default.training.train_samples == 1


@pytest.mark.parametrize("samples, expected", [("10", 10), ("30", 20)])
def test_with_samples_the_lower_number_counts(samples: str, expected: int) -> None:
    """Training ends at the number that is reached first, as Megatron-DeepSpeed's does."""
    loaded = load_config(["--train-samples", samples, "--train-tokens", "10240", *LENGTH])
    assert sample_counts(loaded)[0] == expected


@pytest.mark.parametrize(
    "flags, expected",
    [
        (
            ("--train-tokens", "512", "--train-iters", "3"),
            "`--train-tokens 512` exclude each other",
        ),
        (("--train-tokens", "0"), "`--train-tokens 0`: out of range"),
        (("--train-tokens", "1B"), "`--train-tokens 1B`: expected an integer >= 1"),
    ],
)
def test_wrong_lengths(flags: tuple[str, ...], expected: str) -> None:
    """The error has the flag as it was typed."""
    with pytest.raises(ConfigError) as error:
        validate(load_config([*flags, *LENGTH]), world_size=1)
    assert expected in str(error.value)

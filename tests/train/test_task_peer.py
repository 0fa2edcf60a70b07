"""Fine-tuning a BERT for classification against a plain loop over `transformers`' model."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from suite.selection import peer
from torch.nn import functional

from lmcore.checkpoint import read_manifest
from lmcore.cli.main import main
from lmcore.families.build import create_model
from lmcore.families.saved_shape import read_shape

pytestmark = [pytest.mark.peer, pytest.mark.filterwarnings("ignore")]

WORDS = ("a", "the", "house", "tree", "is", "was", "not", "very", "old", "new", "red", "green")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class Case:
    """Fine-tuning that both sides do: its files, columns and settings."""

    folder: Path
    vocabulary: Path
    train: Path
    valid: Path
    text: tuple[str, str] = ("first", "second")
    label: str = "label"
    layers: int = 2
    hidden: int = 32
    heads: int = 4
    length: int = 16
    steps: int = 30
    batch: int = 8
    lr: float = 3e-3
    seed: int = 1234

    def rows(self, path: Path) -> list[tuple[str, str, str]]:
        """Return the texts and labels of a table."""
        tsv = path.suffix == ".tsv"
        kind: Any = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tsv else {}
        with path.open(encoding="utf-8", newline="") as stream:
            table = csv.DictReader(stream, **kind)
            return [(row[self.text[0]], row[self.text[1]], row[self.label]) for row in table]


def pretrained(case: Case) -> Path:
    """Return a directory with a BERT of random weights, as `transformers` writes it."""
    transformers = peer("transformers")
    torch.manual_seed(3)
    config = transformers.BertConfig(
        vocab_size=len(case.vocabulary.read_text(encoding="utf-8").splitlines()),
        hidden_size=case.hidden,
        num_hidden_layers=case.layers,
        num_attention_heads=case.heads,
        intermediate_size=4 * case.hidden,
        max_position_embeddings=case.length,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        initializer_range=0.1,
    )
    path = case.folder / "bert"
    transformers.BertForPreTraining(config).save_pretrained(path)
    (path / "vocab.txt").write_bytes(case.vocabulary.read_bytes())
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": True}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def ours(case: Case, model: Path) -> tuple[list[float], float, float]:
    """Return the losses of the steps, and loss and accuracy of the validation."""
    run = case.folder / "run"
    flags = (
        f"--load {model} --save {run} --task classification --task-data {case.train}"
        f" --task-valid-data {case.valid} --task-text {' '.join(case.text)}"
        f" --task-label {case.label} --seq-length {case.length} --train-iters {case.steps}"
        f" --micro-batch-size {case.batch} --lr {case.lr} --lr-decay-style constant"
        f" --lr-warmup-iters 0 --weight-decay 0.01 --adam-beta1 0.9 --adam-beta2 0.999"
        f" --adam-eps 1e-8 --clip-grad 1.0 --seed {case.seed} --eval-interval {case.steps}"
        " --attention-dropout 0 --hidden-dropout 0 --device cpu --precision fp32"
        " --cpu-peak-seconds 0 --progress none"
    )
    assert main(["train", *flags.split()]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = rows[-1]
    return (
        [row["loss"] for row in rows],
        last["valid_loss"],
        last["valid_classification_accuracy"],
    )


def first_head(case: Case) -> dict[str, torch.Tensor]:
    """Return the initial values of the run's head."""
    from lmcore.contract import OP_SPECS, OpTable
    from lmcore.families.op_binding import OpBinding

    directory = case.folder / "run" / f"checkpoints/iter_{case.steps:07d}"
    shape = read_shape(read_manifest(directory).model_shape, directory)
    with torch.device("meta"):
        model = create_model(shape, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    return {
        name: model.initial_weight(
            f"classifier.{name}", model.classifier.get_parameter(name).shape, case.seed
        )
        for name in ("weight", "bias")
    }


def theirs(case: Case, directory: Path) -> tuple[list[float], float, float]:
    """Return the same of a plain loop over their model, their tokenizer and torch's AdamW."""
    transformers = peer("transformers")
    tokenizer = transformers.BertTokenizerFast.from_pretrained(directory)
    labels = sorted({label for _, _, label in case.rows(case.train)})
    model = transformers.BertForSequenceClassification.from_pretrained(
        directory, num_labels=len(labels)
    )
    model.classifier.load_state_dict(first_head(case))

    def encoded(rows: list[tuple[str, str, str]]) -> Any:
        first, second, names = zip(*rows, strict=True)
        texts = tokenizer(
            list(first),
            list(second),
            truncation=True,
            max_length=case.length,
            padding="max_length",
            return_tensors="pt",
        )
        return {**texts, "labels": torch.tensor([labels.index(name) for name in names])}

    def order(count: int) -> Iterator[int]:
        for epoch in itertools.count():
            yield from np.random.RandomState(case.seed + epoch).permutation(count).tolist()

    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=case.lr, weight_decay=0.01)
    train, losses = case.rows(case.train), []
    rows = order(len(train))
    model.train()  # no dropout
    for _ in range(case.steps):
        loss = model(**encoded([train[next(rows)] for _ in range(case.batch)])).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        inputs = encoded(case.rows(case.valid))
        logits = model(**inputs).logits
        loss = functional.cross_entropy(logits, inputs["labels"])
    right = (logits.argmax(-1) == inputs["labels"]).float().mean()
    return losses, loss.item(), right.item()


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """Return tables of pairs whose class is a word in them, some longer than a sequence."""
    drawn = np.random.default_rng(5)
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join([*SPECIAL, *WORDS, "yes", "no", "maybe"]) + "\n")
    for name, count in {"train": 101, "valid": 50}.items():
        with (tmp_path / f"{name}.csv").open("w", newline="") as stream:
            table = csv.writer(stream)
            table.writerow(["first", "second", "label"])
            for number in range(count):
                label = ("yes", "no", "maybe")[number % 3]
                first = " ".join(drawn.choice(WORDS, int(drawn.integers(1, 12))))
                second = " ".join(drawn.choice(WORDS, int(drawn.integers(1, 5))))
                table.writerow([first, f"{label} {second}", label])
    return Case(tmp_path, vocabulary, tmp_path / "train.csv", tmp_path / "valid.csv")


def test_a_plain_loop_has_the_same_losses(case: Case) -> None:
    """Each step's loss, and loss and accuracy of the validation."""
    directory = pretrained(case)
    our_losses, our_loss, our_accuracy = ours(case, directory)
    their_losses, their_loss, their_accuracy = theirs(case, directory)
    assert our_losses == pytest.approx(their_losses, rel=2e-3)
    assert our_losses[:10] == pytest.approx(their_losses[:10], rel=1e-5)
    assert our_losses[-1] < our_losses[0] - 0.1
    assert our_loss == pytest.approx(their_loss, rel=5e-3)
    assert our_accuracy == pytest.approx(their_accuracy, abs=0.01)

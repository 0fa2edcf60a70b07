"""Samples and mappings as Megatron makes them, number for number.

`tests/golden/megatron_samples.json` holds what megatron-core gave for the cases below: a hash of
every number of all samples, and one sample in full.  The tests marked `peer` run megatron-core
itself against it; `UPDATE_GOLDEN=1 pytest -m peer` with it installed rewrites the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from lmcore.data.blend.index import build_blend_index
from lmcore.data.dataset.bert import BertDataset, BertSettings
from lmcore.data.dataset.gpt import GPTDataset
from lmcore.data.dataset.masking import MaskingPolicy, MaskingVocabulary, MaskingWords
from lmcore.data.dataset.sentence_index import build_block_mapping, build_segment_mapping
from lmcore.data.dataset.t5 import T5Dataset, T5Settings, T5Vocabulary
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter

GOLDEN = Path(__file__).resolve().parents[3] / "golden/megatron_samples.json"
VOCABULARY = 400
CLS, SEP, MASK, PAD, BOS, EOS = 101, 102, 103, 0, 110, 111
SENTINELS = tuple(range(380, 400))
PIECES = [f"##{i}" if i % 3 == 2 and i > 120 else str(i) for i in range(VOCABULARY)]
CONTINUES = np.array([piece.startswith("##") for piece in PIECES])

# Of (documents, most sentences of one, most tokens of a sentence), samples, length, ...
GPT = {
    "part of an epoch": {"corpus": (60, 1, 90), "samples": 20, "length": 32, "seed": 1234},
    "several epochs": {"corpus": (60, 1, 90), "samples": 400, "length": 32, "seed": 1234},
    "last epoch apart": {"corpus": (60, 1, 90), "samples": 190, "length": 32, "seed": 7},
    "one token": {"corpus": (20, 1, 9), "samples": 500, "length": 1, "seed": 2**32 - 1},
    "longer than documents": {"corpus": (100, 1, 12), "samples": 60, "length": 64, "seed": 0},
    "sentences as documents": {"corpus": (30, 5, 20), "samples": 70, "length": 48, "seed": 5},
    "a range": {"corpus": (60, 1, 90), "samples": 90, "length": 16, "seed": 3, "range": (7, 33)},
}
BERT = {
    "pairs": {"corpus": (40, 9, 30), "samples": 150, "length": 64, "seed": 1234},
    "single segments": {
        "corpus": (40, 9, 30),
        "samples": 90,
        "length": 64,
        "seed": 5,
        "head": False,
    },
    "never short": {"corpus": (40, 9, 30), "samples": 60, "length": 48, "seed": 9, "short": 0.0},
    "often short": {"corpus": (40, 9, 30), "samples": 80, "length": 48, "seed": 11, "short": 0.4},
    "long sentences": {"corpus": (40, 4, 700), "samples": 50, "length": 128, "seed": 2},
    "parts of words": {
        "corpus": (30, 6, 30),
        "samples": 50,
        "length": 64,
        "seed": 3,
        "whole": False,
    },
    "one word at once": {"corpus": (30, 6, 30), "samples": 50, "length": 64, "seed": 4, "ngram": 1},
    "a range": {"corpus": (40, 9, 30), "samples": 60, "length": 64, "seed": 6, "range": (11, 23)},
}
T5 = {
    "spans": {"corpus": (40, 9, 30), "samples": 120, "length": 80, "decoder": 48, "seed": 1234},
    "single words": {
        "corpus": (40, 9, 30), "samples": 60, "length": 64, "decoder": 48, "seed": 8, "ngram": 1,
    },
    "a range": {
        "corpus": (40, 9, 30), "samples": 60, "length": 48, "decoder": 32, "seed": 6,
        "range": (11, 23),
    },
}  # fmt: skip
BLOCKS = {
    "blocks": {"corpus": (50, 12, 30), "samples": 300, "length": 100, "seed": 1234},
    "one epoch": {"corpus": (50, 12, 30), "samples": None, "length": 100, "seed": 1},
    "one sentence": {"corpus": (50, 3, 30), "samples": 200, "length": 40, "seed": 5, "one": True},
    "long sentences": {"corpus": (50, 4, 700), "samples": 90, "length": 200, "seed": 6},
}
SEGMENTS = {
    "pairs": {
        "corpus": (3000, 12, 60),
        "samples": 20000,
        "length": 125,
        "seed": 1234,
        "short": 0.1,
    },
    "one epoch": {
        "corpus": (3000, 12, 60),
        "samples": None,
        "length": 509,
        "seed": 3,
        "short": 0.01,
    },
}
BLENDS = {
    "four": {"weights": [0.1, 0.2, 0.3, 0.4], "size": 3000},
    "uneven": {"weights": [0.999, 0.0005, 0.0005], "size": 20000},
    "thirds": {"weights": [1 / 3, 1 / 3, 1 / 3], "size": 1000},
}


def corpus(shape: tuple[int, int, int]) -> list[list[list[int]]]:
    """Return documents of sentences of tokens; a shape always gives the same ones."""
    documents, sentences, tokens = shape
    rng = np.random.RandomState(documents * 1000 + sentences * 10 + tokens)
    return [
        [
            rng.randint(120, 380, rng.randint(1, tokens + 1)).tolist()
            for _ in range(rng.randint(1, sentences + 1))
        ]
        for _ in range(documents)
    ]


def write(path: Path, shape: tuple[int, int, int]) -> str:
    with IndexedDatasetWriter(path, "uint16") as writer:
        for document in corpus(shape):
            tokens = [token for sentence in document for token in sentence]
            writer.add_document(tokens, [len(sentence) for sentence in document])
    return str(path)


def summed(samples: list[dict[str, object]]) -> dict[str, object]:
    """Recorded content of samples."""
    digest = hashlib.sha256()
    for sample in samples:
        for name in sorted(sample):
            digest.update(name.encode() + np.asarray(sample[name], dtype=np.int64).tobytes())
    plain = {name: np.asarray(value).tolist() for name, value in samples[-1].items()}
    return {"count": len(samples), "sha256": digest.hexdigest(), "last": plain}


def case_of(kind: str, name: str) -> dict:
    return globals()[kind][name]


# --- what lmcore gives


def our_gpt(case: dict, folder: Path) -> list[dict]:
    indexed = IndexedDataset(write(folder / "ours", case["corpus"]))
    made = GPTDataset(
        indexed,
        document_range=case.get("range", (0, indexed.document_count)),
        num_samples=case["samples"],
        sequence_length=case["length"],
        seed=case["seed"],
        cache_dir=folder,
    )
    return [{"text": made.read(i)} for i in range(made.available)]


def our_bert(case: dict, folder: Path) -> list[dict]:
    indexed = IndexedDataset(write(folder / "ours", case["corpus"]))
    made = BertDataset(
        indexed,
        MaskingVocabulary(CLS, SEP, CONTINUES, MASK, PAD),
        BertSettings(
            case["length"],
            case["seed"],
            case.get("head", True),
            case.get("short", 0.1),
            MaskingPolicy(whole_words=case.get("whole", True), max_ngram=case.get("ngram", 3)),
        ),
        document_range=case.get("range", (0, indexed.document_count)),
        num_samples=case["samples"],
        cache_dir=folder,
    )
    return [
        {
            "text": one.tokens_S,
            "types": one.types_S,
            "labels": one.labels_S,
            "is_random": int(one.swapped),
            "padding_mask": one.padding_mask_S,
            "loss_mask": one.loss_mask_S,
            "truncated": int(one.truncated),
        }
        for one in (made[i] for i in range(len(made.rows)))
    ]


def our_t5(case: dict, folder: Path) -> list[dict]:
    indexed = IndexedDataset(write(folder / "ours", case["corpus"]))
    made = T5Dataset(
        indexed,
        T5Vocabulary(MaskingWords(CLS, SEP, CONTINUES), BOS, EOS, PAD, SENTINELS),
        T5Settings(
            case["length"],
            case["decoder"],
            case["seed"],
            policy=MaskingPolicy(max_ngram=case.get("ngram", 10), geometric=True),
        ),
        document_range=case.get("range", (0, indexed.document_count)),
        num_samples=case["samples"],
        cache_dir=folder,
    )
    return [
        {
            "text_enc": one.encoder_tokens_E,
            "text_dec": one.decoder_tokens_D,
            "labels": one.labels_D,
            "loss_mask": one.loss_mask_D,
            "truncated": int(one.truncated),
            "enc_mask": one.encoder_mask_E,
            "dec_mask": one.decoder_mask_D,
        }
        for one in (made[i] for i in range(len(made.rows)))
    ]


def sentences_of(case: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """First sentences, sizes, and sizes of titles."""
    documents = corpus(case["corpus"])
    starts = np.cumsum([0, *map(len, documents)]).astype(np.int64)
    sizes = np.array([len(one) for document in documents for one in document], dtype=np.int32)
    titles = np.random.RandomState(1).randint(1, 9, len(documents)).astype(np.int32)
    return starts, sizes, titles


def our_blocks(case: dict, folder: Path) -> list[dict]:
    mapping = build_block_mapping(
        *sentences_of(case),
        num_samples=case["samples"],
        longest=case["length"],
        seed=case["seed"],
        one_sentence=case.get("one", False),
    )
    assert mapping.dtype == np.uint32
    return [{"rows": mapping}]


def our_segments(case: dict, folder: Path) -> list[dict]:
    starts, sizes, _ = sentences_of(case)
    mapping = build_segment_mapping(
        starts,
        sizes,
        num_samples=case["samples"],
        longest=case["length"],
        short_probability=case["short"],
        seed=case["seed"],
        least_sentences=2,
    )
    assert mapping.dtype == np.uint32
    return [{"rows": mapping[:50], "all": hashed(mapping)}]


def our_blends(case: dict, folder: Path) -> list[dict]:
    dataset, sample = build_blend_index(case["weights"], case["size"])
    return [{"dataset": hashed(dataset), "sample": hashed(sample)}]


def hashed(values: np.ndarray) -> list[int]:
    return list(hashlib.sha256(np.ascontiguousarray(values)).digest())


# --- what megatron-core gives


class Tokenizer:
    """Methods of a tokenizer that its datasets call."""

    cls, sep, mask, pad, bos, eos = CLS, SEP, MASK, PAD, BOS, EOS
    eod = EOS
    vocab_size = VOCABULARY
    inv_vocab: ClassVar = dict(enumerate(PIECES))
    additional_special_tokens_ids = SENTINELS
    unique_identifiers: ClassVar = {"class": "test"}


def their_dataset(module: str, config_class: str, dataset_class: str, case, folder, **settings):
    import importlib

    import torch

    datasets = importlib.import_module(f"megatron.core.datasets.{module}")
    indexed_module = importlib.import_module("megatron.core.datasets.indexed_dataset")
    split = importlib.import_module("megatron.core.datasets.utils").Split
    prefix = write(folder / "theirs", case["corpus"])
    indexed = indexed_module.IndexedDataset(prefix)
    kind = getattr(datasets, dataset_class)
    first, last = case.get("range", (0, kind.numel_low_level_dataset(indexed)))
    config = getattr(datasets, config_class)(
        random_seed=case["seed"],
        sequence_length=case["length"],
        blend=([prefix], None),
        split="1,0,0",
        path_to_cache=str(folder / "cache"),
        tokenizer=Tokenizer(),
        **settings,
    )
    indices = np.arange(first, last, dtype=np.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "get_rank", lambda *_: 0)
        return kind(indexed, prefix, indices, case["samples"], split.train, config)


def masking(case: dict) -> dict:
    return {
        "masking_probability": 0.15,
        "short_sequence_probability": case.get("short", 0.1),
        "masking_do_full_word": case.get("whole", True),
        "masking_do_permutation": False,
        "masking_use_longer_ngrams": False,
    }


def their_gpt(case: dict, folder: Path) -> list[dict]:
    made = their_dataset(
        "gpt_dataset",
        "GPTDatasetConfig",
        "GPTDataset",
        case,
        folder,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
    )
    samples = [made[i] for i in range(len(made))]
    return [{"text": np.append(one["tokens"], one["labels"][-1])} for one in samples]


def their_bert(case: dict, folder: Path) -> list[dict]:
    made = their_dataset(
        "bert_dataset",
        "BERTMaskedWordPieceDatasetConfig",
        "BERTMaskedWordPieceDataset",
        case,
        folder,
        **masking(case),
        masking_max_ngram=case.get("ngram", 3),
        masking_use_geometric_distribution=False,
        classification_head=case.get("head", True),
    )
    return [made[i] for i in range(len(made))]


def their_t5(case: dict, folder: Path) -> list[dict]:
    made = their_dataset(
        "t5_dataset",
        "T5MaskedWordPieceDatasetConfig",
        "T5MaskedWordPieceDataset",
        case,
        folder,
        **masking(case),
        masking_max_ngram=case.get("ngram", 10),
        masking_use_geometric_distribution=True,
        sequence_length_decoder=case["decoder"],
    )
    return [made[i] for i in range(len(made))]


def epochs_of(case: dict) -> tuple[int, int]:
    return (1, 2**62) if case["samples"] is None else (2**31 - 2, case["samples"])


def their_blocks(case: dict, folder: Path) -> list[dict]:
    from megatron.core.datasets import helpers_cpp

    epochs, samples = epochs_of(case)
    one = case.get("one", False)
    arguments = (epochs, samples, case["length"], case["seed"], False, one)
    return [{"rows": helpers_cpp.build_blocks_mapping(*sentences_of(case), *arguments)}]


def their_segments(case: dict, folder: Path) -> list[dict]:
    from megatron.core.datasets import helpers_cpp

    starts, sizes, _ = sentences_of(case)
    epochs, samples = epochs_of(case)
    arguments = (epochs, samples, case["length"], case["short"], case["seed"], False, 2)
    mapping = helpers_cpp.build_mapping(starts, sizes, *arguments)
    return [{"rows": mapping[:50], "all": hashed(mapping)}]


def their_blends(case: dict, folder: Path) -> list[dict]:
    from megatron.core.datasets import helpers_cpp

    dataset, sample = np.zeros(case["size"], np.int16), np.zeros(case["size"], np.int64)
    weights = np.array(case["weights"])
    helpers_cpp.build_blending_indices(dataset, sample, weights, len(weights), case["size"], False)
    return [{"dataset": hashed(dataset), "sample": hashed(sample)}]


KINDS = ("GPT", "BERT", "T5", "BLOCKS", "SEGMENTS", "BLENDS")
CASES = [(kind, name) for kind in KINDS for name in globals()[kind]]


@pytest.mark.parametrize("kind, name", CASES)
def test_samples_are_those_on_record(tmp_path, either, kind, name):
    """In C++ and without it, every number of every sample is what megatron-core gave."""
    made = globals()[f"our_{kind.lower()}"](case_of(kind, name), tmp_path)
    recorded = json.loads(GOLDEN.read_text())[kind][name]
    ours = summed(made)
    assert ours["count"] == recorded["count"]
    assert ours["last"] == recorded["last"]
    assert ours["sha256"] == recorded["sha256"]


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")  # what it imports warns of much that is not ours
@pytest.mark.parametrize("kind, name", CASES)
def test_the_record_is_megatron_s(tmp_path, kind, name):
    """megatron-core itself gives the samples on record; and what differs from ours is shown."""
    pytest.importorskip("megatron.core.datasets.helpers_cpp", reason="needs megatron-core")
    case = case_of(kind, name)
    theirs = globals()[f"their_{kind.lower()}"](case, tmp_path)
    ours = globals()[f"our_{kind.lower()}"](case, tmp_path)
    for mine, its in zip(ours, theirs, strict=True):
        assert mine.keys() == its.keys()
        for field in mine:
            assert np.asarray(mine[field]).tolist() == np.asarray(its[field]).tolist(), field
    recorded = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    if os.environ.get("UPDATE_GOLDEN"):
        recorded.setdefault(kind, {})[name] = summed(theirs)
        GOLDEN.write_text(json.dumps(recorded, indent=None, separators=(",", ":")) + "\n")
    assert recorded[kind][name] == summed(theirs)

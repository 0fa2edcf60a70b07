"""Against megatron-core's dataset builder: blends sample for sample, and its masks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lmcore.config.derived.data_source import Blend, DataSource, RunSources
from lmcore.config.derived.split import parse_split
from lmcore.data.blend.index import (
    BlendWeights,
    build_blend_index,
    build_exhaustive_index,
    source_sizes,
)
from lmcore.data.blend.sources import SampleSettings, build_samples, open_sources
from lmcore.data.blend.train_split import split_ranges
from lmcore.data.dataset.document_mask import DocumentMasks
from lmcore.data.indexed.writer import IndexedDatasetWriter

pytestmark = [
    pytest.mark.peer,
    # What it imports warns of much that is not ours.
    pytest.mark.filterwarnings("ignore"),
]
NEEDED = "needs the package megatron-core"
SEQUENCE, SEED, EOD = 16, 1234, 9


class FakeTokenizer:
    """Methods that the peer's configuration calls."""

    vocab_size, eod, pad = 1000, EOD, -1

    def __init__(self):
        self.unique_identifiers = {"class": "FakeTokenizer"}


@pytest.fixture(scope="module")
def peer():
    """Its builder and its GPT datasets."""
    pytest.importorskip("megatron.core", reason=NEEDED)
    from megatron.core.datasets import blended_megatron_dataset_builder as builder
    from megatron.core.datasets import gpt_dataset, helpers_cpp

    store = torch.distributed.HashStore()  # it asks for its rank before it caches
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield SimpleNamespace(builder=builder, gpt=gpt_dataset, helpers=helpers_cpp)
    torch.distributed.destroy_process_group()


@pytest.fixture
def corpora(tmp_path):
    """Three datasets of 100, 40 and 260 documents."""
    rng = np.random.default_rng(5)
    prefixes = []
    for number, count in enumerate((100, 40, 260)):
        prefixes.append(str(tmp_path / f"set{number}"))
        with IndexedDatasetWriter(prefixes[-1], "uint16") as writer:
            for _ in range(count):
                writer.add_document([*rng.integers(10, 900, rng.integers(1, 40)), EOD])
    return prefixes


def theirs(peer, tmp_path, sizes, **blend):
    config = peer.gpt.GPTDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQUENCE,
        path_to_cache=str(tmp_path / "their_cache"),
        tokenizer=FakeTokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        **blend,
    )
    return peer.builder.BlendedMegatronDatasetBuilder(
        peer.gpt.GPTDataset, sizes, lambda: True, config
    ).build()


def ours(tmp_path, sources, sizes, split="80,20,0"):
    sources = replace(sources, split=parse_split(split))
    parts = open_sources(sources, needed=("train",), prefix_of=lambda one: one.name)
    settings = SampleSettings(SEQUENCE, SEED, tmp_path / "our_cache", 0.8)
    return {
        part: build_samples(parts[part], size, settings, name=part)
        for part, size in zip(("train", "valid"), sizes, strict=False)
        if part in parts
    }


def require_equal(mine, other):
    """Compare every sample that a run of this length reads."""
    for i in range(len(mine)):
        sample = other[i]
        expected = torch.cat([sample["tokens"], sample["labels"][-1:]])
        assert mine[i].tolist() == expected.tolist(), f"sample {i}"


@pytest.mark.parametrize(
    "weights",
    [
        None,
        [0.2, 0.3, 0.5],
        [30.0, 1.0, 5.0],
        [1.0, 1.0, 1.0],
        [0.97, 0.02, 0.01],
        [0.7, 0.2, 0.1],
        [0.6, 0.3, 0.1],
        [70.0, 20.0, 10.0],
    ],
)
@pytest.mark.parametrize("sizes", [(37, 11), (300, 60), (1500, 200)])
def test_blend_divided_by_a_split(peer, corpora, tmp_path, weights, sizes):
    """Several sources with weights, or by their sizes, give its samples in its order."""
    sources = [
        DataSource(prefix, None if weights is None else weights[i])
        for i, prefix in enumerate(corpora)
    ]
    mine = ours(tmp_path, RunSources(Blend("data_path", tuple(sources))), sizes)
    other = theirs(peer, tmp_path, [*sizes, 0], blend=(corpora, weights), split="80,20,0")
    for part, dataset in zip(("train", "valid"), other[:2], strict=True):
        if weights is None and len(dataset) < len(mine[part]):
            # One epoch is all that it gives without weights, its run ends there.
            assert len(dataset) < sizes[("train", "valid").index(part)]
            continue
        require_equal(mine[part], dataset)
        assert weights is None or len(mine[part]) == len(dataset)


def test_sources_of_each_part(peer, corpora, tmp_path):
    """Sources of a part alone are read whole, one without weights as if it stood alone."""
    sources = RunSources(
        None,
        {
            "train": Blend(
                "train_data_path", (DataSource(corpora[0], 0.4), DataSource(corpora[2], 0.6))
            ),
            "valid": Blend("valid_data_path", (DataSource(corpora[1]),)),
        },
    )
    blend = [([corpora[0], corpora[2]], [0.4, 0.6]), ([corpora[1]], None), None]
    other = theirs(peer, tmp_path, [500, 90, 0], blend_per_split=blend)
    mine = ours(tmp_path, sources, (500, 90))
    require_equal(mine["train"], other[0])
    require_equal(mine["valid"], other[1])


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("short", [3, 1, 0, -1])
def test_single_source_with_a_weight(peer, corpora, tmp_path, own, short):
    """Near the end of an epoch one sample more makes another shuffle.

    A weight makes a blend of a data set for all parts, with more samples of it than are needed, and
    none of a data set for one part.
    """
    prefix = corpora[2]
    split = "100,0,0"
    whole = theirs(peer, tmp_path, [None] * 3, blend=([prefix], None), split=split)[0]
    size = len(whole) - short
    source = (DataSource(prefix, 1.0),)
    if own:
        sources = RunSources(None, {"train": Blend("train_data_path", source)})
        blend = {"blend_per_split": [([prefix], [1.0]), None, None]}
    else:
        sources = RunSources(Blend("data_path", source))
        blend = {"blend": ([prefix], [1.0]), "split": split}
    other = theirs(peer, tmp_path, [size, 0, 0], **blend)[0]
    require_equal(ours(tmp_path, sources, (size,), split)["train"], other)


class CountedDataset:
    """Dataset for the peer's builder: documents are counted, and no sample is made."""

    def __init__(self, count, prefix, documents, num_samples, part, config):
        self.unique_identifiers = {"class": "CountedDataset"}
        self.index_split, self.documents, self.num_samples = part, documents, num_samples

    def __len__(self):
        return 10**9  # the order is compared, whatever the surplus is

    @staticmethod
    def build_low_level_dataset(prefix, config):
        return int(prefix)

    @staticmethod
    def numel_low_level_dataset(count):
        return count


def counted(peer, sizes, counts, weights, split):
    """Return what the peer's builder makes of datasets of *counts* documents."""
    config = peer.builder.BlendedMegatronDatasetConfig(
        random_seed=SEED,
        sequence_length=SEQUENCE,
        blend=([str(count) for count in counts], weights),
        split=split,
    )
    builder = peer.builder.BlendedMegatronDatasetBuilder(
        CountedDataset, sizes, lambda: True, config
    )
    return builder._build_blended_dataset_splits()


def weight_lists():
    """Return lists whose sums round, and so have ties that the last bits decide."""
    rng = np.random.default_rng(18)
    lists = [[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [70.0, 20.0, 10.0], [1.0]]
    for digits in (0, 1, 2, 17):
        for _ in range(150):
            values = rng.uniform(1 if digits == 0 else 0.1, 10, rng.integers(2, 12))
            lists.append(np.round(values, digits).tolist())
    return lists


def test_order_of_many_blends(peer):
    """Sizes and order of blends are its own, whatever the weights."""
    differing = {"megatron-core": 0, "lmcore-2026.11": 0}
    for number, weights in enumerate(weight_lists()):
        wanted = 200 + 7 * number % 800
        blend = counted(peer, [wanted, 0, 0], [10] * len(weights), weights, "1,0,0")[0]
        for rule in differing:
            mine = BlendWeights.given(weights, rule)
            size, sizes = source_sizes(mine.sizes, wanted)
            assert size == blend.size
            assert sizes == [dataset.num_samples for dataset in blend.datasets]
            dataset, sample = build_blend_index(mine.order, size)
            alike = (
                dataset.tolist() == blend.dataset_index.tolist()
                and sample.tolist() == blend.dataset_sample_index.tolist()
            )
            differing[rule] += not alike
    assert differing["megatron-core"] == 0
    assert differing["lmcore-2026.11"] > 20  # else these weights decide nothing


SPLITS = ["969,30,1", "949,50,1", "998,1,1", "90,5,5", "1,1,1", "0.7,0.2,0.1", "0.6/0.3/0.1", "9"]


@pytest.mark.parametrize("split", SPLITS)
def test_bounds_of_many_splits(peer, split):
    """Every part has its documents, whatever is rounded."""
    rng = np.random.default_rng(30)
    counts = [*range(1, 130), *rng.integers(100, 300_000, 400).tolist(), 79_000]
    legacy = 0
    for count in counts:
        parts = counted(peer, [1, 1, 1], [count], None, split)
        ranges = [
            None
            if part is None or not len(part.documents)
            else (int(part.documents[0]), int(part.documents[-1]) + 1)
            for part in parts
        ]
        mine = split_ranges(count, parse_split(split), needed=())
        assert [bounds if bounds[0] < bounds[1] else None for bounds in mine.values()] == ranges
        legacy += split_ranges(count, parse_split(split), needed=(), rule="legacy") != mine
    assert legacy > 0 or "," not in split.replace("/", ",")


@pytest.mark.parametrize("lengths", [[5, 3], [1, 100], [7, 7, 7], [50, 1, 9, 200]])
def test_every_sample_once(peer, lengths):
    """A blend that uses its sources up takes them in its order."""
    dataset = np.zeros(sum(lengths), dtype=np.int16)
    sample = np.zeros(sum(lengths), dtype=np.int64)
    peer.helpers.build_exhaustive_blending_indices(
        dataset, sample, np.array(lengths, dtype=np.int64), len(lengths)
    )
    mine = build_exhaustive_index(lengths)
    assert mine[0].tolist() == dataset.tolist()
    assert mine[1].tolist() == sample.tolist()


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("attention", [False, True])
@pytest.mark.parametrize("loss", [False, True])
def test_masks(peer, positions, attention, loss):
    """Positions, hidden tokens and counted targets are its own, with ends wherever they fall."""
    rng = np.random.default_rng(3)
    tokens_BS = torch.from_numpy(rng.choice([1, 2, 3, EOD], size=(40, 24), p=[0.3, 0.3, 0.2, 0.2]))
    tokens_BS[0], tokens_BS[1] = EOD, 1
    masks = DocumentMasks(EOD, positions, attention, loss)
    mine = (masks.positions(tokens_BS), masks.documents(tokens_BS), masks.loss_mask(tokens_BS))
    causal = torch.ones(24, 24, dtype=torch.bool).triu(1)
    for row, tokens in enumerate(tokens_BS):
        hidden, counted, places = peer.gpt._get_ltor_masks_and_position_ids(
            tokens, EOD, positions, attention, loss, True
        )
        own = mine[0][row] if mine[0] is not None else torch.arange(24)
        assert own.tolist() == places.tolist()
        own = causal if mine[1] is None else causal | (mine[1][row][:, None] != mine[1][row])
        assert own.tolist() == hidden[0].tolist()
        assert mine[2][row].tolist() == counted.tolist()

"""Datasets of a run: opened, divided, blended, and changed in the middle."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lmcore.base.errors import CheckpointError, ConfigError, DataError
from lmcore.config.derived.data_source import Blend, DataSource, RunSources
from lmcore.config.derived.split import parse_split
from lmcore.config.section.data import BLEND_RULES, OLDER_RULES, SPLIT_RULES
from lmcore.data.blend.dataset import BlendedDataset, BlendRecord, SourceStream
from lmcore.data.blend.index import build_blend_index, source_sizes
from lmcore.data.blend.order import Order, OrderRecord
from lmcore.data.blend.sources import (
    OpenSource,
    SampleSettings,
    build_samples,
    open_sources,
    weigh_sources,
)
from lmcore.data.dataset.gpt import GPTDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter

LENGTH = 8


@pytest.fixture
def settings(tmp_path):
    """Samples of eight tokens."""
    return SampleSettings(LENGTH, 1234, tmp_path / "cache", 0.8)


@pytest.fixture
def write(tmp_path):
    """Writer of documents of five tokens; the first token identifies dataset and document."""

    def make(name: str, documents: int, tokens: int = 5) -> str:
        prefix = str(tmp_path / name)
        base = 1000 * (1 + "abcdefg".index(name[0]))
        with IndexedDatasetWriter(prefix, "uint16") as writer:
            for number in range(documents):
                writer.add_document([base + number] * tokens)
        return prefix

    return make


def sources_of(*named, split="100,0,0"):
    """Open (prefix, weight) pairs for training."""
    blend = Blend("data_path", tuple(DataSource(*one) for one in named))
    sources = RunSources(blend, split=parse_split(split))
    parts = open_sources(sources, needed=("train",), prefix_of=lambda o: o.name)
    return parts["train"]


def saved(order: Order, position: int) -> OrderRecord:
    """Return the record of an order in a checkpoint at *position*."""
    return OrderRecord(order.fingerprint, position, BlendRecord.from_dict(order.record(position)))


def changed_blend(sources, record: OrderRecord, length: int, settings) -> Order:
    """Continue with new sources or weights."""
    return Order.continue_from(record, length, sources, settings, change_blend=True)


def origin(sample) -> set[int]:
    return set((sample // 1000).tolist())


def shares(samples, positions) -> Counter:
    """Count the datasets that samples come from."""
    found = Counter()
    for i in positions:
        (one,) = origin(samples[i])
        found[one] += 1
    return found


def test_weights_are_kept(write, settings):
    """Of any stretch of samples each source has its share."""
    sources = sources_of((write("a", 40), 3.0), (write("b", 90), 1.0))
    samples = build_samples(sources, 400, settings, name="train")
    assert isinstance(samples, BlendedDataset)
    for start in (0, 100, 300):
        found = shares(samples, range(start, start + 100))
        assert abs(found[1] - 75) <= 1
        assert abs(found[2] - 25) <= 1


def test_one_source_is_used_alone(write, settings):
    """A single dataset without weight is no blend, and gives as many samples as are asked for."""
    (one,) = sources_of((write("a", 40),))
    samples = build_samples([one], 30, settings, name="train")
    assert isinstance(samples, GPTDataset)
    assert len(samples) == 30
    whole = build_samples([one], 1000, settings, name="train", one_pass=True)
    assert len(whole) == (40 * 5 - 1) // LENGTH == 24


def test_sources_without_weights_are_read_once(write, settings):
    """By their sizes, no sample twice; further epochs, where needed, in the same proportion."""
    sources = sources_of((write("a", 40),), (write("b", 120),))
    lengths = [24, 74]
    once = build_samples(sources, 60, settings, name="train")
    assert len(once) == 60
    assert once.weights == pytest.approx([24 / 98, 74 / 98])
    whole = build_samples(sources, 60, settings, name="train", one_pass=True)
    assert len(whole) == 98
    places = [whole.locate(i) for i in range(98)]
    assert sorted(places) == [(s, i) for s, n in enumerate(lengths) for i in range(n)]
    more = build_samples(sources, 300, settings, name="train")
    assert len(more) >= 300
    found = shares(more, range(300))
    assert abs(found[1] / 300 - 24 / 98) < 0.01


def test_more_than_the_surplus(write, settings):
    """More samples of a source are built if the greedy rule takes more than were built."""
    names = [f"{letter}{number}" for letter in "abcdefg" for number in range(5)]
    shares_of_each = (np.random.default_rng(0).random(len(names)) ** 3 + 1e-3).tolist()
    sources = sources_of(
        *((write(name, 2), weight) for name, weight in zip(names, shares_of_each, strict=True))
    )
    _, weights = weigh_sources(sources, settings)
    size, wanted = source_sizes(weights.sizes, 38)
    taken = np.bincount(build_blend_index(weights.order, size)[0], minlength=len(names))
    assert (taken > wanted).any()
    samples = build_samples(sources, 38, settings, name="train")
    assert [len(samples[i]) for i in range(len(samples))] == [LENGTH + 1] * size
    assert samples.consumed(size) == taken.tolist()


def test_small_source_is_left_out_of_a_blend_by_size(write, settings, caplog):
    """A source of less than one sample is named; alone it is an error."""
    small, large = sources_of((write("a", 1),), (write("b", 50),))
    with caplog.at_level(logging.WARNING):
        kept, weights = weigh_sources([small, large], settings)
    assert (kept, weights.sizes) == ([large], [1.0])
    assert f"`{small.name}`: less than one sample of 9 tokens" in caplog.text
    with pytest.raises(DataError, match="no source has a sample"):
        weigh_sources([small], settings)


def test_split_divides_every_source(write, caplog):
    """Each source gives its share to each part; one that has none for a part is named."""
    a, b = write("a", 100), write("b", 10)
    blend = Blend("data_path", (DataSource(a, 0.5), DataSource(b, 0.5)))

    def opened(split, needed=("train", "valid")):
        sources = RunSources(blend, split=parse_split(split))
        return open_sources(sources, needed=needed, prefix_of=lambda o: o.name)

    parts = opened("80,10,10")
    assert [one.documents for one in parts["train"]] == [(0, 80), (0, 8)]
    assert [one.documents for one in parts["valid"]] == [(80, 90), (8, 9)]
    assert [one.documents for one in parts["test"]] == [(90, 100), (9, 10)]
    with caplog.at_level(logging.WARNING):
        parts = opened("979,20,1")
    assert [one.name for one in parts["valid"]] == [a]
    assert f"leaves no validation documents of `{b}` (10 documents)" in caplog.text
    with pytest.raises(DataError, match="`--split 9999,1,0` leaves no validation documents"):
        opened("9999,1,0")
    assert "valid" not in opened("9999,1,0", needed=("train",))


def test_tiny_corpus_has_no_validation_documents(write):
    """Ten documents at 979,20,1: said, with the bounds."""
    blend = Blend("data_path", (DataSource(write("a", 10)),))
    with pytest.raises(DataError) as caught:
        open_sources(
            RunSources(blend, split=parse_split("979,20,1")),
            needed=("train", "valid"),
            prefix_of=lambda one: one.name,
        )
    assert "10 documents are divided at [0, 10, 10, 10]" in str(caught.value.why)


def test_ranges_of_documents(write):
    """Bounds are rounded shares of the documents; an empty range is an error."""
    a, b = write("a", 15), write("b", 3)

    def opened(*ranges):
        found = tuple(DataSource(name, 1.0, span) for name, span in ranges)
        sources = RunSources(None, {"train": Blend("train_weighted_split_paths", found)})
        parts = open_sources(sources, needed=("train",), prefix_of=lambda one: one.name)
        return [one.documents for one in parts["train"]]

    assert opened((a, (0, 0.5)), (b, (0.5, 1))) == [(0, 8), (2, 3)]
    assert opened((a, (0, 0.3)), (b, (0, 0.1))) == [(0, 4)]
    with pytest.raises(DataError, match="leaves no training documents"):
        opened((b, (0, 0.1)))


def test_weight_of_a_single_source(write, settings):
    """A single data set of one part is read as if it had no weight; lmcore 2026.11 asked for more.

    A single weighted data set that `--split` divides is a blend, as in megatron-core.
    """
    source = (DataSource(write("a", 40), 2.0),)  # an epoch has 24 samples

    def samples(sources, rule):
        of_rule = replace(settings, blend_rule=rule)
        parts = open_sources(
            sources, needed=("train",), prefix_of=lambda o: o.name, blend_rule=rule
        )
        return build_samples(parts["train"], 24, of_rule, name="train")

    own = RunSources(None, {"train": Blend("train_data_path", source)})
    alone = samples(own, "megatron-core")
    assert isinstance(alone, GPTDataset)
    assert alone.available == 24
    divided = RunSources(Blend("data_path", source), split=parse_split("100,0,0"))
    for sources, rule in ((own, "lmcore-2026.11"), (divided, None)):
        blend = samples(sources, rule or "megatron-core")
        assert isinstance(blend, BlendedDataset)
        assert blend.sources[0].available == 49  # 25 are asked for: a second epoch


def test_rule_of_a_changed_blend(write, settings):
    """A blend that a checkpoint records continues by its own rule only."""
    a, b, c = (unique(write, name) for name in "abc")
    older = replace(settings, blend_rule="lmcore-2026.11")
    record = saved(Order.begin(sources_of((a, 1.0)), 300, older), 100)
    sources = sources_of((a, 0.7), (b, 0.2), (c, 0.1))
    changed = changed_blend(sources, record, 300, older)
    resumed = Order.continue_from(saved(changed, 170), 300, sources, older)
    assert resumed.fingerprint == changed.fingerprint
    places = [resumed.samples.locate(i) for i in range(100, 300)]
    assert places == [changed.samples.locate(i) for i in range(100, 300)]
    with pytest.raises(ConfigError, match="sources or weights differ") as caught:
        Order.continue_from(saved(changed, 170), 300, sources, settings)
    assert "`--blend-rule megatron-core`" in caught.value.why
    today = changed_blend(sources, record, 300, settings).samples
    assert [today.locate(i) for i in range(100, 300)] != places


@pytest.mark.parametrize(
    "kind,num_samples,orders",
    [
        (
            "data_path",
            24,
            {
                "train": "02e2c4e7176131f28f3bdf5d3fd8259b",
                "valid": "81880798ac17e7c6aafb9145c7a19a68",
                "test": "9e839db5a13986397efacd23ee41c07d",
            },
        ),
        ("train_data_path", 24, {"train": "62d4d8a2d98063fddb8c7e1034ca13d0"}),
        # An epoch of the data set has 54 samples.
        ("single", 54, {"train": "1aa1670d733310c35bf2146c83784d81"}),
    ],
)
def test_samples_of_older_runs(write, settings, kind, num_samples, orders):
    """The orders that lmcore 2026.11 recorded in checkpoints are made by its rules only."""
    named = [(write("a", 37), 0.7), (write("b", 88), 0.2), (write("c", 61), 0.1)]
    blend = Blend(kind, tuple(DataSource(*one) for one in named))
    if kind == "single":
        blend = Blend("train_data_path", blend.sources[1:2])
    if kind == "data_path":
        sources = RunSources(blend, split=parse_split("1,1,1"))
    else:
        sources = RunSources(None, {"train": blend})

    def orders_by(split_rule, blend_rule):
        parts = open_sources(
            sources,
            needed=("train",),
            prefix_of=lambda o: o.name,
            split_rule=split_rule,
            blend_rule=blend_rule,
        )
        of_rule = replace(settings, blend_rule=blend_rule)
        return {
            part: build_samples(parts[part], num_samples, of_rule, name=part).order
            for part in parts
        }

    assert orders_by(**OLDER_RULES) == orders
    assert orders_by(SPLIT_RULES[0], BLEND_RULES[0])["train"] != orders["train"]


def identities(samples, positions) -> list[tuple[int, bytes]]:
    """Return source and tokens of samples."""
    return [(min(origin(samples[i])), samples[i].tobytes()) for i in positions]


def unique(write, name):
    """Return a dataset without two equal samples."""
    prefix = write(name, 0)
    base = 1000 * (1 + "abcdefg".index(name[0]))
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for number in range(200):
            rng = np.random.default_rng(number)
            writer.add_document(base + rng.integers(0, 999, 40))
    return prefix


def test_new_weights_in_mid_run_repeat_nothing(write, settings):
    """After two changes, the first without one of the sources, no source repeats a sample."""
    a, b, c = (unique(write, name) for name in "abc")
    total = 900  # of each source there are 999 samples in an epoch
    first = Order.begin(sources_of((a, 0.7), (b, 0.3)), total, settings)
    seen = identities(first.samples, range(300))
    record = saved(first, 300)
    assert [one.consumed for one in record.blend.sources] == [210, 90]
    second = changed_blend(sources_of((b, 0.5), (c, 0.5)), record, total, settings)
    seen += identities(second.samples, range(300, 500))
    record = saved(second, 500)
    assert {one.name: one.consumed for one in record.blend.sources} == {a: 210, b: 190, c: 100}
    third = changed_blend(sources_of((a, 0.9), (b, 0.1)), record, total, settings).samples
    seen += identities(third, range(500, total))
    assert len(seen) == len(set(seen)) == total
    assert Counter(one for one, _ in seen[500:]) == {1: 360, 2: 40}
    with pytest.raises(IndexError):
        third[499]


def test_a_changed_blend_goes_on_as_if_unbroken(write, settings):
    """A restart in the middle of the second blend sees what an unbroken run would have seen."""
    a, b = unique(write, "a"), unique(write, "b")
    first = Order.begin(sources_of((a, 1.0)), 400, settings)
    changed = changed_blend(sources_of((a, 0.5), (b, 0.5)), saved(first, 100), 400, settings)
    record = saved(changed, 217)
    resumed = Order.continue_from(record, 400, sources_of((a, 0.5), (b, 0.5)), settings)
    assert resumed.fingerprint == changed.fingerprint
    for i in range(100, 400):
        assert resumed.samples[i].tolist() == changed.samples[i].tolist()
    with pytest.raises(ConfigError, match="differ from the checkpoint's") as caught:
        Order.continue_from(record, 400, sources_of((a, 0.4), (b, 0.6)), settings)
    assert f"0.5 `{a}`, 0.5 `{b}`" in str(caught.value.why)


def test_a_source_goes_on_after_its_last_sample(write, settings):
    """A source with too few remaining samples starts an epoch with another shuffle."""
    a, b = write("a", 40), write("b", 40)
    first = Order.begin(sources_of((a, None)), 24, settings)
    sources = sources_of((a, 0.9), (b, 0.1))
    changed = changed_blend(sources, saved(first, 20), 200, settings).samples
    assert changed.sources[0].requested[0] == 24
    assert len(changed.sources[0].requested) == 2
    assert shares(changed, range(20, 200))[1] == 162


def test_a_longer_run_keeps_the_order_of_its_past(write, settings):
    """More epochs, shuffled together, are another order: a longer run continues from its position.

    Other weights, or other rules of the order, are refused by their fingerprint instead.
    """
    sources = sources_of((write("a", 40),))  # an epoch has 24 samples
    short = Order.begin(sources, 24, settings)
    other = Order.begin(sources, 60, settings)
    assert other.fingerprint != short.fingerprint
    longer = Order.continue_from(saved(short, 20), 60, sources, settings)
    assert longer.resumed == short.fingerprint != longer.fingerprint
    assert [longer.samples[i].tolist() for i in range(20, 24)] == [
        short.samples[i].tolist() for i in range(20, 24)
    ]
    again = Order.continue_from(saved(longer, 30), 60, sources, settings)
    assert again.fingerprint == again.resumed == longer.fingerprint
    record = replace(saved(short, 20), same_rules=False)
    refused = Order.continue_from(record, 60, sources, settings)
    assert refused.fingerprint == refused.resumed == other.fingerprint


def test_a_source_that_changed_is_refused(write, settings):
    """The same name with other documents, or other settings of the order, repeat samples."""
    a = write("a", 40)
    record = saved(Order.begin(sources_of((a, 1.0)), 24, settings), 8)
    other = SampleSettings(LENGTH, 99, settings.cache_dir, 0.8)
    with pytest.raises(ConfigError, match="in another order than the checkpoint's"):
        changed_blend(sources_of((a, 2.0)), record, 24, other)
    for suffix in (".bin", ".idx"):
        Path(a + suffix).unlink()
    write("a", 41)
    with pytest.raises(ConfigError, match="has other documents than in the checkpoint's run"):
        changed_blend(sources_of((a, 2.0)), record, 24, settings)


def test_a_source_that_moved_goes_on(write, settings, tmp_path):
    """Documents are known by their content, not by where they lie."""
    a, b = unique(write, "a"), unique(write, "b")
    first = Order.begin(sources_of((a, 0.5), (b, 0.5)), 100, settings)
    for suffix in (".bin", ".idx"):
        Path(a + suffix).rename(tmp_path / f"moved{suffix}")
    moved = str(tmp_path / "moved")
    changed = changed_blend(sources_of((moved, 0.2), (b, 0.8)), saved(first, 50), 100, settings)
    assert changed.samples.taken == (25, 25)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"start": 0, "weights": [1.0], "sources": []},
        {"start": 0, "weights": [1.0], "sources": [{"name": "a"}]},
        {"start": "x", "weights": [], "sources": []},
        {"start": 0, "weights": 3, "sources": []},
    ],
)
def test_damaged_record(values):
    """The record of a checkpoint is checked before use."""
    with pytest.raises(CheckpointError):
        BlendRecord.from_dict(values)


def test_order_does_not_follow_the_length(write, settings):
    """A longer run within the same epochs has the same order; other weights another."""
    sources = sources_of((unique(write, "a"), 0.5), (unique(write, "b"), 0.5))
    short, longer = (build_samples(sources, n, settings, name="train") for n in (100, 150))
    assert short.order == longer.order
    one, other = (
        OpenSource(s.name, s.indexed, s.documents, w)
        for s, w in zip(sources, (0.4, 0.6), strict=True)
    )
    assert build_samples([one, other], 100, settings, name="train").order != short.order
    assert isinstance(short.sources[0], SourceStream)


@pytest.mark.parametrize("name", ["a_text_sentence", "a"])
def test_sentences_are_no_data_of_a_decoder(tmp_path, settings, name):
    """Documents of several sequences, and the name of such data, are refused with the reason."""
    prefix = str(tmp_path / name)
    with IndexedDatasetWriter(prefix, "uint16") as writer:
        for number in range(20):
            lengths = [5] if name.endswith("sentence") else [2, 3]
            writer.add_document([number] * 5, lengths)
    for sources in ([prefix], [prefix, prefix + ".copy"]):
        for other in sources[1:]:
            for end in (".bin", ".idx"):
                Path(other + end).write_bytes(Path(prefix + end).read_bytes())
        opened = sources_of(*((one,) for one in sources))
        with pytest.raises(DataError, match="is split into sentences, and the model") as caught:
            build_samples(opened, 4, settings, name="train")
        assert "such data is for BERT" in (caught.value.why or "")
        stored = "its name ends with `_sentence`", "its 20 documents are stored as 40 sentences"
        assert any(why in (caught.value.why or "") for why in stored)
        assert "without `--split-sentences`" in caught.value.hint

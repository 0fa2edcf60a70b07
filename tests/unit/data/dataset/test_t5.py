"""T5 samples; test_megatron_samples.py compares them with Megatron's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcore.base.errors import DataError
from lmcore.data.dataset.masking import MaskingPolicy, MaskingWords
from lmcore.data.dataset.t5 import T5Dataset, T5Settings, T5Vocabulary, corrupt_spans
from lmcore.data.indexed.dataset import IndexedDataset
from lmcore.data.indexed.writer import IndexedDatasetWriter

CLS, SEP, BOS, EOS, PAD = 1, 2, 3, 4, 0
SENTINELS = tuple(range(900, 1000))
WORDS = MaskingWords(CLS, SEP, np.arange(1000) % 5 == 4)
VOCABULARY = T5Vocabulary(WORDS, BOS, EOS, PAD, SENTINELS)


def restored(encoder: list[int], decoder: list[int]) -> list[int]:
    """Put the pieces of the decoder back in place of the sentinels."""
    pieces: dict[int, list[int]] = {}
    for token in decoder:
        if token in SENTINELS:
            pieces[token] = last = []
        else:
            last.append(token)
    result = []
    for token in encoder:
        result += pieces.pop(token) if token in SENTINELS else [token]
    assert not pieces
    return result


@given(
    tokens=st.lists(st.integers(5, 899), min_size=0, max_size=200),
    seed=st.integers(0, 2**32 - 1),
    probability=st.floats(0.05, 0.6),
    sentinels=st.integers(1, 100),
    room=st.integers(2, 200),
)
@example(tokens=list(range(5, 205)), seed=0, probability=0.6, sentinels=1, room=200)
@example(tokens=list(range(5, 205)), seed=0, probability=0.6, sentinels=100, room=2)
def test_spans_reconstruct(tokens, seed, probability, sentinels, room):
    """Encoder and decoder together hold the text, in order; sentinels and room always suffice."""
    vocabulary = T5Vocabulary(WORDS, BOS, EOS, PAD, SENTINELS[:sentinels])
    encoder, decoder = corrupt_spans(
        np.array(tokens, dtype=np.int64),
        200,
        vocabulary,
        MaskingPolicy(probability, max_ngram=10, geometric=True),
        np.random.RandomState(seed),
        decoder_length=room,
    )
    assert restored(encoder, decoder) == tokens
    assert len(decoder) < room
    used = [token for token in encoder if token in SENTINELS]
    assert used == list(vocabulary.sentinels[: len(used)])


@pytest.fixture
def indexed(tmp_path) -> IndexedDataset:
    rng = np.random.RandomState(0)
    with IndexedDatasetWriter(tmp_path / "sentences", "uint16") as writer:
        for _ in range(30):
            lengths = rng.randint(1, 20, rng.randint(1, 6)).tolist()
            writer.add_document(rng.randint(5, 900, sum(lengths)), lengths)
    return IndexedDataset(tmp_path / "sentences")


def dataset(indexed, tmp_path, **changes) -> T5Dataset:
    arguments = {"encoder_length": 48, "decoder_length": 24, "seed": 3, **changes}
    return T5Dataset(
        indexed,
        VOCABULARY,
        T5Settings(**arguments),
        document_range=(0, 30),
        num_samples=80,
        cache_dir=tmp_path,
    )


def test_input_and_output_of_the_decoder_are_shifted(indexed, tmp_path):
    """The decoder is given its output one place later; both end at the same place."""
    made = dataset(indexed, tmp_path)
    for i in range(len(made)):
        one = made[i]
        length = int(one.loss_mask_D.sum())
        assert one.loss_mask_D.tolist() == [1] * length + [0] * (24 - length)
        assert one.decoder_mask_D.tolist() == one.loss_mask_D.tolist()
        assert one.decoder_tokens_D[0] == BOS
        assert one.labels_D[length - 1] == EOS
        assert (one.decoder_tokens_D[1:length] == one.labels_D[: length - 1]).all()
        assert (one.labels_D[length:] == -1).all()
        assert (one.encoder_tokens_E[one.encoder_mask_E == 0] == 0).all()


def test_the_text_is_the_document_s(indexed, tmp_path):
    """A sample restored is a run of its document's sentences, cut at the encoder's length."""
    made = dataset(indexed, tmp_path)
    for i in range(len(made)):
        one = made[i]
        first, last, target = made.row(i)
        text = np.concatenate([indexed.get(at) for at in range(first, last)]).tolist()
        encoder = one.encoder_tokens_E[: int(one.encoder_mask_E.sum())].tolist()
        decoder = one.labels_D[: int(one.loss_mask_D.sum()) - 1].tolist()
        assert restored(encoder, decoder) == text[:target]
        assert one.truncated == (len(text) > target)


def test_a_short_decoder_takes_less_out(indexed, tmp_path):
    """Fewer spans are removed if the decoder is full; Megatron's run stops there."""
    made = dataset(indexed, tmp_path, decoder_length=5)
    assert max(int(made[i].loss_mask_D.sum()) for i in range(len(made))) <= 5


def test_a_token_beyond_the_vocabulary_is_an_error(indexed, tmp_path):
    """Tokens beyond the vocabulary are an error."""
    words = MaskingWords(CLS, SEP, np.zeros(100, dtype=bool))
    vocabulary = T5Vocabulary(words, BOS, EOS, PAD, (90, 91))
    made = T5Dataset(
        indexed,
        vocabulary,
        T5Settings(48, 24, 3),
        document_range=(0, 30),
        num_samples=80,
        cache_dir=tmp_path,
    )
    with pytest.raises(DataError, match="the vocabulary has 100"):
        made[0]


def test_settings_out_of_range_are_refused():
    """Lengths must leave room for text; without sentinels there is no span corruption."""
    for lengths in [(3, 10), (10, 2)]:
        with pytest.raises(ValueError):
            T5Settings(*lengths, seed=1)
    with pytest.raises(ValueError):
        T5Vocabulary(WORDS, BOS, EOS, PAD, ())

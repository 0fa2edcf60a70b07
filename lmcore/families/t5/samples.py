"""Samples of T5: text without some spans for the encoder, the spans for the decoder.

Shapes: B micro-batch, S encoder sequence, D decoder sequence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lmcore.base.errors import ConfigError
from lmcore.data.dataset.masking import MaskingPolicy, MaskingWords
from lmcore.data.dataset.t5 import T5Dataset, T5Settings, T5Vocabulary
from lmcore.data.tokenizer import special_ids, spellings
from lmcore.families.sample_format import SampleFormat
from lmcore.families.sentences import refuse_named_texts, require_sentences
from lmcore.families.t5.family import MEAN_SPAN, decoder_length

if TYPE_CHECKING:
    from lmcore.config.plan import RunPlan
    from lmcore.data.blend.sources import OpenSource, SampleSettings
    from lmcore.data.dataset.t5 import T5Sample
    from lmcore.data.loading.batch import Batch
    from lmcore.data.tokenizer import Tokenizer

__all__ = ["T5Collation", "T5Samples", "samples", "span_vocabulary"]

_CONTINUES = "##"
_SENTINEL = re.compile(r"<extra_id_(\d+)>")
_PREPARE = (
    "`lmcore data prepare --split-sentences --tokenizer-type SentencePieceTokenizer "
    "--tokenizer-model FILE --vocab-extra-ids 100`"
)


def samples(plan: RunPlan, tokenizer: Tokenizer) -> SampleFormat:
    """Return the format of a run's samples.

    Args:
        plan: The run.
        tokenizer: Tokenizer of the data.

    Raises:
        ConfigError: The tokenizer lacks sentinels or another token, or the run has no sentences to
            read.
    """
    without = "and a tokenizer of bytes has no sentinels"
    refuse_named_texts(plan, "T5", prepare=_PREPARE, why=without)
    config = plan.config
    settings = T5Settings(
        encoder_length=config.model.seq_length,
        decoder_length=decoder_length(config),
        seed=0,  # each source's, see `T5Samples`
        short_probability=config.bert.short_seq_prob,
        policy=MaskingPolicy(probability=config.bert.mask_prob, max_ngram=10, geometric=True),
    )
    vocabulary = span_vocabulary(tokenizer)
    _require_enough(vocabulary, settings)
    return SampleFormat(T5Samples(settings, vocabulary), T5Collation(), sentences=True)


def span_vocabulary(tokenizer: Tokenizer) -> T5Vocabulary:
    """Return what span corruption needs to know of a tokenizer's vocabulary.

    A vocabulary without a token that begins a text has its padding in that place, as the original
    T5's.

    Raises:
        ConfigError: The tokenizer lacks sentinels, another token, or the spelling of its ids.
    """
    special = special_ids(tokenizer)
    sentinels = special.sentinels or _spelled(tokenizer)
    # Another id of padding is replaced by 0 in samples.
    start = 0 if special.pad == 0 else None
    bos = special.bos if special.bos is not None else start
    eos = special.eos if special.eos is not None else special.sep
    needed = {
        "sentinels": sentinels or None,
        "token that begins a text": bos,
        "token that ends a text": eos,
        "padding beside the token that ends a text": None if special.pad == eos else 0,
    }
    missing = [f"no {name}" for name, found in needed.items() if found is None]
    if missing or bos is None or eos is None:
        hint = f"prepare the data again, as by {_PREPARE}"
        if not sentinels and len(missing) == 1:
            hint = (
                "prepare the data again with `--vocab-extra-ids 100`, if the type of the tokenizer "
                f"takes it, or as by {_PREPARE}"
            )
        raise ConfigError(
            f"T5 cannot be trained with the tokenizer `{tokenizer.name}`",
            why=f"its vocabulary has {', '.join(missing)}",
            hint=hint,
        )
    continues = np.array([piece.startswith(_CONTINUES) for piece in spellings(tokenizer)])
    # Special tokens that no text has, where the vocabulary does not have them.
    words = MaskingWords(
        cls=bos if special.cls is None else special.cls,
        sep=eos if special.sep is None else special.sep,
        continues=continues,
    )
    pad = 0 if special.pad is None else special.pad
    return T5Vocabulary(words, bos=bos, eos=eos, pad=pad, sentinels=sentinels)


def _spelled(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the sentinels that a vocabulary has without `--vocab-extra-ids`, in order."""
    pieces = getattr(tokenizer, "spellings", ())
    found = {
        int(match[1]): i for i, piece in enumerate(pieces) if (match := _SENTINEL.fullmatch(piece))
    }
    return tuple(found[number] for number in sorted(found))


def _require_enough(vocabulary: T5Vocabulary, settings: T5Settings) -> None:
    """Refuse fewer sentinels than the spans of a sample in the mean.

    Raises:
        ConfigError: There are fewer.
    """
    length = settings.encoder_length
    spans = max(1, int(settings.policy.probability * (length - 2) / MEAN_SPAN))
    if (held := len(vocabulary.sentinels)) < spans:
        raise ConfigError(
            f"T5 needs more sentinels than the tokenizer's {held} for `--seq-length {length}`",
            why=f"some {spans} spans of a sample are replaced by one each",
            hint="prepare the data again with `--vocab-extra-ids 100`, or use a smaller "
            "`--seq-length` or `--mask-prob`",
        )


@dataclass(frozen=True)
class T5Samples:
    """Builder of T5's samples; see `SampleBuilder`.

    Attributes:
        settings: Settings of the samples, without the seed.
        vocabulary: Vocabulary.
    """

    settings: T5Settings
    vocabulary: T5Vocabulary

    def build(
        self, source: OpenSource, num_samples: int | None, settings: SampleSettings, *, name: str
    ) -> T5Dataset:
        """Return the `T5Dataset` of a source."""
        sizes, room = source.indexed.sizes, self.settings.encoder_length
        if len(sizes) and int(sizes.max()) > room:
            cut = f"and would be cut off after {room - 2} tokens"
            require_sentences(source, "T5", why=cut)
        return T5Dataset(
            source.indexed,
            self.vocabulary,
            replace(self.settings, seed=settings.seed),
            document_range=source.documents,
            num_samples=num_samples,
            cache_dir=settings.cache_dir,
            name=name,
        )

    def samples_per_epoch(self, source: OpenSource, settings: SampleSettings) -> int:
        """Return the number of samples of one pass over a source; its index is built for that."""
        return len(self.build(source, None, settings, name="epoch"))


@dataclass(frozen=True)
class T5Collation:
    """Collation of `T5Sample`; for the tensors see `T5Model.loss`."""

    def __call__(self, samples: Sequence[Any], first: int) -> Batch:  # noqa: ARG002 - a protocol
        """Return the batch of *samples*; see `Collation`."""
        found: Sequence[T5Sample] = samples
        weight_BD = np.stack([sample.loss_mask_D for sample in found])
        batch = {
            "tokens_BS": np.stack([sample.encoder_tokens_E for sample in found]),
            "padding_BS": np.stack([sample.encoder_mask_E for sample in found]) == 0,
            "decoder_tokens_BD": np.stack([sample.decoder_tokens_D for sample in found]),
            "targets_BD": np.stack([sample.labels_D for sample in found]) * (weight_BD > 0),
            "loss_weight_BD": weight_BD.astype(np.float32),
        }
        return {name: torch.from_numpy(values) for name, values in batch.items()}

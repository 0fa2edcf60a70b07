"""Trainers of vocabularies, which write the files that `--tokenizer-type` reads.

All of them are deterministic: the same lines give the same files on any machine.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from lmcore.base.errors import ConfigError, DataError, MissingPackageError
from lmcore.data.tokenizer.bert_pretokenizer import word_splitter
from lmcore.data.tokenizer.bpe_files import byte_alphabet

__all__ = ["KINDS", "Kind", "Recipe", "require_room"]

_END = "<|endoftext|>"
_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_MIN_FREQUENCY = 2
_COVERAGE = 0.9995
_THREADS = 16  # of SentencePiece: its sums, and so its pieces, depend on the number of threads


@dataclass(frozen=True)
class Recipe:
    """Training settings of a vocabulary; None: the default of the kind.

    Attributes:
        vocab_size: number of tokens, including special ones.
        special_tokens: additional special tokens.
        min_frequency: minimum frequency of a pair to be merged.
        model_type: `unigram` or `bpe`, for a SentencePiece model.
        character_coverage: fraction of the text's characters that the alphabet covers.
    """

    vocab_size: int
    special_tokens: tuple[str, ...] = ()
    min_frequency: int | None = None
    model_type: str | None = None
    character_coverage: float | None = None


Train = Callable[[Sequence[str], Recipe, Path], None]


@dataclass(frozen=True)
class Kind:
    """Trainable tokenizer type.

    Attributes:
        train: writes the files into a directory.
        files: names of the files, by tokenizer option; empty for a directory.
        takes: supported settings of the recipe.
        sample_bytes: default size limit of the training text, in bytes.
        own: tokens of every vocabulary of the type: special tokens and bytes.
    """

    train: Train
    files: Mapping[str, str]
    takes: tuple[str, ...]
    sample_bytes: int
    own: tuple[str, ...]


def require_room(kind: Kind, recipe: Recipe) -> None:
    """Raise `ConfigError` if the size is too small for the tokens of every vocabulary of *kind*.

    The letters are not counted: only the text determines them.
    """
    least = len({*kind.own, *recipe.special_tokens})
    _require_room(recipe, least, "the special tokens and bytes of its type")


def _gpt2(lines: Sequence[str], recipe: Recipe, directory: Path) -> None:
    """Write `vocab.json` and `merges.txt` in GPT-2's layout: bytes, merges, special tokens."""
    vocabulary, merges, _ = _byte_level(lines, recipe)
    _write(directory / "vocab.json", json.dumps(vocabulary, ensure_ascii=False))
    rules = "".join(f"{left} {right}\n" for left, right in merges)
    _write(directory / "merges.txt", f"#version: 0.2\n{rules}")


def _pretrained(lines: Sequence[str], recipe: Recipe, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` of a byte-level BPE."""
    vocabulary, merges, special = _byte_level(lines, recipe)
    library = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(
        [tokenizers.AddedToken(token, special=True, normalized=False) for token in special]
    )
    _write(directory / "tokenizer.json", library.to_str(pretty=True))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _END,
        "eos_token": _END,
        "unk_token": _END,
    }
    _write(directory / "tokenizer_config.json", json.dumps(config, indent=2))


def _byte_level(
    lines: Sequence[str], recipe: Recipe
) -> tuple[dict[str, int], list[tuple[str, str]], list[str]]:
    """Return the vocabulary of a byte-level BPE, its merges, and its special tokens."""
    special = [*dict.fromkeys((*recipe.special_tokens, _END))]
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size - len(special),
        min_frequency=recipe.min_frequency or _MIN_FREQUENCY,
        initial_alphabet=list(byte_alphabet()),
        show_progress=False,
    )
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.train_from_iterator(iter(lines), trainer)
    found: list[list[str]] = json.loads(library.to_str())["model"]["merges"]
    merges = [(left, right) for left, right in found]
    tokens = dict.fromkeys([*byte_alphabet(), *(left + right for left, right in merges), *special])
    return {token: i for i, token in enumerate(tokens)}, merges, special


def _wordpiece(lower_case: bool) -> Train:  # noqa: FBT001  # the only difference
    def train(lines: Sequence[str], recipe: Recipe, directory: Path) -> None:
        """Write `vocab.txt`: special tokens, letters, letters inside words, longer pieces."""
        split = word_splitter(lower_case=lower_case)
        first: Counter[str] = Counter()
        inside: Counter[str] = Counter()
        words = Counter(word for line in lines for word in split(line))
        for word, count in words.items():
            first[word[0]] += count
            for letter in word[1:]:
                inside[letter] += count
        alphabet = _covering(first + inside, recipe.character_coverage or _COVERAGE)
        # The trainer's numbering of these changes from run to run and decides between equally
        # frequent pairs: as special tokens they are numbered in order.
        continuing = [f"##{letter}" for letter in alphabet if letter in inside]
        special = [*_BERT, *recipe.special_tokens, *continuing]
        _require_room(recipe, len(special) + len(alphabet), "the letters and the special tokens")
        trainer = trainers.WordPieceTrainer(
            vocab_size=recipe.vocab_size,
            min_frequency=recipe.min_frequency or _MIN_FREQUENCY,
            special_tokens=special,
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
        library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        library.train_from_iterator((" ".join(split(line)) for line in lines), trainer)
        by_id = sorted(library.get_vocab(with_added_tokens=False).items(), key=lambda kv: kv[1])
        ordered = dict.fromkeys([*_BERT, *recipe.special_tokens, *alphabet, *continuing])
        ordered.update(dict.fromkeys(token for token, _ in by_id))
        _write(directory / "vocab.txt", "".join(f"{token}\n" for token in ordered))

    return train


def _covering(counts: Counter[str], coverage: float) -> list[str]:
    """Return the most frequent letters that cover a fraction of the text, by code point."""
    wanted = coverage * counts.total()
    kept: list[str] = []
    covered = 0
    for letter, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if covered >= wanted and not letter.isascii():
            continue
        kept.append(letter)
        covered += count
    return sorted(kept)


def _sentence_piece(settings: Mapping[str, Any], model_type: str) -> Train:
    def train(lines: Sequence[str], recipe: Recipe, directory: Path) -> None:
        """Write `tokenizer.model` with the trainer of the `sentencepiece` library."""
        try:
            import sentencepiece
        except ImportError:
            raise MissingPackageError(
                "sentencepiece",
                needed_for="training a SentencePiece model",
                install="pip install sentencepiece",
            ) from None
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=(text for line in lines if (text := line.rstrip("\r\n"))),
                model_writer=model,
                vocab_size=recipe.vocab_size,
                model_type=recipe.model_type or model_type,
                character_coverage=recipe.character_coverage or _COVERAGE,
                control_symbols=list(recipe.special_tokens),
                num_threads=_THREADS,
                max_sentence_length=1 << 16,
                minloglevel=2,
                **settings,
            )
        except (RuntimeError, ValueError) as error:
            raise DataError(
                f"no SentencePiece model of {recipe.vocab_size} pieces can be trained on this text",
                why=str(error).rsplit("] ", maxsplit=1)[-1],
                hint="use another `--vocab-size`, or more text",
            ) from None
        (directory / "tokenizer.model").write_bytes(model.getvalue())

    return train


# As the original models of these types: T5's normalizes, Llama's keeps every byte.
_T5 = MappingProxyType({"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1})
_LLAMA = MappingProxyType(
    {
        "unk_id": 0,
        "bos_id": 1,
        "eos_id": 2,
        "pad_id": -1,
        "byte_fallback": True,
        "split_digits": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
    }
)


def _require_room(recipe: Recipe, needed: int, what: str) -> None:
    if recipe.vocab_size < needed:
        raise ConfigError(
            f"`--vocab-size {recipe.vocab_size}` is too small for {what}: {needed}",
            hint=f"use {needed} or more; 30000 is common",
        )


def _write(path: Path, text: str) -> None:
    path.write_text(text if text.endswith("\n") else f"{text}\n", encoding="utf-8", newline="\n")


_BYTES = tuple(byte_alphabet())
_LLAMA_OWN = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)))
_GIB = 1 << 30
_BPE = ("special_tokens", "min_frequency")
_PIECES = ("special_tokens", "model_type", "character_coverage")
_WORDS = ("special_tokens", "min_frequency", "character_coverage")
_MODEL: Mapping[str, str] = MappingProxyType({"tokenizer_model": "tokenizer.model"})
_TEXT: Mapping[str, str] = MappingProxyType({"vocab_file": "vocab.txt"})

KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "BertWordPieceCase": Kind(_wordpiece(lower_case=False), _TEXT, _WORDS, _GIB, _BERT),
        "BertWordPieceLowerCase": Kind(_wordpiece(lower_case=True), _TEXT, _WORDS, _GIB, _BERT),
        "GPT2BPETokenizer": Kind(
            _gpt2,
            MappingProxyType({"vocab_file": "vocab.json", "merge_file": "merges.txt"}),
            _BPE,
            _GIB,
            (*_BYTES, _END),
        ),
        "GPTSentencePieceTokenizer": Kind(
            _sentence_piece(_LLAMA, "unigram"), _MODEL, _PIECES, _GIB // 8, _LLAMA_OWN
        ),
        "HFTokenizer": Kind(
            _pretrained,
            MappingProxyType({"tokenizer_name_or_path": ""}),
            _BPE,
            _GIB,
            (*_BYTES, _END),
        ),
        "Llama2Tokenizer": Kind(
            _sentence_piece(_LLAMA, "bpe"), _MODEL, _PIECES, _GIB // 8, _LLAMA_OWN
        ),
        "SentencePieceTokenizer": Kind(
            _sentence_piece(_T5, "unigram"),
            _MODEL,
            _PIECES,
            _GIB // 8,
            ("<pad>", "</s>", "<unk>"),
        ),
    }
)
"""Trainable tokenizer types, by name."""

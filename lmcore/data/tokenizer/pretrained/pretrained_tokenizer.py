"""Pretrained tokenizers of any kind: `PretrainedFromHF`, `HFTokenizer`, `HuggingFaceTokenizer`.

The `tokenizers` library runs their `tokenizer.json`: no code comes with it, and nothing is
downloaded.  Two of its defaults are changed: text that spells a special token is ordinary text, and
nothing is truncated or padded.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from lmcore.base.errors import DataError, counted
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.data.tokenizer.file_tokenizer import FileTokenizer, SpecialIds, refuse_surrogates
from lmcore.data.tokenizer.pretrained.files import (
    AddedSpelling,
    PretrainedFiles,
    read_pretrained,
)

__all__ = ["PretrainedTokenizer", "pretrained_path"]

_SENTINELS = {"PretrainedFromHF": "<extra_id_{:02}>"}
_SENTINEL = "<extra_id_{}>"
_BERT_OPTIONS = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
_PIPELINE_PARTS = ("normalizer", "pre_tokenizer")
_PROBES = ("a", "b c")
_MAX_ID = 2**31 - 2

Ids = tuple[int, ...]


def pretrained_path(settings: TokenizerSettings) -> tuple[str, str]:
    """Return the path of a pretrained tokenizer, empty if none was given, and its flag."""
    if settings.tokenizer_name_or_path is not None:
        return settings.tokenizer_name_or_path, "--tokenizer-name-or-path"
    return settings.tokenizer_model or "", "--tokenizer-model"


class PretrainedTokenizer(FileTokenizer):
    """Tokenizer of a `tokenizer.json`, with the tokens that its configuration adds.

    Args:
        settings: type, path, and the options of pretrained types.

    Attributes:
        roles: spelling of the token for each role, such as bos and eos, that the configuration has.
        added_ids: ids of the tokens that are no result of the model, special ones among them.

    Raises:
        DataError: files that are missing or damaged.
    """

    def __init__(self, settings: TokenizerSettings) -> None:
        path, flag = pretrained_path(settings)
        if settings.tokenizer_type is None or not path:
            raise TypeError("type and path must be given")
        if multiprocessing.parent_process() is not None:
            # One of many worker processes: the library must not start its threads.
            os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        self.settings = settings
        self.name = settings.tokenizer_type
        self._files = read_pretrained(path, flag=flag)
        sentinel = _SENTINELS.get(self.name, _SENTINEL)
        sentinels = [sentinel.format(i) for i in range(settings.vocab_extra_ids)]
        self._library, self._changes = _load(self._files, sentinels)
        vocabulary = self._library.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        by_id = {i: token for token, i in vocabulary.items()}
        self.spellings = tuple(by_id.get(i, "") for i in range(self.vocab_size))
        self.roles: Mapping[str, str] = self._files.roles
        self.special = _special_ids(self._files.roles, vocabulary, sentinels)
        self.eod: int | None = self.special.eos
        self.added = (
            ((), ()) if settings.add_special_tokens is False else self._around(vocabulary, path)
        )
        self._library.post_processor = None  # `encode_batch` adds the special tokens
        self._library.encode_special_tokens = not settings.parse_special_tokens
        added = self._library.get_added_tokens_decoder()
        self.added_ids = frozenset(added)
        self._special_spellings = {i: token.content for i, token in added.items() if token.special}
        words = sorted(self._special_spellings.values(), key=len, reverse=True)
        self._any_special = re.compile("|".join(map(re.escape, words))) if words else None

    def encode(self, text: str) -> list[int]:
        """Return the ids of *text*."""
        return list(map(int, self.encode_batch([text])[0]))

    def encode_batch(self, texts: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Return the ids of each text, as int32 arrays."""
        for text in texts:
            refuse_surrogates(text)
        before, after = self.added
        encoded = self._library.encode_batch_fast(list(texts), add_special_tokens=False)
        arrays = []
        for text, encoding in zip(texts, encoded, strict=True):
            ids: list[int] = encoding.ids
            if self._spells_special(text):
                ids = self._as_text(text)
            arrays.append(np.array([*before, *ids, *after], dtype=np.int32))
        return arrays

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of *ids*, special tokens as their spelling."""
        self.check_ids(ids)
        return self._library.decode(list(ids), skip_special_tokens=False)

    def files(self) -> tuple[str, ...]:
        """Return the paths of `tokenizer.json` and its configuration files."""
        return tuple(str(path) for path in self._files.paths)

    def content_digests(self) -> list[str]:
        """Return a hash of the pipeline, and one of the settings read from the configuration.

        The rest of the configuration, such as chat templates, has no influence on ids.
        """
        settings = asdict(self._files) | {"paths": None, "pipeline": None}
        del settings["numbered"], settings["options"]  # `_changes` has what they change
        pipeline = sha256(Path(self.files()[0]).read_bytes()).hexdigest()
        found = [pipeline, sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()]
        return found + [f"changed: {', '.join(self._changes)}"] * bool(self._changes)

    def special_tokens(self) -> set[int]:
        """Return the ids that are no text, added tokens among them."""
        return super().special_tokens() | set(self._special_spellings)

    def _around(self, vocabulary: dict[str, int], path: str) -> tuple[Ids, Ids]:
        """Return the ids that the tokenizer adds before and after each text.

        The configuration overrides the pipeline, each switch its own side.
        """
        files = self._files
        before = _role(files, "bos", vocabulary) if files.add_bos else ()
        after = _role(files, "eos", vocabulary) if files.add_eos else ()
        if files.add_bos is not None and files.add_eos is not None:
            return before, after
        begin, end = _pipeline_around(self._library, path)
        if files.add_bos is None:
            self._changes += ["bos of the pipeline"] * bool(files.add_eos is not None and begin)
            before = begin
        if files.add_eos is None:
            self._changes += ["eos of the pipeline"] * bool(files.add_bos is not None and end)
            after = end
        return before, after

    def _spells_special(self, text: str) -> bool:
        if self.settings.parse_special_tokens or self._any_special is None:
            return False
        return self._any_special.search(text) is not None

    def _as_text(self, text: str) -> list[int]:
        """Encode a text that spells special tokens, which may be pieces of the model.

        Such a piece is encoded character by character.
        """
        encoding = self._library.encode(text, add_special_tokens=False)
        ids: list[int] = []
        for i, (start, end) in zip(encoding.ids, encoding.offsets, strict=True):
            spelling = self._special_spellings.get(i)
            if spelling is not None and text[start:end].strip() == spelling:
                for character in spelling:
                    ids += [token.id for token in self._library.model.tokenize(character)]
            else:
                ids.append(i)
        return ids


def _load(
    files: PretrainedFiles, sentinels: Sequence[str]
) -> tuple[tokenizers.Tokenizer, list[str]]:
    """Return the library's tokenizer with all added tokens, then the sentinels.

    The second result is what the configuration changes of the pipeline.
    """
    try:
        library = tokenizers.Tokenizer.from_str(files.pipeline)
    except BaseException as error:
        # A panic of the library is not an `Exception`; an interrupt is not its error.
        if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError)):
            raise
        raise DataError(
            f"`{files.paths[0]}` is not a tokenizer",
            why=str(error)[:300],
            hint="it must be a `tokenizer.json` of the `tokenizers` library",
        ) from None
    library.no_truncation()
    library.no_padding()
    known = library.get_vocab(with_added_tokens=True)
    if not known or max(known.values()) > _MAX_ID - len(files.added) - len(sentinels):
        raise DataError(
            f"`{files.paths[0]}` has {counted(len(known), 'token')}",
            why=f"a vocabulary has from 1 token to ids of {_MAX_ID}",
        )
    changes = _set_options(library, files.options)
    added = library.get_added_tokens_decoder()
    present = {token.content: _options_of(token) for token in added.values()}
    roles = set(files.roles.values())
    for token in files.added:
        # As in transformers a token with a role is special, whatever its entry says.
        options = asdict(token) | {"special": token.special or token.content in roles}
        found = present.get(token.content)
        if found is None or (token.content in files.numbered and found != options):
            add = library.add_special_tokens if options["special"] else library.add_tokens
            add([tokenizers.AddedToken(**options)])
            changes += [f"token {token.content}"] * (found is not None)
    library.add_special_tokens(
        [tokenizers.AddedToken(s, special=True, normalized=False) for s in sentinels]
    )
    return library, changes


def _set_options(library: tokenizers.Tokenizer, options: Mapping[str, bool]) -> list[str]:
    """Set options of BERT's normalizer and of byte-level words; return the changed ones.

    As the classes of transformers do after they have read the pipeline, which may lack some.
    """
    changed: list[str] = []
    for part in _PIPELINE_PARTS if options else ():
        component = getattr(library, part)
        if component is None:
            continue
        state = json.loads(component.__getstate__())
        before = len(changed)
        for one in _steps(state):
            for name, value in options.items():
                key = _key(one["type"], name)
                if key in one and one[key] is not value:
                    one[key] = value
                    changed.append(f"{name} {value}")
        if len(changed) > before:
            setattr(library, part, _component(part, state))
    return changed


def _key(kind: str, name: str) -> str | None:
    """Return the key of an option in a step of a pipeline; None: it has no such option."""
    if kind == "ByteLevel":
        return "add_prefix_space" if name == "add_prefix_space" else None
    return _BERT_OPTIONS.get(name) if kind == "BertNormalizer" else None


def _steps(state: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Return the steps of a component, which may be a sequence of them."""
    if state["type"] != "Sequence":
        yield state
    for one in state.get("normalizers", state.get("pretokenizers", ())):
        yield from _steps(one)


def _component(part: str, state: dict[str, Any]) -> Any:
    """Return the library's object of a state, by a tokenizer that has nothing else."""
    model = {"type": "BPE", "vocab": {}, "merges": []}
    whole = {"version": "1.0", "model": model, "added_tokens": [], part: state}
    return getattr(tokenizers.Tokenizer.from_str(json.dumps(whole)), part)


def _options_of(token: tokenizers.AddedToken) -> dict[str, object]:
    return {field.name: getattr(token, field.name) for field in fields(AddedSpelling)}


def _special_ids(
    roles: dict[str, str], vocabulary: dict[str, int], sentinels: Sequence[str]
) -> SpecialIds:
    """Return the special ids; a missing one falls back to its neighbour, as in Megatron."""
    ids = {role: vocabulary.get(token) for role, token in roles.items()}
    eos, sep, bos, cls = ids.get("eos"), ids.get("sep"), ids.get("bos"), ids.get("cls")
    eos = sep if eos is None else eos
    pad = ids.get("pad")
    return SpecialIds(
        cls=bos if cls is None else cls,
        sep=eos if sep is None else sep,
        pad=eos if pad is None else pad,
        mask=ids.get("mask"),
        bos=cls if bos is None else bos,
        eos=eos,
        unk=ids.get("unk"),
        sentinels=tuple(vocabulary[token] for token in sentinels),
    )


def _pipeline_around(library: tokenizers.Tokenizer, path: str) -> tuple[Ids, Ids]:
    """Return the ids that the pipeline adds before and after each text."""
    found: set[tuple[Ids, Ids]] = set()
    for probe in _PROBES:
        plain = library.encode(probe, add_special_tokens=False).ids
        whole = library.encode(probe).ids
        places = range(len(whole) - len(plain) + 1)
        starts = [i for i in places if whole[i : i + len(plain)] == plain]
        if len(starts) != 1:
            raise DataError(
                f"the tokenizer in `{path}` adds special tokens inside a text",
                why=f"it encodes `{probe}` as {whole}, without special tokens as {plain}",
                hint="use `--no-add-special-tokens`",
            )
        i = starts[0]
        found.add((tuple(whole[:i]), tuple(whole[i + len(plain) :])))
    if len(found) != 1:
        raise DataError(
            f"the tokenizer in `{path}` adds different special tokens to different texts",
            hint="use `--no-add-special-tokens`",
        )
    return found.pop()


def _role(files: PretrainedFiles, role: str, vocabulary: dict[str, int]) -> Ids:
    return (vocabulary[files.roles[role]],) if role in files.roles else ()

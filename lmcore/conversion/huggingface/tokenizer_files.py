"""Tokenizer files of a Hugging Face directory, read by a tokenizer of lmcore or written for one.

`tokenizer.json` is written for every tokenizer whose pipeline the `tokenizers` library has.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import DataError, LmcoreError, several, unreadable
from lmcore.config.tokenizer import BUILT_IN_TYPES, TokenizerSettings
from lmcore.data.tokenizer import special_ids, spellings, tokenizer_from
from lmcore.data.tokenizer.bpe_files import byte_alphabet
from lmcore.data.tokenizer.gpt2 import GPT2BPETokenizer
from lmcore.data.tokenizer.pretrained.files import MODEL_CONFIG

if TYPE_CHECKING:
    from lmcore.data.tokenizer import Tokenizer
    from lmcore.model.shape import ModelShape

__all__ = ["tokenizer_settings", "unread_tokens", "write_tokenizer"]

_MAX_CONFIG_BYTES = 32 * 1024 * 1024
_END = "<|endoftext|>"
_PIPELINE = "tokenizer.json"
_CONFIG = "tokenizer_config.json"
_ADDED = "added_tokens.json"
_BERT_CLASSES = ("BertTokenizer", "BertTokenizerFast")
_GPT2_CLASSES = tuple(
    f"{name}Tokenizer{end}" for name in ("GPT2", "CodeGen") for end in ("", "Fast")
)
"""Classes of transformers that divide texts into words as GPT-2 does."""
_QWEN2 = "Qwen2Tokenizer"
_PRETRAINED = {
    name for name, options in BUILT_IN_TYPES.items() if options is BUILT_IN_TYPES["HFTokenizer"]
}


def tokenizer_settings(directory: Path) -> TokenizerSettings | None:
    """Return the settings of the tokenizer whose files are in *directory*; None without one.

    Raises:
        DataError: Its configuration is damaged, or has settings that lmcore's tokenizer does not
            have.
    """
    path = str(directory.absolute())
    if (directory / _PIPELINE).is_file():
        return TokenizerSettings("HuggingFaceTokenizer", tokenizer_name_or_path=path)
    if (directory / "vocab.json").is_file() and (directory / "merges.txt").is_file():
        # Without a class transformers takes the one of the model.
        of_model = _object(directory / MODEL_CONFIG).get("model_type") == "qwen2"
        usual = {"add_prefix_space": False, "add_bos_token": False}
        _require_usual(directory, _QWEN2 if of_model else _GPT2_CLASSES[0], _GPT2_CLASSES, usual)
        return TokenizerSettings(
            "GPT2BPETokenizer", vocab_file=f"{path}/vocab.json", merge_file=f"{path}/merges.txt"
        )
    if (directory / "tokenizer.model").is_file():
        model = f"{path}/tokenizer.model"
        usual = {"add_prefix_space": True, "add_eos_token": False}
        _require_usual(directory, "", None, usual)
        bare = _configuration(directory).get("add_bos_token") is False
        return TokenizerSettings(
            "Llama2Tokenizer", tokenizer_model=model, add_special_tokens=False if bare else None
        )
    if (directory / "vocab.txt").is_file():
        return _wordpiece(directory)
    return None


def unread_tokens(directory: Path, settings: TokenizerSettings | None) -> tuple[str, ...]:
    """Return a note about tokens that transformers adds to files of an older layout.

    Args:
        directory: Directory of the files.
        settings: Result of `tokenizer_settings`.

    Raises:
        DataError: A file is damaged.
    """
    added = {**_object(directory / _ADDED)}
    numbered = _configuration(directory).get("added_tokens_decoder")
    for token in numbered.values() if isinstance(numbered, dict) else ():
        if isinstance(token, dict) and isinstance(token.get("content"), str):
            added[token["content"]] = None
    if not added or settings is None or settings.tokenizer_type in _PRETRAINED:
        return ()
    try:
        tokenizer = tokenizer_from(settings)
    except LmcoreError:
        return ()  # whoever needs the tokenizer meets the error
    known = set(
        tokenizer.tokens_by_id if isinstance(tokenizer, GPT2BPETokenizer) else spellings(tokenizer)
    )
    lacking = [token for token in added if token not in known]
    if not lacking:
        return ()
    are = "is no token" if len(lacking) == 1 else "are no tokens"
    note = (
        f"{several(lacking)}, which transformers adds to the tokenizer, {are} of lmcore's "
        f"`{tokenizer.name}`: texts with that spelling get other ids; save the tokenizer with "
        f"transformers as `{_PIPELINE}`, which is read first"
    )
    return (note,)


def _wordpiece(directory: Path) -> TokenizerSettings | None:
    """Return the settings of BERT's tokenizer, of the same ids as in transformers.

    Raises:
        DataError: Its configuration has settings that lmcore's tokenizer does not have.
    """
    lower = _configuration(directory).get("do_lower_case", True) is not False
    usual = {"tokenize_chinese_chars": True, "strip_accents": lower}
    _require_usual(directory, _BERT_CLASSES[0], _BERT_CLASSES, usual)
    return TokenizerSettings(
        "BertWordPieceLowerCase" if lower else "BertWordPieceCase",
        vocab_file=str(directory.absolute() / "vocab.txt"),
        add_special_tokens=False,
    )


def _require_usual(
    directory: Path,
    default: str,
    classes: Sequence[str] | None,
    usual: Mapping[str, bool],
) -> None:
    """Refuse a tokenizer that gives other ids than lmcore's would from the same files.

    Args:
        directory: Directory of the files.
        default: Class of transformers where the configuration names none.
        classes: Classes that give the ids of lmcore's tokenizer; None: any.
        usual: Values of settings with which they do.

    Raises:
        DataError: The configuration has another class or value.
    """
    config = _configuration(directory)
    kind = config.get("tokenizer_class") or default
    unusual = [name for name, value in usual.items() if config.get(name) not in (None, value)]
    if unusual or (classes is not None and kind not in classes):
        found = f"`{unusual[0]}: {config[unusual[0]]}`" if unusual else f"a `{kind!s:.80}`"
        raise DataError(
            f"lmcore does not have the tokenizer of `{directory}`",
            why=f"its `{_CONFIG}` has {found}"
            if unusual or config.get("tokenizer_class")
            else f"the model has {found}",
            hint=f"save it with transformers as `{_PIPELINE}`, which is read first",
        )


def _configuration(directory: Path) -> dict[str, Any]:
    """Return the tokenizer's configuration; an empty one without a file.

    Raises:
        DataError: The configuration is damaged.
    """
    return _object(directory / _CONFIG)


def _object(path: Path) -> dict[str, Any]:
    """Return the object of a JSON file; an empty one without a file.

    Raises:
        DataError: The file is damaged.
    """
    if not path.is_file():
        return {}
    try:
        config = json.loads(read_bounded_file(path, _MAX_CONFIG_BYTES))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read `{path}`", why=unreadable(error)) from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"`{path}` is not JSON", why=str(error)) from None
    return config if isinstance(config, dict) else {}


def write_tokenizer(tokenizer: Tokenizer, directory: Path, shape: ModelShape) -> list[str]:
    """Write the files of a tokenizer into *directory* and return notes for the user.

    Args:
        tokenizer: Tokenizer of the model.
        directory: Directory of the model.
        shape: Shape of the model.

    Raises:
        OSError: The file system refuses.
    """
    longest = shape.max_position_embeddings
    if tokenizer.name in _PRETRAINED:
        pipeline, *beside = tokenizer.files()
        shutil.copyfile(pipeline, directory / _PIPELINE)
        for path in beside:
            if Path(path).name == MODEL_CONFIG:  # of the model that it came with
                continue
            copy = directory / Path(path).relative_to(Path(pipeline).parent)
            copy.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, copy)
        return []
    if tokenizer.name == "GPT2BPETokenizer":
        vocabulary, merges = tokenizer.files()
        shutil.copyfile(vocabulary, directory / "vocab.json")
        shutil.copyfile(merges, directory / "merges.txt")
        _write_byte_level(directory, str(directory / "vocab.json"), str(directory / "merges.txt"))
        _write_config(directory, "GPT2Tokenizer", longest, with_end=tokenizer.eod is not None)
        return []
    if tokenizer.name == "ByteTokenizer":
        vocabulary_of = {letter: byte for byte, letter in enumerate(byte_alphabet())}
        _write_byte_level(directory, vocabulary_of, [])
        _write_config(directory, "PreTrainedTokenizerFast", longest, with_end=True)
        return []
    if tokenizer.name in {"Llama2Tokenizer", "GPTSentencePieceTokenizer"}:
        shutil.copyfile(tokenizer.files()[0], directory / "tokenizer.model")
        bare = tokenizer.describe().get("add_special_tokens") is False
        begins = tokenizer.name == "Llama2Tokenizer" and not bare
        config = {"tokenizer_class": "LlamaTokenizer", "model_max_length": longest}
        config |= {"add_bos_token": begins, "add_eos_token": False, "legacy": False}
        _write_json(directory / _CONFIG, config)
        return ["transformers reads `tokenizer.model` with the packages sentencepiece and protobuf"]
    if tokenizer.name.startswith("BertWordPiece"):
        shutil.copyfile(tokenizer.files()[0], directory / "vocab.txt")
        if special_ids(tokenizer).sentinels:  # they follow the file's tokens
            tokens = "".join(f"{token}\n" for token in spellings(tokenizer))
            (directory / "vocab.txt").write_text(tokens, encoding="utf-8")
        config = {"tokenizer_class": "BertTokenizer", "model_max_length": longest}
        _write_json(
            directory / _CONFIG, config | {"do_lower_case": tokenizer.name.endswith("LowerCase")}
        )
        return []
    return [f"no tokenizer files are written: transformers has no `{tokenizer.name}`"]


def _write_byte_level(
    directory: Path, vocabulary: str | dict[str, int], merges: str | list[tuple[str, str]]
) -> None:
    """Write `tokenizer.json` of a byte-level BPE; without merges every byte is a token."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers, processors

    model = (
        models.BPE.from_file(vocabulary, merges)
        if isinstance(vocabulary, str) and isinstance(merges, str)
        else models.BPE(vocabulary, merges)
    )
    pipeline = tokenizers.Tokenizer(model)
    words = isinstance(vocabulary, str)
    pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words)
    pipeline.decoder = decoders.ByteLevel()
    pipeline.post_processor = processors.ByteLevel(trim_offsets=False)
    pipeline.add_special_tokens([tokenizers.AddedToken(_END, special=True)])
    (directory / _PIPELINE).write_text(pipeline.to_str(pretty=True), encoding="utf-8")


def _write_config(directory: Path, kind: str, longest: int, *, with_end: bool) -> None:
    config: dict[str, Any] = {"tokenizer_class": kind, "model_max_length": longest}
    config |= {"add_prefix_space": False, "clean_up_tokenization_spaces": False}
    if with_end:
        config |= dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END)
    _write_json(directory / _CONFIG, config)


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")

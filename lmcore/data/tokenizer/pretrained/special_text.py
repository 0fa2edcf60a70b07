"""Encoding of text whose special tokens are meant as such: the text of a chat template.

Elsewhere text that spells a special token is ordinary text.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

from lmcore.contract.tokenizer import Tokenizer
from lmcore.data.tokenizer.byte import ByteTokenizer
from lmcore.data.tokenizer.file_tokenizer import FileTokenizer, special_ids
from lmcore.data.tokenizer.gpt2 import GPT2BPETokenizer
from lmcore.data.tokenizer.pretrained.pretrained_tokenizer import PretrainedTokenizer
from lmcore.data.tokenizer.sentence_piece import Llama2Tokenizer

__all__ = ["role_tokens", "special_encoder"]

_END = "<|endoftext|>"
_ROLES = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def role_tokens(tokenizer: Tokenizer) -> dict[str, str]:
    """Return the spelling of `bos_token`, `eos_token` and so on, as far as there are such tokens.

    The end of a document of a byte-level tokenizer is `<|endoftext|>`, and begins a text too.

    Args:
        tokenizer: Any tokenizer.
    """
    if isinstance(tokenizer, PretrainedTokenizer):
        return {f"{role}_token": token for role, token in tokenizer.roles.items()}
    if isinstance(tokenizer, FileTokenizer):
        known = vars(special_ids(tokenizer))
        return {
            f"{role}_token": tokenizer.spellings[known[role]]
            for role in _ROLES
            if known[role] is not None
        }
    if isinstance(tokenizer, GPT2BPETokenizer | ByteTokenizer) and tokenizer.eod is not None:
        return {"bos_token": _END, "eos_token": _END}
    return {}


def special_encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """Return a function that encodes text, special tokens as such, and adds none.

    The tokens of a pretrained tokenizer are found by its library.  With other types the text
    between two special tokens is encoded by itself.

    Args:
        tokenizer: Any tokenizer.
    """
    if isinstance(tokenizer, PretrainedTokenizer):
        settings = dataclasses.replace(
            tokenizer.settings, add_special_tokens=False, parse_special_tokens=True
        )
        return PretrainedTokenizer(settings).encode
    plain = tokenizer
    ids: dict[str, int] = {}
    if isinstance(tokenizer, FileTokenizer):
        if isinstance(tokenizer, Llama2Tokenizer):  # it would begin each part of the text
            settings = dataclasses.replace(tokenizer.settings, add_special_tokens=False)
            plain = Llama2Tokenizer(settings)
        ids = {tokenizer.spellings[one]: one for one in tokenizer.special_tokens()}
    elif tokenizer.eod is not None and (end := role_tokens(tokenizer).get("eos_token")):
        ids = {end: tokenizer.eod}
    if not ids:
        return plain.encode
    words = sorted(ids, key=len, reverse=True)
    special = re.compile("(" + "|".join(map(re.escape, words)) + ")")

    def encode(text: str) -> list[int]:
        encoded: list[int] = []
        for number, part in enumerate(special.split(text)):
            if number % 2:
                encoded.append(ids[part])
            elif part:
                encoded += plain.encode(part)
        return encoded

    return encode

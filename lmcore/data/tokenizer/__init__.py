"""Tokenizers: text to ids and back, for `lmcore data prepare`, training and generation.

`tokenizer_from` maps the names of types to classes.  Nothing here imports torch.
"""

from lmcore.contract.tokenizer import Tokenizer, TokenizerFactory
from lmcore.data.tokenizer.build import build_tokenizer, tokenizer_from, tokenizer_types
from lmcore.data.tokenizer.byte import ByteTokenizer
from lmcore.data.tokenizer.file_tokenizer import SpecialIds, special_ids, spellings
from lmcore.data.tokenizer.gpt2 import GPT2BPETokenizer
from lmcore.data.tokenizer.null import NullTokenizer

__all__ = [
    "ByteTokenizer",
    "GPT2BPETokenizer",
    "NullTokenizer",
    "SpecialIds",
    "Tokenizer",
    "TokenizerFactory",
    "build_tokenizer",
    "special_ids",
    "spellings",
    "tokenizer_from",
    "tokenizer_types",
]

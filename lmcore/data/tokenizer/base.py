"""What every tokenizer is; it stands in the contract, so that plugins can bring some."""

from lmcore.accelerator.tokenizer import Tokenizer, TokenizerFactory, file_digest

__all__ = ["Tokenizer", "TokenizerFactory", "file_digest"]

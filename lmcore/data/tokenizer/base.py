"""The tokenizer interface, from the plugin contract: plugins can bring types of their own."""

from lmcore.accelerator.tokenizer import Tokenizer, TokenizerFactory, file_digest

__all__ = ["Tokenizer", "TokenizerFactory", "file_digest"]

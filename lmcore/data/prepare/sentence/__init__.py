"""Sentences of a document: what `lmcore data prepare --split-sentences` stores as sequences.

`build_splitter` is the only place that knows the splitters' names.
"""

from lmcore.data.prepare.sentence.base import SentenceOptions, SentenceSplitter
from lmcore.data.prepare.sentence.build import SPLITTERS, build_splitter

__all__ = ["SPLITTERS", "SentenceOptions", "SentenceSplitter", "build_splitter"]

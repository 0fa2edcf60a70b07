"""Sentence splitting for `lmcore data prepare --split-sentences`."""

from lmcore.data.prepare.sentence.base import SentenceOptions, SentenceSplitter
from lmcore.data.prepare.sentence.build import SPLITTERS, build_splitter

__all__ = ["SPLITTERS", "SentenceOptions", "SentenceSplitter", "build_splitter"]

"""Words of a tiny vocabulary."""

from __future__ import annotations

COLORS = ("red", "green", "blue", "black")
WORDS = ("a", "the", "house", "tree", "is", "was", "not", "very", "old", "new")
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")

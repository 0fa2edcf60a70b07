"""Sentences by rules for some 240 languages, without data: the `sentencex` package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcore.data.prepare.sentence.language import code_of
from lmcore.errors import MissingPackageError

__all__ = ["RuleSplitter"]


@dataclass(frozen=True)
class RuleSplitter:
    """Cuts a text by the rules and abbreviations of its language.

    Attributes:
        lang: Name or ISO 639 code; where the package has no rules of its own for a code it takes
            those of a related language.
        keep_newlines: Whether the white space after a sentence stays part of it.

    Raises:
        ConfigError: *lang* is no language.
        MissingPackageError: `sentencex` is not installed.
    """

    lang: str
    keep_newlines: bool = False

    def __post_init__(self) -> None:
        code_of(self.lang)
        try:
            import sentencex  # noqa: F401
        except ImportError:
            raise MissingPackageError(
                "sentencex",
                needed_for="`--sentence-splitter sentencex`",
                install="pip install sentencex",
            ) from None

    def split(self, text: str) -> Sequence[str]:
        """Return the sentences; their text is that of the document, but for white space."""
        import sentencex

        sentences: list[str] = []
        for piece in sentencex.segment(code_of(self.lang), text):
            if not self.keep_newlines:
                sentences.append(piece.strip())
            elif sentences and not piece.strip():  # what parts paragraphs comes by itself
                sentences[-1] += piece
            else:
                sentences.append(piece)
        return [sentence for sentence in sentences if sentence]

    def describe(self) -> dict[str, str]:
        """Return what decides the output."""
        from importlib.metadata import version  # 25 ms, where nobody asks for it

        return {
            "splitter": "sentencex",
            "version": version("sentencex"),
            "lang": code_of(self.lang),
            "keep_newlines": str(self.keep_newlines),
        }

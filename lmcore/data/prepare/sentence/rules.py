"""Rule-based sentence splitting for about 240 languages: the `sentencex` package."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lmcore.data.prepare.sentence.language import code_of
from lmcore.errors import MissingPackageError

__all__ = ["RuleSplitter"]


@dataclass(frozen=True)
class RuleSplitter:
    """Sentence splitter with the rules and abbreviations of a language.

    Attributes:
        lang: name or ISO 639 code; for a code without rules the package uses a related language.
        keep_newlines: keep the white space after a sentence as part of it.

    Raises:
        ConfigError: *lang* is neither a known name nor a code.
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
        """Return the sentences; only white space of the text may be missing."""
        import sentencex

        sentences: list[str] = []
        for piece in sentencex.segment(code_of(self.lang), text):
            if not self.keep_newlines:
                sentences.append(piece.strip())
            elif sentences and not piece.strip():  # the separator of paragraphs is a separate piece
                sentences[-1] += piece
            else:
                sentences.append(piece)
        return [sentence for sentence in sentences if sentence]

    def describe(self) -> dict[str, str]:
        """Return the settings."""
        from importlib.metadata import version  # imported on demand: 25 ms

        return {
            "splitter": "sentencex",
            "version": version("sentencex"),
            "lang": code_of(self.lang),
            "keep_newlines": str(self.keep_newlines),
        }

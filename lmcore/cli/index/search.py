"""`lmcore index search`: find the blocks that a question asks for."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lmcore.base.errors import ConfigError, printable
from lmcore.cli.index.build import loaded_encoder
from lmcore.cli.loading import LoadingSection
from lmcore.cli.selection import find_plugins
from lmcore.config.option import REQUIRED, option
from lmcore.config.options.command_line import parse_with_plugins, wants_help
from lmcore.plugin.registrations import plugin_sections

if TYPE_CHECKING:
    from lmcore.retrieval.answers import Question
    from lmcore.retrieval.index import BlockSource
    from lmcore.retrieval.search import Found

__all__ = ["SearchSection", "run"]

_EPILOG = """\
With --questions the exit status is 0 whatever the shares are.

  lmcore index search wiki.index 'Who wrote Faust?'
  lmcore index search wiki.index --questions nq-test.qa.csv --top 1 5 20 100"""
_ENGINES = ("exact", "faiss")


@dataclass(frozen=True)
class SearchSection(LoadingSection):
    """Find the blocks of an index with the highest scores for a question."""

    index: str = option(REQUIRED, "Directory of the index.", metavar="INDEX")
    question: str | None = option(
        None, "The question; `-` reads one from each line of standard input.", metavar="QUESTION"
    )
    questions: str | None = option(
        None,
        "Count the questions of a file that are answered: lines of `question<TAB>['answer', ...]` "
        "as of Natural Questions, or JSON lines with `question` and `answers`.",
        metavar="FILE",
    )
    load: str | None = option(
        None, "Checkpoint of the encoder; default: the one that built the index.", metavar="DIR"
    )
    top: tuple[int, ...] = option(
        (), "Number of blocks, default 5; with --questions several, default 1 5 20 100.", minimum=1
    )
    engine: str = option("exact", "How to search.", choices=_ENGINES)
    json: bool = option(False, "Print a JSON object for each question.")


def run(argv: list[str]) -> int:
    """Run `lmcore index search` and return the exit status."""
    plugins = find_plugins(argv, probe=not wants_help(argv))
    section, settings = parse_with_plugins(
        SearchSection,
        argv,
        command="lmcore index search",
        plugins=plugin_sections(plugins),
        positionals=("index", "question"),
        epilog=_EPILOG,
    )
    if section.question is not None and section.questions is not None:
        raise ConfigError(
            f"a question and `--questions {section.questions}` are given",
            why="the questions of a file are counted, and a question is answered",
            hint="leave one of them out",
        )
    if section.question is None and section.questions is None:
        raise ConfigError(
            "`lmcore index search` needs a question, or `--questions FILE`",
            hint=f"`lmcore index search {section.index} 'Who wrote Faust?'`",
        )
    if section.question is not None and len(section.top) > 1:
        raise ConfigError("`--top` is one number for a question", hint="give the largest")
    from lmcore.retrieval.answers import read_questions
    from lmcore.retrieval.index import BlockIndex
    from lmcore.retrieval.index_encoder import require_encoder
    from lmcore.retrieval.search import search

    asked = _questions(section)
    known = read_questions(Path(section.questions)) if section.questions else None
    index = BlockIndex(Path(section.index))
    load = Path(section.load or index.record.checkpoint)
    if section.load is None and not load.exists():
        raise ConfigError(
            f"the checkpoint that built the index `{section.index}` is gone",
            why=f"no such directory: `{load}`",
            hint="if it was moved, give its new place by `--load DIR`",
        )
    with loaded_encoder(section, load, plugins, settings) as encoder:
        require_encoder(index, encoder)
        source = index.source(encoder)
        tops = section.top or ((1, 5, 20, 100) if known else (5,))
        texts = [one.text for one in known] if known else asked
        found = search(index, encoder.questions(texts), top=max(tops), engine=section.engine)
    if known is None:
        _show(section, asked, found, source)
    else:
        _score(section, known, found, source, tops)
    return 0


def _questions(section: SearchSection) -> list[str]:
    if section.question != "-":
        return [section.question or ""]
    found = [line.rstrip("\n") for line in sys.stdin]
    if not found:
        raise ConfigError("standard input has no question", hint="pipe one in on each line")
    for number, line in enumerate(found, start=1):
        if not line.strip():
            raise ConfigError(
                f"line {number} of standard input has no question",
                hint="write one on each line, without empty lines",
            )
    return found


def _show(section: SearchSection, asked: list[str], found: Found, source: BlockSource) -> None:
    for question, scores, blocks in zip(asked, found.scores, found.blocks, strict=True):
        texts = [source.text(int(number)) for number in blocks]
        if section.json:
            results = [
                {"score": float(score), "block": int(number), **asdict(text)}
                for score, number, text in zip(scores, blocks, texts, strict=True)
            ]
            print(json.dumps({"question": question, "blocks": results}))
            continue
        if len(asked) > 1:
            print(printable(question))
        for place, (score, text) in enumerate(zip(scores, texts, strict=True), start=1):
            title = f"{text.title}: " if text.title else ""
            print(printable(f"{place:>3}  {score:8.3f}  {title}{text.text}"))


def _score(
    section: SearchSection,
    known: list[Question],
    found: Found,
    source: BlockSource,
    tops: tuple[int, ...],
) -> None:
    from lmcore.retrieval.answers import place_of_answer, summary

    places = []
    for question, blocks in zip(known, found.blocks, strict=True):
        texts = [source.text(int(number)) for number in blocks]
        bodies = [f"{one.title} {one.text}" for one in texts]
        places.append(place_of_answer(question.answers, bodies))
        if section.json:
            print(json.dumps({"question": question.text, "place": places[-1]}))
    print(summary(places, tops), file=sys.stderr if section.json else sys.stdout)

"""Step `ngram`: matches and cuts, by hand and against a slow search; reading evaluation sets."""

from __future__ import annotations

import json
import pickle
import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcore.base.errors import ConfigError, DataError
from lmcore_data_tools.clean.document import Document, Drop, Replace
from lmcore_data_tools.clean.filter.ngram import (
    EvaluationNgrams,
    NgramSettings,
    NgramStep,
    cut_around,
    read_evaluation_sets,
    words_of,
)

PLANTED = "it was a bright cold day in April, and the clocks were striking"  # 13 words
SENTENCE = "Nothing of this is in any test set at all. "  # 43 characters


def step(*texts: str, **changed: int) -> NgramStep:
    """Return the step, as a worker process has it."""
    return pickle.loads(pickle.dumps(NgramStep(EvaluationNgrams(texts, NgramSettings(**changed)))))


def test_planted_ngram_is_cut(make_document: Callable[..., Document]) -> None:
    """Thirteen planted words go with 200 characters on each side, on to the ends of sentences."""
    before, after = SENTENCE * 12, SENTENCE * 12
    planted = f"Winston knew {PLANTED.upper()} thirteen. "
    text = before + planted + after
    verdict = step(f"So {PLANTED} thirteen.").judge(make_document(text))
    # The match begins at 516 + 13 = 529; 200 before is 329, in the eighth sentence (301 to 343),
    # which goes: the seventh ends with its full stop at 299.
    first = text[:300]
    # The match has 14 words, "thirteen" with it, but is found as 13: it ends at 529 + 63 = 592;
    # 200 behind is 792; the text after begins at 516 + 87 = 603; 792 is in its fifth sentence (775
    # to 817), which goes: its full stop is at 603 + 4 * 43 + 41 = 816.
    second = text[817:]
    assert isinstance(verdict, Replace)
    assert verdict.texts == (first, second)
    assert verdict.removed == (text[300:817],)
    assert (len(first), len(second)) == (300, 302)
    assert verdict.detail == words_joined(PLANTED)


def words_joined(text: str) -> str:
    return " ".join(words_of(text))


def test_pieces_too_short_go(make_document: Callable[..., Document]) -> None:
    """A piece below 200 characters goes with the cut, and a document without pieces goes."""
    text = f"{SENTENCE}{PLANTED}. {SENTENCE * 12}"
    verdict = step(PLANTED).judge(make_document(text))
    assert isinstance(verdict, Replace)
    assert len(verdict.texts) == 1
    assert "".join([*verdict.removed, *verdict.texts]) == text
    assert isinstance(step(PLANTED).judge(make_document(PLANTED)), Drop)


def test_many_pieces_drop_the_document(make_document: Callable[..., Document]) -> None:
    """More than ten pieces left drop the document; ten do not."""
    cut = f"{PLANTED}. {SENTENCE * 16}"
    fits = step(PLANTED).judge(make_document(SENTENCE * 16 + cut * 9))
    assert isinstance(fits, Replace)
    assert len(fits.texts) == 10
    verdict = step(PLANTED).judge(make_document(SENTENCE * 16 + cut * 10))
    assert isinstance(verdict, Drop)
    assert verdict.reason == "too many pieces"


def test_short_evaluation_texts(make_document: Callable[..., Document]) -> None:
    """A text of 8 to 12 words is looked for whole, one of 7 is not."""
    eight = "who wrote the first novel of this kind"
    seven = "who wrote the first novel about it"
    looking = step(eight, seven)
    assert isinstance(looking.judge(make_document(f"I wonder {eight.title()}?")), Drop)
    assert looking.judge(make_document(f"I wonder {seven}?")) is None
    assert looking.judge(make_document("who wrote the first novel of this")) is None


def test_punctuation_and_case_do_not_count(make_document: Callable[..., Document]) -> None:
    """Words agree whatever is between them, also after letters that grow in lower case."""
    spaced = "İİ " + ", ".join(words_of(PLANTED)).upper()
    assert isinstance(step(PLANTED).judge(make_document(spaced)), Drop)
    text = "İ" * 300 + f". {SENTENCE * 12}" + spaced + ". " + SENTENCE * 12
    verdict = step(PLANTED).judge(make_document(text))
    assert isinstance(verdict, Replace)
    assert "striking" not in "".join(verdict.texts).lower()


def test_record_of_a_cut_document(corpus: Callable, run_steps: Callable, tmp_path: Path) -> None:
    """Pieces keep the other fields and are numbered; what was cut out is reported."""
    tasks = tmp_path / "task.jsonl"
    tasks.write_text(json.dumps({"question": PLANTED}) + "\n", encoding="utf-8")
    text = f"{SENTENCE * 12}{PLANTED}. {SENTENCE * 12}"
    path = corpus([{"text": text, "id": 7}, {"text": "clean", "id": 8}])
    done = run_steps("ngram", path, tasks=(str(tasks),), task_keys=("question",))
    assert [(one["id"], one.get("piece")) for one in done.records] == [(7, 1), (7, 2), (8, None)]
    (line,) = done.dropped
    assert (line["reason"], line["line"]) == ("cut", 1)
    assert line["removed"] == [text.removeprefix(done.texts[0]).removesuffix(done.texts[1])]
    (report,) = done.report.steps
    assert (report.documents, report.kept, report.changed, report.added) == (2, 3, 1, 1)


def test_nothing_to_look_for(corpus: Callable, run_steps: Callable) -> None:
    """Without evaluation sets, or with texts that are all too short, it says so."""
    with pytest.raises(ConfigError, match="needs `--tasks`"):
        run_steps("ngram", corpus(["a"]))
    short = corpus(["only a few words"], name="task.jsonl")
    with pytest.raises(ConfigError, match="is long enough"):
        run_steps("ngram", corpus(["a"]), tasks=(short,))
    with pytest.raises(ConfigError, match="`--ngram-min 14` is more than `--ngram 13`"):
        NgramSettings(shortest=14)


def slow_cuts(text: str, texts: list[str], how: NgramSettings) -> list[tuple[int, int]]:
    """Return the cuts by trying every place of what is left of the text, as upstream does."""
    forbidden = set()
    for one in texts:
        words = words_of(one)
        if len(words) >= how.shortest:
            size = min(how.longest, len(words))
            forbidden |= {tuple(words[at : at + size]) for at in range(len(words) - size + 1)}
    cuts: list[tuple[int, int]] = []
    offset = 0
    while True:
        rest = text[offset:]
        words, spans, at = words_of(rest), [], 0
        for word in words:
            at = rest.lower().index(word, at)
            spans.append((at, at := at + len(word)))
        found = [
            (start, size)
            for start in range(len(words))
            for size in range(how.longest, how.shortest - 1, -1)
            if start + size <= len(words) and tuple(words[start : start + size]) in forbidden
        ]
        if not found:
            return cuts
        start, size = found[0]
        left = spans[start][0] - how.cut
        while left > 0 and rest[left] not in ".!?":
            left -= 1
        right = spans[start + size - 1][1] + how.cut
        while right < len(rest) and rest[right] not in ".!?":
            right += 1
        cuts.append((offset + (left + 1 if left > 0 else 0), min(offset + right + 1, len(text))))
        if cuts[-1][1] == len(text):
            return cuts
        offset = cuts[-1][1]


@given(
    st.lists(st.sampled_from("abc"), max_size=60),
    st.lists(st.lists(st.sampled_from("abcd"), max_size=8), max_size=4),
    st.integers(0, 2**32),
    st.integers(0, 6),
)
@example([*"abcabcaabbccabcabcbacabc"], [[*"abc"], [*"bcaab"], [*"dabca"]], 0, 0)
@example([*"abcabcaabbccabcabcbacabc"], [[*"abc"], [*"bcaab"], [*"dabca"]], 1, 6)
def test_equal_to_a_slow_search(
    words: list[str], tasks: list[list[str]], seed: int, margin: int
) -> None:
    """The cuts match a search that tries every place of every piece again."""
    choice = random.Random(seed)
    text = "".join(word + choice.choice([" ", " ", ", ", ". ", "! "]) for word in words)
    how = NgramSettings(longest=5, shortest=3, cut=margin, shortest_piece=1, most_pieces=99)
    texts = [" ".join(task) for task in tasks]
    ngrams = EvaluationNgrams(texts, how)
    found = words_of(text)
    spans, at = [], 0
    for word in found:
        at = text.index(word, at)
        spans.append((at, at := at + len(word)))
    matches = ngrams.matches(found, ngrams.numbers_of(found)) if len(ngrams) else ()
    places = [(spans[start][0], spans[start + size - 1][1]) for start, size in matches]
    assert cut_around(text, places, margin) == slow_cuts(text, texts, how)


def test_lambada(shared_data: Path) -> None:
    """Every line of LAMBADA gives its text."""
    texts = read_evaluation_sets(
        [str(shared_data / "evals/lambada/lambada_test.part1.jsonl")], ["text"]
    )
    assert len(texts) == 2576
    assert texts[0].startswith("In my palm is a clear stone")


def test_race(shared_data: Path) -> None:
    """The files of RACE, one object each, give articles and questions."""
    folder = shared_data / "evals/race_plus/dev"
    texts = read_evaluation_sets([f"{folder}/*.txt"], ["article", "questions"])
    assert len(texts) == 60 + 210


def test_glue(shared_data: Path) -> None:
    """A table of GLUE gives its columns, quotes and all."""
    table = shared_data / "evals/mnli/dev_matched.tsv"
    assert len(read_evaluation_sets([str(table)], ["sentence1", "sentence2"])) == 1000


def test_squad(tmp_path: Path) -> None:
    """Questions and contexts of SQuAD are found in its depth; answers are not wanted."""
    squad = {
        "data": [
            {
                "title": "T",
                "paragraphs": [
                    {
                        "context": "C",
                        "qas": [{"question": "Q1", "answers": [{"text": "A"}]}, {"question": "Q2"}],
                    }
                ],
            }
        ]
    }
    path = tmp_path / "squad.json"
    path.write_text(json.dumps(squad, indent=1), encoding="utf-8")
    assert read_evaluation_sets([str(path)], ["question", "context"]) == ["C", "Q1", "Q2"]


def test_no_such_key(tmp_path: Path) -> None:
    """A file without the keys is named together with its keys."""
    path = tmp_path / "task.jsonl"
    path.write_text('{"query": "a", "gold": 1}\n', encoding="utf-8")
    with pytest.raises(DataError, match="has no text under `text`") as caught:
        read_evaluation_sets([str(path)], ["text"])
    assert caught.value.why == "its keys: `query`, `gold`"


@pytest.mark.parametrize(
    "content, message",
    [
        (b'{"text": "a"}\n{"text": \n', "line 2: broken JSON"),
        (b'{"text": "\xff"}', "is not UTF-8"),
    ],
)
def test_damaged(tmp_path: Path, content: bytes, message: str) -> None:
    """A broken line or byte is named."""
    path = tmp_path / "task.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_evaluation_sets([str(path)], ["text"])

"""Write made corpora and task data in the layouts of their releases, for `argonne_llama.sh`.

    python examples/argonne_llama/make_text.py DIRECTORY

Every text says who put what where, so that a small model can learn it within minutes:

    corpora/SOURCE/SOURCE-0000.json.gz   JSON lines of three sources, two files each
    epochs.txt                           epochs of each source, for `lmcore data weights`
    wikitext-103/wiki.test.tokens        articles under headings, with WikiText's spaces and marks
    lambada_test.jsonl                   passages whose last word follows from the text before it
    RACE/{train,dev}/{middle,high}/N.txt articles with questions of four options
    glue_data/MNLI/{train,dev_*}.tsv     pairs of sentences in the 12 and 16 columns of GLUE
"""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path

WHO = ["Ada", "Bruno", "Clara", "Dmitri", "Esther", "Farid", "Greta", "Hugo"]
WHAT = ["lamp", "letter", "violin", "map", "clock", "basket", "coin", "book"]
WHERE = ["kitchen", "garden", "attic", "cellar", "library", "workshop"]
COLORS = ["red", "green", "old", "heavy", "small"]
EPOCHS = {"arxiv": 2, "books": 1, "wiki": 2.5}
FILES, DOCUMENTS, SENTENCES = 2, 150, 8
PASSAGES, ARTICLES, PAIRS = 40, 24, 240
MNLI_COLUMNS = [
    *("index", "promptID", "pairID", "genre", "sentence1_binary_parse", "sentence2_binary_parse"),
    *("sentence1_parse", "sentence2_parse", "sentence1", "sentence2", "label1"),
]


def event(draw: random.Random) -> tuple[str, str, str]:
    """Return who moves something, what it is and where it is then."""
    return draw.choice(WHO), f"{draw.choice(COLORS)} {draw.choice(WHAT)}", draw.choice(WHERE)


def told(who: str, what: str, where: str) -> str:
    """Return an event in two sentences: the second one follows from the first."""
    return f"{who} put the {what} in the {where}. The {what} is in the {where}."


def document(draw: random.Random) -> str:
    """Return some events, a line each."""
    return "\n".join(told(*event(draw)) for _ in range(SENTENCES))


def write_corpora(draw: random.Random, folder: Path) -> None:
    """Write the sources of the training data, and their epochs."""
    for source in EPOCHS:
        for number in range(FILES):
            path = folder / "corpora" / source / f"{source}-{number:04}.json.gz"
            path.parent.mkdir(parents=True, exist_ok=True)
            with gzip.open(path, "wt", encoding="utf-8") as file:
                for index in range(DOCUMENTS):
                    title = f"{draw.choice(WHO)}'s {draw.choice(WHERE)}"
                    row = {"src": source, "text": document(draw), "id": str(index), "title": title}
                    file.write(json.dumps(row) + "\n")
    lines = [f"{source} {epochs}\n" for source, epochs in EPOCHS.items()]
    (folder / "epochs.txt").write_text("# corpus epochs\n" + "".join(lines), encoding="utf-8")


def write_wikitext(draw: random.Random, folder: Path) -> None:
    """Write articles as WikiText has them: headings, and spaces around signs."""
    (folder / "wikitext-103").mkdir()
    articles = []
    for who in WHO[:4]:
        text = document(draw).replace(".", " .").replace("\n", " ")
        articles.append(f" \n = {who} = \n \n {text} \n")
    (folder / "wikitext-103/wiki.test.tokens").write_text("".join(articles), encoding="utf-8")


def write_lambada(draw: random.Random, folder: Path) -> None:
    """Write passages, each ending with a place that the text before names."""
    passages = [document(draw)[:-1] for _ in range(PASSAGES)]
    rows = "".join(json.dumps({"text": one}) + "\n" for one in passages)
    (folder / "lambada_test.jsonl").write_text(rows, encoding="utf-8")


def choices_with(place: str, draw: random.Random) -> list[str]:
    """Return four places, with this one at any of them."""
    choices = draw.sample([one for one in WHERE if one != place], 3)
    choices.insert(draw.randrange(4), place)
    return choices


def write_race(draw: random.Random, folder: Path) -> None:
    """Write articles, each with two questions about its first events."""
    for part in ("train/middle", "train/high", "dev/middle", "dev/high"):
        path = folder / "RACE" / part
        path.mkdir(parents=True)
        for number in range(1, ARTICLES + 1):
            events = [event(draw) for _ in range(2)]
            options = [choices_with(place, draw) for *_, place in events]
            article = {
                "article": "\n".join(told(*one) for one in events),
                "questions": [f"Where did {who} put the {what}?" for who, what, _ in events],
                "options": options,
                "answers": [
                    "ABCD"[choices.index(place)]
                    for choices, (*_, place) in zip(options, events, strict=True)
                ],
                "id": f"{part.rpartition('/')[2]}{number}.txt",
            }
            (path / f"{number}.txt").write_text(json.dumps(article), encoding="utf-8")


def pair(draw: random.Random) -> tuple[str, str, str]:
    """Return a premise, a hypothesis and the relation between them."""
    who, what, where = event(draw)
    other = draw.choice([one for one in WHERE if one != where])
    label, hypothesis = draw.choice(
        [
            ("entailment", f"The {what} is in the {where}."),
            ("contradiction", f"The {what} is in the {other}."),
            ("neutral", f"{draw.choice(WHO)} likes the {what}."),
        ]
    )
    return f"{who} put the {what} in the {where}.", hypothesis, label


def write_mnli(draw: random.Random, folder: Path) -> None:
    """Write pairs of sentences as tables of GLUE; the columns of parses are fillers."""
    path = folder / "glue_data/MNLI"
    path.mkdir(parents=True)
    dev = [*MNLI_COLUMNS, "label2", "label3", "label4", "label5", "gold_label"]
    for name, columns, count in (
        ("train", [*MNLI_COLUMNS, "gold_label"], PAIRS),
        ("dev_matched", dev, PAIRS // 4),
        ("dev_mismatched", dev, PAIRS // 4),
    ):
        lines = ["\t".join(columns)]
        for index in range(count):
            premise, hypothesis, label = pair(draw)
            start = [str(index), f"{index}p", f"{index}n", "fiction", *["( )"] * 4]
            labels = [label] * (len(columns) - 10)
            lines.append("\t".join([*start, premise, hypothesis, *labels]))
        (path / f"{name}.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main(folder: Path) -> None:
    """Write all files into *folder*."""
    draw = random.Random(7)
    folder.mkdir(parents=True, exist_ok=True)
    for write in (write_corpora, write_wikitext, write_lambada, write_race, write_mnli):
        write(draw, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

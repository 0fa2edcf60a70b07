"""Write a small Turkish corpus of made sentences, for `turkish_gpt2.sh` if there is no other.

    python examples/turkish_gpt2/make_text.py DIRECTORY

`corpus.jsonl` has a document on each line, `held_out.txt` text that is in none of them; `train.tsv`
and `valid.tsv` have sentences with the tense of their verb, for a classifier.
"""
# ruff: noqa: RUF001 - Turkish has a dotless i

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

WHO = [
    "Ayşe",
    "Mehmet",
    "Zeynep",
    "Çağlar",
    "Elif",
    "Öğretmen",
    "Komşu",
    "Çocuk",
    "Balıkçı",
    "Doktor",
]
WHEN = {
    "geçmiş": ["dün", "geçen hafta", "geçen yıl", "sabahleyin"],
    "gelecek": ["yarın", "gelecek hafta", "gelecek yıl", "akşama"],
}
WHERE = ["bahçede", "okulda", "köyde", "şehirde", "pazarda", "denizde", "evde", "kütüphanede"]
WHAT = ["kitabı", "mektubu", "ekmeği", "elmayı", "çiçekleri", "balığı", "şiiri", "gazeteyi"]
VERBS = {
    "geçmiş": ["okudu", "yazdı", "aldı", "sattı", "buldu", "gördü", "getirdi", "sakladı"],
    "gelecek": [
        "okuyacak",
        "yazacak",
        "alacak",
        "satacak",
        "bulacak",
        "görecek",
        "getirecek",
        "saklayacak",
    ],
}
DOCUMENTS, SENTENCES, ROWS = 600, 12, 400


def sentence(draw: random.Random) -> tuple[str, str]:
    """Return a sentence and the tense of its verb."""
    tense = draw.choice(sorted(VERBS))
    words = [draw.choice(each) for each in (WHO, WHEN[tense], WHERE, WHAT)]
    return f"{' '.join(words)} {draw.choice(VERBS[tense])}.", tense


def main(folder: Path) -> None:
    """Write the four files into *folder*."""
    draw = random.Random(7)
    folder.mkdir(parents=True, exist_ok=True)
    documents = [" ".join(sentence(draw)[0] for _ in range(SENTENCES)) for _ in range(DOCUMENTS)]
    *corpus, last = documents
    lines = "".join(json.dumps({"text": one}, ensure_ascii=False) + "\n" for one in corpus)
    (folder / "corpus.jsonl").write_text(lines, encoding="utf-8")
    (folder / "held_out.txt").write_text(last + "\n", encoding="utf-8")
    for name, rows in (("train", ROWS), ("valid", ROWS // 4)):
        table = "".join(
            f"{text}\t{tense}\n" for text, tense in (sentence(draw) for _ in range(rows))
        )
        (folder / f"{name}.tsv").write_text("text\tlabel\n" + table, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

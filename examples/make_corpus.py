"""Write a small corpus and its vocabulary, for `train_bpe.sh` if there is no other.

    python examples/make_corpus.py DIRECTORY

`corpus.jsonl` holds the scenes of the bundled text, one JSON object a line; `vocab.json` and
`merges.txt` are a byte-level BPE in GPT-2's form, learned from it.
"""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

LINES_PER_DOCUMENT = 200
VOCABULARY = 2048


def main(folder: Path) -> None:
    """Write the three files into *folder*."""
    text = files("lmcore.data").joinpath("bundled", "shakespeare.txt").read_text(encoding="utf-8")
    lines = text.splitlines(keepends=True)
    starts = range(0, len(lines), LINES_PER_DOCUMENT)
    documents = ["".join(lines[start : start + LINES_PER_DOCUMENT]) for start in starts]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "corpus.jsonl").open("w", encoding="utf-8") as corpus:
        corpus.writelines(json.dumps({"text": document}) + "\n" for document in documents)
    tokenizer = ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(
        documents, VOCABULARY, special_tokens=["<|endoftext|>"], show_progress=False
    )
    tokenizer.save_model(str(folder))
    print(f"{len(documents)} documents, {tokenizer.get_vocab_size()} tokens: {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Write small files in the layout of C4, for `intel_gpt_3_6b.sh` if there is no C4.

    python examples/intel_gpt_3_6b/make_c4.py DIRECTORY

`en/c4-train.00000-of-00008.json.gz` and so on have a JSON object with `text`, `timestamp` and `url`
on each line, as the files of allenai/c4 do; `en/c4-validation.00000-of-00001.json.gz` has others,
and `held_out.txt` text that is in none of them.  The text is lmcore's bundled one.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

SHARDS = 8
CHARACTERS = 1500


def documents() -> list[str]:
    """Return the bundled text in pieces that end at a blank line."""
    text = (resources.files("lmcore.data") / "bundled/shakespeare.txt").read_text("utf-8")
    found = [""]
    for paragraph in text.split("\n\n"):
        if len(found[-1]) > CHARACTERS:
            found.append("")
        found[-1] += paragraph + "\n\n"
    return found


def write_shard(path: Path, texts: Sequence[str], shard: int) -> None:
    """Write documents as compressed JSON lines."""
    rows = (
        {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": f"https://{shard}.test/{i}"}
        for i, text in enumerate(texts)
    )
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(content, mtime=0))


def main(folder: Path) -> None:
    """Write the files into *folder*."""
    (folder / "en").mkdir(parents=True, exist_ok=True)
    texts = documents()
    held_out, valid, train = texts[:5], texts[5:40], texts[40:]
    (folder / "held_out.txt").write_text("".join(held_out), encoding="utf-8")
    write_shard(folder / "en/c4-validation.00000-of-00001.json.gz", valid, SHARDS)
    for shard in range(SHARDS):
        name = f"en/c4-train.{shard:05d}-of-{SHARDS:05d}.json.gz"
        write_shard(folder / name, train[shard::SHARDS], shard)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Hints as instructions: the command lines to which the hint of an error leads.

A hint is a list of instructions, separated by commas and "or": flags to use or to remove, keys to
delete from DeepSpeed's file, and commands.  The reason follows a colon or a semicolon.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Sequence

from lmcore.base.errors import LmcoreError
from lmcore.cli.commands import known_commands
from lmcore.config.section import run_options

__all__ = ["followed", "instructions"]

VALUES = {
    "--data-parallel-replicas": "2",
    "--deepspeed-config": "{}",
    "--eval-interval": "5",
    "--eval-iters": "5",
    "--merge-file": "merges.txt",
    "--num-layers-per-virtual-pipeline-stage": "1",
    "--pipeline-model-parallel-size": "2",
    "--kv-channels": "8",
    "--profile-step-end": "12",
    "--rotary-percent": "1",
    "--vocab-size": "64",
    "--valid-data-path": "books",
    "--test-weighted-split-paths": "a: 1 0:1 web",
    "--train-weighted-split-paths": "a: 1 0:1 web",
    "--valid-weighted-split-paths": "a: 1 0:1 web",
    "--vocab-file": "vocab.json",
    "--zero-stage": "1",
    "DIR": "runs",
    "0:SIZE": "0:64",
    "TOKENS:SIZE": "1M:128",
    "INCREMENT": "16",
    "N": "64",
    "PREFIX": "books",
    "SAMPLES": "100",
    "START": "16",
    "TYPE": "ByteTokenizer",
    "X": "0.5",
    "module:Class": "torch.optim:NAdam",
}
"""Values that a user fills in: by flag, or by placeholder."""


INSTRUCTION = re.compile(
    r"(?:use|add|remove|delete|leave|give|keep|write|did you mean) |`(?:--|lmcore )"
)
MODES = {
    r"\b(?:use|add|give|write|mean|then)\b": "add",
    r"\b(?:remove|leave|without|in place of)\b": "remove",
    r"\bdelete\b": "delete",
}


def instructions(hint: str) -> list[str]:
    """Return the instructions of a hint, without reasons and other parts in words."""
    spans = iter(re.findall(r"`[^`]*`", hint))
    said = re.split(r"[:;] ", re.sub(r"`[^`]*`", "\0", hint))[0]
    pieces: list[str] = []
    for part in re.split(r",? or |, ", said):
        piece = re.sub("\0", lambda _: next(spans), part)
        if re.match("and |then ", piece) and pieces:
            pieces[-1] += f" {piece}"
        elif INSTRUCTION.match(piece):
            pieces.append(piece)
        elif pieces and re.fullmatch("`[^`]+`", piece):  # another value of the same flag
            pieces.append(re.sub("(`--[^` ]+ )[^`]+`", rf"\g<1>{piece[1:]}", pieces[-1]))
    return pieces


def followed(words: Sequence[str], problem: LmcoreError, piece: str) -> list[tuple[str, ...]]:
    """Return the lines that one instruction of a problem's hint leads to."""
    shown = [span.split()[0] for span in re.findall(r"`(--[^`]+)`", problem.what)]
    if re.search("one of them|one of the two", piece):
        return [without(words, flag) for flag in shown]
    line, mode, changed = tuple(words), "", False
    if "is not supported" in problem.what and shown:
        line = without(line, shown[0])
    if re.match("(?:leave|remove) it", piece):
        line, changed = without(line, shown[0]), True
    if "delete it" in piece and (key := re.search(r"`[^`]*: ([\w.]+)", problem.what)):
        line, changed = without_key(line, key[1]), True
    for before, span in re.findall(r"([^`]*)`([^`]+)`", piece):
        mode = next((to for words_, to in MODES.items() if re.search(words_, before)), mode)
        changed = True
        if span.startswith("lmcore "):
            assert span.split()[1] in known_commands()
        elif mode == "delete" and not span.endswith(".json"):
            line = without_key(line, span)
        elif span.startswith("--") and mode == "remove":
            line = without(line, span.split()[0])
        elif span.startswith("--"):
            line = with_flags(line, shlex.split(span))
    return [line] if changed and line != tuple(words) else []


def with_flags(words: Sequence[str], flags: Sequence[str]) -> tuple[str, ...]:
    """Return a line with flags, whose placeholders and missing values are filled in."""
    options = {option.flag: option for option in run_options().values()}
    line, last = tuple(words), ""
    for place, word in enumerate(flags):
        if word == "...":
            continue
        if not word.startswith("--"):
            line = (*line, VALUES.get(last, VALUES[word]) if word in VALUES else word)
            continue
        line, last = (*without(line, word), word), word
        is_last = place + 1 == len(flags) or flags[place + 1].startswith("--")
        if is_last and word in options and options[word].type is not bool:
            line = (*line, VALUES[word])
    return line


def without(words: Sequence[str], flag: str) -> tuple[str, ...]:
    """Return a command line without a flag and its values."""
    kept, skipping = [], False
    for word in words:
        if word.startswith("--"):
            skipping = word == flag
        if not skipping:
            kept.append(word)
    return tuple(kept)


def without_key(words: Sequence[str], path: str) -> tuple[str, ...]:
    """Return a command line whose file of DeepSpeed lacks a key."""
    place = list(words).index("--deepspeed-config") + 1
    content = json.loads(words[place])
    *outer, last = path.split(".")
    inside = functools.reduce(lambda part, name: part[name], outer, content)
    del inside[last]
    return (*words[:place], json.dumps(content), *words[place + 1 :])

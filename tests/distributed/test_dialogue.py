"""A dialogue on a terminal with a model in two processes: Ctrl-C ends an answer, not the model."""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from lmcore.base.signals import SAME_SIGNAL_SECONDS
from lmcore.checkpoint import save_checkpoint
from lmcore.contract import OP_SPECS, OpTable
from lmcore.data.tokenizer import ByteTokenizer
from lmcore.data.tokenizer.saved import save_tokenizer
from lmcore.families.gpt.model import GPT
from lmcore.families.op_binding import OpBinding
from lmcore.model.shape import ModelShape

pytestmark = [pytest.mark.distributed, pytest.mark.full]

SHAPE = ModelShape(2, 32, 4, 48, 8192, 384, init_method_std=0.3)
TWO = ("--tensor-model-parallel-size", "2", "--nproc-per-node", "2")


def save_run(directory: Path) -> str:
    """Write a run with a byte model of random weights that writes letters."""
    model = GPT(SHAPE, OpBinding(OpTable(OP_SPECS), "cpu", "float32"))
    model.initialize(3)
    with torch.no_grad():
        model.head_weight[128:] = 0
        model.head_weight[:32] = 0
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.named_parameters()}
    save_checkpoint(directory / "checkpoints", 5, tensors, {}, model_shape=SHAPE.to_dict())
    save_tokenizer(ByteTokenizer(), directory / "tokenizer")
    return str(directory)


class Terminal:
    """Terminal of a command: what it shows, and the keys of a user."""

    def __init__(self, file: int) -> None:
        self._file, self._shown = file, b""

    def press(self, keys: bytes) -> None:
        """Send keys."""
        os.write(self._file, keys)

    def read(self, text: bytes = b"", *, more: int = 0, press: bytes = b"") -> bytes:
        """Read until a text and some bytes after it are shown; without a text, to the end.

        Args:
            text: The text.
            more: Number of bytes after it.
            press: Keys to send now, and again after five seconds: an interrupt that Python receives
                within a finalizer is lost.
        """
        begin = time.monotonic()
        end, pressed = begin + 60, begin - 5
        while not text or not self._has(text, more):
            assert time.monotonic() < end, self._shown[-500:]
            if press and time.monotonic() > pressed + 5:
                self.press(press)
                pressed = time.monotonic()
            if select.select([self._file], [], [], 0.1)[0]:
                try:
                    self._shown += os.read(self._file, 65536)
                except OSError:  # the other side is closed
                    assert not text, self._shown[-500:]
                    break
        place = self._shown.index(text) + len(text) if text else len(self._shown)
        found, self._shown = self._shown[:place], self._shown[place:]
        return found

    def _has(self, text: bytes, more: int) -> bool:
        _, found, rest = self._shown.partition(text)
        return bool(found) and len(rest) >= more


@contextmanager
def terminal(*argv: str) -> Iterator[tuple[Terminal, int]]:
    """Run `lmcore` on a new terminal; give the terminal and the process."""
    pid, file = pty.fork()
    if pid == 0:
        command = [sys.executable, "-m", "lmcore", *argv]
        os.execve(sys.executable, command, os.environ | {"OMP_NUM_THREADS": "1", "TERM": "dumb"})
    try:
        yield Terminal(file), pid
    finally:
        os.close(file)  # a hang-up ends a command that still runs


def test_interrupted_answers(tmp_path: Path) -> None:
    """Each Ctrl-C ends an answer or a line, and the next answer follows."""
    argv = ("generate", "--load", save_run(tmp_path), "--device", "cpu", "--interactive")
    with terminal(*argv, "--tokens", "8000", *TWO) as (user, pid):
        for _ in range(2):
            user.read(b"prompt>")
            user.press(b"abc\r")
            user.read(b"abc", more=60)
            time.sleep(SAME_SIGNAL_SECONDS)
            user.read(b"(stopped)", press=b"\x03")
        user.read(b"prompt>")
        user.read(b"Ctrl-D ends", press=b"\x03")
        user.read(b"prompt>")
        user.press(b"\x04")
        assert b"error" not in user.read()
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0

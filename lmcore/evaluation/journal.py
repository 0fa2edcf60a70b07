"""`Journal`: results of an evaluation that are kept, so that a stopped one continues.

The file has a JSON line for each pass, or for generated texts: the key of the task's requests and
of the model, and the log-likelihoods or texts by the number of the request.  A line that is cut off
at the end of the file is left out.  Results that the evaluation did not ask for are of another one,
and stay in the file at its end.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from lmcore.base.durable import AtomicFile
from lmcore.base.errors import RunError, counted, unreadable
from lmcore.evaluation.likelihood import Scored
from lmcore.evaluation.score import LogLikelihood

__all__ = ["Journal", "requests_key"]

logger = logging.getLogger(__name__)

_LONGEST = 1 << 26
"""Most bytes of a line."""


def requests_key(model: str, requests: Sequence[Scored]) -> str:
    """Return a hash of a model and of requests, whose results a journal has under it.

    Args:
        model: Text that differs for different models.
        requests: The requests, in order.
    """
    digest = hashlib.sha256(model.encode())
    for one in requests:
        digest.update(f"{one.context}{one.targets}".encode())
    return digest.hexdigest()


class Journal:
    """File with results, which is written pass by pass."""

    def __init__(self, path: Path) -> None:
        """Open the file, and read the results that it has.

        Args:
            path: The file; it is made if there is none.

        Raises:
            RunError: It cannot be read or written.
        """
        self.path = path
        self._places: dict[str, list[int]] = {}
        self._own: set[str] = set()
        try:
            if path.exists():
                self._read()
            self._stream: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise RunError(
                f"cannot use `{path}` to continue the evaluation", why=error.strerror
            ) from error

    def known(self, key: str) -> Mapping[int, LogLikelihood]:
        """Return the results of requests by their number, read from the file.

        Args:
            key: Result of `requests_key`.

        Raises:
            RunError: The file cannot be read.
        """
        found = self._found(key)
        return {number: one for number, one in found.items() if isinstance(one, LogLikelihood)}

    def texts(self, key: str) -> Mapping[int, str]:
        """Return the generated texts of requests by their number, read from the file.

        Args:
            key: Result of `requests_key`.

        Raises:
            RunError: The file cannot be read.
        """
        return {number: one for number, one in self._found(key).items() if isinstance(one, str)}

    def add(self, key: str, found: Mapping[int, LogLikelihood]) -> None:
        """Write the results of a pass.

        Args:
            key: Result of `requests_key`.
            found: Results by the number of the request.
        """
        results = [[number, one.logprob, one.greedy, one.tokens] for number, one in found.items()]
        self._write(key, results)

    def add_texts(self, key: str, found: Mapping[int, str]) -> None:
        """Write generated texts.

        Args:
            key: Result of `requests_key`.
            found: Texts by the number of the request.
        """
        self._write(key, [[number, text] for number, text in found.items()])

    def close(self) -> None:
        """Close the file, which stays if it has results."""
        self._stream.close()
        if self.path.exists() and not self.path.stat().st_size:
            self.path.unlink(missing_ok=True)

    def remove(self) -> None:
        """Close the file and remove what it has of this evaluation, which is complete."""
        self._stream.close()
        left = sorted(
            place
            for key, places in self._places.items()
            if key not in self._own
            for place in places
        )
        if not left:
            self.path.unlink(missing_ok=True)
            return
        with self.path.open("rb") as stream, AtomicFile(self.path) as kept:
            for place in left:
                stream.seek(place)
                kept.write(stream.readline(_LONGEST))
        logger.warning(
            "`%s` keeps results of another evaluation, which was stopped; remove it if that one is "
            "not to be continued",
            self.path,
        )

    def _write(self, key: str, results: Sequence[Sequence[Any]]) -> None:
        self._own.add(key)
        self._stream.write(json.dumps({"key": key, "results": results}) + "\n")
        self._stream.flush()

    def _found(self, key: str) -> dict[int, LogLikelihood | str]:
        found: dict[int, LogLikelihood | str] = {}
        self._own.add(key)
        if key not in self._places:
            return found
        try:
            with self.path.open("rb") as stream:
                for place in self._places[key]:
                    stream.seek(place)
                    found |= _results(stream.readline(_LONGEST))[1]
        except (OSError, ValueError) as error:
            raise RunError(f"cannot read `{self.path}`", why=unreadable(error)) from error
        return found

    def _read(self) -> None:
        """Find the lines that have results of each key; the results stay in the file."""
        count = place = 0
        with self.path.open("rb") as stream:
            for line in iter(lambda: stream.readline(_LONGEST), b""):
                try:
                    key, results = _results(line)
                    self._places.setdefault(key, []).append(place)
                    count += len(results)
                except ValueError:
                    logger.warning("a line of `%s` cannot be read and is left out", self.path)
                place += len(line)
        if count:
            logger.info("`%s` has %s of an evaluation", self.path, counted(count, "result"))


def _results(line: bytes) -> tuple[str, dict[int, LogLikelihood | str]]:
    """Return the key and the results of a line.

    Raises:
        ValueError: It has none.
    """
    try:
        record = json.loads(line)
        return str(record["key"]), {
            int(number): str(values[0])
            if len(values) == 1
            else LogLikelihood(float(values[0]), bool(values[1]), int(values[2]))
            for number, *values in record["results"]
        }
    except (KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(repr(error)) from error

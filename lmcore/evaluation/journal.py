"""`Journal`: log-likelihoods of an evaluation that are kept, so that a stopped one continues.

The file has a JSON line for each pass: the key of the task's requests and of the model, and the
results by the number of the request.  A line that is cut off at the end of the file is left out.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from lmcore.base.errors import RunError, counted
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
        self._held: dict[str, dict[int, LogLikelihood]] = {}
        try:
            if path.exists():
                self._read()
            self._stream: TextIO = path.open("a", encoding="utf-8")
        except OSError as error:
            raise RunError(
                f"cannot use `{path}` to continue the evaluation", why=error.strerror
            ) from error

    def known(self, key: str) -> Mapping[int, LogLikelihood]:
        """Return the results of requests by their number.

        Args:
            key: Result of `requests_key`.
        """
        found = self._held.get(key, {})
        if found:
            logger.info("`%s` has %s of this task", self.path, counted(len(found), "result"))
        return found

    def add(self, key: str, found: Mapping[int, LogLikelihood]) -> None:
        """Write the results of a pass.

        Args:
            key: Result of `requests_key`.
            found: Results by the number of the request.
        """
        results = [[number, one.logprob, one.greedy, one.tokens] for number, one in found.items()]
        self._stream.write(json.dumps({"key": key, "results": results}) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Close the file, which stays."""
        self._stream.close()

    def remove(self) -> None:
        """Close and remove the file: the evaluation is complete."""
        self._stream.close()
        self.path.unlink(missing_ok=True)

    def _read(self) -> None:
        with self.path.open("rb") as stream:
            for line in iter(lambda: stream.readline(_LONGEST), b""):
                try:
                    record = json.loads(line)
                    results = {
                        int(number): LogLikelihood(float(logprob), bool(greedy), int(tokens))
                        for number, logprob, greedy, tokens in record["results"]
                    }
                    self._held.setdefault(str(record["key"]), {}).update(results)
                except (ValueError, KeyError, TypeError, RecursionError):
                    logger.warning("a line of `%s` cannot be read and is left out", self.path)

"""Reading of one file, as the tests of the formats do it."""

from __future__ import annotations

import pytest

from lmcore.data.input.files import find_inputs
from lmcore.data.input.options import InputOptions
from lmcore.data.input.read import read_input


class Read:
    """The documents and the problems of an input."""

    def __init__(self, batches) -> None:
        self.batches = batches
        self.rows = [row for batch in batches for row in zip(*batch.columns, strict=True)]
        self.texts = [row[0] for row in self.rows]
        self.numbers = [number for batch in batches for number in batch.numbers]
        self.problems = [problem for batch in batches for problem in batch.problems]
        self.told = [(problem.line, problem.reason) for problem in self.problems]


@pytest.fixture
def read():
    """Return a function that reads a file; options as `InputOptions` has them."""

    def read(path, input_format="auto", **options):
        files = find_inputs([str(path)], input_format)
        batches = [
            batch
            for batch in read_input(files, InputOptions(**options))
            if batch.problems or batch.size
        ]
        return Read([batch for batch in batches if hasattr(batch, "columns")])

    return read

"""Weights as arrays of numpy: a file with the shape of the model, and an archive of arrays."""

import json
import zipfile

import numpy as np
import torch

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import CheckpointArgumentError, CheckpointError
from lmcore.conversion.state import WEIGHT, ModelState, require_no_problems
from lmcore.families.saved_shape import read_shape
from lmcore_example_format.plugin import MODEL, WEIGHTS

MAX_BYTES = 2**20


class NpzState(ModelState):
    """Model in such a directory."""

    format = "numpy"

    def __init__(self, path, *, weights_only=False, compare=True):
        """Open the directory and compare names and sizes with the shape; tensors are read later."""
        del weights_only, compare  # there are weights alone, and zipfile compares checksums
        try:
            model = json.loads(read_bounded_file(path / MODEL, MAX_BYTES))
            self.path, self.shape = path, read_shape(model["shape"], path)
            self.vocab_size = model["vocab_size"]
            with zipfile.ZipFile(path / WEIGHTS) as archive:
                names = {name.removesuffix(".npy") for name in archive.namelist()}
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as cause:
            raise CheckpointError(f"`{path}` is damaged", why=str(cause)) from cause
        missing = [f"`{name}` is missing" for name in self.parameters if name not in names]
        surplus = [f"`{name}` is unknown" for name in names - self.parameters.keys()]
        require_no_problems(path, missing + sorted(surplus), description=f"its `{MODEL}`")

    def dtype(self, name, kind=WEIGHT):
        """Return the dtype of a weight."""
        return self.read(name, kind).dtype

    def read(self, name, kind=WEIGHT):
        """Return a whole weight."""
        assert kind == WEIGHT
        try:
            with zipfile.ZipFile(self.path / WEIGHTS) as archive:
                array = np.lib.format.read_array(archive.open(f"{name}.npy"), allow_pickle=False)
            return torch.from_numpy(array)
        except (OSError, ValueError, TypeError, zipfile.BadZipFile) as cause:
            raise CheckpointError(f"`{self.path / WEIGHTS}` is damaged", why=str(cause)) from cause


def write_npz(state, directory, tokenizer, *, dtype):
    """Write a model tensor by tensor and return notes for the user."""
    if dtype == torch.bfloat16:
        raise CheckpointArgumentError("`--dtype bfloat16`: numpy has no such dtype")
    shape = {"shape": state.shape.to_dict(), "vocab_size": state.vocab_size}
    (directory / MODEL).write_text(json.dumps(shape, indent=1), encoding="utf-8")
    with zipfile.ZipFile(directory / WEIGHTS, "w") as archive:
        for name in state.parameters:
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, state.read(name).to(dtype).numpy())
    return [] if tokenizer is None else ["the tokenizer is not written: give its options"]

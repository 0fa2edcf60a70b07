"""`Architecture`: a model of transformers that computes what a family's models compute.

Torch-free.  A family names its architectures in `Family.names`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmcore.base.errors import CheckpointError
from lmcore.model.family import families, family_of
from lmcore.model.shape import ModelShape

__all__ = ["Architecture", "ConfigReader", "ForeignTensors", "architectures", "architectures_for"]

_FORMAT = "huggingface"


@dataclass(frozen=True)
class ForeignTensors:
    """Tensors of another program that one parameter of lmcore is made of.

    Attributes:
        names: Names in the other program.
        rows: Sizes of several tensors along the first dim of the parameter; empty: it is one.
        transposed: True if the other program has the matrix transposed.
        by_head: True if it has the query, key and value of each head together.
    """

    names: tuple[str, ...]
    rows: tuple[int, ...] = ()
    transposed: bool = False
    by_head: bool = False


@dataclass
class ConfigReader:
    """Values of one `config.json`.

    Attributes:
        path: Path of the file.
        config: Its values.
        notes: Differences between the model and lmcore's, for the user.
        zeros: Pattern of the names of the parameters that the model lacks, and that lmcore sets
            to 0; empty: none.
    """

    path: Path
    config: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)
    zeros: str = ""

    def get(self, name: str, default: Any) -> Any:
        """Return a value; *default* if it is missing or null."""
        value = self.config.get(name)
        return default if value is None else value

    def require(self, name: str, allowed: Sequence[Any]) -> Any:
        """Return a value that is in *allowed*, whose first item is the default.

        Raises:
            CheckpointError: It is another value.
        """
        value = self.config.get(name, allowed[0])
        if value not in allowed:
            listed = " or ".join(f"`{json.dumps(one)}`" for one in allowed)
            raise self.unsupported(f"`{name}` is `{json.dumps(value)}`; lmcore computes {listed}")
        return value

    def unsupported(self, why: str) -> CheckpointError:
        """Return the error for a model that lmcore does not have."""
        return CheckpointError(
            f"lmcore does not have the model of `{self.path}`",
            why=why,
            hint="convert it with the program that it belongs to, or use a supported model",
        )


def _one_spelling(name: str) -> tuple[str, ...]:
    return (name,)


@dataclass(frozen=True)
class Architecture:
    """Model of transformers that computes what the models of a family compute.

    Attributes:
        model_type: `model_type` in its `config.json`.
        read: Returns the values of the shape, as `read_shape` takes them.
        tensors: Returns the tensors that a parameter of lmcore is made of.
        differences: Returns the features of a model that it lacks; None: it is only read.
        write: Returns the values of `config.json` that describe a shape.
        class_name: Returns the class of transformers that has the model of a shape.
        other_classes: Pattern of the names of classes whose models it does not have.
        purpose: Words for what the models of the other classes are not.
        head: Name of the output layer's weight, if it may have other values than the embedding;
            empty: it may not.
        copies: Names of tensors that are the same as others, to which they are tied.
        spellings: Returns the names that a tensor may have in files.
        buffers: Pattern of the names of tensors in files that a model computes by itself.
        ignored: Pattern of the names of tensors in files that a model may lack the use of.
        generates: True if it generates text: the files name the tokens that begin and end one.
        begins_decoder: True if it has a decoder beside an encoder: the files name the tokens that
            begin and end the decoder's text, and the padding.
        with_tensors: Returns the shape that a model has according to the names in its files.
        hint: Advice for a model that it does not compute.
    """

    model_type: str
    read: Callable[[ConfigReader], Mapping[str, Any]]
    tensors: Callable[[str, ModelShape], ForeignTensors]
    write: Callable[[ModelShape], dict[str, Any]]
    class_name: Callable[[ModelShape], str]
    other_classes: re.Pattern[str]
    purpose: str
    buffers: re.Pattern[str]
    differences: Callable[[ModelShape], list[str]] | None = None
    head: str = ""
    copies: Mapping[str, str] = field(default_factory=dict)
    spellings: Callable[[str], Sequence[str]] = _one_spelling
    ignored: re.Pattern[str] | None = None
    generates: bool = True
    begins_decoder: bool = False
    with_tensors: Callable[[ModelShape, Collection[str]], ModelShape] = lambda shape, _names: shape
    hint: str = "train a model of one of these families to share it there"


def architectures() -> dict[str, Architecture]:
    """Return the architectures of all families by their `model_type`."""
    found = [one.load_names(_FORMAT) or () for one in families().values()]
    return {one.model_type: one for each in found for one in each}


def architectures_for(shape: ModelShape) -> tuple[Architecture, ...]:
    """Return the architectures of a model's family that are written, in the order of preference."""
    found: Sequence[Architecture] = family_of(shape).load_names(_FORMAT) or ()
    return tuple(one for one in found if one.differences is not None)

"""Settings that a checkpoint records: the values of the run that wrote it, as a layer of settings.

The layer above reads them from the checkpoint's manifest; every value is checked like one of a
file, since a checkpoint may come from anywhere.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from lmcore.base.errors import ConfigError, LmcoreError
from lmcore.config.file.paths import map_paths
from lmcore.config.option import Option
from lmcore.config.settings import Provenance
from lmcore.config.tokenizer import TokenizerSettings
from lmcore.model.family import families

__all__ = ["SavedSettings"]

_ENCODING = "position_embedding_type"
_POSITIONS = "max_position_embeddings"


@dataclass(frozen=True)
class SavedSettings:
    """The settings of the run that wrote a checkpoint.

    Attributes:
        checkpoint: Directory of the checkpoint.
        config: Values by section and key; of a plugin's section below `plugins` and its name.
        sources: Source of each value by option name, as `Provenance` writes it.
        tokenizer: Settings of the run's own copy of its tokenizer; None if there is none.
        continues: False for another program's checkpoint without the state of a run.
    """

    checkpoint: str
    config: Mapping[str, Any]
    sources: Mapping[str, Any]
    tokenizer: TokenizerSettings | None = None
    continues: bool = True

    def model_layer(
        self, options: Mapping[str, Option], problems: list[LmcoreError]
    ) -> dict[str, tuple[Any, Provenance]]:
        """Return the settings of model and tokenizer, and the precision; see `layer`.

        The tokenizer is the run's own copy, if there is one.
        """
        fields = [field.name for field in dataclasses.fields(TokenizerSettings)]
        names = {name for name, option in options.items() if option.section == "model"}
        names |= {one for family in families().values() for one in family.settings}
        names |= {*fields, "precision"}
        names -= {"pad_vocab_size_to"}  # the checkpoint itself says how many rows it has
        model = self.config.get("model")
        # A table of learned positions keeps its rows when `--seq-length` changes.
        learned = isinstance(model, Mapping) and model.get(_ENCODING) == "learned_absolute"
        derived = {_POSITIONS} if learned else set[str]()
        derived |= {"make_vocab_size_divisible_by"}
        found = self.layer(options, problems, names=names, derived=derived)
        if self.tokenizer is not None:
            origin = Provenance("checkpoint", self.checkpoint)
            vocab_size = found.get("vocab_size")  # also the size that a model is padded to
            found = {name: value for name, value in found.items() if name not in fields}
            if vocab_size is not None:
                found["vocab_size"] = vocab_size
            for name in fields:
                value = getattr(self.tokenizer, name)
                if value != options[name].default:
                    found[name] = (value, origin)
        return found

    def layer(
        self,
        options: Mapping[str, Option],
        problems: list[LmcoreError],
        *,
        names: Collection[str] | None = None,
        derived: Collection[str] = (),
    ) -> dict[str, tuple[Any, Provenance]]:
        """Return the values that the run's user set, with their provenance, by option name.

        Derived values are left out, and defaults that are the same in this version.

        Args:
            options: Options by name.
            problems: List to which wrong values are added.
            names: Options to take; None for all.
            derived: Options to take although they are derived.
        """
        found: dict[str, tuple[Any, Provenance]] = {}
        for name, option in options.items():
            if option.one_start or (names is not None and name not in names):
                continue
            source = str(self.sources.get(name, ""))
            section = self._section(option)
            if option.key not in section:
                continue
            if source.startswith("derived") and name not in derived:
                continue
            where = f"checkpoint `{self.checkpoint}`: `{name}: {section[option.key]}`"
            try:
                value = option.convert(_typed(section[option.key]), where=where)
            except ConfigError as problem:
                problems.append(problem)
                continue
            if source == "default" and value == option.default:
                continue
            value = map_paths(option, value, os.path.abspath)
            found[name] = (value, Provenance("checkpoint", self.checkpoint))
        return found

    def _section(self, option: Option) -> Mapping[str, Any]:
        keys = ("plugins", option.plugin) if option.plugin else (option.section,)
        found: Any = self.config
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}


def _typed(value: Any) -> Any:
    """Return a JSON value in a form that an option converts; an object becomes its text."""
    if isinstance(value, list):
        return [item if isinstance(item, (str, int, float)) else str(item) for item in value]
    return value if value is None or isinstance(value, (str, int, float)) else str(value)

"""Protection of existing files from the commands that write datasets, corpora and lists.

Every `lmcore data` command that writes calls one of these checks before it reads its input.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from lmcore.base.errors import ConfigError, counted
from lmcore.data.indexed.metadata import metadata_path, read_metadata

__all__ = ["dataset_paths", "require_replaceable", "require_unused"]


def require_unused(
    paths: Iterable[str | Path],
    option: str,
    *,
    overwrite: bool | None = None,
    why: str | None = None,
) -> None:
    """Refuse output files that exist already.

    Args:
        paths: paths of all output files.
        option: option that names the output, such as `--output`.
        overwrite: value of `--overwrite`; None if the command never replaces a file.
        why: reason that replacing them would do harm.

    Raises:
        ConfigError: a file exists and is not to be replaced, or is a directory or a device.
    """
    outputs = [Path(path) for path in paths]
    for path in outputs:
        above = next((folder for folder in path.parents if os.path.lexists(folder)), None)
        if above is not None and above.exists() and not above.is_dir():
            hint = f"choose another `{option}`"
            raise ConfigError(f"cannot write `{path}`", why=f"`{above}` is a file", hint=hint)
    existing = [path for path in outputs if os.path.lexists(path)]
    for path in existing:
        if path.exists() and not path.is_file():
            kind = "a directory" if path.is_dir() else "not a regular file"
            raise ConfigError(f"`{path}` is {kind}", hint=f"name a file with `{option}`")
    if not existing or overwrite:
        return
    these = "it" if len(existing) == 1 else "them"
    if why is None and len(existing) > 1:
        why = f"{counted(len(existing), 'file')} would be replaced"
    raise ConfigError(
        f"`{existing[0]}` exists already",
        why=why,
        hint=f"remove {these}, or give another `{option}`"
        if overwrite is None
        else f"give another `{option}`, or add `--overwrite` to replace {these}",
    )


def dataset_paths(prefix: str) -> list[Path]:
    """Return the paths of the files of an indexed dataset."""
    return [Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), metadata_path(prefix)]


def require_replaceable(
    prefixes: Sequence[str], *, overwrite: bool, fingerprint: str | None, tokenizer: str | None
) -> None:
    """Refuse output datasets that exist already, and ones of another tokenizer in any case.

    Args:
        prefixes: paths of the output datasets, without suffix.
        overwrite: value of `--overwrite`.
        fingerprint: fingerprint of the new datasets' tokenizer; None if unknown.
        tokenizer: name of that tokenizer; None if unknown.

    Raises:
        ConfigError: a dataset exists and is not to be replaced.
        DataError: the metadata of an existing dataset is invalid.
    """
    paths = [path for prefix in prefixes for path in dataset_paths(prefix)]
    require_unused(paths, "--output-prefix", overwrite=overwrite)
    for prefix in prefixes:
        metadata = read_metadata(prefix)
        if metadata is None or fingerprint is None or metadata.fingerprint == fingerprint:
            continue
        names = (str(metadata.tokenizer.get("type")), str(tokenizer))
        if names[0] == names[1]:
            names = (f"{names[0]} {metadata.fingerprint}", f"{names[1]} {fingerprint}")
        files = ", ".join(f"`{path}`" for path in dataset_paths(prefix) if path.exists())
        raise ConfigError(
            f"`{prefix}` was prepared with another tokenizer",
            why=f"it was prepared with `{names[0]}`, this command uses `{names[1]}`; `--overwrite` "
            "replaces only datasets of the same tokenizer",
            hint=f"give another `--output-prefix`; to replace it nevertheless, remove {files} "
            "first",
        )

"""Manifest of a checkpoint: read, checked and written.

`manifest.json` is written last, so that a directory without it is not a checkpoint.  It is read
first, bounded and strictly checked, because its author is not known; its own checksum covers all of
it, so that an altered counter is found as an altered weight is.  Nothing here loads torch:
`inspect` and `find_checkpoint` read manifests only.
"""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from lmcore.base.bounded_file import read_bounded_file
from lmcore.base.errors import CheckpointArgumentError, CheckpointError
from lmcore.model.manifest import FileEntry, Manifest, ShapeValue, TensorEntry

__all__ = [
    "CONVERT_IT",
    "FORMAT",
    "FORMAT_VERSION",
    "JSON",
    "MANIFEST_NAME",
    "MEGATRON_FORMAT",
    "FileEntry",
    "Manifest",
    "NewerFormatError",
    "ShapeValue",
    "TensorEntry",
    "check_shape",
    "encode_manifest",
    "read_manifest",
    "shortened",
]

JSON: TypeAlias = (
    "str | int | float | bool | Mapping[str, JSON] | list[JSON] | tuple[JSON, ...] | None"
)

FORMAT = "lmcore-checkpoint"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
MEGATRON_FORMAT = "it has the format of Megatron"
"""Reason why a checkpoint of another program is not continued as a run of lmcore."""
CONVERT_IT = "`lmcore checkpoint convert {} RUN --to lmcore` makes a run of it, if it is complete"
"""Hint for such a checkpoint, with `{}` in the place of its path."""
# Far above any real manifest (about 100 bytes a tensor), far below what hurts to read.
MAX_MANIFEST_BYTES = 128 * 1024 * 1024

_CRC32 = re.compile(r"[0-9a-f]{8}")
_SHOWN = 20
_LONGEST_SHOWN = 80
_LONGEST_FILE_NAME = 255
"""Longest name of a file in bytes, on all common file systems."""


class NewerFormatError(CheckpointError):
    """Undamaged checkpoint whose format version is newer than this lmcore.

    Args:
        what, why, hint: See `LmcoreError`.
        sequence: Save number in its manifest; None if the newer format has none.
    """

    def __init__(self, what: str, *, why: str, hint: str, sequence: int | None) -> None:
        super().__init__(what, why=why, hint=hint)
        self.sequence = sequence


def encode_manifest(manifest: Manifest) -> bytes:
    """Return the JSON text of *manifest*, its own checksum included.

    Raises:
        TypeError, ValueError: `meta` or `model_shape` is not JSON: it has NaN, or keys that are
            not strings.
    """
    _check_keys(manifest.meta)
    _check_keys(manifest.model_shape)
    document: dict[str, Any] = {
        "format": FORMAT,
        "format_version": manifest.format_version,
        "lmcore_version": manifest.lmcore_version,
        "torch_version": manifest.torch_version,
        "iteration": manifest.iteration,
        "sequence": manifest.sequence,
        "model_shape": dict(manifest.model_shape),
        "meta": dict(manifest.meta),
        "tensors": {
            name: {"dtype": entry.dtype, "shape": list(entry.shape)}
            for name, entry in manifest.tensors.items()
        },
        "files": {
            name: {"size": entry.size, "crc32": f"{entry.crc32:08x}"}
            for name, entry in manifest.files.items()
        },
    }
    document["manifest_sha256"] = _checksum(document)
    return (json.dumps(document, indent=1, allow_nan=False) + "\n").encode("utf-8")


def read_manifest(checkpoint: Path) -> Manifest:
    """Return the manifest of the directory *checkpoint*, checked against the schema.

    Raises:
        CheckpointError: There is no manifest, or it is foreign, of a newer version, or altered.
    """
    path = checkpoint / MANIFEST_NAME
    document = _parse(path, _read_bounded(path))
    if document.get("format") != FORMAT:
        raise CheckpointError(
            f"`{path}` is not the manifest of an lmcore checkpoint",
            why=f"its `format` is {_quoted(document.get('format'))}, not `{FORMAT}`",
        )
    version = document.get("format_version")
    stated = document.pop("manifest_sha256", None)
    sound = stated == _checksum(document)
    # A flipped bit may make the version a higher one: then there is a checksum that does not match.
    if isinstance(version, int) and version > FORMAT_VERSION and (sound or stated is None):
        saves = document.get("sequence")
        raise NewerFormatError(
            f"checkpoint `{checkpoint}` was written by a newer lmcore",
            why=f"its format version is {version}; this lmcore reads up to {FORMAT_VERSION}",
            hint=f"install lmcore {_quoted(document.get('lmcore_version'))} or newer, or name an "
            "older checkpoint: `--load RUN/checkpoints/iter_XXXXXXX`",
            sequence=saves if isinstance(saves, int) else None,
        )
    if not sound:
        raise CheckpointError(
            f"`{path}` was altered after it was written",
            why="its content does not match its own checksum",
            hint="use an earlier checkpoint, or restore this one from a copy",
        )
    manifest = _Schema(path).manifest(document)
    counters = manifest.meta.get("counters")
    counted = counters.get("iteration") if isinstance(counters, Mapping) else None
    if counted is not None and counted != manifest.iteration:
        raise CheckpointError(
            f"`{path}` contradicts itself",
            why=f"its iteration is {shortened(str(manifest.iteration))}, its counters are of "
            f"iteration {shortened(str(counted))}",
            hint="use an earlier checkpoint, or restore this one from a copy",
        )
    return manifest


def shortened(text: str) -> str:
    """Return *text* for a message: cut after 80 characters."""
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def check_shape(manifest: Manifest, model_shape: Mapping[str, ShapeValue]) -> None:
    """Refuse a checkpoint whose model is not *model_shape*; name every difference.

    Raises:
        CheckpointError: At least one entry differs, or is on one side only.
    """
    saved = manifest.model_shape
    differing = [
        f"{name}: checkpoint {_shown(saved, name)}, model {_shown(model_shape, name)}"
        for name in sorted({*saved, *model_shape})
        if _shown(saved, name) != _shown(model_shape, name)
    ]
    if differing:
        raise CheckpointArgumentError(
            f"the checkpoint of iteration {manifest.iteration} is of another model",
            why="\n".join(differing),
            hint="give the model options that the checkpoint was trained with, or load another one",
        )


def _shown(shape: Mapping[str, ShapeValue], name: str) -> str:
    # 256 and 256.0 are one width, but True is not 1: compare what is shown.
    if name not in shape:
        return "absent"
    value = shape[name]
    return f"{value:g}" if isinstance(value, float) and value.is_integer() else str(value)


def _check_keys(value: object) -> None:
    if isinstance(value, Mapping):
        for key, entry in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} of a checkpoint's `meta` is not a string")
            _check_keys(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            _check_keys(entry)


def _checksum(document: Mapping[str, Any]) -> str:
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode("utf-8")).hexdigest()


def _read_bounded(path: Path) -> bytes:
    try:
        return read_bounded_file(path, MAX_MANIFEST_BYTES)
    except FileNotFoundError:
        if any(path.parent.glob("mp_rank_*")) or (path.parent / "common.pt").exists():
            raise CheckpointError(
                f"`{path.parent}` is not a checkpoint of lmcore",
                why=MEGATRON_FORMAT,
                hint=CONVERT_IT.format(shlex.quote(str(path.parent))),
            ) from None
        raise CheckpointError(
            f"`{path.parent}` is not a complete checkpoint",
            why=f"it has no `{MANIFEST_NAME}`, which is written last",
            hint="load an earlier checkpoint, or copy this one again",
        ) from None
    except OSError as error:
        why = error.strerror or str(error)
        raise CheckpointError(f"cannot read `{path}`", why=why) from error


def _parse(path: Path, content: bytes) -> dict[str, Any]:
    try:
        document = json.loads(
            content.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_refuse_constant
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"`{path}` is damaged",
            why=f"it is not JSON: {error}",
            hint="use an earlier checkpoint, or restore this one from a copy",
        ) from error
    if not isinstance(document, dict):
        raise CheckpointError(f"`{path}` is damaged", why="it is not a JSON object")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key is twice in one object")
    return mapping


def _refuse_constant(name: str) -> None:
    raise ValueError(f"`{name}` is not a JSON number")


def _quoted(value: object) -> str:
    return f"`{shortened(str(value))}`" if value is not None else "missing"


class _Schema:
    """Checks the fields of a parsed manifest; errors name the field."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def manifest(self, document: dict[str, Any]) -> Manifest:
        expected = {*Manifest.__dataclass_fields__, "format"}
        if set(document) != expected:
            odd = ", ".join(f"`{name[:80]}`" for name in sorted(expected ^ set(document))[:_SHOWN])
            raise self.error(f"missing or unknown fields: {odd}")
        return Manifest(
            format_version=self.count(document, "format_version"),
            lmcore_version=self.text(document, "lmcore_version"),
            torch_version=self.text(document, "torch_version"),
            iteration=self.count(document, "iteration"),
            sequence=self.count(document, "sequence"),
            model_shape=self.mapping(document, "model_shape", self.shape_value),
            meta=self.mapping(document, "meta", lambda _name, value: value, names=False),
            tensors=self.mapping(document, "tensors", self.tensor),
            files=self.mapping(document, "files", self.file),
        )

    def error(self, why: str) -> CheckpointError:
        return CheckpointError(f"`{self.path}` does not follow the manifest's schema", why=why)

    def count(self, document: Mapping[str, Any], name: str) -> int:
        value = document[name]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.error(f"`{name}` is not a count")
        return value

    def text(self, document: Mapping[str, Any], name: str) -> str:
        value = document[name]
        if not isinstance(value, str):
            raise self.error(f"`{name}` is not a string")
        self.require_encodable(name, value)
        return value

    def mapping(
        self,
        document: Mapping[str, Any],
        name: str,
        convert: Callable[[str, Any], Any],
        *,
        names: bool = True,
    ) -> dict[str, Any]:
        """Return a field with its values converted; *names* are used outside of the manifest."""
        value = document[name]
        if not isinstance(value, dict):
            raise self.error(f"`{name}` is not an object")
        for key in value if names else ():
            self.require_encodable(name, key)
        return {key: convert(key, entry) for key, entry in value.items()}

    def require_encodable(self, field: str, text: str) -> None:
        """Refuse text that JSON can escape and UTF-8 cannot have: an unpaired surrogate."""
        try:
            text.encode()
        except UnicodeEncodeError:
            shown = shortened(text.encode(errors="backslashreplace").decode())
            raise self.error(f"`{shown}` in `{field}` cannot be encoded in UTF-8") from None

    def shape_value(self, name: str, value: Any) -> ShapeValue:
        if isinstance(value, str):
            return self.text({name: value}, name)
        if value is None or isinstance(value, int | float):
            return value
        raise self.error(f"`model_shape` entry `{shortened(name)}` is not a plain value")

    def tensor(self, name: str, value: Any) -> TensorEntry:
        if not isinstance(value, dict) or set(value) != {"dtype", "shape"}:
            raise self.error(
                f"tensor `{shortened(name)}` does not have exactly `dtype` and `shape`"
            )
        shape = value["shape"]
        sizes = isinstance(shape, list) and all(
            isinstance(size, int) and not isinstance(size, bool) and size >= 0 for size in shape
        )
        if not sizes:
            raise self.error(f"the shape of tensor `{shortened(name)}` is not a list of sizes")
        return TensorEntry(dtype=self.text(value, "dtype"), shape=tuple(shape))

    def file(self, name: str, value: Any) -> FileEntry:
        if name in {"", ".", "..", MANIFEST_NAME} or "/" in name or "\\" in name or "\0" in name:
            raise self.error(f"file `{shortened(name)}` is not a name inside the checkpoint")
        if len(name.encode()) > _LONGEST_FILE_NAME:
            raise self.error(f"the name of file `{shortened(name)}` has {len(name)} characters")
        if not isinstance(value, dict) or set(value) != {"size", "crc32"}:
            raise self.error(f"file `{shortened(name)}` does not have exactly `size` and `crc32`")
        checksum = self.text(value, "crc32")
        if not _CRC32.fullmatch(checksum):
            raise self.error(f"the `crc32` of file `{shortened(name)}` is not 8 hexadecimal digits")
        return FileEntry(size=self.count(value, "size"), crc32=int(checksum, 16))

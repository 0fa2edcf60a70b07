"""The plugin contract as data, its snapshots, and the rule that its version follows."""

from __future__ import annotations

import inspect
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version

from lmcore import contract
from lmcore.base.errors import ConfigError, PluginError
from lmcore.contract import API_VERSION, OP_SPECS
from lmcore.contract.op.records import load_target
from lmcore_conformance.contract import snapshot
from lmcore_conformance.contract.diff import ChangeKind, compare, version_problem

CURRENT = snapshot.describe_contract()
OUTSIDE = {"Any", "Callable", "Mapping", "Sequence", "None", "str", "Config"}
"""Names in the annotations of hooks that are no types of the contract."""


def test_the_snapshot_of_this_version_is_what_the_code_has():
    """A change of the contract is a visible decision: the snapshot is part of the change."""
    shipped = snapshot.load_contract(API_VERSION)
    changes = "\n".join(str(change) for change in compare(shipped, CURRENT))
    if shipped["frozen"]:
        message = f"version {API_VERSION} is released: take this back, or raise `API_VERSION` first"
    else:
        message = "if this is meant, run `python docs/generate.py` and name it in CHANGELOG.md"
    assert {**CURRENT, "frozen": shipped["frozen"]} == shipped, f"{message}\n{changes}"


def test_this_version_may_follow_each_older_one():
    """Breaking changes since an older snapshot raised the first number, additions the second."""
    for version in snapshot.contract_versions():
        if version != API_VERSION:
            assert Version(version) < Version(API_VERSION)
            assert version_problem(snapshot.load_contract(version), CURRENT) is None


def test_only_the_last_version_can_change():
    """A version that has a successor is released, and the last one is the code's."""
    *earlier, last = snapshot.contract_versions()
    assert all(snapshot.load_contract(version)["frozen"] for version in earlier)
    assert last == API_VERSION


def test_every_hook_is_described_with_all_its_fields():
    """Arguments, result and the five texts of its docstring are there."""
    assert list(CURRENT["hooks"]) == list(snapshot.specified_hooks())
    for name, hook in CURRENT["hooks"].items():
        wanted = inspect.signature(snapshot.specified_hooks()[name])
        assert list(hook["arguments"]) == list(wanted.parameters)
        for key in ("summary", "called_by", "when", "ranks", "returns", "result"):
            assert hook[key], (name, key)


def test_a_docstring_is_read_by_its_lines():
    """A field continues over lines; a title inside a line begins none."""
    text = "Say it.\n\nCalled by: the core\nand others.\nWhen: at once. Return: not a title.\n"
    assert snapshot.parse_hook_docstring(text) == (
        "Say it.",
        {"Called by": "the core and others.", "When": "at once. Return: not a title."},
    )


def test_every_type_that_a_hook_names_is_described():
    """Every record in a hook's signature is part of the snapshot."""
    named = {
        name
        for hook in CURRENT["hooks"].values()
        for text in (*hook["arguments"].values(), hook["result"])
        for name in re.findall(r"\w+", text)
    }
    assert named - set(CURRENT["types"]) - OUTSIDE == set()


def test_types_that_records_lead_to_are_described():
    """Types that a record's function takes or returns belong to the contract as well."""
    assert {"MemoryStats", "OpContext", "Reject", "ProbeState", "CheckStatus"} <= set(
        CURRENT["types"]
    )


def test_what_plugins_can_import_is_described():
    """Every name of `lmcore.contract` is a type, a function, or another name, once."""
    functions = {name for name in contract.__all__ if inspect.isfunction(getattr(contract, name))}
    assert functions == {name for name in CURRENT["functions"] if "." not in name}
    assert set(contract.__all__) <= {
        *CURRENT["types"],
        *CURRENT["functions"],
        *CURRENT["names"],
    }
    assert not set(CURRENT["names"]) & {*CURRENT["types"], *CURRENT["functions"]}


def test_public_modules_are_described():
    """Names by module, functions with their parameters, errors by their constructors."""
    assert CURRENT["modules"]["lmcore.contract"] == sorted(contract.__all__)
    functions = CURRENT["functions"]
    constructor = functions["lmcore.base.errors.LmcoreError"]["parameters"]
    assert [parameter["name"] for parameter in constructor] == ["what", "why", "hint"]
    recompute = functions["lmcore.contract.activation_saving.recompute"]
    assert recompute["parameters"][-1] == {
        "name": "remember",
        "type": "Remember",
        "kind": "keyword_only",
        "default": None,
    }
    assert "PackageKind" in CURRENT["types"]
    assert "lmcore.config.section.Config" not in functions


def test_a_record_has_its_fields_and_defaults():
    """Names, annotations as written, and whether the field may be left out."""
    fields = {field["name"]: field for field in CURRENT["types"]["Probe"]["fields"]}
    assert fields["state"] == {"name": "state", "type": "ProbeState", "default": False}
    assert fields["facts"] == {"name": "facts", "type": "Mapping[str, Any]", "default": True}
    assert CURRENT["types"]["CommBackend"]["methods"] == {}  # a field's default is no method
    assert CURRENT["types"]["ProbeState"]["values"]["PRESENT"] == "present"


@pytest.mark.parametrize("spec", OP_SPECS, ids=lambda spec: spec.name)
def test_an_op_is_described_as_its_reference_is(spec):
    """The signature read from the source is the signature that Python sees."""
    described = CURRENT["ops"][spec.name]
    assert described["schema"] == spec.schema
    assert described["gradients"] == list(spec.gradients)
    assert described["attributes"] == list(spec.attributes)
    wanted = [
        {
            "name": parameter.name,
            "type": parameter.annotation,
            "kind": parameter.kind.name.lower(),
            "default": None
            if parameter.default is inspect.Parameter.empty
            else repr(parameter.default),
        }
        for parameter in inspect.signature(load_target(spec.reference)).parameters.values()
    ]
    assert described["parameters"] == wanted


def test_the_description_loads_no_torch():
    """Commands can read the contract as fast as they start."""
    code = """
import sys
from lmcore_conformance.contract import snapshot
snapshot.describe_contract()
snapshot.load_contract(snapshot.API_VERSION)
print('torch' in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_an_unknown_version_lists_those_shipped():
    """The error names the choices."""
    with pytest.raises(ConfigError, match=re.escape("no snapshot of version `0.1`")) as error:
        snapshot.load_contract("0.1")
    assert f"`{API_VERSION}`" in str(error.value.hint)


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of snapshots that a test can change."""
    folder = tmp_path / "versions"
    folder.mkdir()
    monkeypatch.setattr(snapshot.resources, "files", lambda package: tmp_path)
    (folder / "README.md").write_text("not a snapshot", encoding="utf-8")
    return folder


def write(folder: Path, contract: dict, version: str, *, frozen: bool) -> None:
    text = json.dumps({**contract, "api": version, "frozen": frozen})
    (folder / f"{version}.json").write_text(text, encoding="utf-8")


def other_contract() -> dict:
    """Return a contract that has one more hook than the code."""
    return {
        **CURRENT,
        "hooks": {**CURRENT["hooks"], "lmcore_old": CURRENT["hooks"]["lmcore_probe"]},
    }


def test_versions_are_sorted_as_versions(shipped):
    """1.10 comes after 1.9, and other files do not count."""
    for version in ("1.10", "1.9", "1.0"):
        write(shipped, CURRENT, version, frozen=True)
    assert snapshot.contract_versions() == ["1.0", "1.9", "1.10"]


def test_a_first_snapshot_is_a_draft(shipped):
    """For a version without a snapshot the code's is written, open to change."""
    assert json.loads(snapshot.renewed_contract()) == {"frozen": False, **CURRENT}


def test_a_draft_is_renewed(shipped):
    """Before its release, a version takes the contract that the code has."""
    write(shipped, other_contract(), API_VERSION, frozen=False)
    assert json.loads(snapshot.renewed_contract()) == {"frozen": False, **CURRENT}


def test_a_released_snapshot_is_not_overwritten(shipped):
    """After its release, a changed contract needs another version; the message says which."""
    write(shipped, other_contract(), API_VERSION, frozen=True)
    with pytest.raises(PluginError) as error:
        snapshot.renewed_contract()
    assert "breaking: hook `lmcore_old` is gone" in str(error.value.why)
    assert f"to {Version(API_VERSION).major + 1}.0" in str(error.value.why)


def test_the_wording_of_a_released_snapshot_can_change(shipped):
    """A better sentence in a docstring needs no new version, and it stays released."""
    hooks = {**CURRENT["hooks"]}
    hooks["lmcore_probe"] = {**hooks["lmcore_probe"], "when": "once upon a time."}
    write(shipped, {**CURRENT, "hooks": hooks}, API_VERSION, frozen=True)
    assert json.loads(snapshot.renewed_contract()) == {"frozen": True, **CURRENT}
    (change,) = compare(snapshot.load_contract(API_VERSION), CURRENT)
    assert change.kind is ChangeKind.WORDING

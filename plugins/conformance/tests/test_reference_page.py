"""The reference page of the suite: its checks, and recorded runs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("lmcore_conformance", reason="lmcore-conformance is not installed")

from lmcore_conformance import registry
from lmcore_conformance.registry import LEVELS, all_checks
from lmcore_conformance.requirements import REQUIREMENTS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    path = ROOT / "docs/generate_conformance.py"
    spec = importlib.util.spec_from_file_location("docs_generate_conformance", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_is_up_to_date(generator: ModuleType) -> None:
    """The page is what the registry and the recorded reports make now."""
    made = generator.page()
    found = generator.PAGE.read_text(encoding="utf-8")
    assert made == found, "run `python docs/generate_conformance.py`"


def test_order_does_not_depend_on_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks of the layouts that were imported before are in their place."""
    wanted = [check.id for check in all_checks()]
    known = registry._REGISTERED
    first = {name: check for name, check in known.items() if name.startswith("parallel.")}
    monkeypatch.setattr(registry, "_REGISTERED", first | known)
    assert [check.id for check in all_checks()] == wanted


def test_every_check_says_what_and_why() -> None:
    """Each has a level, a summary, a reason, a limit, and requirements that exist."""
    checks = all_checks()
    assert len(checks) == len({check.id for check in checks}) > 150
    for check in checks:
        assert check.level in LEVELS
        for text in (check.title, check.reason):
            assert text.endswith("."), check.id
            assert len(text.split()) > 3, check.id
        assert 0 < check.seconds <= 300
        assert set(check.requires) <= set(REQUIREMENTS), check.id
    assert {check.level for check in checks} == set(LEVELS)


def test_every_requirement_has_a_check() -> None:
    """Each requirement that an author can close is used by a check."""
    required = {name for check in all_checks() for name in check.requires}
    assert required == set(REQUIREMENTS)


def test_every_op_of_the_core_is_checked() -> None:
    """An op that joins the core joins the suite."""
    from lmcore.contract import OP_SPECS

    ids = {check.id for check in all_checks()}
    for spec in OP_SPECS:
        own = {name for name in ids if name.startswith(f"ops.{spec.name}.")}
        assert own, spec.name
        if spec.has_backward:
            assert {f"ops.{spec.name}.forward", f"ops.{spec.name}.backward"} <= own

"""Checks of a plugin's kernels: known ops, ids, targets, signatures, results of `supports`.

Part of `lmcore plugin check`.  A kernel's results are not checked here, but by tests against
the references.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from lmcore.base.errors import PluginError, nearest
from lmcore.contract.op.context import TRAITS
from lmcore.contract.op.records import (
    REFERENCE,
    OpContext,
    OpImpl,
    Reject,
    impl_problem,
    load_target,
    missing_packages,
)
from lmcore.contract.op.signature import readable_signature, signature_problem
from lmcore.contract.probe import Check, CheckStatus
from lmcore.plugin.record import located
from lmcore_conformance.contract.diff import new_path
from lmcore_conformance.plugin_check.records import field_problems
from lmcore_conformance.plugin_check.source import private_name

__all__ = ["check_kernels", "contexts", "reference_of"]

Described = Mapping[str, Any]

_DTYPES = ("float32", "bfloat16", "float16", "float64")
_VALUES: Mapping[str, tuple[Any, ...]] = {
    "head_dim": (64, 80, 128, 256),
    "num_attention_heads": (16,),
    "num_query_groups": (16, 2),
    "seq_length": (1024, 1),
    "causal": (True, False),
    "masked": (False, True),
    "dropout": (0.0, 0.1),
    "hidden_size": (1024, 1000),
    "ffn_hidden_size": (4096,),
    "in_features": (1024, 1000),
    "out_features": (1024, 1000),
    "bias": (True, False),
    "rotary_dim": (64,),
    "vocab_size": (50304, 50257),
    "compile": (False, True),
    "score_bias": (False, True),
    "score_bias_gradient": (False, True),
}
"""Values of each attribute in the calls of `supports`: the usual value first."""


def reference_of(op: Described) -> Callable[..., Any]:
    """Return a function with the signature of an op in a snapshot; it does nothing."""

    def reference() -> None:
        raise AssertionError

    parameters = [
        inspect.Parameter(
            parameter["name"],
            getattr(inspect.Parameter, parameter["kind"].upper()),
            default=inspect.Parameter.empty
            if parameter["default"] is None
            else ast.literal_eval(parameter["default"]),
        )
        for parameter in op["parameters"]
    ]
    reference.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return reference


def contexts(device_type: str, attributes: Sequence[str]) -> Iterator[OpContext]:
    """Yield cases of an op: the usual one, each attribute varied alone, and one without any."""
    known = [name for name in attributes if name in _VALUES]
    usual = {name: _VALUES[name][0] for name in known}
    varied = [usual | {name: value} for name in known for value in _VALUES[name][1:]]
    for dtype in _DTYPES:
        for values in (usual, *varied, {}):
            yield OpContext(device_type, dtype, values)


def check_kernels(
    kernels: Sequence[OpImpl], device_type: str, contract: Described
) -> Iterator[Check]:
    """Yield a check for each kernel that can be bound, and for each reason why one cannot.

    Args:
        kernels: result of `lmcore_op_impls`.
        device_type: The device that they were offered for.
        contract: The version of the contract that they are held against.
    """
    seen: set[tuple[str, str]] = set()
    for impl in kernels:
        name = f"{impl.op}={impl.id}"
        problem = impl_problem(impl)
        if problem:
            yield Check(name, CheckStatus.FAILED, problem)
            continue
        problems = list(_record_problems(impl, contract))
        if (impl.op, impl.id) in seen:
            problems.append(f"op `{impl.op}` has another kernel with the id `{impl.id}`")
        seen.add((impl.op, impl.id))
        if problems:
            yield from (Check(name, CheckStatus.FAILED, problem) for problem in problems)
        else:
            yield from _usable(impl, name, contract["ops"][impl.op], device_type)
    if not kernels:
        yield Check("lmcore_op_impls", CheckStatus.OK, "it offers none")


def _record_problems(impl: OpImpl, contract: Described) -> Iterator[str]:
    yield from field_problems(impl, contract)
    if impl.op not in contract["ops"]:
        close = nearest(impl.op, contract["ops"])
        meant = f"; did you mean `{close}`?" if close else ""
        yield f"version {contract['api']} of the contract has no op `{impl.op}`{meant}"
    target = new_path(impl.load.replace(":", "."), contract.get("moved", {}))
    if target.startswith("lmcore.") and private_name(target, contract["modules"]):
        yield f"its target `{impl.load}` is private: any release of lmcore may change it"
    if impl.id == REFERENCE:
        yield f"the id `{REFERENCE}` is the core's"


def _usable(impl: OpImpl, name: str, op: Described, device_type: str) -> Iterator[Check]:
    """Yield whether a kernel with a right record and its `supports` can be called."""
    answers, problems, warnings = _answers(impl, device_type, op["attributes"])
    lacking = missing_packages(impl)
    if lacking:
        detail = f"not loaded: it needs `{'`, `'.join(lacking)}`, not installed"
        yield Check(name, CheckStatus.SKIPPED, detail)
    else:
        try:
            function = load_target(impl.load)
        except PluginError as error:
            if None in answers or not answers:  # otherwise it is never bound, so never loaded
                problems.append(error.what_and_why)
        else:
            problem = signature_problem(function, reference_of(op))
            if problem:
                problems.append(f"`{impl.load}` cannot be called like the op: {problem}")
            elif readable_signature(function) is None:
                detail = f"`{impl.load}` is compiled and has no readable signature"
                yield Check(name, CheckStatus.SKIPPED, detail)
    yield from (Check(name, CheckStatus.FAILED, problem) for problem in problems)
    warnings += _trait_warnings(impl)
    yield from (Check(name, CheckStatus.WARNING, *warning) for warning in warnings)
    if not problems and not lacking:
        yield from _summary(impl, name, answers)


def _summary(impl: OpImpl, name: str, answers: Sequence[Reject | None]) -> Iterator[Check]:
    supported = sum(answer is None for answer in answers)
    detail = f"`{impl.load}` does {supported} of {len(answers)} cases"
    reasons = list(dict.fromkeys(answer.reason for answer in answers if answer is not None))
    if supported == 0:
        detail += f": {'; '.join(reasons[:3])}"
        yield Check(name, CheckStatus.WARNING, detail, "a kernel that does none is never bound")
    else:
        yield Check(name, CheckStatus.OK, detail)


def _answers(
    impl: OpImpl, device_type: str, attributes: Sequence[str]
) -> tuple[list[Reject | None], list[str], list[tuple[str, str | None]]]:
    """Return the answer of `supports` to each case, its errors, and its oddities."""
    answers: list[Reject | None] = []
    wrong: dict[str, list[str]] = {}
    odd: list[tuple[str, str | None]] = []
    for case in contexts(device_type, attributes):
        try:
            answer: object = None if impl.supports is None else impl.supports(case)
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            problem = f"`supports` raised {located(error)}"
            if case.attributes or problem in wrong:
                wrong.setdefault(problem, []).append(_case(case))
            elif not odd:
                hint = "read an attribute by `.get`"
                odd.append((f"{problem} for a case without attributes", hint))
            continue
        if answer is None or (isinstance(answer, Reject) and answer.reason):
            answers.append(answer)
        else:
            problem = (
                f"`supports` returned {answer!r:.80}, neither None nor a `Reject` with a reason"
            )
            wrong.setdefault(problem, []).append(_case(case))
    return answers, [_with_cases(problem, cases) for problem, cases in wrong.items()], odd


def _with_cases(problem: str, cases: Sequence[str]) -> str:
    more = f", and for {len(cases) - 1} other cases" if len(cases) > 1 else ""
    return f"{problem}, for {cases[0]}{more}"


def _case(case: OpContext) -> str:
    given = ", ".join(f"{name}={value}" for name, value in case.attributes.items())
    return f"{case.dtype}, {given or 'no attributes'}"


def _trait_warnings(impl: OpImpl) -> list[tuple[str, str | None]]:
    """Return the traits that look like one that a user may insist on, and are not."""
    found = [(trait, nearest(trait, TRAITS)) for trait in sorted(impl.traits - set(TRAITS))]
    return [
        (f"trait `{trait}` is not one of lmcore's", f"did you mean `{close}`?")
        for trait, close in found
        if close
    ]

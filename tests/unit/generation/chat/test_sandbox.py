"""Abilities of chat templates, and their limits."""

from __future__ import annotations

import io
import resource
import signal
from typing import Any

import pytest
from jinja2 import TemplateError
from jinja2.exceptions import SecurityError, UndefinedError

from lmcore.generation.chat.json_messages import read_message, write_message
from lmcore.generation.chat.sandbox import TemplateRefusalError, render, serve


def text(template: str, **variables: Any) -> str:
    """Return the text of a template."""
    return render(template, variables, longest=1000)


@pytest.mark.parametrize(
    "template,expected",
    [
        ("a\n  {% if true %}\nb\n{% endif %}\nc\n", "a\nb\nc"),  # blocks leave no line
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% for i in [1, 2] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "2"),
        ("{% generation %}a{{ x }}{% endgeneration %}b", "a<b>b"),
        ("{{ {'b': '<ü>', 'a': [1]} | tojson }}", '{"b": "<ü>", "a": [1]}'),
        ("{{ {'b': '<ü>', 'a': 1} | tojson(true, sort_keys=true) }}", '{"a": 1, "b": "<\\u00fc>"}'),
        ("{{ [1] | tojson(indent=1) }}", "[\n 1\n]"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{% set n = namespace(self=2) %}{% set n.b = 3 %}{{ n.self }}{{ n.b }}", "23"),
        ("{{ missing }}|{{ missing is defined }}", "|False"),
        ("{{ 'a,b'.split(',')[-1].strip() }}", "b"),
    ],
)  # fmt: skip
def test_language(template: str, expected: str) -> None:
    """Tags, filters, functions and line breaks are as in templates for transformers."""
    assert text(template, x="<b>") == expected


@pytest.mark.parametrize(
    "template,error",
    [
        ("{{ ''.__class__.__mro__ }}", SecurityError),
        ("{{ x.append(1) }}", SecurityError),
        ("{{ strftime_now.__globals__.x }}", SecurityError),
        ("{{ namespace(_a=1) }}", SecurityError),
        ("{% set n = namespace() %}{% set n._a = 1 %}", SecurityError),
        ("{{ missing.a }}", UndefinedError),
        ("{{ range(1000000) | length }}", OverflowError),
        ("{% for i in range(1001) %}a{% endfor %}", TemplateError),
        ("{{ raise_exception('no: ' + x[0] | string) }}", TemplateRefusalError),
    ],
)
def test_refusals(template: str, error: type[Exception]) -> None:
    """Python's internals, changes of the caller's values and long texts are refused."""
    with pytest.raises(error):
        text(template, x=[1])


def test_answers() -> None:
    """Each request gets a text, or the kind of its problem."""
    requests = io.BytesIO()
    for template in ("{{ a }}", "{{ raise_exception('no') }}", "\n{% if %}", "{{ a.b.c }}"):
        write_message(
            requests,
            {"template": template, "variables": {"a": "ü"}, "longest": 9, "seconds": 1000},
        )
    requests.seek(0)
    answers = io.BytesIO()
    memory, _ = resource.getrlimit(resource.RLIMIT_AS)
    assert serve(requests, answers, memory) == 0
    assert signal.getitimer(signal.ITIMER_PROF) == (0, 0)
    answers.seek(0)
    assert [read_message(answers) for _ in range(6)] == [
        {"ready": True},
        {"text": "ü"},
        {"problem": "refusal", "message": "no"},
        {
            "problem": "syntax",
            "message": "line 2: Expected an expression, got 'end of statement block'",
        },
        {"problem": "error", "message": "UndefinedError: 'str object' has no attribute 'b'"},
        None,
    ]

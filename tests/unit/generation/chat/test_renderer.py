"""The process that renders chat templates, and its limits."""

from __future__ import annotations

import threading

import pytest

from lmcore.base.errors import ConfigError
from lmcore.generation.chat import template as renderer_module
from lmcore.generation.chat.template import ChatRenderer

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{{ ('a' * 2000000000) | length }}"
DEEP = "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}"


@pytest.fixture(scope="module")
def renderer():
    """One process for all tests."""
    made = ChatRenderer(seconds=0.5)
    yield made
    made.close()


def test_texts(renderer: ChatRenderer) -> None:
    """Threads get each the text of their variables, from one process."""
    found: dict[int, str] = {}

    def ask(number: int) -> None:
        found[number] = renderer.render("{{ x }}ü", {"x": number}, name="here")

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == {number: f"{number}ü" for number in range(8)}


@pytest.mark.parametrize(
    "template,what,why",
    [
        ("{{ raise_exception('roles') }}", "refuses the messages", "roles"),
        ("{{ 1 / 0 }}", "fails", "ZeroDivisionError: division by zero"),
        ("{{ (", "is no valid template", "line 1: unexpected 'end of template'"),
        (ENDLESS, "does not end", "it computed for 0.5 s"),
        (HUGE, "needs too much memory", "it may use 1024 MiB"),
        (DEEP, "fails", "RecursionError: maximum recursion depth exceeded"),
        ("x" * (2**20 + 1), "is too large", "it has 1,048,577 characters; 1,048,576 are allowed"),
    ],
    ids=["refusal", "error", "syntax", "time", "memory", "depth", "size"],
)
def test_problems(renderer: ChatRenderer, template: str, what: str, why: str) -> None:
    """A wrong template is an error with its reason, and the next one is rendered."""
    with pytest.raises(ConfigError) as caught:
        renderer.render(template, {}, name="here")
    assert caught.value.what == f"the chat template of `here` {what}"
    assert (caught.value.why or "").startswith(why)
    assert renderer.render("a", {}, name="here") == "a"


def test_end_of_the_process(renderer: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that died is an error that says how, and is replaced."""
    assert renderer.render("a", {}, name="here") == "a"
    process = renderer._process
    assert process is not None
    process.kill()
    process.wait()
    assert renderer.render("a", {}, name="here") == "a"

    def die(_sink: object, _value: object) -> None:
        assert renderer._process is not None
        renderer._process.kill()

    with monkeypatch.context() as patch:
        patch.setattr(renderer_module, "write_message", die)
        with pytest.raises(ConfigError, match="failed: its process was killed by SIGKILL"):
            renderer.render("a", {}, name="here")
    assert renderer.render("a", {}, name="here") == "a"

    def interrupted(_source: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(renderer_module, "read_message", interrupted)
        with pytest.raises(KeyboardInterrupt):
            renderer.render("old answer", {}, name="here")
    assert renderer.render("a", {}, name="here") == "a"

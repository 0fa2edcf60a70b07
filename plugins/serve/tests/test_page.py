"""The page in a browser: what a person does, sees and reads, without a mouse too."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
from suite.selection import peer

from lmcore.generation.chat.template import ChatTemplate
from lmcore.generation.generate import recompute
from lmcore.generation.request import Request
from lmcore.generation.sampling.options import SamplingOptions
from lmcore.inference.load import LoadedModel
from lmcore.inference.text_model import Execution
from lmcore_serve.served_model import ServedModel

from .conftest import Server, new_loaded, running_server

pytestmark = pytest.mark.peer

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
FACTS = {
    "family": "GPT",
    "parameters": 1_234_567,
    "layers": 1,
    "hidden_size": 24,
    "positions": 96,
    "vocabulary": 257,
    "tokenizer": "ByteTokenizer",
    "checkpoint": "iter_0000001",
    "device": "a test",
    "precision": "fp32",
    "chat": False,
}


class Pause(nullcontext[None]):
    """Context of a pass of the model that takes 30 ms longer."""

    def __enter__(self) -> None:
        time.sleep(0.03)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser without a window."""
    peer("playwright")
    from playwright.sync_api import sync_playwright

    path = shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium is installed: `apt-get install chromium`")
    with sync_playwright() as playwright:
        # The sandbox of the browser refuses to run as root.
        options = ["--no-sandbox"] if os.geteuid() == 0 else []
        made = playwright.chromium.launch(executable_path=path, args=options)
        yield made
        made.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Return a function that opens the page of a server.

    The browser's console has to stay empty but for replies that are errors, which a test expects.
    """
    contexts, messages = [], []

    def opened(server: Server, **options: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}} | options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("console", lambda message: messages.append(message.text))
        page.on("pageerror", lambda error: messages.append(str(error)))
        page.goto(f"http://127.0.0.1:{server.port}/")
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [one for one in messages if not one.startswith("Failed to load resource")] == []


@pytest.fixture(scope="module")
def expect() -> Any:
    """Playwright's assertions, which wait for a state of the page."""
    peer("playwright")
    from playwright.sync_api import expect

    expect.set_options(timeout=10_000)
    return expect


def with_facts(model: ServedModel) -> ServedModel:
    """Return the model with `lmcore serve`'s description."""
    return dataclasses.replace(model, facts=FACTS | {"chat": model.template is not None})


@pytest.fixture(scope="module")
def shown(loaded: LoadedModel) -> Iterator[Server]:
    """A server of a model that takes its time."""
    slow = dataclasses.replace(loaded, execution=Execution(Pause))
    with running_server(slow, change=with_facts) as made:
        yield made


@pytest.fixture(scope="module")
def chatting(loaded: LoadedModel) -> Iterator[Server]:
    """A server of a model that chats."""
    template = ChatTemplate(loaded.tokenizer, {"default": TEMPLATE}, "test")

    def change(model: ServedModel) -> ServedModel:
        return with_facts(dataclasses.replace(model, template=template))

    with running_server(loaded, change=change) as made:
        yield made
    template.close()


def greedy(loaded: LoadedModel, prompt: str, length: int) -> str:
    """Return the text that recomputation gives."""
    sampling = SamplingOptions(greedy=True)
    request = Request(list(prompt.encode()), length, sampling, 0, frozenset({256}))
    (found,) = recompute(loaded.model, [request], 257)
    return loaded.tokenizer.decode(found.tokens)


def ask(page: Any, text: str, tokens: int) -> None:
    """Enter a text, and have it answered greedily."""
    page.fill("#max_tokens", str(tokens))
    page.fill("#temperature", "0")
    page.fill("#prompt", text)
    page.press("#prompt", "Control+Enter")


def test_an_answer_grows(
    open_page: Callable[..., Any], expect: Any, shown: Server, loaded: LoadedModel
) -> None:
    """The facts of the model are there; a text appears token by token, with its numbers."""
    page = open_page(shown)
    expect(page).to_have_title("tiny - lmcore")
    expect(page.locator("#facts")).to_contain_text("GPT, 1.23M parameters")
    expect(page.locator("#facts")).to_contain_text("1 layer, 96 positions")
    # As many as fit beside a prompt of the same length.
    assert page.input_value("#max_tokens") == "48"
    ask(page, "Hello", 20)
    expect(page.locator(".token").nth(2)).to_be_visible()
    assert page.is_enabled("#stop")
    assert page.is_disabled("#send")
    assert page.locator(".token").count() < 20
    expect(page.locator(".status")).to_contain_text("Prompt: 5 tokens. Generated: 20 tokens")
    expect(page.locator(".status")).to_contain_text("Ended at the token limit")
    assert page.locator(".text").text_content() == "Hello" + greedy(loaded, "Hello", 20)
    assert page.is_disabled("#stop")


@pytest.mark.parametrize("key", [False, True])
def test_stop(open_page: Callable[..., Any], expect: Any, shown: Server, key: bool) -> None:
    """The button and Escape end the text, on the server too."""
    page = open_page(shown)
    service = shown.models["tiny"].service
    before = service.statistics.ended.get("cancelled", 0)
    ask(page, "Hello", 90)
    expect(page.locator(".token").nth(2)).to_be_visible()
    if key:
        page.keyboard.press("Escape")
    else:
        page.click("#stop")
    expect(page.locator(".status")).to_contain_text("Stopped after")
    expect(page.locator("#send")).to_be_enabled()
    assert 3 <= page.locator(".token").count() < 80
    end = time.monotonic() + 10
    while service.statistics.ended.get("cancelled", 0) == before:
        assert time.monotonic() < end
        time.sleep(0.01)


def test_probabilities(
    open_page: Callable[..., Any], expect: Any, chatting: Server, loaded: LoadedModel
) -> None:
    """A token shows what else was probable to the mouse, and to Tab and the arrow keys."""
    page = open_page(chatting)
    ask(page, "Hello", 8)
    expect(page.locator(".status")).to_contain_text("Prompt: 5 tokens. Generated: 8 tokens")
    tip, tokens = page.locator("#tip"), page.locator(".token")
    expect(tip).to_be_hidden()
    tokens.nth(1).hover()
    expect(tip).to_be_visible()
    text = greedy(loaded, "Hello", 8)
    expect(tip.locator(".chosen td").first).to_have_text(text[1])
    shares = [float(one.rstrip(" %")) for one in tip.locator("td:last-child").all_text_contents()]
    assert len(shares) == 5
    assert shares == sorted(shares, reverse=True)
    assert 0 < sum(shares) <= 100.5
    page.mouse.move(1, 1)
    expect(tip).to_be_hidden()
    page.locator("#stop_text").focus()
    page.keyboard.press("Tab")
    expect(tokens.first).to_be_focused()
    expect(tip.locator(".chosen td").first).to_have_text(text[0])
    for _ in range(2):
        page.keyboard.press("ArrowRight")
    expect(tokens.nth(2)).to_be_focused()
    expect(tokens.nth(2)).to_have_attribute("aria-describedby", "tip")
    expect(tip.locator(".chosen td").first).to_have_text(text[2])
    page.keyboard.press("End")
    expect(tokens.last).to_be_focused()
    page.keyboard.press("Escape")
    expect(tip).to_be_hidden()


def test_tab_order(open_page: Callable[..., Any], expect: Any, shown: Server) -> None:
    """The prompt has the focus; the keys go through buttons and settings in their order."""
    page = open_page(shown)
    expect(page.locator("#facts")).to_contain_text("GPT")
    expect(page.locator("#prompt")).to_be_focused()
    found = []
    for _ in range(11):
        page.keyboard.press("Tab")
        found.append(page.evaluate("document.activeElement.id || document.activeElement.tagName"))
    assert found == [
        *("send", "clear", "SUMMARY", "max_tokens", "temperature", "top_p", "top_k", "min_p"),
        *("repetition_penalty", "seed", "stop_text"),
    ]


def test_a_conversation(
    open_page: Callable[..., Any], expect: Any, chatting: Server, loaded: LoadedModel
) -> None:
    """The model sees the messages before; one that was not answered is given back."""
    page = open_page(chatting)
    page.get_by_text("Chat", exact=True).click()
    ask(page, "Hi", 6)
    first = greedy(loaded, "u:Hi;a:", 6)
    texts = page.locator(".text")
    expect(texts).to_have_text(["Hi", first])
    expect(page.locator("#send")).to_be_enabled()
    expect(page.locator("#prompt")).to_have_value("")
    page.fill("#system", "Be brief")
    ask(page, "So", 5)
    prompt = f"s:Be brief;u:Hi;a:{first};u:So;a:"
    expect(texts).to_have_text(["Hi", first, "So", greedy(loaded, prompt, 5)])
    expect(page.locator("#send")).to_be_enabled()
    ask(page, "x" * 90, 5)
    expect(page.locator(".status.error")).to_contain_text("the model has 96 positions")
    expect(page.locator(".status.error")).to_contain_text("clear the conversation")
    expect(page.locator("#prompt")).to_have_value("x" * 90)
    expect(texts).to_have_count(4)
    page.click("#clear")
    expect(texts).to_have_count(0)
    page.fill("#system", "")
    ask(page, "Hi", 6)
    expect(texts).to_have_text(["Hi", first])


def test_two_models(open_page: Callable[..., Any], expect: Any, loaded: LoadedModel) -> None:
    """Their answers are side by side, each under the name of its model."""
    other = new_loaded(8)
    with running_server(loaded, others={"other": other}, change=with_facts) as server:
        page = open_page(server)
        ask(page, "Hello", 12)
        panels = page.locator(".answer")
        expect(panels.locator("h2")).to_have_text(["tiny", "other"])
        for at, model in enumerate((loaded, other)):
            expect(panels.nth(at).locator(".status")).to_contain_text(
                "Prompt: 5 tokens. Generated: 12 tokens"
            )
            text = panels.nth(at).locator(".text").text_content()
            assert text == "Hello" + greedy(model, "Hello", 12)
        boxes = [panels.nth(at).bounding_box() for at in range(2)]
        assert boxes[0]["y"] == boxes[1]["y"]
        assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]


def test_a_key(open_page: Callable[..., Any], expect: Any, loaded: LoadedModel) -> None:
    """The page asks for it, reports a wrong key, and continues with a right one."""
    with running_server(loaded, keys=["right"], change=with_facts) as server:
        page = open_page(server)
        expect(page.locator("#facts")).to_contain_text("needs an API key")
        expect(page.locator("#key")).to_be_focused()
        page.keyboard.type("wrong")
        page.keyboard.press("Enter")
        expect(page.locator("#facts")).to_contain_text("not known")
        page.fill("#key", "right")
        page.keyboard.press("Enter")
        expect(page.locator("#facts")).to_contain_text("GPT")
        expect(page.locator("#prompt")).to_be_focused()
        ask(page, "Hello", 4)
        expect(page.locator(".status")).to_contain_text("Prompt: 5 tokens. Generated: 4 tokens")


def test_errors(open_page: Callable[..., Any], expect: Any, loaded: LoadedModel) -> None:
    """The server's error messages are shown; a server that has ended is reported."""
    with running_server(loaded, change=with_facts) as server:
        page = open_page(server)
        ask(page, "Hello", 96)
        expect(page.locator(".status.error")).to_contain_text("leave room for 92")
        page.fill("#max_tokens", "97")
        page.locator("#settings summary").click()
        expect(page.locator("#max_tokens")).to_be_hidden()
        page.press("#prompt", "Control+Enter")
        # The field is shown again, with what is wrong below it.
        expect(page.locator("#max_tokens")).to_be_visible()
        expect(page.locator(".wrong")).to_have_text("At most 96")
        ask(page, "Hello", 4)
        expect(page.locator(".status")).to_contain_text("Prompt: 5 tokens. Generated: 4 tokens")
        expect(page.locator(".status.error")).to_have_count(0)
    ask(page, "Hello", 4)
    expect(page.locator(".status.error")).to_contain_text("does not answer")
    expect(page.locator("#send")).to_be_enabled()


WRONG_VALUES = {
    "max_tokens": ("97", "At most 96"),
    "temperature": ("", "Needs a number"),
    "top_p": ("2", "At most 1"),
    "top_k": ("1.5", "A whole number"),
    "repetition_penalty": ("0", "At least 0.01"),
    "seed": ("-1", "At least 0"),
}


def test_wrong_values(open_page: Callable[..., Any], expect: Any, shown: Server) -> None:
    """Each wrong value is described below its field until it is right; nothing is sent."""
    page = open_page(shown)
    expect(page.locator("#facts")).to_contain_text("GPT")
    for name, (value, _) in WRONG_VALUES.items():
        page.fill(f"#{name}", value)
    page.press("#prompt", "Control+Enter")
    for name, (_, words) in WRONG_VALUES.items():
        expect(page.locator(f"#{name}-wrong")).to_have_text(words)
        expect(page.locator(f"#{name}")).to_have_attribute("aria-describedby", f"{name}-wrong")
    expect(page.locator("#max_tokens")).to_be_focused()
    assert page.locator(".token").count() == 0
    page.fill("#top_p", "1")
    expect(page.locator("#top_p-wrong")).to_have_count(0)
    expect(page.locator(".wrong")).to_have_count(5)


def test_words_of_a_chat(open_page: Callable[..., Any], expect: Any, chatting: Server) -> None:
    """A message is sent and a prompt continued; a key is asked for only where it is needed."""
    page = open_page(chatting)
    expect(page.locator("#send")).to_contain_text("Generate")
    page.get_by_text("Chat", exact=True).click()
    expect(page.locator("#send")).to_contain_text("Send")
    expect(page.locator("#key")).to_be_hidden()


def test_facts_on_a_phone(open_page: Callable[..., Any], expect: Any, shown: Server) -> None:
    """The facts of a model take one line on a phone, and open at a tap."""
    page = open_page(shown, viewport={"width": 390, "height": 800}, has_touch=True)
    facts = page.locator("#facts")
    expect(facts).to_contain_text("GPT")
    assert facts.bounding_box()["height"] < 30
    facts.locator("summary").tap()
    assert facts.bounding_box()["height"] > 30


# Three tokens of a stream: the first choice, one of a tenth of its probability, a line break.
EVENTS = [
    ("a", {"a": -6.0, " ": -6.5}),
    ("b", {"a": -6.0, "b": -6.0 - 2.302585, "\n": -9.0, "\t": -9.5}),
    ("\n", {"\n": -6.0, "c": -6.5}),
]


def test_tint_and_signs(open_page: Callable[..., Any], expect: Any, shown: Server) -> None:
    """The tint compares with the first choice; spaces and line breaks are shown as signs.

    Expected by hand: no tint for the first choice of a weak model, half of it at a tenth.
    """
    page = open_page(shown)
    expect(page.locator("#facts")).to_contain_text("GPT")
    lines = [
        {
            "text": text,
            "logprobs": {"tokens": [text], "token_logprobs": [top[text]], "top_logprobs": [top]},
        }
        for text, top in EVENTS
    ]
    body = (
        "".join(f"data: {json.dumps({'choices': [one]})}\n\n" for one in lines) + "data: [DONE]\n\n"
    )
    page.route("**/v1/completions", lambda route: route.fulfill(body=body))
    ask(page, "x", 3)
    tokens = page.locator(".token")
    expect(tokens).to_have_count(3)
    strengths = [
        float(tokens.nth(at).evaluate("one => one.style.getPropertyValue('--strength')"))
        for at in range(3)
    ]
    assert strengths == [0, 0.5, 0]
    expect(page.locator(".legend")).to_be_visible()
    tokens.nth(1).hover()
    cells = page.locator("#tip td:first-child")
    expect(cells).to_have_text(["a", "b", "\u21b5", "\u21e5"])
    tokens.nth(0).click()
    expect(cells).to_have_text(["a", "\u2423"])
    # One outline at a time: a hovered token, and the focused one where none is hovered.
    tokens.nth(1).hover()
    styles = [tokens.nth(at).evaluate("one => getComputedStyle(one).outlineStyle") for at in (0, 1)]
    assert styles == ["none", "solid"]


CONTRAST = """() => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgb = (layers) => {
    canvas.clearRect(0, 0, 1, 1);
    for (const one of layers) { canvas.fillStyle = one; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (color) => color.map((one) => one / 255)
    .map((one) => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4)
    .reduce((sum, one, at) => sum + one * [0.2126, 0.7152, 0.0722][at], 0);
  const found = {};
  const names = ["h1", ".facts", "label", "#prompt", "#send", "#clear", ".modes span", "summary",
    ".text", ".text .prompt", ".token", ".status", ".hint", ".chosen td", "#tip td",
    "kbd"];
  for (const name of names) for (const one of document.querySelectorAll(name)) {
    const layers = [];
    for (let at = one; at; at = at.parentElement) {
      layers.unshift(getComputedStyle(at).backgroundColor);
    }
    const [a, b] = [light(rgb(layers)), light(rgb([...layers, getComputedStyle(one).color]))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    found[name] = Math.min(found[name] ?? 99, ratio);
  }
  return found;
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390, 320])
def test_it_can_be_read(
    open_page: Callable[..., Any], expect: Any, chatting: Server, scheme: str, width: int
) -> None:
    """No text is paler than WCAG's AA allows, and nothing is wider than the window."""
    page = open_page(
        chatting, color_scheme=scheme, viewport={"width": width, "height": 800}, has_touch=True
    )
    expect(page.locator("#facts")).to_contain_text("GPT")
    if width < 800:
        expect(page.locator("#max_tokens")).to_be_hidden()
        page.locator("#settings summary").click()
    ask(page, "W" * 40, 40)
    expect(page.locator(".status")).to_contain_text("Prompt: 40 tokens. Generated: 40 tokens")
    page.locator(".token").nth(20).tap()
    expect(page.locator("#tip")).to_be_visible()
    found = page.evaluate(CONTRAST)
    assert len(found) == 16
    assert {name: ratio for name, ratio in found.items() if ratio < 4.5} == {}
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    box = page.locator("#tip").bounding_box()
    assert box["x"] >= 0
    assert box["x"] + box["width"] <= width
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    dark = sum(map(int, re.findall(r"\d+", background)[:3])) < 3 * 128
    assert dark == (scheme == "dark")

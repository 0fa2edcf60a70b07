"""Step `url`: rules, malformed and repeated addresses."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcore.base.errors import DataError
from lmcore_data_tools.clean.document import Document, Drop
from lmcore_data_tools.clean.filter.url import UrlStep, normalized, read_rules

OURS = UrlStep(read_rules(["default"]))


@pytest.mark.parametrize(
    "url, verdict",
    [
        ("https://example.org/story", None),
        ("https://example.org/a.jpg/story", None),
        ("https://example.org/jpg", None),
        ("http://192.0.2.7:8080/x", None),
        ("http://[2001:db8::1]/x", None),
        ("http://münchen.example/straße", None),
        ("https://www.youtube.com/watch?v=1", Drop("host", "youtube")),
        ("https://video.google.co.uk/", None),
        ("https://m.facebook.co.uk/x", Drop("host", "facebook")),
        ("https://t.co/abc", Drop("host", "t.co")),
        ("https://not-t.co/abc", None),
        ("https://example.org/photo.JPG?size=1", Drop("ending", ".jpg")),
        ("https://example.org/all.tar.gz", Drop("ending", ".gz")),
        ("https://example.org/a.jpg.html", None),
        ("ftp://example.org/x", Drop("malformed", "ftp://example.org/x")),
        ("example.org/x", Drop("malformed", "example.org/x")),
        ("http://localhost/x", Drop("malformed", "http://localhost/x")),
        ("http://exam ple.org/", Drop("malformed", "http://exam ple.org/")),
        ("http://example..org/", Drop("malformed", "http://example..org/")),
        ("http://-example.org/", Drop("malformed", "http://-example.org/")),
        ("http://example.org:99999/", Drop("malformed", "http://example.org:99999/")),
        ("http://[::1/", Drop("malformed", "http://[::1/")),
        ("", Drop("malformed", "")),
    ],
)
def test_verdicts(make_document: Callable[..., Document], url: str, verdict: Drop | None) -> None:
    """Addresses of sites and files without prose go, and what is no web address."""
    assert OURS.judge(make_document(url=url)) == verdict


def test_own_rules(make_document: Callable[..., Document], tmp_path: Path) -> None:
    """A list of one's own takes the place of ours: hosts with all below, names, endings."""
    path = tmp_path / "rules.txt"
    path.write_text("# mine\nexample.org\nShop  # every shop\n.htm\n\n", encoding="utf-8")
    step = pickle.loads(pickle.dumps(UrlStep(read_rules([str(path)]))))

    def reason(url: str) -> str:
        verdict = step.judge(make_document(url=url))
        return verdict.reason if isinstance(verdict, Drop) else "kept"

    assert reason("http://www.example.org/") == "host"
    assert reason("http://myexample.org/") == "kept"
    assert reason("http://shop.example.com/") == "host"
    assert reason("http://workshop.com/") == "kept"
    assert reason("http://a.shop/") == "kept"  # the last part of a host is no name
    assert reason("http://example.com/a.htm") == "ending"
    assert reason("http://www.youtube.com/") == "kept"
    both = UrlStep(read_rules(["default", str(path)]))
    assert isinstance(both.judge(make_document(url="http://www.youtube.com/")), Drop)


def test_line_that_is_no_rule(tmp_path: Path) -> None:
    """A wrong line of a list is named."""
    path = tmp_path / "rules.txt"
    path.write_text("good.org\nhttp://bad.org/\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"line 2: `http://bad.org/` is not a rule"):
        read_rules([str(path)])


def test_repeated_addresses(corpus: Callable[..., str], run_steps: Callable[..., object]) -> None:
    """Of documents with one address the first stays, whatever scheme, host case, `#` and `/`."""
    urls = [
        "http://Example.org/a/",
        "https://example.org/a#part",
        "https://example.org/a?page=2",
        "https://example.org:443/a",
        "https://example.org:8080/a",
    ]
    path = corpus({"text": str(n), "url": url} for n, url in enumerate(urls))
    done = run_steps("url", path)
    assert done.texts == ["0", "2", "4"]
    (step,) = done.report.steps
    assert (step.documents, step.kept, step.dropped) == (5, 3, {"duplicate": 2})
    assert [line["kept"]["line"] for line in done.dropped] == [1, 1]


def test_address_inside_an_object(
    corpus: Callable[..., str], run_steps: Callable[..., object]
) -> None:
    """A dotted key leads into inner objects."""
    path = corpus([{"text": "a", "meta": {"url": "https://example.org/x.pdf"}}])
    assert run_steps("url", path, url_key="meta.url").texts == []


@given(st.text(max_size=60))
@example("[::1")
@example("a:99999999/")
@example("\u2100\uff0f@ \ud800")
def test_any_text_has_a_verdict(url: str) -> None:
    """No text breaks the step, nor the comparison of addresses."""
    step = OURS
    step.judge(Document("f", 1, b"{}", {}, "", url))
    step.judge(Document("f", 1, b"{}", {}, "", f"http://{url}"))
    assert isinstance(normalized(f"http://{url}"), str)

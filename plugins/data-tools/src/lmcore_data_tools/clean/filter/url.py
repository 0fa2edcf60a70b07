"""Step `url`: removal of documents by URL: malformed ones, hosts and file suffixes by rules.

The default rules, `url_rules.txt`, are sites and files without prose.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from lmcore.base.errors import DataError
from lmcore.data.input.compression import open_text
from lmcore_data_tools.clean.document import Document, Drop, Verdict

__all__ = ["DEFAULT_RULES", "UrlRules", "UrlStep", "normalized", "read_rules"]

DEFAULT_RULES = "default"
"""Name of the bundled list for `--url-rules`."""


_OUR_RULES = Path(__file__).with_name("url_rules.txt")
_LABEL = re.compile(r"[^\W_](?:[\w-]{0,61}[^\W_])?")
_UNFIT = re.compile(r"[\s\x00-\x20\x7f<>\"{}|\\^`]")
_LONGEST_HOST = 253


@dataclass(frozen=True)
class UrlRules:
    """Rules of URLs to drop.

    Attributes:
        hosts: `example.org` is the host and all its subdomains.
        names: `example` is every host with this label before the last: `example.com`,
            `www.example.co.uk`.
        endings: suffixes of the path, with a dot: `.jpg`.
    """

    hosts: frozenset[str]
    names: frozenset[str]
    endings: frozenset[str]


def read_rules(sources: Sequence[str]) -> UrlRules:
    """Return the rules of all *sources*: files with one rule per line, or `default`.

    A rule is a host (`example.org`), a name (`example`) or a suffix (`.jpg`); `#` begins a comment.
    Files may be compressed.

    Raises:
        DataError: a file that cannot be read, or a line that is not a rule.
    """
    hosts: set[str] = set()
    names: set[str] = set()
    endings: set[str] = set()
    for source in sources:
        for rule in _read(str(_OUR_RULES) if source == DEFAULT_RULES else source):
            kind = endings if rule.startswith(".") else hosts if "." in rule else names
            kind.add(rule)
    return UrlRules(frozenset(hosts), frozenset(names), frozenset(endings))


def _read(path: str) -> list[str]:
    rules = []
    with open_text(path) as stream:
        for number, line in enumerate(stream, start=1):
            try:
                rule = line.decode("utf-8-sig").partition("#")[0].strip().lower()
            except UnicodeDecodeError:
                raise DataError(f"`{path}` line {number} is not UTF-8") from None
            if not rule:
                continue
            if not all(_LABEL.fullmatch(part) for part in rule.removeprefix(".").split(".")):
                raise DataError(
                    f"`{path}` line {number}: `{rule[:60]}` is not a rule",
                    hint="a rule is a host `example.org`, a name `example` or a suffix `.jpg`",
                )
            rules.append(rule)
    return rules


class UrlStep:
    """Document step that drops documents whose URL is malformed or matches a rule."""

    def __init__(self, rules: UrlRules) -> None:
        self._rules = rules

    def judge(self, document: Document) -> Verdict:
        """Return `Drop` with the reason `malformed`, `host` or `ending`."""
        parts = _parts(document.url)
        if parts is None:
            return Drop("malformed", document.url[:200])
        host = (parts.hostname or "").rstrip(".")
        labels = host.split(".")
        rules = self._rules
        for start in range(len(labels)):
            below = ".".join(labels[start:])
            if below in rules.hosts:
                return Drop("host", below)
        for label in labels[:-1]:
            if label in rules.names:
                return Drop("host", label)
        pieces = parts.path.rpartition("/")[2].lower().rsplit(".", 2)
        for start in range(1, len(pieces)):  # `.tar.gz`, then `.gz`
            ending = "." + ".".join(pieces[start:])
            if ending in rules.endings:
                return Drop("ending", ending)
        return None


def normalized(url: str) -> str:
    """Return a normal form, equal for URLs of the same page.

    Without scheme, default port, fragment, final `/` and the case of the host; a malformed URL is
    returned unchanged.
    """
    parts = _parts(url)
    if parts is None:
        return url
    port = parts.port
    host = (parts.hostname or "").rstrip(".")
    place = host if port in {None, 80, 443} else f"{host}:{port}"
    query = f"?{parts.query}" if parts.query else ""
    return f"{place}{parts.path.rstrip('/')}{query}"


def _parts(url: str) -> SplitResult | None:
    """Return the parts of a URL, or None if it is malformed."""
    if _UNFIT.search(url):
        return None
    try:
        parts = urlsplit(url)
        host, _ = (parts.hostname or "").rstrip("."), parts.port
    except ValueError:
        return None
    if parts.scheme not in {"http", "https"} or not host or len(host) > _LONGEST_HOST:
        return None
    if ":" in host:  # an IPv6 address, checked by urlsplit
        return parts
    labels = host.split(".")
    fit = len(labels) > 1 and all(_LABEL.fullmatch(label) for label in labels)
    return parts if fit else None

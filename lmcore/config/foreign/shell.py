"""Shell scripts that start programs: their commands with variables expanded, never run.

What a shell would do is followed as far as it can be without running anything: assignments,
arrays, quotes, here-documents and `bash -c`; see `Variables` for values.  Every branch of `if`,
`case` and loops is read, as none is decided.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from lmcore.base.errors import ConfigError
from lmcore.config.foreign.shell_values import SPACE, Variables, substitution_end

__all__ = ["ShellScript", "read_shell"]

_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
_NAME = re.compile(r"[A-Za-z_]\w*")
_KEYWORDS = frozenset({"if", "then", "elif", "else", "while", "until", "do", "{", "!", "time"})
_ENDS = frozenset({"fi", "done", "esac", "}"})
_DECLARE = frozenset({"export", "declare", "local", "readonly", "typeset"})
_MOST_NESTED = 8
_MOST_COMMANDS = 10_000
_PLACEHOLDER = re.compile(r"<[A-Za-z](?:[^<>\n]|<[^<>\n]*>)*>")
_BETWEEN = re.compile(r"[ \t\n]+")
_BLANK = " \t\r"
_FENCE = re.compile(r"^(```|~~~)\w*$", re.MULTILINE)  # around a command copied from a document


@dataclass
class ShellScript:
    """Commands of a script.

    Attributes:
        commands: Words of each simple command in order, without assignments and redirections.
        files: Content of each file that a here-document writes, by its path.
        unknown: Values that only a run of the script has, as written, in order: variables
            without a value and the output of commands.
        notes: Further parts that a reader has to look at, a line each.
        exports: Variables that it exports and does not use itself, in order.
        text: The script itself.
    """

    commands: list[list[str]] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    exports: list[str] = field(default_factory=list)
    text: str = ""


@dataclass(frozen=True)
class _Piece:
    """Part of a word with one kind of quotes: `'`, `"`, or none."""

    text: str
    quote: str = ""


_Word = list[_Piece]


@dataclass
class _Document:
    """Here-document: its end mark, and its text when it has been read."""

    mark: str
    quoted: bool
    tabs: bool
    text: str = ""


@dataclass
class _Command:
    """Words of a command, the path that it writes, and its here-document."""

    words: list[_Word] = field(default_factory=list)
    target: str | None = None
    document: _Document | None = None


def read_shell(text: str, variables: Mapping[str, str], names: Collection[str] = ()) -> ShellScript:
    """Return the commands of a script.

    Args:
        text: The script.
        variables: Values of variables, which count whatever the script sets.
        names: Variables that may be given though no command has them.

    Raises:
        ConfigError: A quote, a parenthesis or a here-document does not end, there are too many
            commands, or the script has no variable of a given name.
    """
    text = _FENCE.sub("", text)
    script, values = ShellScript(text=text), Variables(variables)
    _Reader(text, values, script).read()
    values.check_given(names)
    script.commands = [[one.replace(SPACE, " ") for one in words] for words in script.commands]
    script.unknown = values.unknown
    script.exports = [one for one in dict.fromkeys(script.exports) if one not in values.read]
    return script


class _Reader:
    """One pass over a script, or over the argument of `bash -c`."""

    def __init__(
        self, text: str, variables: Variables, script: ShellScript, depth: int = 0
    ) -> None:
        self.text, self.at = text.replace("\r\n", "\n"), 0
        self.variables, self.script, self.depth = variables, script, depth
        self.documents: list[_Document] = []
        self.branches = 0  # `if` that have not ended

    def read(self) -> None:
        """Read all commands."""
        while self.at < len(self.text):
            self._run(self._command())

    def _unended(self, what: str, begin: int) -> ConfigError:
        line = self.text.count("\n", 0, begin) + 1
        return ConfigError(
            f"{what} that begins in line {line} of the script does not end",
            hint="give the script as it runs, or the command line alone",
        )

    def _skip_blank(self) -> None:
        while self.at < len(self.text):
            if self.text[self.at] in _BLANK:
                self.at += 1
            elif self.text.startswith("\\\n", self.at):
                self.at += 2
            else:
                return

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.at)
        self.at = len(self.text) if end < 0 else end

    def _command(self) -> _Command:
        """Read up to the end of a command."""
        found, text = _Command(), self.text
        while True:
            self._skip_blank()
            char = text[self.at : self.at + 1]
            if char == "#":
                self._skip_line()
            elif char in {"", "\n"}:
                self.at += 1
                self._take_documents()
                return found
            elif text.startswith("<<", self.at) and not text.startswith("<<<", self.at):
                found.document = self._document()
            elif char in {"<", ">"} or text.startswith("&>", self.at):
                found.target = self._redirection(found.words) or found.target
            elif char in {";", "|", "(", ")", "&"}:
                self.at += 1
                return found
            else:
                found.words.append(self._word())

    def _document(self) -> _Document:
        """Read the end mark of a here-document."""
        self.at += 2
        tabs = self.text.startswith("-", self.at)
        self.at += tabs
        self._skip_blank()
        mark = self._word()
        found = _Document(_plain(mark), any(piece.quote for piece in mark), tabs)
        self.documents.append(found)
        return found

    def _take_documents(self) -> None:
        """Read the bodies of here-documents, which begin after the line of their command."""
        for document in self.documents:
            begin, body = self.at, list[str]()
            while True:
                end = self.text.find("\n", self.at)
                line = self.text[self.at : len(self.text) if end < 0 else end]
                line = line.lstrip("\t") if document.tabs else line
                self.at = len(self.text) if end < 0 else end + 1
                if line == document.mark:
                    break
                if end < 0:
                    raise self._unended(f"the here-document `{document.mark}`", begin)
                body.append(line)
            text = "".join(f"{one}\n" for one in body)
            if not document.quoted:
                text = "".join(self.variables.expanded(text, quoted=True))
            document.text = text.replace(SPACE, " ")
        self.documents.clear()

    def _redirection(self, words: list[_Word]) -> str | None:
        """Skip a redirection; return the path that it writes, if it writes one."""
        begin = self.at
        while self.text[self.at : self.at + 1] in {"<", ">", "&", "|"}:
            self.at += 1
        signs = self.text[begin : self.at]
        if words and _plain(words[-1]).isdigit() and self.text[begin - 1].isdigit():
            words.pop()  # the number of the stream: `2>`
        self._skip_blank()
        if self.text[self.at : self.at + 1] in {"", "\n", ";", "|", ")"}:
            return None
        path = " ".join(self._fields(self._word()))
        return path if ">" in signs and not signs.endswith("&") else None

    def _word(self) -> _Word:
        """Read a word with its quotes."""
        pieces: _Word = []
        while self.at < len(self.text):
            char = self.text[self.at]
            if self.text.startswith("\\\n", self.at):
                self.at += 2
            elif char == "\\":
                pieces.append(_Piece(self.text[self.at + 1 : self.at + 2], "'"))
                self.at += 2
            elif char in {"'", '"'}:
                pieces.append(self._quoted(char))
            elif char in " \t\n;|&()<>":
                held = _PLACEHOLDER.match(self.text, self.at) if char == "<" and pieces else None
                if held is None:
                    break
                # `PATH=<your path>` in an example that is to be filled in.
                pieces.append(_Piece(self.variables.mark_unknown(held.group()), "'"))
                self.at = held.end()
            else:
                pieces.append(self._unquoted())
        if self.text[self.at : self.at + 1] == "(" and _is_array(pieces):
            self._array(pieces)
        return pieces

    def _unquoted(self) -> _Piece:
        begin = self.at
        while self.at < len(self.text) and self.text[self.at] not in " \t\n;|&()<>'\"\\":
            if self.text[self.at] in {"$", "`"}:
                self.at = substitution_end(self.text, self.at)
            else:
                self.at += 1
        return _Piece(self.text[begin : self.at])

    def _quoted(self, quote: str) -> _Piece:
        begin = self.at
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == quote:
                self.at += 1
                return _Piece(self.text[begin + 1 : self.at - 1], quote)
            if quote == '"' and char in {"$", "`"}:
                self.at = substitution_end(self.text, self.at)
            else:
                self.at += 2 if quote == '"' and char == "\\" else 1
        raise self._unended(f"the quote {quote}", begin)

    def _array(self, pieces: _Word) -> None:
        """Read `NAME=(...)` and set it at once; the word that is left sets nothing."""
        held = _ASSIGNMENT.fullmatch(_plain(pieces))
        assert held is not None
        begin, found = self.at, list[str]()
        self.at += 1
        while (char := self.text[self.at : self.at + 1]) != ")":
            if not char:
                raise self._unended(f"the array `{held.group(1)}=(`", begin)
            if char == "#":
                self._skip_line()
            elif char in _BLANK + "\n;|&<>(" or self.text.startswith("\\\n", self.at):
                self.at += 1
            else:
                found += self._fields(self._word())
        self.at += 1
        self.variables.set(held.group(1), found, add=bool(held.group(2)))
        pieces.clear()

    def _run(self, command: _Command) -> None:
        """Follow one command: set variables, keep files and commands."""
        words = command.words
        while words and _plain(words[0]) in _KEYWORDS:
            self.branches += _plain(words[0]) == "if"
            words = words[1:]
        self.branches -= bool(words) and _plain(words[0]) == "fi"
        if words and _plain(words[0]) == "export":
            self.script.exports += [
                held.group() for one in words[1:] if one and (held := _NAME.match(one[0].text))
            ]
        if words and _plain(words[0]) in _DECLARE:
            words = [one for one in words[1:] if one and _ASSIGNMENT.match(one[0].text)]
        while words and (not words[0] or self._assign(words[0])):
            words = words[1:]
        if not words or _plain(words[0]) in _ENDS:
            return
        if _plain(words[0]) in {"for", "select"} and len(words) > 1:
            name = _plain(words[1])
            self.variables.forget(name)
            self.script.notes.append(f"the loop over `{name}` is read once, without a value")
            return
        fields = [one for word in words for one in self._fields(word)]
        if command.document is not None and command.target is not None:
            self.script.files[command.target] = command.document.text
        elif fields and fields[0] in {"source", "."}:
            self.script.notes.append(
                f"`{' '.join(fields[1:])}` is not read; give what it sets by `--set NAME=VALUE`"
            )
        elif fields and not self._inner(fields):
            self._keep(fields)

    def _keep(self, fields: list[str]) -> None:
        if fields[0].startswith("--"):
            self.script.notes.append(
                f"`{' '.join(fields)}` is a command by itself, as the line before it does not end "
                "with a backslash: it is left out"
            )
            return
        self.script.commands.append(fields)
        if len(self.script.commands) > _MOST_COMMANDS:
            raise ConfigError(
                f"the script has more than {_MOST_COMMANDS:,} commands",
                hint="give the command line alone",
            )

    def _inner(self, fields: list[str]) -> bool:
        """Read the argument of `bash -c`, `sh -c` and `eval`; return True if there is one."""
        places = [
            place
            for place, one in enumerate(fields[:-2])
            if one.rpartition("/")[2] in {"bash", "sh"}
            and re.fullmatch(r"-\w*c", fields[place + 1])
        ]
        if fields[0] == "eval":
            inner, before = " ".join(fields[1:]), list[str]()
        elif places:
            inner, before = fields[places[0] + 2], fields[: places[0]]
        else:
            return False
        if self.depth >= _MOST_NESTED:
            raise ConfigError(f"the script nests `bash -c` more than {_MOST_NESTED} times")
        known = len(self.script.commands)
        _Reader(inner, self.variables, self.script, self.depth + 1).read()
        for place in range(known, len(self.script.commands)):
            self.script.commands[place] = [*before, *self.script.commands[place]]
        return True

    def _assign(self, word: _Word) -> bool:
        """Set a variable, if the word does; return True then."""
        held = _ASSIGNMENT.match(word[0].text) if not word[0].quote else None
        if held is None:
            return False
        rest = _with_home([_Piece(word[0].text[held.end() :]), *word[1:]])
        if self.branches and self.variables.has(held.group(1)):
            self._note_branch(held.group(1))
        value = "".join(self._joined(piece) for piece in rest)
        self.variables.set(held.group(1), [value], add=bool(held.group(2)))
        return True

    def _note_branch(self, name: str) -> None:
        note = (
            f"`{name}` is set in an `if`, which is read as if it held; `--set {name}=VALUE` gives "
            "another value"
        )
        if note not in self.script.notes:
            self.script.notes.append(note)

    def _joined(self, piece: _Piece) -> str:
        """Return the text of a piece in an assignment, where nothing is split."""
        if piece.quote == "'":
            return piece.text
        return " ".join(self.variables.expanded(piece.text, quoted=bool(piece.quote)))

    def _fields(self, word: _Word) -> list[str]:
        """Return the fields that a word becomes."""
        fields: list[str] = []
        is_open = False  # the last field may still grow

        def grow(text: str) -> None:
            nonlocal is_open
            if is_open:
                fields[-1] += text
            else:
                fields.append(text)
            is_open = True

        for piece in _with_home(word):
            if piece.quote == "'":
                grow(piece.text)
                continue
            parts = self.variables.expanded(piece.text, quoted=bool(piece.quote))
            for number, part in enumerate(parts):
                is_open = is_open and not number
                if piece.quote:
                    grow(part)
                    continue
                for place, one in enumerate(_BETWEEN.split(part)):
                    is_open = is_open and not place
                    if one:
                        grow(one)
        return fields


def _with_home(word: _Word) -> _Word:
    """Return a word with the variable of the home directory in place of a `~` at its start."""
    first = word[0] if word else _Piece("")
    is_home = first.text.startswith("~/") or (first.text == "~" and len(word) == 1)
    if first.quote or not is_home:
        return word
    return [_Piece("$HOME", '"'), _Piece(first.text[1:]), *word[1:]]


def _plain(word: _Word) -> str:
    return "".join(piece.text for piece in word)


def _is_array(pieces: _Word) -> bool:
    one = len(pieces) == 1 and not pieces[0].quote
    return one and _ASSIGNMENT.fullmatch(pieces[0].text) is not None

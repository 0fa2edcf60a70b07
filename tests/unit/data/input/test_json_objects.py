"""JSON arrays and objects over several lines, read a piece at a time."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcore.data.input.files import InputFile
from lmcore.data.input.json_objects import read as read_objects
from lmcore.data.input.options import InputOptions

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@given(
    texts=st.lists(TEXT, max_size=12),
    other=VALUES,
    indent=st.sampled_from([None, 2]),
    ascii_only=st.booleans(),
    array=st.booleans(),
    batch_bytes=st.integers(1, 200),
)
def test_objects_are_those_of_the_whole_text(
    tmp_path_factory, texts, other, indent, ascii_only, array, batch_bytes
):
    """The objects equal json.loads's, however the text is cut while reading."""
    objects = [{"other": other, "text": text} for text in texts]
    written = [json.dumps(one, indent=indent, ensure_ascii=ascii_only) for one in objects]
    path = tmp_path_factory.mktemp("json") / "x.json"
    whole = "[" + ",\n".join(written) + "]\n" if array else "\n".join(written)
    path.write_text(whole, encoding="utf-8")
    options = InputOptions(batch_bytes=batch_bytes)
    batches = list(read_objects(InputFile(str(path), "json"), options))
    assert not any(batch.problems for batch in batches)
    assert [text for batch in batches for text in batch.columns[0]] == texts
    assert [number for batch in batches for number in batch.numbers] == [*range(1, len(texts) + 1)]
    taken = sum(map(len, (one.encode() for one in written)))
    size = sum(batch.size for batch in batches)  # with the white space before an object
    assert taken <= size <= taken + 2 * len(texts)


@pytest.mark.parametrize(
    "content, reason, told",
    [
        ('[{"text": "a"} {"text": "b"}]', "broken JSON", "Expecting ',' or ']' at line 1"),
        ('[{"text": "a"},\n{"text": b}]', "broken JSON", "at line 2"),
        ('[{"text": "a"},\n\n]', "broken JSON", "Expecting value at line 3"),
        ('[{"text": "a"}', "cut short", "the array has no end"),
        ('[{"text": "a"}, {"text": "b', "broken JSON", "Unterminated string"),
        ('[{"text": "a"}] x', "broken JSON", "after the end of the array at line 1"),
        ('{"text": "a"}\n{"text": ', "broken JSON", "Expecting value at line 2"),
        ('{"text": "a"}\n{"text":\n\n1, "b', "broken JSON", "string starting at line 4"),
        ('[{"text": "a"}, ' + "[" * 100_000, "broken JSON", "nested too deeply"),
        ('[{"text": "a"}, {"text": 1' + "0" * 9999 + "}]", "broken JSON", "digits"),
    ],
)
def test_broken_json_keeps_the_objects_before_it(tmp_path, read, content, reason, told):
    """The objects before the break come, the break is named with its line."""
    (tmp_path / "x.json").write_text(content)
    found = read(tmp_path / "x.json", "json", batch_bytes=8, skip=True)
    assert found.texts == ["a"]
    (problem,) = found.problems
    assert problem.reason == reason
    assert told in problem.detail


def test_elements_that_are_no_documents_are_problems_of_their_own(tmp_path, read):
    """A number, a missing key or a number for a text leaves the other objects alone."""
    content = '[1, {"text": "a"}, {"txt": "b"}, {"text": 3}, null, {"text": "c"}]'
    (tmp_path / "x.json").write_text(content)
    found = read(tmp_path / "x.json", skip=True)
    assert found.texts == ["a", "c"]
    assert found.numbers == [2, 6]
    assert found.told == [
        (1, "broken JSON"),
        (3, "key missing"),
        (4, "not a string"),
        (5, "broken JSON"),
    ]
    assert "this is a number" in found.problems[0].detail
    assert "did you mean `--json-keys txt`" in str(found.problems[1].error())
    assert read(tmp_path / "x.json").told == [(1, "broken JSON")]


def test_object_that_is_too_long_ends_the_file(tmp_path, read):
    """A huge object, or one that never ends, is bounded and named."""
    (tmp_path / "x.json").write_text('[{"text": "a"}, {"text": "' + "b" * 10_000)
    found = read(tmp_path / "x.json", batch_bytes=64, max_document_bytes=1000, skip=True)
    assert found.texts == ["a"]
    assert found.told == [(2, "too long")]
    (tmp_path / "y.json").write_text('[{"text": "' + "b" * 1100 + '"}]')
    assert read(tmp_path / "y.json", max_document_bytes=1000).told == [(1, "too long")]


def test_bytes_that_are_no_utf8_are_named(tmp_path, read):
    """A text that is not UTF-8 is a problem of its object."""
    (tmp_path / "x.json").write_bytes(b'[{"text": "caf\xe9"}, {"text": "a"}]')
    found = read(tmp_path / "x.json", skip=True)
    assert found.texts == ["a"]
    assert found.told == [(1, "not UTF-8")]
    assert "byte 0xe9 after 3 characters" in found.problems[0].detail


def test_empty_input_has_no_documents(tmp_path, read):
    """Nothing, white space and an empty array are no error here."""
    for content in ("", " \n", "[]", " [ ] \n"):
        (tmp_path / "x.json").write_text(content)
        assert read(tmp_path / "x.json", "json").batches == []

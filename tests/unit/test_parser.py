"""The fast decoder of a body agrees with json.loads."""

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic_core import from_json

from faststream_sqlbroker import parser
from faststream_sqlbroker.parser import SAMPLES, _is_compatible, _parse_json

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
AROUND = st.sampled_from([b"", b" ", b"\n", b"\xef\xbb\xbf", b"1", b"\x00", b","])
CODES = st.sampled_from(["utf-8", "utf-16", "utf-16-le", "utf-32"])


NUMBERS = st.from_regex(rb"-?[0-9]{1,40}(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?", fullmatch=True)
DEEP = b"[" * 250 + b"]" * 250


def answer(load: Any, body: bytes) -> Any:
    try:
        return load(body)
    except (ValueError, RecursionError) as error:
        return type(error), str(error)


@pytest.fixture
def default_digits() -> Iterator[None]:
    """The limit on digits is the default again afterwards."""
    before = sys.get_int_max_str_digits()
    yield
    sys.set_int_max_str_digits(before)


@given(JSON, st.booleans(), CODES, AROUND, AROUND)
def test_json_and_near_json_are_decoded_as_by_json_loads(
    value: Any, ascii_only: bool, code: str, before: bytes, after: bytes
) -> None:
    body = before + json.dumps(value, ensure_ascii=ascii_only).encode(code, "surrogatepass") + after
    assert answer(_parse_json, body) == answer(json.loads, body)


@given(NUMBERS)
@example(b"1" * 4_300)
@example(b"1" * 4_301)
@example(b"0." + b"1" * 5_000)
@example(b"5e-324")
@example(b"2.4703282292062327208e-324")
@example(b"9007199254740993")
def test_numbers_are_the_same_to_the_last_digit(body: bytes) -> None:
    # Also their types: 1.0 is equal to 1.
    assert repr(answer(_parse_json, body)) == repr(answer(json.loads, body))


@pytest.mark.parametrize(
    "body",
    [
        *SAMPLES,
        *(b"nan", b"-NaN", b"01", b"1.", b".5", b"+1", b"[1,]", b'{"a":1,}', b"", b" ", b"1 2"),
        *(rb'"\ud800"', rb'{"\udc00\ud800": 1}', b'"\xed\xa0\x80"', b'"\xff"', b'"\xc0\x80"'),
        *(b'"\x01"', b'"a\x00b"', rb'"\x"', b'"\x7f"', rb'"\/"', b"\x0b1", b"\xa01", b"1\x00"),
        *(DEEP, b"[" * 5_000 + b"]" * 5_000, b"{" * 300),
    ],
    ids=lambda body: repr(body[:20]),
)
def test_where_parsers_differ_it_is_json_loads(body: bytes) -> None:
    assert repr(answer(_parse_json, body)) == repr(answer(json.loads, body))


@pytest.mark.usefixtures("default_digits")
@pytest.mark.parametrize("limit", [640, 2_000, 0, 10_000])
@pytest.mark.parametrize("digits", [640, 641, 2_001, 4_301, 9_000])
def test_the_applications_limit_on_digits_holds(limit: int, digits: int) -> None:
    sys.set_int_max_str_digits(limit)
    body = b"[" + b"1" * digits + b"]"
    assert answer(_parse_json, body) == answer(json.loads, body)


def test_a_parser_that_reads_a_sample_differently_is_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _is_compatible(from_json)
    for sample in SAMPLES:

        def reads_it_differently(body: bytes, wrong: bytes = sample) -> Any:
            return "another" if body == wrong else json.loads(body)

        assert not _is_compatible(reads_it_differently)
    monkeypatch.setattr(parser, "from_json", lambda body: json.loads(body, parse_float=str))
    assert parser._select_loader() is json.loads


@given(st.binary())
def test_any_bytes_are_decoded_as_by_json_loads(body: bytes) -> None:
    assert repr(answer(_parse_json, body)) == repr(answer(json.loads, body))


def test_a_body_that_is_text_already() -> None:
    """A middleware that decrypts, for example; json.loads takes it."""
    assert _parse_json('{"a": 1}') == {"a": 1}  # type: ignore[arg-type]

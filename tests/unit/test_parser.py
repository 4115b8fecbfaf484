"""The fast decoder of a body agrees with json.loads."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from faststream_sqlbroker.parser import _json_loads

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
AROUND = st.sampled_from([b"", b" ", b"\n", b"\xef\xbb\xbf", b"1", b"\x00", b","])
CODES = st.sampled_from(["utf-8", "utf-16", "utf-16-le", "utf-32"])


def answer(load: Any, body: bytes) -> Any:
    try:
        return load(body)
    except ValueError as error:
        return type(error)


@given(JSON, st.booleans(), CODES, AROUND, AROUND)
def test_json_and_near_json_are_decoded_as_by_json_loads(
    value: Any, ascii_only: bool, code: str, before: bytes, after: bytes
) -> None:
    body = before + json.dumps(value, ensure_ascii=ascii_only).encode(code, "surrogatepass") + after
    assert answer(_json_loads, body) == answer(json.loads, body)


@given(st.binary())
def test_any_bytes_are_decoded_as_by_json_loads(body: bytes) -> None:
    assert repr(answer(_json_loads, body)) == repr(answer(json.loads, body))


def test_a_body_that_is_text_already() -> None:
    """A middleware that decrypts, for example; json.loads takes it."""
    assert _json_loads('{"a": 1}') == {"a": 1}  # type: ignore[arg-type]

"""Error texts: storable, bounded, and made without ever failing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faststream_sqlbroker.core.text import (
    DEFAULT_LIMIT,
    clean_text,
    describe_exception,
    format_size,
    replace_invisible,
)
from faststream_sqlbroker.exceptions import TransientStoreError

UNSEEN = "\x00\x07\n\x1b\x7f\x9b\u200f\u2028\u202e\u2066"
any_text = st.text(st.characters(codec=None, categories=None), max_size=400)


def raised(error: BaseException, cause: BaseException | None = None) -> BaseException:
    try:
        raise error from cause
    except BaseException as caught:
        return caught


def test_invisible_characters_are_shown() -> None:
    assert replace_invisible(UNSEEN) == "\ufffd" * len(UNSEEN)
    assert (
        replace_invisible("shop:email:send [b] ö \U0001f600") == "shop:email:send [b] ö \U0001f600"
    )


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("", ""),
        ("plain", "plain"),
        ("a\x00b", "a\ufffdb"),
        ("a\ud800b\udfff", "a\ufffdb\ufffd"),
        ("\U0001f600", "\U0001f600"),
    ],
)
def test_unstorable_characters_are_replaced(text: str, cleaned: str) -> None:
    assert clean_text(text) == cleaned


def test_long_text_keeps_its_beginning_and_its_end() -> None:
    cleaned = clean_text("first " + "x" * 100_000 + " last")
    assert len(cleaned.encode()) == DEFAULT_LIMIT
    assert cleaned.startswith("first ")
    assert cleaned.endswith(" last")
    assert "\n[...]\n" in cleaned


def test_the_limit_counts_bytes() -> None:
    assert clean_text("é" * 32, limit=64) == "é" * 32
    cut = clean_text("é" * 33, limit=64)
    assert len(cut.encode()) <= 64
    assert "[...]" in cut


def test_a_tiny_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="limit must be at least 64 bytes, got 63"):
        clean_text("", limit=63)


@given(any_text, st.integers(64, 300))
def test_any_text_becomes_storable_and_bounded(text: str, limit: int) -> None:
    cleaned = clean_text(text, limit=limit)
    assert len(cleaned.encode("utf-8")) <= limit
    assert "\x00" not in cleaned
    assert clean_text(cleaned, limit=limit) == cleaned


def test_an_exception_shows_type_message_and_the_frame_that_raised_it() -> None:
    text = describe_exception(raised(ValueError("no such order")))
    assert text.startswith("ValueError: no such order\n")
    assert "in raised" in text
    assert "raise error from cause" in text


def test_own_types_carry_their_module_and_no_traceback_is_fine() -> None:
    class OrderError(Exception):
        pass

    assert describe_exception(OrderError()) == f"{__name__}.{OrderError.__qualname__}"


def test_causes_and_groups_are_named() -> None:
    group = ExceptionGroup("two", [KeyError("a"), OSError("disk")])
    text = describe_exception(raised(RuntimeError("outer"), raised(group)))
    assert text.splitlines()[1] == "caused by ExceptionGroup: two (2 sub-exceptions)"
    assert "contains KeyError: 'a'\ncontains OSError: disk" in describe_exception(group)


def test_the_statement_that_caused_an_error_of_ours_is_not_told() -> None:
    statement = RuntimeError("refused [SQL: INSERT INTO message] [parameters: secret]")
    ours = raised(TransientStoreError("refused"), statement)
    for error in (ours, raised(ValueError("outer"), ours)):
        text = describe_exception(error)
        assert "TransientStoreError: refused" in text
        assert "secret" not in text


def test_a_context_hidden_by_from_none_stays_hidden() -> None:
    error = ValueError("seen")
    error.__context__ = KeyError("hidden")
    assert "caused by KeyError: 'hidden'" in describe_exception(error)
    error.__suppress_context__ = True
    assert describe_exception(error) == "ValueError: seen"


def test_a_circle_of_causes_ends() -> None:
    first = ValueError("one")
    second = ValueError("two")
    first.__cause__ = second
    second.__cause__ = first
    assert describe_exception(first) == "ValueError: one\ncaused by ValueError: two"


def test_a_deep_recursion_is_bounded() -> None:
    def dive() -> None:
        dive()

    with pytest.raises(RecursionError) as caught:
        dive()
    assert len(describe_exception(caught.value).splitlines()) < 50


def test_exceptions_that_misbehave_are_still_described() -> None:
    class MuteError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    class BrokenError(Exception):
        def __getattribute__(self, name: str) -> object:
            raise RuntimeError(name)

        def __str__(self) -> str:
            return 5  # type: ignore[return-value]  # noqa: PLE0307

    assert describe_exception(MuteError()).endswith("MuteError: (its message cannot be read)")
    assert describe_exception(BrokenError()).startswith("BrokenError: ")


def test_a_message_with_nul_and_surrogates_is_storable() -> None:
    text = describe_exception(raised(ValueError("a\x00b\ud800" + "z" * 100_000)))
    assert text.startswith("ValueError: a\ufffdb\ufffdz")
    assert "in raised" in text
    assert len(text.encode()) <= DEFAULT_LIMIT


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1023.6, "1 KiB"),
        (1023.99 * 2**10, "1 MiB"),
        (1020 * 2**20, "1020 MiB"),
        (1000 * 2**30, "1000 GiB"),
        (12.345 * 2**30, "12.3 GiB"),
        (5000 * 2**40, "5000 TiB"),
    ],
)
def test_sizes_are_whole_numbers_or_of_three_digits(size: float, text: str) -> None:
    assert format_size(size) == text

"""How long finished messages are kept: what is allowed, and what it means."""

from datetime import timedelta
from typing import Any

import pytest

from faststream_sqlbroker import Retention, SetupError, SqlBroker
from faststream_sqlbroker.core.retention import parse_age
from faststream_sqlbroker.core.states import MessageState


@pytest.mark.parametrize(
    ("age", "seconds"),
    [
        ("30d", 30 * 86_400),
        ("1d12h", 129_600),
        ("90m", 5_400),
        (timedelta(days=7), 604_800),
        (1.5, 1.5),
        ("0d1s", 1),
    ],
)
def test_an_age_may_be_in_days(age: Any, seconds: float) -> None:
    assert parse_age("completed", age) == seconds


@pytest.mark.parametrize("age", ["30", "d", "-1d", "1d-2h", "soon", 0, -5, "0d", 0.5, True])
def test_what_is_no_age_is_refused(age: Any) -> None:
    with pytest.raises(SetupError, match=r"^failed "):
        Retention(failed=age)


def test_an_age_that_is_none_is_told_with_those_that_are() -> None:
    with pytest.raises(
        SetupError, match=r"failed cannot be '30 days': .* text like .* or \"30d\", each number"
    ):
        Retention(failed="30 days")


def test_nothing_to_remove_is_refused() -> None:
    with pytest.raises(SetupError, match="removes nothing: give completed="):
        Retention()


@pytest.mark.parametrize("rows", [0, -1, 1.5, True, "many"])
def test_the_number_of_rows_is_checked(rows: Any) -> None:
    with pytest.raises(SetupError, match="max_rows of Retention must be a whole number"):
        Retention(max_rows=rows)


def test_only_what_is_given_has_an_age() -> None:
    assert Retention(completed="1d", discarded="1h").ages == {
        MessageState.COMPLETED: 86_400,
        MessageState.DISCARDED: 3_600,
    }
    assert Retention(max_rows=5).ages == {}


@pytest.mark.parametrize("given", ["30d", {"completed": "30d"}, Retention])
def test_the_option_of_the_broker_is_checked(given: Any) -> None:
    with pytest.raises(SetupError, match="retention must be a Retention, such as"):
        SqlBroker("sqlite+aiosqlite:///never_made.db", retention=given)

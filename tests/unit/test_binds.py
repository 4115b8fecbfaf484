"""Which of PostgreSQL's statements inserts a message."""

from datetime import datetime, timezone
from typing import Any

import pytest

from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.postgresql.binds import build_insert

NAMES: Any = {name: name for name in ("insert", "insert_dedup", "insert_now", "insert_one")}
OPTIONS = {
    "priority": 3,
    "key": "k",
    "delay": 0.5,
    "next_attempt_at": datetime(2026, 1, 1, tzinfo=timezone.utc),
    "expires_in": 60.0,
}


def test_without_options_only_the_message_is_sent() -> None:
    query: Any = build_insert(NAMES, [NewMessage("q", b"body", '{"a": 1}')])
    assert query.clause == "insert_now"
    assert query.binds == {"queue": "q", "payload": b"body", "headers": '{"a": 1}'}


@pytest.mark.parametrize("option", OPTIONS)
def test_each_option_is_sent_also_if_it_is_the_only_one(option: str) -> None:
    alone: dict[str, Any] = {option: OPTIONS[option]}
    query: Any = build_insert(NAMES, [NewMessage("q", b"body", **alone)])
    assert query.clause == "insert_one"
    assert OPTIONS[option] in query.binds.values()


def test_a_dedup_id_has_its_own_statement() -> None:
    query: Any = build_insert(NAMES, [NewMessage("q", b"body", dedup_id="d")])
    assert query.clause == "insert_dedup"

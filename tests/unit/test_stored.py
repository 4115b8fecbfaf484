"""What a stored message tells of itself."""

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest

from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.stored import (
    StoredMessage,
    build_history,
    decode_body,
    get_dead_letter_origin,
)

NOON = datetime(2026, 11, 24, 12, tzinfo=timezone.utc)


def message(**given: Any) -> StoredMessage:
    fields: dict[str, Any] = {
        "id": 7,
        "queue": "q",
        "state": MessageState.PENDING,
        "priority": 0,
        **dict.fromkeys(("key", "dedup_id", "origin_id", "expires_at", "last_error")),
        **dict.fromkeys(("first_attempt_at", "last_attempt_at", "acquired_at")),
        "attempts_count": 0,
        "deliveries_count": 0,
        "publish_count": 1,
        "created_at": NOON,
        "next_attempt_at": NOON + timedelta(minutes=9),
    }
    return StoredMessage(**{**fields, **given})


def minutes(count: int) -> datetime:
    return NOON + timedelta(minutes=count)


def texts(stored: StoredMessage) -> list[str]:
    events = build_history(stored)
    assert [e.at for e in events] == sorted(e.at for e in events)
    return [event.text for event in events]


def test_a_waiting_message_has_a_past_and_a_future() -> None:
    assert texts(message()) == ["published", "due"]
    retried = message(
        state=MessageState.RETRYABLE,
        attempts_count=2,
        first_attempt_at=minutes(1),
        last_attempt_at=minutes(2),
        last_error="ValueError: no\n  File ...",
        expires_at=minutes(60),
    )
    assert texts(retried) == [
        "published",
        "the first attempt ended",
        "attempt 2 ended; last error: ValueError: no",
        "due",
        "expires",
    ]


def test_a_leased_message_names_its_worker() -> None:
    leased = message(
        state=MessageState.PROCESSING,
        acquired_at=minutes(1),
        deliveries_count=3,
        lease_expires_at=minutes(2),
        worker="host:1:ab",
    )
    assert texts(leased) == [
        "published",
        "claimed by host:1:ab, delivery 3",
        "the lease expires unless it is renewed",
    ]


def test_an_archived_message_tells_how_it_ended() -> None:
    ended = message(
        state=MessageState.DISCARDED,
        archived_at=minutes(5),
        reason="superseded",
        related_id=9,
        origin_id=3,
    )
    assert texts(ended) == [
        "published, as a replay of message 3",
        "archived as DISCARDED: superseded, by message 9",
    ]


@pytest.mark.parametrize(
    ("payload", "headers", "body"),
    [
        (b'{"a": 1}', {}, {"a": 1}),
        (b'{"a": 1}', {"content-type": "application/json"}, {"a": 1}),
        (b"7", {"content-type": "text/plain"}, "7"),
        (b"no json", {}, b"no json"),
        (b"\xff", {"content-type": "text/plain; charset=utf-8"}, b"\xff"),
        (b"7", {"content-type": "image/png"}, b"7"),
        (b"[" * 100_000, {}, b"[" * 100_000),
        (b"7", {"content-type": None}, b"7"),
    ],
)
def test_a_body_is_decoded_by_its_content_type(
    payload: bytes, headers: dict[str, Any], body: Any
) -> None:
    assert decode_body(payload, headers) == body


def test_a_dead_letter_tells_where_it_came_from() -> None:
    origin = {"queue": "orders", "reason": "max_attempts"}
    assert get_dead_letter_origin({"dead-letter": origin}) == origin
    assert get_dead_letter_origin({"dead-letter": "text"}) is None
    assert get_dead_letter_origin({}) is None
    assert get_dead_letter_origin(None) is None

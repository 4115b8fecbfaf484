"""The meaning of outcomes, without a database: not ready, dead letters, replaced headers."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faststream_sqlbroker.control_exceptions import ControlException, NotReadyYet, RetryPossible
from faststream_sqlbroker.control_exceptions import Move as MoveException
from faststream_sqlbroker.control_exceptions import Postpone as PostponeException
from faststream_sqlbroker.core.outcome import (
    Abandon,
    Ack,
    Defer,
    Discard,
    Nack,
    NotReady,
    Outcome,
    Reject,
    Release,
    Relocate,
    Skip,
)
from faststream_sqlbroker.core.retry import ConstantRetryStrategy
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.core.states import TRANSITIONS, MessageState
from faststream_sqlbroker.core.text import load_headers, replace_headers
from faststream_sqlbroker.exceptions import SetupError

START = datetime(2026, 1, 1, tzinfo=UTC)
RULES = SettleRules(retry_strategy=ConstantRetryStrategy(delay_seconds=30, max_attempts=3))
TO_DEAD = SettleRules(retry_strategy=RULES.retry_strategy, dead_letter_queue="dead")
SECONDS = st.floats(0, 1e6, allow_subnormal=False)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=10,
)
HEADERS = st.dictionaries(st.text(max_size=8), JSON, max_size=5)
OUTCOMES: st.SearchStrategy[Outcome | None] = st.sampled_from(
    [
        None,
        Ack(),
        Skip(),
        Nack(),
        Nack(delay=5),
        Nack(error=ValueError("no")),
        Reject(),
        Reject("bad", ValueError("no")),
        Defer(5),
        Defer(5, ValueError("no")),
        NotReady(5, 10),
        Release(),
        Abandon(),
        Abandon(5.0, ValueError("no")),
        Relocate("other"),
        Relocate("other", b"new", "{}", 5),
        Discard("expired"),
    ]
)


def claimed(**fields: Any) -> ClaimedMessage:
    """A row of queue q, claimed at START."""
    values: dict[str, Any] = {
        "id": 1,
        "queue": "q",
        "payload": b"x",
        "stored_headers": None,
        "priority": 0,
        "key": None,
        "attempts_count": 0,
        "deliveries_count": 1,
        "publish_count": 1,
        "created": START,
        "due": START,
        "expires_at": None,
        "first_attempt_at": None,
        "last_attempt_at": None,
        "acquired": START,
        "lease_token": uuid4(),
        **fields,
    }
    return ClaimedMessage(**values)


@given(
    retry_in=SECONDS,
    give_up_after=st.floats(0.001, 1e6),
    late=st.lists(st.floats(0.001, 1e4), min_size=1, max_size=30),
)
def test_not_ready_gives_up_when_its_time_is_over_and_not_before(
    retry_in: float, give_up_after: float, late: list[float]
) -> None:
    """P7. Each look begins `late` after it was due, and takes no time."""
    now = 0.0
    first = None
    for delay in late:
        now += delay
        at = START + timedelta(seconds=now)
        row = claimed(
            acquired=at,
            first_attempt_at=None if first is None else START + timedelta(seconds=first),
        )
        end = settle(row, NotReady(retry_in, give_up_after), RULES, ended_after=0.0)
        first = now if first is None else first
        waited = now - first
        if end.state is MessageState.FAILED:
            assert (end.reason, end.attempted) == ("not_ready", True)
            assert waited >= give_up_after - 1e-3
            return
        assert end.state is MessageState.PENDING
        assert waited <= give_up_after + 1e-3
        assert (end.attempted, end.uncharge, end.ran) == (False, True, True)
        assert end.delay is not None
        assert end.delay <= retry_in
        assert waited + end.delay <= give_up_after + 1e-3
        now += end.delay


def test_not_ready_is_a_matter_of_the_databases_times_only() -> None:
    row = claimed(first_attempt_at=START - timedelta(seconds=10), last_attempt_at=START)
    assert settle(row, NotReady(5, 12), RULES, ended_after=1.0).delay == 1.0
    assert settle(row, NotReady(5, 12), RULES, ended_after=2.0).state is MessageState.FAILED
    # A first attempt in the future: the server's clock was set back.
    row = claimed(first_attempt_at=START + timedelta(hours=1))
    assert settle(row, NotReady(5, 12), RULES, ended_after=0.0).delay == 5


def test_a_strategys_total_delay_does_not_begin_before_the_first_attempt() -> None:
    """The message was not ready for an hour, and its first attempt fails."""
    strategy = ConstantRetryStrategy(delay_seconds=30, max_attempts=3, max_total_delay_seconds=60)
    row = claimed(first_attempt_at=START - timedelta(hours=1))
    end = settle(row, Nack(), SettleRules(retry_strategy=strategy), ended_after=1.0)
    assert (end.state, end.delay) == (MessageState.RETRYABLE, 30.0)
    again = claimed(first_attempt_at=START - timedelta(hours=1), attempts_count=1)
    end = settle(again, Nack(), SettleRules(retry_strategy=strategy), ended_after=1.0)
    assert end.state is MessageState.FAILED


@given(outcome=OUTCOMES, attempts=st.integers(0, 5), headers=HEADERS, attempted=st.booleans())
def test_a_dead_letter_queue_takes_only_failures(
    outcome: Outcome | None, attempts: int, headers: dict[str, Any], attempted: bool
) -> None:
    """M4."""
    row = claimed(
        attempts_count=attempts, deliveries_count=attempts + 1, stored_headers=json.dumps(headers)
    )
    plain = settle(row, outcome, RULES, ended_after=1.0, attempted=attempted)
    end = settle(row, outcome, TO_DEAD, ended_after=1.0, attempted=attempted)
    if plain.state is not MessageState.FAILED:
        assert end == plain
        return
    assert (end.state, end.queue, end.delay, end.is_final) == (
        MessageState.PENDING,
        "dead",
        0.0,
        False,
    )
    assert end.headers is not None
    stored = json.loads(end.headers)
    origin = stored.pop("dead-letter")
    assert stored == {name: value for name, value in headers.items() if name != "dead-letter"}
    assert origin == {
        "queue": "q",
        "reason": plain.reason,
        "error": plain.error,
        "attempts": attempts + int(plain.attempted),
        "deliveries": attempts + 1,
    }
    assert end.error == plain.error


def test_a_long_error_is_cut_in_the_header_and_kept_in_the_column() -> None:
    end = settle(claimed(), Reject("bad", ValueError("x" * 20_000)), TO_DEAD, ended_after=0.0)
    assert end.headers is not None
    assert end.error is not None
    assert len(json.loads(end.headers)["dead-letter"]["error"]) <= 1024 < len(end.error)


@given(outcome=OUTCOMES, rules=st.sampled_from([RULES, TO_DEAD]), attempts=st.integers(0, 3))
def test_every_settlement_is_one_of_the_transitions(
    outcome: Outcome | None, rules: SettleRules, attempts: int
) -> None:
    allowed = {target for source, _, target in TRANSITIONS if source is MessageState.PROCESSING}
    end = settle(claimed(attempts_count=attempts), outcome, rules, ended_after=0.0)
    assert end.state is None or end.state in allowed


@given(headers=HEADERS, changes=HEADERS)
def test_replaced_headers(headers: dict[str, Any], changes: dict[str, Any]) -> None:
    """None in the changes takes a header away; what is not named stays."""
    expected = {**headers, **{n: v for n, v in changes.items() if v is not None}}
    for name in changes:
        if changes[name] is None:
            expected.pop(name, None)
    for stored in (headers, json.dumps(headers)):
        assert json.loads(replace_headers(stored, changes)) == expected


@given(stored=st.text() | st.binary() | st.none() | st.integers())
def test_headers_of_a_foreign_producer_are_kept_under_value(stored: Any) -> None:
    changed = json.loads(replace_headers(stored, {"dead-letter": 1}))
    assert changed.pop("dead-letter") == 1
    if load_headers(stored) == load_headers(stored):  # no NaN in it
        assert json.dumps(changed) == json.dumps(
            {k: v for k, v in load_headers(stored).items() if k != "dead-letter"}
        )


def test_headers_that_cannot_be_written_again_are_left_out() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert json.loads(replace_headers({"a": deep}, {"b": 1, "c": None})) == {"b": 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PostponeException("soon"), "delay cannot be 'soon'"),
        (lambda: NotReadyYet("soon", 5), "retry_in cannot be 'soon'"),
        (lambda: NotReadyYet(1, 0), "give_up_after must be longer than 0 seconds, got 0"),
        (lambda: NotReadyYet("1s", "x"), "give_up_after cannot be 'x'"),
        (lambda: MoveException(""), "'' cannot be the name of a queue: it must not be empty"),
        (
            lambda: MoveException(5),
            "5 cannot be the name of a queue: it must be a string, not int",
        ),  # type: ignore[arg-type]
        (lambda: MoveException("q", delay="soon"), "delay cannot be 'soon'"),
        (lambda: RetryPossible(delay="1"), "delay cannot be '1'"),
    ],
)
def test_wrong_control_exceptions_are_refused_where_they_are_made(make: Any, message: str) -> None:
    with pytest.raises(SetupError) as caught:
        make()
    assert message in str(caught.value)


def test_p13_negative_delays_of_control_exceptions_are_at_once() -> None:
    assert PostponeException(-1).delay == 0.0
    assert NotReadyYet("-1s", 5).retry_in == 0.0
    assert MoveException("q", delay=-1).place.delay == 0.0
    assert RetryPossible(delay="-1s").delay == 0.0


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (PostponeException("1m"), "Message was postponed by 60.0 s"),
        (NotReadyYet("1s", "1h"), "Message was not ready: retry in 1.0 s, for at most 3600.0 s"),
        (MoveException("other", body=5), "Message was moved to queue 'other'"),
        (RetryPossible(), "Message may be retried"),
    ],
)
def test_control_exceptions_tell_in_a_line_what_they_are(said: ControlException, text: str) -> None:
    assert str(said) == text

"""One message is logged on its whole way, because its header asks for it."""

import logging
from typing import Any

import pytest
from sqlalchemy.ext.asyncio import AsyncEngine

from faststream_sqlbroker import ConstantRetryStrategy, Debounce, SetupError, SqlBroker
from faststream_sqlbroker.broker.logging import find_enabled_level
from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.flow import debug_log
from faststream_sqlbroker.flow.debug_log import DebugLog, PerMinuteLimit
from tests.faststream.conftest import QUICK, Heard, Look, Make, on_each
from tests.helpers import eventually
from tests.http.conftest import on_sqlite

pytestmark = pytest.mark.capability("`debug_header`: one message is logged at each step")
ASKS = {"X-Debug": "1"}
BODY = "the-body-is-secret"


@pytest.fixture(autouse=True)
def a_limit_of_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have asked, too."""
    monkeypatch.setattr(debug_log.PROCESS_LIMIT, "_admitted", debug_log.deque())


def in_order(texts: list[str], parts: list[str]) -> bool:
    """Whether each part is in a text after that of the part before."""
    rest = iter(texts)
    return all(any(part in text for text in rest) for part in parts)


@on_each("pipeline", [""], ["generic"])
async def test_p14_one_message_is_told_at_each_step(
    make: Make,
    broker: SqlBroker,
    look: Look,
    heard: Heard,
    logger: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    pipeline: str,
) -> None:
    """P14: on a level that the logger would not write, with times, without the body."""
    if pipeline:
        monkeypatch.setenv("SQLBROKER_PIPELINE", pipeline)
    logger.setLevel(logging.ERROR)
    debugged = make(debug_header="X-Debug")
    once = ConstantRetryStrategy(delay_seconds=0.01, max_attempts=2)

    @debugged.subscriber("q", retry_strategy=once, **QUICK)
    async def handle(body: str) -> None:
        if body == BODY:
            raise ValueError(body)

    headers = {**ASKS, "correlation_id": "a\x1b[31m\nb"}
    message_id = await debugged.publish(BODY, "q", headers=headers)
    await debugged.publish("quiet", "q", headers={"X-Debug": ""})
    await debugged.publish("quiet", "q")
    await debugged.start()
    await look.archived(3)

    def told() -> list[str]:
        return heard.texts("debug: ")

    await eventually(lambda: any(", archived" in text for text in told()), timeout=60)
    texts = told()
    assert all(f"message {message_id} of 'q', correlation id 'a" in text for text in texts)
    steps = [
        "published in ",
        "claimed, delivery 1, attempts before 0, publish count 1",
        "attempt 1 begins",
        "attempt ended: Nack for ValueError",
        "settled: RETRYABLE, due in 0.010 s, waits for the flush",
        "flush: sent to the database",
        "written: RETRYABLE",
        "claimed, delivery 2, attempts before 1",
        "attempt 2 begins",
        "settled: FAILED, reason 'max_attempts'",
        "written: FAILED, reason 'max_attempts', archived",
    ]
    assert in_order(texts, steps), texts
    assert all(" ms)" in text for text in texts)
    joined = "".join(texts)
    assert BODY not in joined
    assert "\x1b" not in joined
    assert "\n" not in joined


async def test_p14_decisions_of_policies_are_told(
    make: Make, broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """P14."""
    debugged = make(debug_header="X-Debug")

    @debugged.subscriber("q", policies=[Debounce("200ms")], **QUICK)
    async def handle(body: str) -> None: ...

    first = await debugged.publish("1", "q", key="k", headers=ASKS)
    await debugged.publish("2", "q", key="k")
    await debugged.start()

    async def ended() -> bool:
        return len(await look.rows(archive=True)) == 2

    await eventually(ended)
    said = "\n".join(heard.texts(f"debug: message {first} of 'q'"))
    _, _, after = said.partition("policies: stands by for another message of its key")
    assert "policies: ended, superseded" in after


async def test_p14_a_logger_that_raises_changes_nothing(
    make: Make, broker: SqlBroker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P14: as loguru does, which fills in what is in braces, also those of a header."""
    asked: list[str] = []

    def fail(_: SqlBroker, text: str, *_more: Any) -> None:
        asked.append(text)
        raise KeyError(text)

    monkeypatch.setattr(SqlBroker, "_log_debug", fail)
    debugged = make(debug_header="X-Debug")
    once = ConstantRetryStrategy(delay_seconds=0.01, max_attempts=2)

    @debugged.subscriber("q", retry_strategy=once, **QUICK)
    async def handle(body: str) -> None:
        if body == "fails":
            raise ValueError(body)

    for body in ("well", "fails"):
        assert await debugged.publish(body, "q", headers={**ASKS, "correlation_id": "{x}"})
    await debugged.start()
    rows = await look.archived(2)
    assert sorted((row["state"], row["attempts_count"]) for row in rows) == [
        ("COMPLETED", 1),
        ("FAILED", 2),
    ]
    steps = ["published in ", "claimed", "begins", "ended", "settled", "flush", "written"]
    assert in_order(asked, steps)


@on_sqlite
async def test_p14_it_is_off_unless_the_broker_allows_it(
    broker: SqlBroker, look: Look, heard: Heard
) -> None:
    """P14."""

    @broker.subscriber("q", **QUICK)
    async def handle(body: str) -> None: ...

    await broker.publish("x", "q", headers=ASKS)
    await broker.start()
    await look.archived()
    assert heard.texts("debug: ") == []


def test_p14_at_most_sixty_messages_a_minute() -> None:
    """P14."""
    now = 100.0
    told: list[str] = []

    clock = Clock()
    clock.monotonic = lambda: now
    limit = PerMinuteLimit(clock=clock)
    debug = DebugLog("X-Debug", lambda text, _id, _queue: told.append(text), Clock(), limit)
    asks = NewMessage("q", b"body", '{"X-Debug": true}')

    def publish(first: int, count: int) -> None:
        ids = list(range(first, first + count))
        debug.log_published([asks] * count, ids, 0.001, "")

    publish(1, 100)
    assert len(told) == 61
    assert told[60] == "debug: more than 60 messages a minute request it; the others are not logged"
    now += 59
    publish(101, 5)
    assert len(told) == 61
    now += 1
    publish(201, 5)
    assert len(told) == 66


@pytest.mark.parametrize(
    ("headers", "asked"),
    [
        ('{"X-Debug": "1"}', True),
        ('{"X-Debug": false}', False),
        ('{"X-Debug": null}', False),
        ('{"other": "X-Debug"}', False),
        ('{"other": {"X-Debug": 1}}', False),
        ('["X-Debug"]', False),
        ("not JSON", False),
        (None, False),
        ({"X-Debug": 1}, True),
    ],
)
def test_what_asks(headers: Any, asked: bool) -> None:
    debug = DebugLog("X-Debug", lambda *_: None, Clock(), PerMinuteLimit())
    assert debug._is_requested(headers) is asked


def test_a_level_that_passes() -> None:
    quiet = logging.Logger("quiet", logging.ERROR)  # noqa: LOG001 - one for this test
    assert find_enabled_level(quiet) == logging.ERROR
    handler = logging.NullHandler()
    handler.setLevel(logging.CRITICAL)
    quiet.addHandler(handler)
    assert find_enabled_level(quiet) == logging.CRITICAL
    assert find_enabled_level(logging.Logger("all", logging.DEBUG)) == logging.DEBUG  # noqa: LOG001
    assert find_enabled_level(object()) == logging.CRITICAL


@pytest.mark.parametrize("name", ["", "x y", 'x"', "x\n", "é", "x" * 101, 7])
@on_sqlite
async def test_what_is_no_header(engine: AsyncEngine, name: Any) -> None:
    with pytest.raises(SetupError, match="debug_header must be 1 to 100 letters"):
        SqlBroker(engine, debug_header=name)

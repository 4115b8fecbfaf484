"""An idle process hardly asks: one look for all its subscribers."""

import pytest

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.core.rows import NewMessage
from tests.clock import VirtualTime
from tests.faststream.idle import Statements, pass_time
from tests.helpers import eventually

SUBSCRIBERS = 5
MOST = {"postgresql": 65}
"""Statements a minute; elsewhere a look takes two, and a sign of life some more."""
MOST_ELSEWHERE = 200
MINUTES = 5
"""In so many everything comes that a process does from time to time."""


@pytest.fixture
def time(broker: SqlBroker) -> VirtualTime:
    made = VirtualTime()
    broker._clock.use(made)
    return made


async def started(broker: SqlBroker, time: VirtualTime, **options: object) -> None:
    for number in range(SUBSCRIBERS):

        @broker.subscriber(f"q{number}", **options)  # type: ignore[arg-type]
        async def handle(_body: str) -> None: ...

    await broker.start()
    if broker._store.can_listen and options.get("wakeup") != "poll":
        await eventually(lambda: broker._wakeups.is_listening)
    await pass_time(broker, time, 20.0)


async def test_an_idle_process_sends_a_look_a_second(broker: SqlBroker, time: VirtualTime) -> None:
    statements = Statements(broker)
    await started(broker, time)
    statements.clear()
    await pass_time(broker, time, MINUTES * 60.0)
    most = MOST.get(broker._store.dialect_name, MOST_ELSEWHERE)
    sent = "\n".join(f"{n} {text}" for text, n in statements.most_common())
    assert 50 * MINUTES <= statements.total() <= most * MINUTES, sent


async def test_a_message_without_a_wake_up_is_found_within_the_longest_pause(
    broker: SqlBroker, time: VirtualTime
) -> None:
    """F5, F11: one look for all finds what any of them waits for."""
    got = list[str]()

    @broker.subscriber("other", wakeup="poll")
    async def other(body: str) -> None:
        got.append(body)

    await started(broker, time, wakeup="poll")
    for number in range(3):
        await broker._store.insert([NewMessage("other", f"n{number}".encode())])
        await pass_time(broker, time, 1.01)
        await eventually(lambda n=number: len(got) == n + 1)  # type: ignore[misc]

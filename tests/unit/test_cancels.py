"""What a subscriber does with requests to cancel, without a database."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from uuid import uuid4

import pytest

from faststream_sqlbroker.core.orders import CancelRequest
from faststream_sqlbroker.core.outcome import (
    Abandon,
    Ack,
    Defer,
    Discard,
    Nack,
    Outcome,
    Reject,
    Release,
    Relocate,
)
from faststream_sqlbroker.core.rows import ClaimedMessage
from faststream_sqlbroker.core.settle import SettleRules, settle
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.flow.deliver.cancels import MessageCanceller
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.outcome_states import DeliveryState
from faststream_sqlbroker.flow.deliver.worker import Worker
from faststream_sqlbroker.flow.publish_on_ack import CurrentDelivery
from faststream_sqlbroker.subscriber.options import make_settings
from tests.unit.test_inflight import quiet, row

TEXT = "cancelled by Ann"


def request(message: ClaimedMessage, **changes: Any) -> CancelRequest:
    fields = {"message_id": message.id, "lease_token": message.lease_token, "text": TEXT}
    return CancelRequest(**{**fields, **changes})


def cancels(inflight: Inflight, **options: bool) -> MessageCanceller:
    ways = {"cancellable": True, "ack_first": False, **options}
    return MessageCanceller(inflight, SettleRules(), quiet, **ways)


def test_what_waits_for_a_worker_is_discarded_at_once() -> None:
    inflight = Inflight()
    inflight.add([first := row(1), second := row(2)])
    cancels(inflight).cancel([request(first), request(second, lease_token=uuid4())])
    assert list(inflight.waiting.items) == [second]
    [settlement] = inflight.queued
    assert (settlement.id, settlement.state) == (1, MessageState.DISCARDED)
    assert (settlement.reason, settlement.error) == ("cancelled", TEXT)
    assert not settlement.attempted
    assert second.cancelled is None
    assert inflight.find_state(first) is DeliveryState.QUEUED


def test_an_outcome_that_waits_to_be_written_wins() -> None:
    inflight = Inflight()
    inflight.add([first := row(1)])
    inflight.waiting.get_nowait()
    inflight.queue_outcome(settle(first, Nack(), SettleRules(), ended_after=0.0))
    cancels(inflight).cancel([request(first)])
    assert first.cancelled is None
    assert len(inflight.queued) == 1


@pytest.mark.parametrize(
    ("outcome", "state"),
    [
        (Ack(), MessageState.COMPLETED),
        (Reject(), MessageState.FAILED),
        (Relocate("other"), MessageState.PENDING),
        (Relocate("q"), MessageState.DISCARDED),
        (Nack(), MessageState.DISCARDED),
        (Abandon(), MessageState.DISCARDED),
        (Release(), MessageState.DISCARDED),
        (Defer(5.0), MessageState.DISCARDED),
        (None, MessageState.DISCARDED),
        (Discard("expired"), MessageState.DISCARDED),
    ],
    ids=str,
)
def test_nothing_brings_it_back(outcome: Outcome | None, state: MessageState) -> None:
    message = row()
    message.cancelled = TEXT
    settlement = settle(message, outcome, SettleRules(), ended_after=0.0)
    assert settlement.state is state
    expired = isinstance(outcome, Discard)
    expected = "cancelled" if state is MessageState.DISCARDED and not expired else None
    assert expected is None or settlement.reason == expected


class Running:
    """One worker, whose handler is the test's."""

    def __init__(self, handle: Callable[[ClaimedMessage], Awaitable[None]]) -> None:
        self.inflight = Inflight()
        self.must_end = False
        store: Any = object()
        self.worker = Worker(
            store,
            self.inflight,
            make_settings(["q"], {}),
            handle,
            quiet,
            rules=SettleRules(),
            renew=lambda _rows: asyncio.sleep(0),
            first=None,
            stopping=lambda: False,
            must_end=lambda _task: self.must_end,
            on_idle=lambda: None,
        )
        self.task = asyncio.create_task(self.worker.run())

    async def ended(self) -> list[Any]:
        """What is settled once the worker has come to its end."""
        self.inflight.waiting.put_nowait(None)
        await asyncio.wait_for(self.task, 60)
        return self.inflight.queued


@pytest.mark.parametrize("turns", range(8))
async def test_a_cancel_at_each_turn_of_a_handler_reaches_nothing_else(turns: int) -> None:
    """The handler suspends five times; before, in between and after, the request comes. What comes
    next runs undisturbed, and each message is settled once."""
    began = asyncio.Event()
    ended: list[int] = []

    async def handle(message: ClaimedMessage) -> None:
        began.set()
        for _ in range(5):
            await asyncio.sleep(0)
        ended.append(message.id)
        message.record_outcome(Ack())

    running = Running(handle)
    running.inflight.add([first := row(1), row(2), row(3)])
    if turns:
        await began.wait()
    for _ in range(turns):
        await asyncio.sleep(0)
    cancels(running.inflight).cancel([request(first)])
    settled = await running.ended()
    assert sorted(s.id for s in settled) == [1, 2, 3]
    states = {s.id: s.state for s in settled}
    assert states[2] is states[3] is MessageState.COMPLETED
    won = 1 in ended
    assert states[1] is (MessageState.COMPLETED if won else MessageState.DISCARDED)
    assert won or turns < 6
    assert not won or turns > 1
    assert running.task.cancelling() == 0


async def test_a_cancel_never_strikes_the_worker_between_two_messages() -> None:
    here = CurrentDelivery(object())  # type: ignore[arg-type]
    message = row()
    here.delivery = message
    message.no_chain_reason = ""
    here.cancel(row())
    assert not here.asked
    task = asyncio.current_task()
    assert task is not None
    here.cancel(message)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(0)
    assert here.clear_cancel(asyncio.CancelledError())
    assert task.cancelling() == 0
    assert not here.clear_cancel(asyncio.CancelledError())


async def test_a_stop_that_comes_as_well_ends_the_worker() -> None:
    began = asyncio.Event()

    async def handle(_message: ClaimedMessage) -> None:
        began.set()
        await asyncio.Event().wait()

    running = Running(handle)
    running.inflight.add([message := row()])
    await began.wait()
    cancels(running.inflight).cancel([request(message)])
    running.must_end = True
    running.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running.task
    [settlement] = running.inflight.queued
    assert settlement.state is MessageState.DISCARDED


def test_a_handler_that_cannot_be_cancelled_is_renewed_no_more() -> None:
    inflight = Inflight()
    inflight.add([message := row()], requested_at=inflight.clock.monotonic() - 50.0)
    inflight.waiting.get_nowait()
    assert inflight.list_due_for_renewal(60.0, None) == [message]
    cancels(inflight, cancellable=False).cancel([request(message)])
    assert message.cancelled == TEXT
    assert inflight.list_due_for_renewal(60.0, None) == []
    message.record_outcome(Ack())
    assert inflight.list_due_for_renewal(60.0, None) == [message]


def test_a_message_of_ack_first_is_not_touched() -> None:
    inflight = Inflight()
    inflight.add([message := row()])
    inflight.waiting.get_nowait()
    cancels(inflight, ack_first=True).cancel([request(message)])
    assert message.cancelled is None

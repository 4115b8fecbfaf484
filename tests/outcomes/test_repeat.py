"""A transient failure of one outcome: it is set apart and repeated, and the others are written.
An outage sets nothing apart."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch
from uuid import uuid4

import pytest

from faststream_sqlbroker.core.outcome import Ack
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Settlement, SettleResult
from faststream_sqlbroker.core.settle import SettleRules
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.database.errors import NotConnectedError
from faststream_sqlbroker.exceptions import StoreError, TransientStoreError
from faststream_sqlbroker.flow.deliver.flush import Flusher
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.outcome_states import MAX_PARTS, SPLIT_AFTER, DeliveryState
from faststream_sqlbroker.flow.deliver.settlements import Settlements
from tests.outcomes.database import ACK, FAILED, Database
from tests.outcomes.test_model import NOW, HighLimit


class Direct:
    """A store that answers at once; `fault` may raise first."""

    def __init__(self) -> None:
        self.database = Database()
        self.dialect: Any = type("Dialect", (), {"has_archive": True})
        self.sizes: list[int] = []
        self.fault: Callable[[Sequence[Settlement]], None] = lambda _parts: None

    async def settle(
        self, parts: Sequence[Settlement], *, skip_locked: bool = False
    ) -> SettleResult:
        self.sizes.append(len(parts))
        self.fault(parts)
        return self.database.settle_whole(parts, skip_locked=skip_locked)


class Bench:
    """A flush over it."""

    def __init__(self, batch_size: int = 100) -> None:
        self.store: Any = Direct()
        self.database: Database = self.store.database
        self.logs: list[str] = []

        def log(_level: int, text: str, **_: Any) -> None:
            self.logs.append(text)

        self.inflight = Inflight(log)
        self.flusher = Flusher(self.store, self.inflight, log, batch_size=batch_size, interval=1.0)
        self.settlements = Settlements(SettleRules(retry_strategy=HighLimit()), log)

    def claim(self, count: int) -> list[ClaimedMessage]:
        first = len(self.database.rows.tokens) + len(self.database.rows.written)
        self.database.rows.tokens.update(dict.fromkeys(range(first + 1, first + count + 1)))
        rows = [
            ClaimedMessage(
                i, "q", b"", {}, 0, None, 0, 1, 1, NOW, NOW, None, None, None, NOW, token
            )
            for i, token in self.database.claim(count)
        ]
        self.inflight.add(rows)
        while not self.inflight.waiting.empty():
            self.inflight.waiting.get_nowait()
        return rows

    def ack(self, rows: list[ClaimedMessage], answer: bytes | None = None) -> None:
        """A handler of all of them ends."""
        for row in rows:
            row.outcome = Ack()
        if answer is not None:
            rows[0].chained = [NewMessage("out", answer)]
        self.inflight.queue_outcomes(self.settlements(rows))

    async def flush(self) -> None:
        """As the loop does, whose errors are a pause."""
        try:
            await self.flusher.flush_batch()
        except TransientStoreError:
            pass

    async def repeat(self) -> None:
        """Everything that is refused or set apart, once more."""
        for batch in list(self.inflight.batches):
            batch.due = 0.0
        for _ in range(len(self.inflight.batches)):
            await self.flusher.quarantine.tick()

    def states(self, rows: list[ClaimedMessage]) -> set[DeliveryState]:
        return {self.inflight.find_state(row) for row in rows}


async def test_one_that_cannot_be_written_for_a_passing_reason_delays_no_others() -> None:
    """It stays as it is, for as long as the reason does, and is then what its handler said."""
    bench = Bench()
    rows = bench.claim(20)
    for n, row in enumerate(rows):
        bench.ack([row], b"held" if n == 7 else b"%d" % n if n % 2 else None)
    bench.database.held.add(b"held")
    for _ in range(2):
        await bench.flush()
    assert bench.states(rows) == {DeliveryState.QUARANTINED}, "at the second failure"
    for _ in range(20):
        await bench.repeat()
    assert bench.states([rows[7]]) == {DeliveryState.QUARANTINED}
    assert bench.states(rows[:7] + rows[8:]) == {DeliveryState.WRITTEN}
    later = bench.claim(3)
    for row in later:
        bench.ack([row])
    await bench.flush()
    assert bench.states(later) == {DeliveryState.WRITTEN}
    assert [(len(b.parts), b.tries > 10) for b in bench.inflight.batches] == [(1, True)]
    bench.database.held.clear()
    await bench.repeat()
    assert bench.database.rows.written[rows[7].id, rows[7].lease_token] == ACK
    assert bench.database.rows.answers[b"held"] == 1
    assert bench.inflight.is_empty
    assert bench.inflight.lease_lost_count == 0


async def test_a_batch_with_answers_stays_whole_while_it_is_searched() -> None:
    bench = Bench()
    first = bench.claim(3)
    second = bench.claim(3)
    third = bench.claim(3)
    for rows, answer in ((first, b"a"), (second, b"held"), (third, b"c")):
        bench.ack(rows, answer)
    bench.database.held.add(b"held")
    for _ in range(2):
        await bench.flush()
    for _ in range(5):
        await bench.repeat()
    assert bench.states(first + third) == {DeliveryState.WRITTEN}
    assert bench.states(second) == {DeliveryState.QUARANTINED}
    assert bench.database.rows.answers == {b"a": 1, b"c": 1}
    assert bench.store.sizes.count(3) > 3
    assert set(bench.store.sizes) <= {3, 6, 9}


async def test_an_outage_does_not_set_each_outcome_apart() -> None:
    """One batch, in a few parts; the others stay in the queue, and all are written as soon as it is
    over."""
    bench = Bench(batch_size=100)
    rows = bench.claim(1_000)
    for row in rows:
        bench.ack([row], b"%d" % row.id)

    def down(_parts: Sequence[Settlement]) -> None:
        raise TransientStoreError("the disk is full")

    bench.store.fault = down
    for _ in range(9):
        await bench.flush()
        await bench.repeat()
    assert len(bench.inflight.queued) == 900
    assert len(bench.inflight.batches) <= MAX_PARTS
    assert not bench.flusher.quarantine.healthy
    bench.store.fault = lambda _parts: None
    bench.store.sizes.clear()
    await bench.repeat()
    while bench.inflight.queued:
        await bench.flush()
    assert bench.states(rows) == {DeliveryState.WRITTEN}
    assert len(bench.store.sizes) <= MAX_PARTS + 9
    assert bench.flusher.quarantine.healthy


async def test_a_second_that_cannot_be_written_delays_no_others_either() -> None:
    """Nothing else was written between the two."""
    bench = Bench()
    first = bench.claim(1)
    rows = bench.claim(41)
    bench.ack(first, b"held")
    bench.database.held |= {b"held", b"held too"}
    for _ in range(2):
        await bench.flush()
    assert bench.states(first) == {DeliveryState.QUARANTINED}
    for n, row in enumerate(rows):
        bench.ack([row], None if n else b"held too")
    for _ in range(10):
        await bench.flush()
        await bench.repeat()
    assert bench.states([*first, rows[0]]) == {DeliveryState.QUARANTINED}
    assert bench.states(rows[1:]) == {DeliveryState.WRITTEN}


async def test_more_than_a_few_that_cannot_be_written_delay_no_others_for_ever() -> None:
    """What is apart says nothing any more of an outage, but the failures do end."""
    bench = Bench(batch_size=1)
    rows = bench.claim(MAX_PARTS + 3)
    for row in rows[:-1]:
        bench.ack([row], b"%d" % row.id)
    bench.database.held |= {b"%d" % row.id for row in rows[:-1]}
    bench.ack(rows[-1:])
    for _ in range(2 * MAX_PARTS):
        await bench.flush()
    for _ in range(SPLIT_AFTER - 1):
        await bench.flush()
    assert len(bench.inflight.batches) == MAX_PARTS, "an outage would look the same"
    for _ in range(SPLIT_AFTER + 2):
        await bench.flush()
    assert bench.states(rows[:-1]) == {DeliveryState.QUARANTINED}
    assert bench.states(rows[-1:]) == {DeliveryState.WRITTEN}


async def test_a_process_that_cannot_connect_sets_nothing_apart() -> None:
    bench = Bench()
    rows = bench.claim(3)
    bench.ack(rows)

    def away(_parts: Sequence[Settlement]) -> None:
        raise NotConnectedError("refused")

    bench.store.fault = away
    for _ in range(5):
        await bench.flush()
    assert bench.states(rows) == {DeliveryState.QUEUED}


async def test_a_batch_is_searched_in_the_end_though_nothing_else_can_be_written() -> None:
    """More culprits than parts, and no other traffic."""
    bench = Bench()
    rows = bench.claim(32)
    for row in rows:
        bench.ack([row], b"%d" % row.id)
    bench.database.held |= {b"%d" % row.id for row in rows[::3]}
    for _ in range(2):
        await bench.flush()
    for _ in range(150):
        await bench.repeat()
    assert bench.states(rows[::3]) == {DeliveryState.QUARANTINED}
    assert bench.states([row for n, row in enumerate(rows) if n % 3]) == {DeliveryState.WRITTEN}


async def test_an_outcome_refused_in_a_batch_that_was_set_apart_is_refused_alone() -> None:
    bench = Bench()
    rows = bench.claim(4)
    for row, answer in zip(rows, (b"held", b"bad", b"fine", None), strict=True):
        bench.ack([row], answer)
    bench.database.held.add(b"held")
    for _ in range(2):
        await bench.flush()
    bench.database.refused.add(b"bad")
    for _ in range(5):
        await bench.repeat()
    assert [bench.inflight.find_state(row) for row in rows] == [
        DeliveryState.QUARANTINED,
        DeliveryState.REFUSED,
        DeliveryState.WRITTEN,
        DeliveryState.WRITTEN,
    ]


async def test_a_lesser_version_is_written_whole_too() -> None:
    """A row of the unit is locked when its answers are given up: all are nacked together."""
    bench = Bench()
    rows = bench.claim(3)
    bench.ack(rows, b"bad")
    bench.database.refused.add(b"bad")
    bench.database.locked = {rows[1].id}
    with patch("faststream_sqlbroker.flow.deliver.outcome_writer.REDUCE_AFTER", 2):
        # The first waits for the lock, in vain.
        for _ in range(8):
            await bench.flush()
            await bench.repeat()
        assert bench.database.rows.written == {}
        bench.database.locked.clear()
        for _ in range(8):
            await bench.flush()
            await bench.repeat()
    assert set(bench.database.rows.written.values()) == {FAILED}
    assert len(bench.database.rows.written) == 3
    assert bench.inflight.lease_lost_count == 0


async def test_a_unit_whose_row_is_locked_while_its_answer_is_refused() -> None:
    """Between the refusals and the lesser version another session locks a row."""
    bench = Bench()
    rows = bench.claim(2)
    bench.ack(rows, b"bad")
    bench.database.refused.add(b"bad")
    with patch("faststream_sqlbroker.flow.deliver.outcome_writer.REDUCE_AFTER", 2):
        await bench.flush()
        await bench.repeat()
        with patch.object(bench.database, "settle_whole", _late_lock(bench, rows[1].id)):
            await bench.repeat()
        assert bench.database.rows.written == {}
        bench.database.locked.clear()
        await bench.repeat()
    assert set(bench.database.rows.written.values()) == {FAILED}
    assert len(bench.database.rows.written) == 2
    assert bench.inflight.lease_lost_count == 0


def _late_lock(bench: Bench, row: int) -> Any:
    """The first transaction finds the row free, the next ones locked."""
    original = bench.database.settle_whole
    calls = []

    def settle_whole(parts: Sequence[Settlement], **options: Any) -> SettleResult:
        calls.append(parts)
        bench.database.locked = {row} if len(calls) > 1 else set()
        return original(parts, **options)

    return settle_whole


async def test_a_write_of_other_rows_is_no_success_of_rows_that_a_failure_left_locked() -> None:
    """A server may still hold a try that its client has given up: if other traffic counted as
    success, it would fail for ever."""
    bench = Bench()
    rows = bench.claim(2)
    bench.ack(rows[:1], b"held")
    bench.ack(rows[1:])
    bench.database.held.add(b"held")
    await bench.flush()
    bench.database.locked = {row.id for row in rows}
    others = bench.claim(3)
    bench.ack(others)
    await bench.flush()
    assert bench.states(others) == {DeliveryState.WRITTEN}
    bench.database.locked = set()
    await bench.flush()
    assert bench.states(rows) == {DeliveryState.QUARANTINED}


async def test_a_failure_that_leaves_nothing_to_set_apart() -> None:
    """A batch is cut as the database refuses it; a lease of one part is lost, and the other part
    has come back to us."""
    bench = Bench()
    rows = bench.claim(3)
    bench.ack(rows[:2], b"answer")
    bench.ack(rows[2:])
    bench.database.rows.tokens[rows[0].id] = uuid4()
    failed = []

    def fault(parts: Sequence[Settlement]) -> None:
        if not failed:
            failed.append(1)
            raise TransientStoreError("the first failure")
        if len(parts) == 3:
            raise StoreError("refused")
        if parts[0].id == rows[2].id:
            bench.inflight.add([replace(rows[2], lease_token=uuid4(), outcome=None)])
            raise TransientStoreError("the second failure")

    bench.store.fault = fault
    with pytest.raises(TransientStoreError, match="first"):
        await bench.flusher.flush_batch()
    with pytest.raises(TransientStoreError, match="second"):
        await bench.flusher.flush_batch()
    assert bench.inflight.batches == []
    assert [(s.id, s.state) for s in bench.inflight.queued] == [(rows[1].id, MessageState.PENDING)]

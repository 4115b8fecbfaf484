"""A model walks the states of outcomes: no outcome is in two places, none vanishes, answers go with
all acks or with none."""

import asyncio
import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, ClassVar
from unittest.mock import patch
from uuid import UUID

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from faststream_sqlbroker.core.outcome import Ack, Nack, Outcome, Reject, Release, Relocate
from faststream_sqlbroker.core.rows import ClaimedMessage, NewMessage, Settlement
from faststream_sqlbroker.core.settle import SettleRules
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.flow.deliver.flush import Flusher
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.outcome_states import (
    TRANSITIONS,
    DeliveryState,
    OutcomeBatch,
)
from faststream_sqlbroker.flow.deliver.settlements import Settlements
from tests.outcomes.database import ACK, FAILED, Database, Mark, Store
from tests.policies.machine import LONGER

NOW = datetime.now(timezone.utc)
EDGES = {(source, target) for source, _, target in TRANSITIONS}
ENDS = {DeliveryState.WRITTEN, DeliveryState.LOST}
MOVERS = (
    "add",
    "queue_outcome",
    "queue_outcomes",
    "start_batch",
    "start_due_batch",
    "apply_result",
    "requeue",
    "quarantine",
    "quarantine_refused",
    "retry_later",
    "nack_denied",
    "lose",
    "drop",
    "release_waiting",
    "_finish_writing",
)
"""What may change states."""
walked: set[tuple[DeliveryState | None, DeliveryState]] = set()
"""By all examples."""


class HighLimit:
    """A strategy whose limit no example reaches.

    Without a limit, a message that another lease of its unit sends back is charged an attempt,
    which this model would take for a failure.
    """

    max_attempts = 1_000

    def get_next_attempt_at(self, **times: Any) -> Any:
        return times["last_attempt_at"]


class Watched(Inflight):
    """Each of its steps goes along arrows of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[ClaimedMessage] = []
        self._depth = 0
        for name in MOVERS:
            setattr(self, name, self._watched(getattr(self, name)))

    def _watched(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def walk(*arguments: Any, **options: Any) -> Any:
            before = {id(row): self.find_state(row) for row in self.rows}
            self._depth += 1
            try:
                return step(*arguments, **options)
            finally:
                self._depth -= 1
                if not self._depth:
                    for row in self.rows:
                        self.walk(before.get(id(row)), self.find_state(row))

        return walk

    @contextmanager
    def track_writing(self, settlements: Sequence[Settlement]) -> Iterator[OutcomeBatch]:
        """Also noted."""
        before = {id(row): self.find_state(row) for row in self.rows}
        with super().track_writing(settlements) as batch:
            for row in self.rows:
                self.walk(before[id(row)], self.find_state(row))
            yield batch

    def walk(self, source: DeliveryState | None, target: DeliveryState) -> None:
        """One row went from `source` to `target`."""
        if source is not target:
            assert (source, target) in EDGES, f"{source} → {target}"
            walked.add((source, target))


class Machine(RuleBasedStateMachine):
    """One subscriber: claims, workers, the flush and the repeats, over a database that others use
    as well."""

    moods: ClassVar[list[str]] = [
        "ok",
        "ok",
        "ok",
        "ok",
        "down",
        "down",
        "unknown, committed",
        "unknown, not committed",
    ]

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.database = Database()
        self.store = Store(self.database)
        self.inflight = Watched()
        self.told: Counter[Mark] = Counter()
        self.unknown: set[Mark] = set()
        tell = self.inflight.lost_leases.report

        def telling(delivery: Settlement | ClaimedMessage, *arguments: Any) -> None:
            self.told[mark := (delivery.id, delivery.lease_token)] += 1
            before = self.inflight.settle_unknown_count
            tell(delivery, *arguments)
            if self.inflight.settle_unknown_count > before:
                self.unknown.add(mark)

        self.inflight.lost_leases.report = telling  # type: ignore[method-assign]
        store: Any = self.store
        quiet = lambda *_, **__: None  # noqa: E731
        self.flusher = Flusher(store, self.inflight, quiet, batch_size=5, interval=1.0)
        self.settlements = Settlements(SettleRules(retry_strategy=HighLimit()), quiet)
        self.tasks: dict[str, asyncio.Task[Any]] = {}
        self.running: list[list[ClaimedMessage]] = []
        self.units: dict[bytes, set[Mark]] = {}
        """By answer, the deliveries that it belongs to."""
        self.may_fail: set[bytes] = set()
        """Answers that are refused, or whose handler's transaction is rolled back."""
        self.refused_rows: set[int] = set()
        """Messages that were refused once."""
        self.ids = itertools.count(1)
        self.names = itertools.count(1)

    kinds: ClassVar[dict[str, int]] = {
        "claim": 3,
        "start": 4,
        "end": 5,
        "end_in_transaction": 1,
        "end_refused": 2,
        "give_back": 1,
        "flush": 6,
        "answer": 10,
        "repeat": 4,
        "renew": 2,
        "expire": 3,
        "lose": 3,
        "lock": 2,
        "refuse": 2,
        "cancel": 1,
    }

    @rule(data=st.data())
    def act(self, data: st.DataObject) -> None:
        """One rule, of which Hypothesis cannot leave out parts: without flushes and answers little
        happens."""
        impossible = {
            "start": not self.inflight.waiting.qsize(),
            "end": not self.running,
            "end_in_transaction": not self.running or "worker" in self.tasks,
            "end_refused": not any(len(rows) > 1 for rows in self.running),
            "flush": "flush" in self.tasks or not self.inflight.queued,
            "repeat": "repeat" in self.tasks or not self.inflight.batches,
            "answer": not self.store.calls,
            "cancel": not self.tasks,
            **dict.fromkeys(("renew", "expire", "lose", "lock", "refuse"), not self.inflight.held),
        }
        possible = [
            kind for kind, n in self.kinds.items() if not impossible.get(kind) for _ in range(n)
        ]
        getattr(self, data.draw(st.sampled_from(possible), "kind"))(data)

    def spin(self) -> None:
        """Let tasks run until they wait for the database."""

        async def turns() -> None:
            for _ in range(6):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        for name, task in list(self.tasks.items()):
            if task.done():
                del self.tasks[name]
                error = None if task.cancelled() else task.exception()
                assert error is None or isinstance(error, StoreError), repr(error)

    # -- claims and workers ------------------------------------------------------------------------

    def claim(self, data: st.DataObject) -> None:
        """Publish some; claim what is free, also what was ours and has come back."""
        limit = data.draw(st.integers(1, 4), "limit")
        for _ in range(data.draw(st.integers(0, 3), "new")):
            self.database.rows.tokens[next(self.ids)] = None
        self.take_in([self.row(*mark) for mark in self.database.claim(limit)], self.inflight.add)

    def take_in(
        self, rows: list[ClaimedMessage], take_in: Callable[[list[ClaimedMessage]], None]
    ) -> None:
        """What was claimed is ours."""
        take_in(rows)
        self.inflight.rows += rows
        for row in rows:
            self.inflight.walk(None, DeliveryState.WAITING)
            self.inflight.walk(DeliveryState.WAITING, self.inflight.find_state(row))

    def row(self, number: int, token: UUID) -> ClaimedMessage:
        return ClaimedMessage(
            number, "q", b"", {}, 0, None, 0, 1, 1, NOW, NOW, None, None, None, NOW, token
        )

    def start(self, data: st.DataObject) -> None:
        """A worker takes a batch."""
        count = data.draw(st.integers(1, 4), "count")
        rows = []
        while len(rows) < count and not self.inflight.waiting.empty():
            row = self.inflight.waiting.get_nowait()
            assert row is not None
            if not row.lease_lost:
                rows.append(row)
                self.inflight.walk(DeliveryState.WAITING, self.inflight.find_state(row))
        if rows:
            self.running.append(rows)

    outcomes = st.sampled_from(
        [Ack(), Ack(), Ack(), Ack(), Relocate("next"), Nack(), Reject(), Release()]
    )

    def end(self, data: st.DataObject) -> None:
        """A handler ends, with an answer or without."""
        rows = self.running.pop(data.draw(st.integers(0, len(self.running) - 1), "which"))
        self.inflight.queue_outcomes(self.settled(rows, data))

    def settled(self, rows: list[ClaimedMessage], data: st.DataObject) -> list[Settlement]:
        alike = data.draw(st.booleans(), "all acked")
        outcomes: list[Outcome] = [
            Ack() if alike else data.draw(self.outcomes, "outcome") for _ in rows
        ]
        for row, outcome in zip(rows, outcomes, strict=True):
            row.outcome = outcome
        if data.draw(st.booleans(), "answer"):
            kinds = st.sampled_from(["fine", "held", "refused", "denied"])
            self.publish_an_answer(rows, data.draw(kinds, "answer"))
        return self.settlements(rows)

    def publish_an_answer(self, rows: list[ClaimedMessage], kind: str) -> None:
        """`rows` are one unit with an answer, which the database treats as `kind` says."""
        answer = f"answer {next(self.names)}".encode()
        rows[0].chained = [NewMessage("out", answer)]
        self.units[answer] = {
            (row.id, row.lease_token) for row in rows if isinstance(row.outcome, Ack | Relocate)
        }
        if kind != "fine":
            getattr(self.database, kind).add(answer)
        if kind in {"refused", "denied"}:
            self.may_fail.add(answer)

    def end_refused(self, _data: st.DataObject) -> None:
        """Several messages are acked with an answer that a constraint refuses.

        By chance alone this is too rare to meet a lease that is lost before the repetition.
        """
        rows = next(rows for rows in self.running if len(rows) > 1)
        self.running.remove(rows)
        for row in rows:
            row.outcome = Ack()
        self.publish_an_answer(rows, "refused")
        self.inflight.queue_outcomes(self.settlements(rows))

    def end_in_transaction(self, data: st.DataObject) -> None:
        """A handler ends in a transaction of its own; if that is rolled back, all is nacked."""
        rows = self.running.pop(data.draw(st.integers(0, len(self.running) - 1), "which"))
        rows = [row for row in rows if not row.lease_lost]
        settlements = self.settled(rows, data) if rows else []
        self.may_fail |= {
            row.payload for s in settlements if s.unit is not None for row in s.unit.on_ack
        }

        async def commit() -> None:
            try:
                with self.inflight.track_writing(settlements) as batch:
                    result = await self.store.settle(settlements)
                    self.inflight.apply_result(batch, result)
                    left = {s.id for s in batch.parts}
            except StoreError:
                left = {s.id for s in settlements}
            back = [row for row in rows if row.id in left and not row.lease_lost]
            for row in back:
                row.outcome = Nack()
                row.chained = ()
            self.inflight.queue_outcomes(self.settlements(back))

        if settlements:
            self.tasks["worker"] = self.loop.create_task(commit())
            self.spin()

    def give_back(self, _data: st.DataObject | None = None) -> None:
        """As at a stop, or a pause."""
        self.inflight.release_waiting()

    # -- the loops ---------------------------------------------------------------------------------

    def flush(self, _data: st.DataObject | None = None) -> None:
        """The flush loop's turn."""
        self.tasks["flush"] = self.loop.create_task(self.flusher.flush_batch())
        self.spin()

    def repeat(self, _data: st.DataObject | None = None) -> None:
        """The repeat loop's, when every pause is over."""
        for batch in self.inflight.batches:
            batch.due = 0.0
        self.tasks["repeat"] = self.loop.create_task(self.flusher.quarantine.tick())
        self.spin()

    def cancel(self, data: st.DataObject) -> None:
        """A stop does not wait for ever."""
        name = data.draw(st.sampled_from(sorted(self.tasks)), "task")
        if name != "worker":  # a handler's transaction has its own rules
            self.tasks[name].cancel()
            self.spin()

    def answer(self, data: st.DataObject) -> None:
        """The database answers, or does not."""
        mood = data.draw(st.sampled_from(self.moods), "mood")
        call = data.draw(st.integers(0, len(self.store.calls) - 1), "call")
        self.store.calls[call].set_result(mood)
        self.spin()

    def renew(self, _data: st.DataObject) -> None:
        """Find out which leases are gone."""
        tokens = self.database.rows.tokens
        held = list(self.inflight.held.values())
        self.inflight.lose(
            [row for row in held if tokens.get(row.id) != row.lease_token], "renew", ""
        )

    # -- others ------------------------------------------------------------------------------------

    def expire(self, data: st.DataObject) -> None:
        """A lease runs out and is given back; nothing here knows."""
        held = self.inflight.held.keys()
        batches = self.inflight.batches
        repeated = [
            s
            for batch in batches
            if batch.state in (DeliveryState.REFUSED, DeliveryState.QUARANTINED)
            for s in batch.parts
        ]
        sizes = Counter(s.unit for s in repeated if s.unit is not None)
        # What Hypothesis hardly finds by itself: one row of several that are repeated together.
        together = {s.id for s in repeated if sizes[s.unit] > 1} & held
        apart = {s.id for batch in batches for s in batch.parts} & held
        unusual = apart and data.draw(st.booleans(), "with an unusual outcome")
        chosen = together or (apart if unusual else held)
        number = data.draw(st.sampled_from(sorted(chosen)), "message")
        if number in self.database.rows.tokens and number not in self.database.locked:
            self.database.rows.tokens[number] = None

    def lose(self, data: st.DataObject) -> None:
        """A lease runs out, which is found out at once."""
        self.expire(data)
        self.renew(data)

    def lock(self, data: st.DataObject) -> None:
        """Another session locks a row, or lets go of it."""
        self.database.locked ^= {data.draw(st.sampled_from(sorted(self.inflight.held)), "message")}

    def refuse(self, data: st.DataObject) -> None:
        """A trigger keeps a row from being settled, or does not any more."""
        number = data.draw(st.sampled_from(sorted(self.inflight.held)), "message")
        self.database.refused_rows ^= {number}
        self.refused_rows.add(number)

    # -- what holds --------------------------------------------------------------------------------

    @invariant()
    def no_outcome_is_in_two_places(self) -> None:
        inflight = self.inflight
        marks = Counter((s.id, s.lease_token) for s in inflight.queued)
        for batch in inflight.batches:
            assert batch.state in (
                DeliveryState.WRITING,
                DeliveryState.QUARANTINED,
                DeliveryState.REFUSED,
            )
            marks.update((s.id, s.lease_token) for s in batch.parts)
        assert all(count == 1 for count in marks.values())
        queued = Counter(s.id for s in inflight.queued if s.unit is not None)
        assert all(count == 1 for count in queued.values()), (
            "answers are sent with what is settled, by message"
        )
        running = {id(row) for rows in self.running for row in rows}
        for row in inflight.rows:
            waits = any(item is row for item in inflight.waiting.items)
            has_outcome = marks[row.id, row.lease_token]
            if not row.lease_lost:
                assert waits + (id(row) in running) + has_outcome <= 1

    @invariant()
    def none_vanishes(self) -> None:
        """Each delivery is here, or was written, or told as lost."""
        running = {id(row) for rows in self.running for row in rows}
        for row in self.inflight.rows:
            mark = (row.id, row.lease_token)
            state = self.inflight.find_state(row)
            assert self.told[mark] == (state is DeliveryState.LOST), (
                f"{state}, told {self.told[mark]} times"
            )
            if state is DeliveryState.WRITTEN:
                assert mark in self.database.rows.written
            if state is DeliveryState.LOST and mark in self.database.rows.written:
                assert mark in self.unknown, "written, and called a lost lease"
            if state is DeliveryState.RUNNING and "worker" not in self.tasks:
                assert id(row) in running, "no worker has it"

    @invariant()
    def answers_go_with_all_acks_or_none(self) -> None:
        rows = self.database.rows
        for answer, marks in self.units.items():
            acked = {mark for mark in marks if rows.written.get(mark) == ACK}
            assert acked in (set(), marks), f"{len(acked)} of {len(marks)} acked"
            assert rows.answers[answer] == bool(acked)
            if answer not in self.may_fail and not self.refused_rows & {
                number for number, _ in marks
            }:
                assert FAILED not in {rows.written.get(mark) for mark in marks}, (
                    "it would only have had to wait"
                )

    @invariant()
    def units_stay_whole(self) -> None:
        """Side by side, with nothing between."""
        for parts in (self.inflight.queued, *(b.parts for b in self.inflight.batches)):
            units = [
                unit
                for unit, _ in itertools.groupby(parts, key=lambda s: s.unit)
                if unit is not None
            ]
            assert len(units) == len(set(units))

    @invariant()
    def counts_agree(self) -> None:
        inflight = self.inflight
        states = Counter(inflight.find_state(row) for row in inflight.rows)
        assert inflight.claimed_count == len(inflight.rows)
        assert inflight.settled_count == states[DeliveryState.WRITTEN]
        assert (
            inflight.lease_lost_count + inflight.settle_unknown_count == states[DeliveryState.LOST]
        )
        waiting = (
            states[DeliveryState.QUEUED]
            + states[DeliveryState.WRITING]
            + states[DeliveryState.QUARANTINED]
            + states[DeliveryState.REFUSED]
        )
        assert len(inflight.unwritten) == waiting
        assert inflight.writing_count == states[DeliveryState.WRITING]
        assert (
            inflight.quarantined_count
            >= states[DeliveryState.QUARANTINED] + states[DeliveryState.REFUSED]
        )
        inflight.running = len(self.running)  # as workers count themselves
        if inflight.is_empty:
            assert (
                not states[DeliveryState.WAITING]
                + states[DeliveryState.RUNNING]
                + states[DeliveryState.QUEUED]
            )

    def teardown(self) -> None:
        """The others let go, and the database works: everything ends."""
        try:
            self.finish()
        finally:
            for task in self.tasks.values():
                task.cancel()
            self.spin()
            self.loop.close()

    def finish(self) -> None:
        d = self.database
        d.locked = set()
        d.held = set()
        d.refused_rows = set()
        self.inflight.release_waiting()
        for rows in self.running:
            for row in rows:
                row.outcome = row.outcome or Ack()
            self.inflight.queue_outcomes(self.settlements(rows))
        self.running = []
        for _ in range(500):
            for call in list(self.store.calls):
                call.set_result("ok")
            self.spin()
            if not self.tasks and not self.inflight.unwritten:
                break
            if "flush" not in self.tasks:
                self.flush()
            if "repeat" not in self.tasks:
                self.repeat()
        assert not self.inflight.unwritten
        assert not self.inflight.held
        for check in (self.none_vanishes, self.answers_go_with_all_acks_or_none, self.counts_agree):
            check()
        assert {self.inflight.find_state(row) for row in self.inflight.rows} <= ENDS


@patch("faststream_sqlbroker.flow.deliver.outcome_writer.REDUCE_AFTER", 2)
def test_outcomes_go_by_the_table() -> None:
    walked.clear()
    # Hypothesis parses this file. Python 3.11 fails if an object dies then whose end logs a
    # traceback, which it parses, too.
    gc.collect()
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        Machine,
        settings=settings(
            max_examples=150 * LONGER,
            stateful_step_count=80,
            deadline=None,
            database=None,
            report_multiple_bugs=False,
            derandomize=LONGER == 1,
            suppress_health_check=list(HealthCheck),
        ),
    )
    ways = {(source, target) for source, target in EDGES if source is not target}
    assert walked == ways, f"not walked: {ways - walked}"

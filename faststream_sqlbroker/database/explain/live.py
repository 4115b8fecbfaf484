"""Why a live message has not reached its handler."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import Select, and_, func, literal_column, or_, select, text

from faststream_sqlbroker.core.policies.flags import HEADER_KEY
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import (
    MIXED,
    ORDERED_WAY,
    LiveSubscriber,
    Reason,
    WaitingMessage,
    by_way,
    error_text,
    moment_text,
    ways_text,
)
from faststream_sqlbroker.core.suspects import SUSPECT_AFTER
from faststream_sqlbroker.database.explain.policies import (
    PolicyFacts,
    delay,
    policy_reasons,
    standby,
)
from faststream_sqlbroker.database.parts import cancels
from faststream_sqlbroker.database.parts.live_subscribers import read_pause, select_pauses
from faststream_sqlbroker.database.parts.row_locks import locked_by_others
from faststream_sqlbroker.schema.types import MYSQL, clock

COLUMNS = (
    "id",
    "queue",
    "priority",
    "key",
    "state",
    "attempts_count",
    "deliveries_count",
    "created_at",
    "next_attempt_at",
    "expires_at",
    "acquired_at",
    "last_error",
    "lease_token",
    "lease_expires_at",
    "policy_marks",
    "policy_key",
)
"""What is read of a message: not its body, which may be large."""
MOST_COUNTED = 1_000
"""Messages that are counted at most. The explanation then says "1000 or more"."""

# Literals, because a generic plan cannot use a partial index if its condition is a parameter.
_CLAIMABLE = text("state IN ('PENDING', 'RETRYABLE')")
_CLAIMABLE_MYSQL = literal_column("claimable") == 1
_LEASED = text("state = 'PROCESSING' AND lease_expires_at IS NOT NULL")


class LiveMessage:
    """A message of the message table, and the reasons why it waits."""

    def __init__(self, facts: PolicyFacts, known: Sequence[LiveSubscriber], row: Any) -> None:
        """Explain `row`: `COLUMNS` of the message, and the database's time as `now`.

        `facts` are those of its queue; `known` are all subscribers, with crashed ones.
        """
        self._facts = facts
        self._connection = facts.connection
        self._dialect = facts.dialect
        self._row = row
        self._table = facts.dialect.tables.message
        self._known = known
        self._alive = facts.subscribers
        self._claiming = [s for s in self._alive if s.claims]

    def reasons(self) -> list[Reason]:
        """Why it waits; if nothing delays it, the messages that come first."""
        return [*self._own_reasons(), *self._mixed()]

    def _own_reasons(self) -> list[Reason]:
        if self._row.state == "PROCESSING":
            return [*self._cancelled(), *self._leased()]
        found = [
            *self._expired(),
            *self._paused(),
            *self._drained(),
            *self._not_due(),
            *self._no_subscriber(),
            *self._suspect(),
        ]
        found += self._behind()
        found += policy_reasons(self._facts, self._waiting())
        return found or [self._turn()]

    def _waiting(self) -> WaitingMessage:
        r = self._row
        return WaitingMessage(
            id=r.id,
            queue=r.queue,
            key=r.policy_key if r.policy_marks & HEADER_KEY else r.key,
            state=MessageState[r.state],
            attempts_count=r.attempts_count,
            deliveries_count=r.deliveries_count,
            next_attempt_at=r.next_attempt_at,
            expired=r.expires_at is not None and r.expires_at <= r.now,
            policy_marks=r.policy_marks,
            now=r.now,
        )

    def _at(self, moment: datetime) -> str:
        return moment_text(moment, self._row.now)

    def _worker(self, token: UUID | None) -> str | None:
        return next((s.worker for s in self._known if s.holds(token)), None)

    def _cancelled(self) -> list[Reason]:
        r = self._row
        if r.lease_token is None:
            return []
        table = self._dialect.tables.policy_state
        asked = cancels.of_leases(self._connection, table, [(r.id, r.lease_token)])
        if not asked:
            return []
        words = (
            f"it is to be {asked[r.id].text}; its holder is asked to end it, and it is discarded "
            "when its lease is over, unless its handler ends first"
        )
        return [Reason("cancel_requested", words)]

    def _leased(self) -> list[Reason]:
        r = self._row
        worker = self._worker(r.lease_token)
        until = r.lease_expires_at
        name = worker or "a subscriber that is not listed"
        if until is not None and until > r.now:
            since = "" if r.acquired_at is None else f" since {self._at(r.acquired_at)}"
            words = (
                f"{name} has it{since}, and handles it or is about to; its lease, renewed as long "
                f"as that process lives, runs until {self._at(until)}"
            )
            gone = worker is not None and all(s.worker != worker for s in self._alive)
            words += "; that process has not been heard of lately" if gone else ""
            return [Reason("processing", words, until=until, worker=worker)]
        if inside := self._in_transaction(worker):
            return [inside]
        ran_out = (
            "it has no lease" if until is None else f"the lease of {name} ran out {self._at(until)}"
        )
        words = f"{ran_out}: a subscriber of the queue gives it back, by its release_stuck_interval"
        return [
            Reason("lease_expired", words, worker=worker),
            *self._paused(),
            *self._no_subscriber(),
        ]

    def _in_transaction(self, worker: str | None) -> Reason | None:
        """Whether a transaction holds it: then nothing can renew its lease, nor give it back."""
        r = self._row
        if r.lease_expires_at is None:
            return None
        locked = locked_by_others(self._connection, self._dialect, [r.id])
        name = worker or "a subscriber that is not listed"
        over = f"its lease ran out {self._at(r.lease_expires_at)}"
        if locked:
            words = (
                f"{name} has it, and a transaction holds its row, as that of a handler with "
                f"transactional=True does: {over}, and can be neither renewed nor given back "
                "until that transaction ends"
            )
            return Reason("in_transaction", words, worker=worker)
        if locked is None and any(s.worker == worker and s.transactional for s in self._known):
            words = (
                f"{over}, but its handler may still run in a transaction of {name}, which this "
                "database does not show; if that has ended, a subscriber of the queue gives it back"
            )
            return Reason("in_transaction", words, worker=worker)
        return None

    def _expired(self) -> list[Reason]:
        at = self._row.expires_at
        if at is None or at > self._row.now:
            return []
        return [Reason("expired", f"it expired at {self._at(at)}: the next claim discards it")]

    def _paused(self) -> list[Reason]:
        found = []
        table = self._dialect.tables.policy_state
        statement = select_pauses(table).where(table.c.key == self._row.queue)
        for p in map(read_pause, self._connection.execute(statement)):
            end = "it is resumed" if p.until is None else self._at(p.until)
            why = "" if p.reason is None else f" ({p.reason})"
            words = f"{p.by} has paused the queue since {self._at(p.since)}, until {end}{why}"
            found.append(Reason("paused", words, until=p.until))
        if not self._claiming and (own := [s.worker for s in self._alive if s.paused]):
            # Those that an operator has drained are a reason of their own.
            few = any(s.drained for s in self._alive)
            who = "a" if few else "every"
            words = f"{who} live subscriber of the queue is paused in its own process: {_some(own)}"
            found.append(Reason("paused", words))
        return found

    def _drained(self) -> list[Reason]:
        drained = [s.worker for s in self._alive if s.drained]
        if not drained or self._claiming:
            return []
        words = (
            f"no live subscriber of the queue claims, as an operator has drained {_some(drained)}; "
            "`sqlbroker undrain` ends that"
        )
        return [Reason("drained", words, worker=drained[0])]

    def _mixed(self) -> list[Reason]:
        """Subscribers of its queue differ, so that what one promises may not hold."""
        ways = by_way(self._row.queue, self._alive)
        if len(ways) < 2:  # noqa: PLR2004 - one is none to differ from
            return []
        words = f"subscribers of the queue differ: {ways_text(ways)}; {MIXED}"
        return [Reason("mixed_subscribers", words)]

    def _not_due(self) -> list[Reason]:
        r = self._row
        at = r.next_attempt_at
        if at <= r.now:
            return []
        waiting = self._waiting()
        if shifted := standby(self._facts, waiting) or delay(self._facts, waiting):
            return shifted
        if r.state == "PENDING":
            return [Reason("delayed", f"it is not due before {self._at(at)}", until=at)]
        words = f"the next attempt is due at {self._at(at)}, after {r.attempts_count}"
        words += " attempt" if r.attempts_count == 1 else " attempts"
        words += error_text(r.last_error)
        return [Reason("retrying", words, until=at)]

    def _no_subscriber(self) -> list[Reason]:
        if self._alive:
            return []
        words = "no process that is alive subscribes to the queue"
        last = next((s for s in self._known if self._row.queue in s.queues), None)
        if last is None:
            return [Reason("no_live_subscriber", words)]
        words += (
            f"; {last.worker} did, and counted as alive until {self._at(last.lease_expires_at)}"
        )
        return [Reason("no_live_subscriber", words, worker=last.worker)]

    def _suspect(self) -> list[Reason]:
        lost = self._row.deliveries_count - self._row.attempts_count
        if lost < SUSPECT_AFTER:
            return []
        words = (
            f"{lost} of its deliveries ended without an outcome, so it may have killed its "
            "process: it runs alone, when a process holds nothing else"
        )
        return [Reason("suspect", words)]

    def _behind(self) -> list[Reason]:
        r = self._row
        expired = r.expires_at is not None and r.expires_at <= r.now
        if r.key is None or expired or not any(s.ordered for s in self._alive):
            return []
        c = self._table.c
        columns = c.id, c.state, c.next_attempt_at, c.lease_token, c.lease_expires_at
        live = or_(c.expires_at.is_(None), c.expires_at > clock())
        of_key = and_(c.queue == r.queue, c.key == r.key)
        first = select(*columns).where(of_key, c.id < r.id, live).order_by(c.id).limit(1)
        running = self._indexed(select(*columns), "leased")
        running = running.where(of_key, c.id != r.id, _LEASED).limit(1)
        for statement in (self._indexed(first, "key"), running):
            found = self._connection.execute(statement).first()
            if found is not None:
                return [self._behind_message(found)]
        return []

    def _behind_message(self, other: Any) -> Reason:
        """Name `other`, a row of the message table, as the reason."""
        worker = None
        until = None
        if other.state == "PROCESSING":
            worker = self._worker(other.lease_token)
            until = other.lease_expires_at
            lasting = until is not None and until > self._row.now
            words = f"{worker or 'a subscriber that is not listed'} has it"
            if until is not None:
                words += f", by a lease {'until' if lasting else 'that ran out'} {self._at(until)}"
        elif other.next_attempt_at > self._row.now:
            until = other.next_attempt_at
            what = (
                "its next attempt is due" if other.state == "RETRYABLE" else "it is not due before"
            )
            words = f"{what} {self._at(until)}"
        else:
            words = "it is due"
        words = f"message {other.id} of the same key comes first, as {ORDERED_WAY} wants: {words}"
        return Reason(
            "behind_earlier_message",
            words,
            until=until,
            message_id=other.id,
            worker=worker,
            policy=ORDERED_WAY,
        )

    def _turn(self) -> Reason:
        ahead = self._ahead()
        workers = sum(s.max_workers for s in self._claiming)
        busy = self._count(
            self._indexed(select(literal_column("1")), "leased").where(self._of_queue, _LEASED)
        )
        who = f"{workers} workers of {len(self._claiming)} subscribers take from the queue"
        if not ahead and busy < workers:
            words = (
                f"nothing stands in its way, it is claimed next: {who}, {busy} messages are leased"
            )
            return Reason("ready", words)
        words = f"{_up_to(ahead)} due messages come first and {_up_to(busy)} are leased: {who}"
        return Reason("waiting_for_capacity", words)

    @property
    def _of_queue(self) -> Any:
        return self._table.c.queue == self._row.queue

    def _ahead(self) -> int:
        """Due messages of the queue that are claimed before this one, at most `MOST_COUNTED`."""
        r = self._row
        c = self._table.c
        own = or_(
            c.next_attempt_at < r.next_attempt_at,
            and_(c.next_attempt_at == r.next_attempt_at, c.id < r.id),
        )
        higher = [
            pair.priority
            for pair in self._dialect.ready_pairs(self._connection, [r.queue])
            if pair.priority > r.priority and pair.due_in <= 0
        ]
        count = 0
        for priority, before in [
            *((p, c.next_attempt_at <= clock()) for p in higher),
            (r.priority, own),
        ]:
            if count < MOST_COUNTED:
                due = self._indexed(select(literal_column("1")), "ready").where(
                    self._claimable, self._of_queue
                )
                due = due.where(c.priority == priority, before)
                count += self._count(due, MOST_COUNTED - count)
        return count

    @property
    def _claimable(self) -> Any:
        return _CLAIMABLE_MYSQL if self._connection.dialect.name in MYSQL else _CLAIMABLE

    def _count(self, rows: Select[Any], most: int = MOST_COUNTED) -> int:
        found = rows.select_from(self._table).limit(most).subquery()
        return int(self._connection.execute(select(func.count()).select_from(found)).scalar_one())

    def _indexed(self, statement: Select[Any], index: str) -> Select[Any]:
        """Force this index, on databases that allow it."""
        return self._dialect.use_index(statement, self._table, f"{index}_index", on_sqlite=True)


def _up_to(count: int) -> str:
    return str(count) if count < MOST_COUNTED else f"{MOST_COUNTED} or more"


def _some(names: list[str], most: int = 5) -> str:
    rest = len(names) - most
    return ", ".join(names[:most]) + (f" and {rest} more" if rest > 0 else "")

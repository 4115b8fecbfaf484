"""Explain why a live message has not reached its handler."""

from collections.abc import Sequence
from datetime import datetime
from typing import Any

from sqlalchemy import Select, and_, func, literal_column, or_, select, text

from faststream_sqlbroker.core.policies.flags import HEADER_KEY
from faststream_sqlbroker.core.states import MessageState
from faststream_sqlbroker.core.status import (
    MIXED_HINT,
    ORDERED_MODE,
    LiveSubscriber,
    Reason,
    WaitingMessage,
    find_holder,
    format_error,
    format_modes,
    format_timestamp,
    group_by_mode,
)
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.core.verification import MEANINGS, NO_LEASE
from faststream_sqlbroker.database.explain.policy_waits import (
    PolicyDetails,
    explain_delay,
    explain_policies,
    explain_standby,
)
from faststream_sqlbroker.database.parts import cancel_requests
from faststream_sqlbroker.database.parts.live_subscribers import read_pause, select_pauses
from faststream_sqlbroker.database.parts.row_locks import find_locked
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
"""Columns that are read of a message: not its body, which may be large."""
MAX_COUNTED = 1_000
"""Maximum messages that are counted. The explanation then says "1000 or more"."""

# Literals, because a generic plan cannot use a partial index if its condition is a parameter.
_CLAIMABLE = text("state IN ('PENDING', 'RETRYABLE')")
_CLAIMABLE_MYSQL = literal_column("claimable") == 1
_LEASED = text("state = 'PROCESSING' AND lease_expires_at IS NOT NULL")


class LiveMessage:
    """A message of the message table, with the reasons for the wait."""

    def __init__(
        self, details: PolicyDetails, subscribers: Sequence[LiveSubscriber], row: Any
    ) -> None:
        """Explain `row`: `COLUMNS` of the message, and the database's time as `now`.

        `details` are those of its queue; `subscribers` are all subscribers, including crashed ones.
        """
        self._details = details
        self._connection = details.connection
        self._dialect = details.dialect
        self._row = row
        self._table = details.dialect.tables.message
        self._subscribers = subscribers
        self._live_subscribers = details.subscribers
        self._claiming = [subscriber for subscriber in self._live_subscribers if subscriber.claims]

    def list_reasons(self) -> list[Reason]:
        """Return the reasons for the wait; without delays, the messages that come first."""
        return [*self._list_own_reasons(), *self._explain_mixed()]

    def _list_own_reasons(self) -> list[Reason]:
        """Return the reasons that concern this message, in the order of display.

        A leased message has only reasons about its lease. Without any reason, it waits for a
        worker.
        """
        if self._row.state == "PROCESSING":
            return [*self._explain_cancel(), *self._explain_lease()]
        reasons = [
            *self._explain_expiry(),
            *self._explain_pauses(),
            *self._explain_drain(),
            *self._explain_due_time(),
            *self._explain_no_subscriber(),
            *self._explain_suspect(),
        ]
        reasons += self._explain_order()
        reasons += explain_policies(self._details, self._to_waiting())
        return reasons or [self._explain_capacity()]

    def _to_waiting(self) -> WaitingMessage:
        """Convert the row to the form that the functions for policies read."""
        row = self._row
        return WaitingMessage(
            id=row.id,
            queue=row.queue,
            key=row.policy_key if row.policy_marks & HEADER_KEY else row.key,
            state=MessageState[row.state],
            attempts_count=row.attempts_count,
            deliveries_count=row.deliveries_count,
            next_attempt_at=row.next_attempt_at,
            expired=row.expires_at is not None and row.expires_at <= row.now,
            policy_marks=row.policy_marks,
            now=row.now,
        )

    def _format_time(self, timestamp: datetime) -> str:
        return format_timestamp(timestamp, self._row.now)

    def _explain_cancel(self) -> list[Reason]:
        """Explain that an operator has requested to cancel the message under this lease.

        The request is stored until the worker has ended the handler, or the lease expires.
        """
        row = self._row
        if row.lease_token is None:
            return []
        table = self._dialect.tables.policy_state
        requests = cancel_requests.find_requests(
            self._connection, table, [(row.id, row.lease_token)]
        )
        if not requests:
            return []
        description = (
            f"it is being {requests[row.id].text}; its worker is asked to cancel the handler, and "
            "the message is discarded when its lease expires, unless the handler ends first"
        )
        return [Reason("cancel_requested", description)]

    def _explain_lease(self) -> list[Reason]:
        """Explain a PROCESSING message: a worker holds it, or its lease has expired.

        An expired lease is released by any subscriber of the queue, so its reasons include what
        keeps the subscribers from that: a transaction that locks the row, a pause, or that there
        are none. Nothing releases a message without a lease, which only another program can write.
        """
        row = self._row
        worker = find_holder(self._subscribers, row.lease_token)
        until = row.lease_expires_at
        name = worker or "an unlisted subscriber"
        if until is None:
            description = (
                f"{MEANINGS[NO_LEASE]}; set its state to PENDING, and its lease_token and "
                "lease_expires_at to NULL"
            )
            return [Reason(NO_LEASE, description)]
        if until > row.now:
            since = (
                "" if row.acquired_at is None else f" since {self._format_time(row.acquired_at)}"
            )
            description = (
                f"{name} holds it{since}, and its handler runs or is about to start; its lease, "
                f"renewed while that process lives, expires at {self._format_time(until)}"
            )
            is_gone = worker is not None and all(
                subscriber.worker != worker for subscriber in self._live_subscribers
            )
            description += "; that process has sent no heartbeat recently" if is_gone else ""
            return [Reason("processing", description, until=until, worker=worker)]
        if transaction_reason := self._explain_transaction(worker):
            return [transaction_reason]
        description = (
            f"the lease of {name} expired at {self._format_time(until)}; a subscriber of the "
            "queue releases it within its release_stuck_interval"
        )
        return [
            Reason("lease_expired", description, worker=worker),
            *self._explain_pauses(),
            *self._explain_no_subscriber(),
        ]

    def _explain_transaction(self, worker: str | None) -> Reason | None:
        """Return a reason if a transaction locks the row, or possibly does.

        Then nothing can renew or release the lease, so an expired lease does not mean that the
        handler is gone: with transactional=True, it runs in that transaction.
        """
        row = self._row
        locked = find_locked(self._connection, self._dialect, [row.id])
        name = worker or "an unlisted subscriber"
        expiry = f"its lease expired at {self._format_time(row.lease_expires_at)}"
        if locked:
            description = (
                f"{name} holds it, and a transaction has locked its row, as a handler with "
                f"transactional=True does; {expiry} and can be neither renewed nor released "
                "until that transaction ends"
            )
            return Reason("in_transaction", description, worker=worker)
        if locked is None and any(
            subscriber.worker == worker and subscriber.transactional
            for subscriber in self._subscribers
        ):
            description = (
                f"{expiry}, but its handler may still run in a transaction of {name}, which this "
                "database does not show; if that has ended, a subscriber of the queue releases it"
            )
            return Reason("in_transaction", description, worker=worker)
        return None

    def _explain_expiry(self) -> list[Reason]:
        """Explain that the message has expired."""
        expires_at = self._row.expires_at
        if expires_at is None or expires_at > self._row.now:
            return []
        return [
            Reason(
                "expired",
                f"it expired at {self._format_time(expires_at)}; the next claim discards it",
            )
        ]

    def _explain_pauses(self) -> list[Reason]:
        """Explain a pause of the queue, or of all its live subscribers in their own processes."""
        reasons = []
        table = self._dialect.tables.policy_state
        statement = select_pauses(table).where(table.c.key == self._row.queue)
        for pause in map(read_pause, self._connection.execute(statement)):
            end = "it is resumed" if pause.until is None else self._format_time(pause.until)
            reason = "" if pause.reason is None else f" ({pause.reason})"
            since = self._format_time(pause.since)
            description = f"{pause.by} paused the queue at {since}, until {end}{reason}"
            reasons.append(Reason("paused", description, until=pause.until))
        if not self._claiming and (
            paused_workers := [
                subscriber.worker for subscriber in self._live_subscribers if subscriber.paused
            ]
        ):
            # Drained subscribers are reported as a separate reason.
            has_drained = any(subscriber.drained for subscriber in self._live_subscribers)
            quantifier = "a" if has_drained else "every"
            description = (
                f"{quantifier} live subscriber of the queue is paused in its own process: "
                f"{_format_names(paused_workers)}"
            )
            reasons.append(Reason("paused", description))
        return reasons

    def _explain_drain(self) -> list[Reason]:
        """Explain that no live subscriber claims because operators have drained some.

        A drained subscriber finishes its messages and claims no more.
        """
        workers = [subscriber.worker for subscriber in self._live_subscribers if subscriber.drained]
        if not workers or self._claiming:
            return []
        description = (
            f"an operator has drained {_format_names(workers)}, and no other live subscriber "
            "claims from the queue; end the drain with `sqlbroker undrain`"
        )
        return [Reason("drained", description, worker=workers[0])]

    def _explain_mixed(self) -> list[Reason]:
        """Return a reason if subscribers of the queue differ, so that promises may not hold.

        A subscriber without ordered=True, for example, would not keep the order that others
        promise.
        """
        modes = group_by_mode(self._row.queue, self._live_subscribers)
        if len(modes) < 2:  # noqa: PLR2004 - one is none to differ from
            return []
        description = f"subscribers of the queue differ: {format_modes(modes)}; {MIXED_HINT}"
        return [Reason("mixed_subscribers", description)]

    def _explain_due_time(self) -> list[Reason]:
        """Explain a later due time, set by a policy, a publish or a retry."""
        row = self._row
        due_at = row.next_attempt_at
        if due_at <= row.now:
            return []
        waiting = self._to_waiting()
        if shifted := explain_standby(self._details, waiting) or explain_delay(
            self._details, waiting
        ):
            return shifted
        if row.state == "PENDING":
            return [
                Reason("delayed", f"it is not due before {self._format_time(due_at)}", until=due_at)
            ]
        description = (
            f"the next attempt is due at {self._format_time(due_at)}, after {row.attempts_count}"
        )
        description += " attempt" if row.attempts_count == 1 else " attempts"
        description += format_error(row.last_error)
        return [Reason("retrying", description, until=due_at)]

    def _explain_no_subscriber(self) -> list[Reason]:
        """Explain that the queue has no live subscriber, and name the last."""
        if self._live_subscribers:
            return []
        description = "the queue has no live subscriber"
        last = next(
            (
                subscriber
                for subscriber in self._subscribers
                if self._row.queue in subscriber.queues
            ),
            None,
        )
        if last is None:
            return [Reason("no_live_subscriber", description)]
        alive_until = self._format_time(last.lease_expires_at)
        description += f"; the last one, {last.worker}, counted as alive until {alive_until}"
        return [Reason("no_live_subscriber", description, worker=last.worker)]

    def _explain_suspect(self) -> list[Reason]:
        """Explain that the message runs alone, because it may have killed its process.

        By its deliveries that ended without an attempt, and the limit of a live subscriber. A
        process must finish its other messages first, so such a message waits longer.
        """
        lost_deliveries = self._row.deliveries_count - self._row.attempts_count
        limits = {subscriber.max_deliveries for subscriber in self._live_subscribers} or {None}
        rules = map(SuspectRule.from_max_deliveries, limits)
        if not any(rule is not None and rule.classify(lost_deliveries) for rule in rules):
            return []
        description = (
            f"{lost_deliveries} of its deliveries ended without an outcome, so it may have killed "
            "its process; it runs alone, in a process that holds no other message"
        )
        return [Reason("suspect", description)]

    def _explain_order(self) -> list[Reason]:
        """Explain that an earlier or a leased message of the key goes first under ordered=True.

        An expired message waits for no other: the next claim discards it.
        """
        row = self._row
        expired = row.expires_at is not None and row.expires_at <= row.now
        if (
            row.key is None
            or expired
            or not any(subscriber.ordered for subscriber in self._live_subscribers)
        ):
            return []
        c = self._table.c
        columns = c.id, c.state, c.next_attempt_at, c.lease_token, c.lease_expires_at
        unexpired = or_(c.expires_at.is_(None), c.expires_at > clock())
        of_key = and_(c.queue == row.queue, c.key == row.key)
        first_of_key = (
            select(*columns).where(of_key, c.id < row.id, unexpired).order_by(c.id).limit(1)
        )
        leased_of_key = self._use_index(select(*columns), "leased")
        leased_of_key = leased_of_key.where(of_key, c.id != row.id, _LEASED).limit(1)
        for statement in (self._use_index(first_of_key, "key"), leased_of_key):
            blocker = self._connection.execute(statement).first()
            if blocker is not None:
                return [self._build_order_reason(blocker)]
        return []

    def _build_order_reason(self, other: Any) -> Reason:
        """Build the reason that names `other`, the message that goes first under ordered=True.

        `other` is a row of the message table: it is leased, waits for its due time, or is due
        itself.
        """
        worker = None
        until = None
        if other.state == "PROCESSING":
            worker = find_holder(self._subscribers, other.lease_token)
            until = other.lease_expires_at
            lasting = until is not None and until > self._row.now
            description = f"{worker or 'an unlisted subscriber'} holds it"
            if until is not None:
                state = "until" if lasting else "that expired at"
                description += f", with a lease {state} {self._format_time(until)}"
        elif other.next_attempt_at > self._row.now:
            until = other.next_attempt_at
            event = (
                "its next attempt is due at"
                if other.state == "RETRYABLE"
                else "it is not due before"
            )
            description = f"{event} {self._format_time(until)}"
        else:
            description = "it is due"
        description = (
            f"message {other.id} of the same key comes first under {ORDERED_MODE}: {description}"
        )
        return Reason(
            "behind_earlier_message",
            description,
            until=until,
            message_id=other.id,
            worker=worker,
            policy=ORDERED_MODE,
        )

    def _explain_capacity(self) -> Reason:
        """Explain that only messages before this message, or busy workers, keep it waiting.

        Called if nothing else explains the wait.
        """
        ahead = self._count_ahead()
        workers = sum(subscriber.max_workers for subscriber in self._claiming)
        busy = self._count_rows(
            self._use_index(select(literal_column("1")), "leased").where(
                self._queue_condition, _LEASED
            )
        )
        worker_info = f"{workers} workers of {len(self._claiming)} subscribers claim from the queue"
        if not ahead and busy < workers:
            description = f"it is claimed next: {worker_info}, and {busy} messages are leased"
            return Reason("ready", description)
        description = (
            f"{_format_count(ahead)} due messages come first and {_format_count(busy)} are leased: "
            f"{worker_info}"
        )
        return Reason("waiting_for_capacity", description)

    @property
    def _queue_condition(self) -> Any:
        return self._table.c.queue == self._row.queue

    def _count_ahead(self) -> int:
        """Count the due messages that are claimed before this message, up to `MAX_COUNTED`.

        These are all due messages of higher priorities, and the earlier messages of its own.
        """
        row = self._row
        c = self._table.c
        same_priority = or_(
            c.next_attempt_at < row.next_attempt_at,
            and_(c.next_attempt_at == row.next_attempt_at, c.id < row.id),
        )
        higher = [
            pair.priority
            for pair in self._dialect.find_ready_pairs(self._connection, [row.queue])
            if pair.priority > row.priority and pair.due_in <= 0
        ]
        count = 0
        for priority, condition in [
            *((higher_priority, c.next_attempt_at <= clock()) for higher_priority in higher),
            (row.priority, same_priority),
        ]:
            if count < MAX_COUNTED:
                due = self._use_index(select(literal_column("1")), "ready").where(
                    self._claimable, self._queue_condition
                )
                due = due.where(c.priority == priority, condition)
                count += self._count_rows(due, MAX_COUNTED - count)
        return count

    @property
    def _claimable(self) -> Any:
        return _CLAIMABLE_MYSQL if self._connection.dialect.name in MYSQL else _CLAIMABLE

    def _count_rows(self, rows: Select[Any], maximum: int = MAX_COUNTED) -> int:
        """Count the rows up to `maximum`: the queue may be large."""
        subquery = rows.select_from(self._table).limit(maximum).subquery()
        return int(
            self._connection.execute(select(func.count()).select_from(subquery)).scalar_one()
        )

    def _use_index(self, statement: Select[Any], index: str) -> Select[Any]:
        """Force this index on databases that allow that.

        With unlucky statistics, a database would read all messages of a queue.
        """
        return self._dialect.add_index_hint(
            statement, self._table, f"{index}_index", on_sqlite=True
        )


def _format_count(count: int) -> str:
    return str(count) if count < MAX_COUNTED else f"{MAX_COUNTED} or more"


def _format_names(names: list[str], maximum: int = 5) -> str:
    remaining = len(names) - maximum
    return ", ".join(names[:maximum]) + (f" and {remaining} more" if remaining > 0 else "")

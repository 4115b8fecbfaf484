"""Statements of a claim under policies: arrivals, due times and states by key, all for lists."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from sqlalchemy import Connection

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.outcome import Discard
from faststream_sqlbroker.core.policies.flags import BURST, HELD_BURST, PERSISTENT_MASK
from faststream_sqlbroker.core.policies.standby import STANDBY
from faststream_sqlbroker.core.suspects import SuspectRule
from faststream_sqlbroker.core.times import from_microseconds
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.policies.slot_use import ReadTime

DecisionListener = Callable[[str, Mapping[int, str], Mapping[int, Any]], None]
"""Called with a queue, descriptions of the decisions by id, and the stored headers by id."""
_MAX_TIME = 10**16
"""In the year 2286: later than any scan, and still a valid date with `STANDBY` added."""
SCAN_SIZE = 5_000
"""Messages that one statement reads, shifts or discards."""


@dataclass(slots=True)
class Arrival:
    """A due message that a policy has not seen yet. Times are microseconds since 1970."""

    id: int
    key: str | None
    due: int
    created: int
    """Never later than the database's time of the scan."""
    expired: bool
    is_delivered: bool
    """True if the message was delivered before, or admitted by a Throttle."""
    flags: int


def _to_arrival(r: Sequence[Any]) -> Arrival:
    return Arrival(r[0], as_key(r[1]), int(r[2]), int(r[3]), bool(r[4]), bool(r[5]), int(r[6]))


class QueuedMessage(NamedTuple):
    """A message in a queue. Times are microseconds since 1970."""

    state: str
    due: int
    acquired: int | None
    key: str | None
    flags: int
    lost_deliveries: int
    """Deliveries that ended without an attempt; valid while the message is not leased."""
    expired: bool


class StandbyMessage(NamedTuple):
    """A message that stands by for another of the key (times in microseconds since 1970)."""

    id: int
    key: str | None
    due: int
    """When the message is checked again."""
    expired: bool
    created: int


class DelayedMessage(NamedTuple):
    """A message that becomes due later."""

    id: int
    due: int
    flags: int


def read_now(dialect: Dialect, connection: Connection, clock: Clock) -> ReadTime:
    """Read the database's clock, and the process's clock before and after.

    The two readings bound the moment at which the database read its clock, so that its times can be
    converted to times of this process.
    """
    asked_at = clock.monotonic()
    now = int(connection.execute(dialect.sql["policy_now"]).scalar_one())
    return ReadTime(now, asked_at, clock.monotonic())


@dataclass(slots=True)
class PolicyRows:
    """The policy statements for a queue in a transaction, called with lists of any length."""

    dialect: Dialect
    connection: Connection
    """Holds the lock of `queue` if anything is written."""
    queue: str
    by_header: bool = False
    """True if the keys were read from a header."""
    on_decision: DecisionListener | None = None
    """Called with decisions about messages without a lease, before they are written."""

    def _run(self, name: str, **binds: Any) -> Any:
        """Execute the statement `name`, in its variant for keys of a header if those are used."""
        statements = self.dialect.sql
        statement = statements.get_by_header(name) if self.by_header else statements[name]
        return self.connection.execute(statement, binds)

    def _run_for_queue(self, name: str, **binds: Any) -> Any:
        return self._run(name, queue=self.queue, **binds)

    def list_arrivals(
        self, priority: int, *, required_flags: int, missing_flag: int, since: int
    ) -> list[Arrival]:
        """Return up to `SCAN_SIZE` due messages that miss a flag, by due time and id.

        Args:
            priority: Only messages of this priority.
            required_flags: Flags of the earlier policies, which the messages must have.
            missing_flag: The flag that they must not have.
            since: Skip messages that were due before.
        """
        rows = self._run_for_queue(
            "policy_arrivals",
            priority=priority,
            before=required_flags,
            own=missing_flag,
            since=since,
            size=SCAN_SIZE,
        )
        return [_to_arrival(row) for row in rows]

    def list_arrivals_by_keys(
        self, keys: Sequence[str], *, required_flags: int, missing_flag: int
    ) -> tuple[list[Arrival], set[str]]:
        """Return the due messages of `keys` that miss a flag, and the keys that were read fully.

        Reads all priorities, up to `SCAN_SIZE` messages in all, key after key. Of the last key that
        was read before the limit, more messages may exist.
        """
        key_rows = [{"n": n, "k": key} for n, key in enumerate(keys)]
        rows = self._run_for_queue(
            "policy_arrivals_of",
            rows=json.dumps(key_rows),
            before=required_flags,
            own=missing_flag,
            size=SCAN_SIZE,
        ).all()
        # The last key that was read may have more.
        complete_count = len(keys) if len(rows) < SCAN_SIZE else int(rows[-1][7])
        return [_to_arrival(row) for row in rows], set(keys[:complete_count])

    def list_delayed(self, priority: int, *, now: int, size: int) -> list[DelayedMessage]:
        """Return up to `size` waiting messages due later than `now`, by due time and id."""
        rows = self._run_for_queue("policy_waits_later", priority=priority, now=now, size=size)
        # SQLite may have values other than numbers here, until the next claim corrects or rejects
        # them.
        return [DelayedMessage(row[0], row[2], row[5]) for row in rows if isinstance(row[2], int)]

    def find_next_standby(self, priority: int) -> list[int]:
        """Return when the first standby message is to be checked, or an empty list.

        A standby message stays in the queue while another message of its key is to be delivered in
        its place. Checks find out whether that message is gone.
        """
        return [message.due for message in self.list_due_standby(priority, now=_MAX_TIME, size=1)]

    def list_due_standby(self, priority: int, *, now: int, size: int) -> list[StandbyMessage]:
        """Return up to `size` standby messages to check by `now`, by that time and id.

        A standby message waits in case another message of its key cannot be delivered. Its stored
        due time is `STANDBY` later than its check, so that no claim finds it.
        """
        rows = self._run_for_queue(
            "policy_standby_due", priority=priority, now=STANDBY + now, size=size
        )
        return _to_standby_messages(rows)

    def list_standby_by_keys(
        self, ranges: Mapping[str, tuple[int, int]], *, last: bool = False
    ) -> tuple[list[StandbyMessage], set[str]]:
        """Return up to `SCAN_SIZE` standby messages by key, and the keys that were read completely.

        A standby message takes the place of another message of its key if that cannot be delivered.
        Reads, key by key, the messages whose ids lie in the range of their key; of each key the
        oldest first, or the latest first with `last`.
        """
        keys = list(ranges)
        range_rows = [
            {"n": n, "k": key, "low": low, "high": high}
            for n, (key, (low, high)) in enumerate(ranges.items())
        ]
        name = "policy_standby_last" if last else "policy_standby_first"
        rows = self._run_for_queue(name, rows=json.dumps(range_rows), size=SCAN_SIZE).all()
        # The last key that was read may have more.
        complete_count = len(keys) if len(rows) < SCAN_SIZE else int(rows[-1].n)
        # MySQL treats keys as equal that differ only in trailing spaces.
        messages = _to_standby_messages(row for row in rows if as_key(row[1]) == keys[row.n])
        return messages, set(keys[:complete_count])

    def set_standby(
        self, due: Mapping[int, int], keys: Mapping[int, str | None] = MappingProxyType({})
    ) -> None:
        """Put messages on standby until the checks at `due`; `keys` as for `discard`.

        Such a message is stored with a due time `STANDBY` later, so that no claim finds it. Its
        flags about a single attempt, such as `SLOT`, are cleared; `ADMITTED` stays.
        """
        shifted_due = {message: STANDBY + timestamp for message, timestamp in due.items()}
        self.shift(shifted_due, BURST | HELD_BURST, PERSISTENT_MASK | HELD_BURST, keys=keys)

    def read_headers(self, ids: Sequence[int]) -> dict[int, Any]:
        """Return the stored headers of `ids`."""
        rows = json.dumps([{"id": message} for message in sorted(ids)])
        header_rows = self._run_for_queue("policy_headers", rows=rows)
        return {row.id: row.headers for row in header_rows}

    def set_keys(self, keys: Mapping[int, str | None]) -> None:
        """Store keys read from headers, which policies use for the messages from now on."""
        rows = json.dumps([{"id": message, "k": key} for message, key in sorted(keys.items())])
        self._run_for_queue("policy_give_keys", rows=rows)

    def shift(
        self,
        due: Mapping[int, int | None],
        flags: int,
        retained_flags: int = ~0,
        *,
        keys: Mapping[int, str | None] = MappingProxyType({}),
    ) -> None:
        """Set `flags` and new due times, and clear all flags except `retained_flags`.

        The flags (the column `policy_marks`) say which policies have seen a message and which of
        them set its due time. A due time of None leaves the due time unchanged; `keys` as for
        `discard`.
        """
        if due:
            self._report_decisions(
                {message: _describe_shift(timestamp) for message, timestamp in due.items()}
            )
            shift_rows = [
                {"id": message, "due": timestamp, "k": keys.get(message)}
                for message, timestamp in due.items()
            ]
            rows = json.dumps(shift_rows)
            self._run_for_queue("policy_shift", rows=rows, mark=flags, kept=retained_flags)

    def discard(
        self,
        ends: Mapping[int, Discard],
        *,
        keep: bool,
        keys: Mapping[int, str | None] = MappingProxyType({}),
    ) -> None:
        """End messages without a lease as DISCARDED, and archive them if `keep`.

        Messages in `keys` are discarded only if they still have that key. Some databases do it in
        one statement; the others lock the rows, copy them to the archive and delete them.
        """
        if not ends:
            return
        self._report_decisions({message: f"ended, {end.reason}" for message, end in ends.items()})
        rows = _format_discards(ends, keys)
        keeps_copy = keep and self.dialect.has_archive
        if keeps_copy and self.dialect.sql.has("policy_discard"):
            self._run_for_queue("policy_discard", rows=rows)
            return
        if self.dialect.sql.has("policy_lock"):
            # Lock first, then copy and delete exactly the locked rows: a row that another
            # transaction claims in between must not be copied.
            locked = set(self._run_for_queue("policy_lock", rows=rows).scalars())
            rows = _format_discards(
                {message: end for message, end in ends.items() if message in locked}
            )
        if keeps_copy:
            self._run_for_queue("policy_archive", rows=rows)
        self._run_for_queue("policy_drop", rows=rows)

    def _report_decisions(self, decisions: Mapping[int, str]) -> None:
        """Pass decisions to the debug log, with the headers that request the log."""
        if self.on_decision is not None:
            stored = self.read_headers(list(decisions))
            self.on_decision(self.queue, decisions, stored)

    def load_states(self, scope: str, keys: Iterable[str]) -> dict[str, Any]:
        """Return the stored state of each of `keys` in `scope`.

        The policy state is a small table of data that outlives a message, such as the last starts
        under a throttle. A scope is the group of its rows that belong to one purpose.
        """
        requested = sorted(set(keys))
        if not requested:
            return {}
        rows = self._run(
            "policy_states", scope=scope, rows=json.dumps([{"k": key} for key in requested])
        ).all()
        states = {as_key(key): None if info is None else json.loads(info) for key, info in rows}
        return {key: info for key, info in states.items() if key is not None}

    def save_states(
        self,
        scope: str,
        states: Mapping[str, tuple[Any, int]],
        due: Mapping[str, int | None] | None = None,
    ) -> None:
        """Store the state of each key and the time after which the state may be deleted.

        `due` has the time at which to check a key, by which `find_next_due` and a selection by key
        find it; other keys have no such time.
        """
        if states:
            due = due or {}
            rows = json.dumps(
                [
                    {
                        "k": key,
                        "info": json.dumps(info),
                        "expires": expires,
                        "due": due.get(key),
                    }
                    for key, (info, expires) in sorted(states.items())
                ]
            )
            self._run("policy_keep", scope=scope, rows=rows)

    def find_next_due(self, scope: str) -> int | None:
        """Return when the next key of `scope` is to be checked, later than now."""
        at = self._run("policy_next_due", scope=scope).scalar_one()
        return None if at is None else int(at)

    def mark_keys_due(self, scope: str) -> None:
        """Make the keys of `scope` that are to be checked later due now. Called once by each
        process for each queue: the stored times may have been computed from another rate.
        """
        self._run("policy_look_anew", scope=scope)

    def count_leases(self, queue: str, maximum: int) -> int:
        """Count the leases of `queue`, up to `maximum`.

        A greater number would not change the decision, and counting takes time.
        """
        return int(self._run("policy_running", queue=queue, size=maximum).scalar_one())

    def load_messages(self, ids: Iterable[int]) -> dict[int, QueuedMessage]:
        """Return the messages of `ids` that are still in the queue.

        A message that has ended or moved since is missing in the result.
        """
        requested = sorted(set(ids))
        if not requested:
            return {}
        rows = self._run_for_queue(
            "policy_live", rows=json.dumps([{"id": message} for message in requested])
        )
        return {
            row[0]: QueuedMessage(
                row[1],
                int(row[2]),
                None if row[3] is None else int(row[3]),
                as_key(row[4]),
                row[5],
                row[6],
                bool(row[7]),
            )
            for row in rows
        }

    def list_due(
        self,
        priority: int,
        *,
        required_flags: int,
        now: int,
        size: int,
        excluded: SuspectRule | None,
        only: int | None,
    ) -> list[tuple[int, str | None, int]]:
        """Return id, key and due time of up to `size` messages that were due by `now`.

        Only messages with `required_flags`: the policies have seen them. `now` is the time of the
        claim's scan, not the current time: a burst that has ended since may lack messages that
        arrived after the scan and before its end. `excluded` leaves out suspects, which may have
        killed their process; `only` restricts the result to one message.
        """
        binds: dict[str, Any] = {
            "priority": priority,
            "before": required_flags,
            "now": now,
            "size": size,
        }
        suffix = ""
        if only is not None:
            suffix = "_one"
            binds["only"] = only
        elif excluded is not None:
            suffix = "_others"
            binds |= excluded.binds
        rows = self._run_for_queue(f"policy_due{suffix}", **binds)
        return [(row[0], as_key(row[1]), int(row[2])) for row in rows]


def _to_standby_messages(rows: Iterable[Sequence[Any]]) -> list[StandbyMessage]:
    """Convert rows of standby messages; `due` becomes the time of the next check.

    A standby message is stored with a due time `STANDBY` later, so that no claim finds it.
    """
    return [
        StandbyMessage(row[0], as_key(row[1]), int(row[2]) - STANDBY, bool(row[3]), int(row[4]))
        for row in rows
    ]


def _describe_shift(due: int | None) -> str:
    """Describe a new due time for the debug log.

    None leaves it unchanged: the policy has accepted the message. A time of `STANDBY` or later is
    how a standby message is stored.
    """
    if due is not None and due >= STANDBY:
        return "stands by for another message of its key"
    return "accepted" if due is None else f"due at {from_microseconds(due).isoformat()}"


def _format_discards(
    ends: Mapping[int, Discard], keys: Mapping[int, str | None] = MappingProxyType({})
) -> str:
    """Return `ends` as the JSON array that the statements bind; `keys` as for `discard`.

    Each entry has the reason, the message that superseded this message, and the key that the
    message must still have.
    """
    return json.dumps(
        [
            {
                "id": message,
                "reason": end.reason,
                "related_id": end.related_id,
                "k": keys.get(message),
            }
            for message, end in sorted(ends.items())
        ]
    )


def as_key(value: Any) -> str | None:
    """Return a key as text, or None for bytes (SQLite) that are no valid text.

    No broker has written such bytes, nor a NUL: SQLite's JSON functions end a text there.
    """
    if value is None or isinstance(value, str):
        return value
    try:
        text = bytes(value).decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text

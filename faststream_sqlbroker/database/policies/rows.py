"""Reads and writes of claims under policies: arrivals, due times, states by key. All in lists."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from sqlalchemy import Connection

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.core.outcome import Discard
from faststream_sqlbroker.core.policies.flags import BURST, HELD_BURST, KEPT
from faststream_sqlbroker.core.policies.standby import STANDBY
from faststream_sqlbroker.core.suspects import Suspicion
from faststream_sqlbroker.core.times import from_microseconds
from faststream_sqlbroker.database.dialect import Dialect
from faststream_sqlbroker.database.policies.slot_use import ReadTime

Decided = Callable[[str, Mapping[int, str], Mapping[int, Any]], None]
"""Called with a queue, texts by id, and the headers as they are stored, by id."""
_ANY_TIME = 10**16
"""In the year 2286: later than any look, and such that with `STANDBY` it is in the calendar."""
SCAN = 5_000
"""Messages that one statement looks at, shifts or discards."""


@dataclass(slots=True)
class Arrival:
    """A due message that a policy has not seen yet. Times are microseconds since 1970."""

    id: int
    key: str | None
    due: int
    created: int
    """Never later than the database's time of the look."""
    expired: bool
    delivered: bool
    """Whether it was delivered before, or let in by a Throttle."""
    marks: int


def _arrival(r: Sequence[Any]) -> Arrival:
    return Arrival(r[0], as_key(r[1]), int(r[2]), int(r[3]), bool(r[4]), bool(r[5]), int(r[6]))


class Live(NamedTuple):
    """A message that is in its queue. Times are microseconds since 1970."""

    state: str
    due: int
    acquired: int | None
    key: str | None
    marks: int
    lost: int
    """Deliveries that ended without an attempt, while it is not leased."""
    expired: bool


class Standing(NamedTuple):
    """A message that stands by. Times are microseconds since 1970."""

    id: int
    key: str | None
    due: int
    """When it is looked at again."""
    expired: bool
    created: int


class Later(NamedTuple):
    """A message that is due later."""

    id: int
    due: int
    marks: int


def read_now(dialect: Dialect, connection: Connection, clock: Clock) -> ReadTime:
    """The database's clock, and when the process read that clock."""
    asked = clock.monotonic()
    now = int(connection.execute(dialect.sql["policy_now"]).scalar_one())
    return ReadTime(now, asked, clock.monotonic())


@dataclass(slots=True)
class PolicyRows:
    """The statements about a queue in one transaction, called with lists of any length."""

    dialect: Dialect
    connection: Connection
    """Under the lock of `queue`, where something is written."""
    queue: str
    by_header: bool = False
    """Whether keys are those that were read from a header."""
    decided: Decided | None = None
    """Told of what is decided of messages without a lease, before it is written."""

    def _run(self, name: str, **binds: Any) -> Any:
        statements = self.dialect.sql
        statement = statements.by_header(name) if self.by_header else statements[name]
        return self.connection.execute(statement, binds)

    def _run_of_queue(self, name: str, **binds: Any) -> Any:
        return self._run(name, queue=self.queue, **binds)

    def arrivals(self, priority: int, *, before: int, own: int, since: int) -> list[Arrival]:
        """Up to `SCAN` due messages that have the marks `before` and not `own`, by due time and id.

        Args:
            priority: Only of this one.
            before: Marks of the policies before.
            own: The mark that is missing.
            since: Messages that were due before are left out.
        """
        rows = self._run_of_queue(
            "policy_arrivals", priority=priority, before=before, own=own, since=since, size=SCAN
        )
        return [_arrival(row) for row in rows]

    def arrivals_of(
        self, keys: Sequence[str], *, before: int, own: int
    ) -> tuple[list[Arrival], set[str]]:
        """The due messages of `keys`, of all priorities, that have the marks `before` and not
        `own`, as far as `SCAN` goes; and the keys of which all were read.
        """
        listed = [{"n": n, "k": key} for n, key in enumerate(keys)]
        rows = self._run_of_queue(
            "policy_arrivals_of", rows=json.dumps(listed), before=before, own=own, size=SCAN
        ).all()
        # The last key that was read may have more.
        whole = len(keys) if len(rows) < SCAN else int(rows[-1][7])
        return [_arrival(row) for row in rows], set(keys[:whole])

    def later(self, priority: int, *, now: int, size: int) -> list[Later]:
        """Up to `size` messages that are due later than `now` and wait, by due time and id."""
        rows = self._run_of_queue("policy_waits_later", priority=priority, now=now, size=size)
        # SQLite may hold other values than numbers, until the next claim corrects or rejects them.
        return [Later(r[0], r[2], r[5]) for r in rows if isinstance(r[2], int)]

    def next_standby(self, priority: int) -> list[int]:
        """When the first that stands by is to be looked at; empty: nothing does."""
        return [each.due for each in self.standby_due(priority, now=_ANY_TIME, size=1)]

    def standby_due(self, priority: int, *, now: int, size: int) -> list[Standing]:
        """Up to `size` messages that stand by and are to be looked at by `now`, by that time and
        id.
        """
        rows = self._run_of_queue(
            "policy_standby_due", priority=priority, now=STANDBY + now, size=size
        )
        return _standing(rows)

    def standby_of(
        self, ranges: Mapping[str, tuple[int, int]], *, last: bool = False
    ) -> tuple[list[Standing], set[str]]:
        """Up to `SCAN` messages of keys that stand by, whose ids lie between the two of their key,
        key by key; of each the oldest first, or the `last`; and the keys of which all were read.
        """
        keys = list(ranges)
        listed = [
            {"n": n, "k": key, "low": low, "high": high}
            for n, (key, (low, high)) in enumerate(ranges.items())
        ]
        name = "policy_standby_last" if last else "policy_standby_first"
        rows = self._run_of_queue(name, rows=json.dumps(listed), size=SCAN).all()
        # The last key that was read may have more.
        whole = len(keys) if len(rows) < SCAN else int(rows[-1].n)
        # To MySQL, keys that differ in spaces at their ends are equal.
        found = _standing(row for row in rows if as_key(row[1]) == keys[row.n])
        return found, set(keys[:whole])

    def stand_by(
        self, due: Mapping[int, int], keys: Mapping[int, str | None] = MappingProxyType({})
    ) -> None:
        """Let messages stand by until they are looked at when they are `due`; `keys` as for
        `discard`.
        """
        at = {message: STANDBY + moment for message, moment in due.items()}
        self.shift(at, BURST | HELD_BURST, KEPT | HELD_BURST, keys=keys)

    def headers(self, ids: Sequence[int]) -> dict[int, Any]:
        """The stored headers of `ids`."""
        rows = json.dumps([{"id": message} for message in sorted(ids)])
        found = self._run_of_queue("policy_headers", rows=rows)
        return {row.id: row.headers for row in found}

    def give_keys(self, keys: Mapping[int, str | None]) -> None:
        """From now on policies go by these keys of messages, which their headers have."""
        rows = json.dumps([{"id": message, "k": key} for message, key in sorted(keys.items())])
        self._run_of_queue("policy_give_keys", rows=rows)

    def shift(
        self,
        due: Mapping[int, int | None],
        mark: int,
        kept: int = ~0,
        *,
        keys: Mapping[int, str | None] = MappingProxyType({}),
    ) -> None:
        """Give messages `mark`, of their marks leave `kept`, and another due time unless it is
        None; `keys` as for `discard`.
        """
        if due:
            self._tell({i: _put_off(at) for i, at in due.items()})
            listed = [{"id": i, "due": at, "k": keys.get(i)} for i, at in due.items()]
            rows = json.dumps(listed)
            self._run_of_queue("policy_shift", rows=rows, mark=mark, kept=kept)

    def discard(
        self,
        ends: Mapping[int, Discard],
        *,
        keep: bool,
        keys: Mapping[int, str | None] = MappingProxyType({}),
    ) -> None:
        """End messages that have no lease as DISCARDED, archived if `keep`; those of `keys` only if
        their keys are still these.
        """
        if not ends:
            return
        self._tell({i: f"ended, {end.reason}" for i, end in ends.items()})
        rows = _ends_json(ends, keys)
        archived = keep and self.dialect.has_archive
        if archived and self.dialect.sql.has("policy_discard"):
            self._run_of_queue("policy_discard", rows=rows)
            return
        if self.dialect.sql.has("policy_lock"):
            # Lock first, then copy and delete exactly the locked rows: a row that another
            # transaction takes in between must not be copied.
            held = set(self._run_of_queue("policy_lock", rows=rows).scalars())
            rows = _ends_json({message: end for message, end in ends.items() if message in held})
        if archived:
            self._run_of_queue("policy_archive", rows=rows)
        self._run_of_queue("policy_drop", rows=rows)

    def _tell(self, decisions: Mapping[int, str]) -> None:
        if self.decided is not None:
            stored = self.headers(list(decisions))
            self.decided(self.queue, decisions, stored)

    def states(self, scope: str, keys: Iterable[str]) -> dict[str, Any]:
        """What is stored under `scope` for each of `keys`."""
        wanted = sorted(set(keys))
        if not wanted:
            return {}
        rows = self._run(
            "policy_states", scope=scope, rows=json.dumps([{"k": key} for key in wanted])
        ).all()
        found = {as_key(key): None if info is None else json.loads(info) for key, info in rows}
        return {key: info for key, info in found.items() if key is not None}

    def keep(
        self,
        scope: str,
        states: Mapping[str, tuple[Any, int]],
        due: Mapping[str, int | None] | None = None,
    ) -> None:
        """Store what is known of each key, and when it may be forgotten.

        `due` says of a key when it is to be looked at; without it there is no such time.
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

    def next_due(self, scope: str) -> int | None:
        """When the next key of `scope` is to be looked at, later than now."""
        at = self._run("policy_next_due", scope=scope).scalar_one()
        return None if at is None else int(at)

    def look_anew(self, scope: str) -> None:
        """Let every key of `scope` that is to be looked at later be looked at now."""
        self._run("policy_look_anew", scope=scope)

    def running(self, queue: str, most: int) -> int:
        """Leases of `queue`, counted up to `most`."""
        return int(self._run("policy_running", queue=queue, size=most).scalar_one())

    def live(self, ids: Iterable[int]) -> dict[int, Live]:
        """Those of `ids` that are in the queue."""
        wanted = sorted(set(ids))
        if not wanted:
            return {}
        rows = self._run_of_queue(
            "policy_live", rows=json.dumps([{"id": message} for message in wanted])
        )
        return {
            r[0]: Live(
                r[1],
                int(r[2]),
                None if r[3] is None else int(r[3]),
                as_key(r[4]),
                r[5],
                r[6],
                bool(r[7]),
            )
            for r in rows
        }

    def due(
        self,
        priority: int,
        *,
        before: int,
        now: int,
        size: int,
        others: Suspicion | None,
        only: int | None,
    ) -> list[tuple[int, str | None, int]]:
        """Up to `size` messages due by `now`, when the claim began, that have the marks `before`:
        id, key, due time.

        Without the suspects that `others` tells. A burst that has ended since may lack what arrived
        after the policies looked, and before its end.
        """
        binds: dict[str, Any] = {
            "priority": priority,
            "before": before,
            "now": now,
            "size": size,
        }
        which = ""
        if only is not None:
            which = "_one"
            binds["only"] = only
        elif others is not None:
            which = "_others"
            binds |= others.binds
        rows = self._run_of_queue(f"policy_due{which}", **binds)
        return [(r[0], as_key(r[1]), int(r[2])) for r in rows]


def _standing(rows: Iterable[Sequence[Any]]) -> list[Standing]:
    return [Standing(r[0], as_key(r[1]), int(r[2]) - STANDBY, bool(r[3]), int(r[4])) for r in rows]


def _put_off(due: int | None) -> str:
    if due is not None and due >= STANDBY:
        return "stands by for another message of its key"
    return "taken in" if due is None else f"due at {from_microseconds(due).isoformat()}"


def _ends_json(
    ends: Mapping[int, Discard], keys: Mapping[int, str | None] = MappingProxyType({})
) -> str:
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
    """A key as text; None for bytes (SQLite) that are no text, which no broker has written.

    Nor has one written a NUL: SQLite's functions of JSON end a text there.
    """
    if value is None or isinstance(value, str):
        return value
    try:
        text = bytes(value).decode()
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text

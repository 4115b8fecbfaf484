"""Whether all is well: the database, its tables and what is in them, and this process.

Each part of a diagnosis is bounded in time and fails alone.
"""

import asyncio
import platform
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from time import monotonic
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.admin.arguments import LONGEST_AGE, check_limit
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.access import Activities, Activity
from faststream_sqlbroker.core.health import (
    OLD_TRANSACTION,
    Diagnosis,
    DiagnosisPart,
    Health,
    clock_problems,
    dead_row_problems,
    pool_problems,
    subscriber_problems,
    transaction_problems,
)
from faststream_sqlbroker.core.stored import NotACursorError
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration, positive_seconds
from faststream_sqlbroker.core.verification import Verification
from faststream_sqlbroker.exceptions import (
    AccessError,
    SetupError,
    StoreError,
)
from faststream_sqlbroker.schema.migrate import HEAD

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

MOST_DRAINED = 20
"""Drained subscribers that are named."""
PACKAGES = ("sqlbroker", "faststream", "sqlalchemy", "anyio", "alembic", "starlette", "uvicorn")
"""Whose versions are told, besides the driver's, where they are installed."""
Found = tuple[Mapping[str, Any], list[str]]
Look = Callable[[], Awaitable[Found]]
MOST_DAMAGES = 10_000
"""Damages that one call lists; what is beyond is counted."""


class HealthReport(Operations):
    """Whether all is well: the database, its tables, and this process."""

    async def health(self, *, old_transaction: Duration = OLD_TRANSACTION) -> Health:
        """Look at the server, the tables, the rights, the clocks, the pool and the subscribers of
        this process.

        It leaves nothing in the database, and reads no table of messages. `Health.problems` says
        what is wrong, one line each with what to do. What a database cannot tell, or not to this
        user, is None, and `Health.database.hidden` names the right that is missing. SQLite tells
        its version only.

        Args:
            old_transaction: The age from which an open transaction of any session is a problem:
                seconds, a timedelta or text like "5m".

        Raises:
            SetupError: `old_transaction` is not a duration, or not longer than 0.
        """
        oldest = positive_seconds("old_transaction", old_transaction)
        process = self._process()
        difference, doubt = await compare_clocks(self._store)
        used, limit = self._store.pool_use
        lacks: list[Any] = []
        # No right can be tried on a server that is read-only; all else can be told there.
        if (writes := await self._write_problem()) is None:
            lacks.extend((await self._store.access.find_lacks(self._needed)).lacks)
        schema = tuple(await self._store.server.differences())
        return Health(
            database=await self._store.server.health(),
            clock_difference=difference,
            clock_doubt=doubt,
            pool_used=used,
            pool_limit=limit,
            process=process,
            writes=writes,
            lacks=tuple(map(str, lacks)),
            schema=schema,
            differing_windows=() if schema else await self._differing(),
            drained=() if schema else await self._drained(),
            old_transaction=oldest,
        )

    @property
    def _needed(self) -> Activities:
        """Return the activities of this process; without any, those of operators."""
        return self._process().activities or frozenset({Activity.OPERATE})

    async def _differing(self) -> tuple[str, ...]:
        """Windows of lakes that are not pruned."""
        try:
            found = await self._store.retention.loaded.differing()
        except AccessError:
            return ()  # A producer needs no right on the records.
        return tuple(f"window {window} of lake {lake!r}" for lake, window in found)

    async def _drained(self) -> tuple[str, ...]:
        try:
            return tuple(await self._store.live_subscribers.drained(MOST_DRAINED))
        except AccessError:
            return ()  # A producer needs no right on the registrations.

    async def diagnosis(self, *, timeout: Duration = 5.0) -> Diagnosis:
        """Look at the database, the tables, the rights, the clock, the pool, the listener, the
        subscribers, the brokers that answers go to and the versions of packages.

        It leaves nothing in the database, and shows no password. A part that fails or takes too
        long says so; the others go on.

        Args:
            timeout: Longest time of each part, all of which are looked at together: seconds, a
                timedelta or text like "5s".

        Raises:
            SetupError: `timeout` is not a duration, or not longer than 0.
        """
        limit = positive_seconds("timeout", timeout)
        looks: dict[str, Look] = {
            "database": self._of_database,
            "schema": self._of_schema,
            "rights": self._of_rights,
            "clock": self._of_clock,
            "pool": self._of_pool,
            "listener": self._of_listener,
            "subscribers": self._of_subscribers,
            "relays": self._of_relays,
            "versions": self._of_versions,
        }
        parts = await asyncio.gather(*(_part(name, look, limit) for name, look in looks.items()))
        return Diagnosis(tuple(parts))

    async def _of_database(self) -> Found:
        found = await self._store.server.health()
        url = self._store.engine.url
        facts = {
            "name": self._store.database_name,
            "version": found.version,
            "driver": self._store.driver,
            "host": url.host,
            "port": url.port,
            "database": url.database,
            "open_transactions": len(found.transactions),
            "hidden": found.hidden,
        }
        problems = [*transaction_problems(found.transactions), *dead_row_problems(found)]
        writes = await self._write_problem()
        return facts, problems if writes is None else [writes, *problems]

    async def _of_schema(self) -> Found:
        tables = self._store.tables
        there = await self._store.server.schema_version()
        facts = {
            "version": there,
            "needed": HEAD,
            "schema": tables.config.schema,
            "tables": [table.name for table in tables.ours],
        }
        return facts, await self._store.server.differences()

    async def _of_rights(self) -> Found:
        access = await self._store.access.find_lacks(self._needed)
        facts = {"user": access.who, "asked": sorted(each.value for each in self._needed)}
        return facts, [str(lack) for lack in access.lacks]

    async def _of_clock(self) -> Found:
        difference, doubt = await compare_clocks(self._store)
        facts = {"difference": round(difference, 3), "doubt": round(doubt, 3)}
        return facts, list(clock_problems(difference, doubt))

    async def _of_pool(self) -> Found:
        used, limit = self._store.pool_use
        facts = {"used": used, "limit": limit, "of_the_broker": self._store.max_connections}
        return facts, list(pool_problems(used, limit))

    async def _of_listener(self) -> Found:
        listening = self._surroundings().listening
        deaf = "wake-ups of other processes are not heard, so messages are found by polling: see "
        problems = [f"{deaf}the log for why LISTEN fails"] if listening is False else []
        return {"listening": listening}, problems

    async def _of_subscribers(self) -> Found:
        process = self._process()
        facts = {
            "running": self._surroundings().is_running,
            "subscribers": [
                {"queues": list(each.queues), "worker": each.worker, "held": each.held}
                for each in process.subscribers
            ],
        }
        return facts, list(subscriber_problems(process.subscribers))

    async def _of_relays(self) -> Found:
        relays = self._surroundings().relays
        problems = [
            f"{name} cannot publish: start its broker with this one"
            for name, can_publish in relays.items()
            if not can_publish
        ]
        return dict(relays), problems if self._surroundings().is_running else []

    async def _of_versions(self) -> Found:
        names = (*PACKAGES, self._store.driver)
        found = {name: known for name in names if (known := _version(name)) is not None}
        return {"python": platform.python_version(), **found}, []

    async def verify(
        self,
        *,
        after: str | None = None,
        rows: int = 1_000_000,
        time_limit: Duration = "10m",
        lease_over: Duration = "10m",
        limit: int = 100,
    ) -> Verification:
        """Look through the tables for rows that contradict each other or cannot be.

        Looked at are live messages, the archive, jobs of operators, and what exports to a lake have
        recorded (`record_as`) against the rows of the archive. Nothing is written. A transaction
        reads 2 000 rows at most, so the broker can run. `health` compares the tables' definitions.

        Args:
            after: `after` of the call before, to go on where it ended.
            rows: It ends after so many rows, and then has `after`; 1 or more.
            time_limit: It ends after this time as well.
            lease_over: A lease that ended so long ago has no owner, as any live subscriber of its
                queue gives such messages back within seconds. A message whose holder lives has one:
                the transaction of a handler may last longer than its lease.
            limit: Damages to list; 1 to 10 000. All of them are counted.

        Raises:
            ValueError: `rows` is less than 1.
            SetupError: an argument is not valid.
        """
        check_limit(rows)
        if not 1 <= limit <= MOST_DAMAGES:
            raise SetupError(f"limit must be 1 to {MOST_DAMAGES}, got {limit!r}")
        over = positive_seconds("lease_over", lease_over)
        if over > LONGEST_AGE:
            raise SetupError(f"lease_over must be at most 100 years, got {short(lease_over)}")
        try:
            return await self._store.verifier.verify(
                after,
                rows=rows,
                seconds=positive_seconds("time_limit", time_limit),
                lease_over=over,
                limit=limit,
            )
        except NotACursorError:
            raise SetupError(
                f"after must be what the call before returned as after, got {short(after)}"
            ) from None


async def _part(name: str, look: Look, limit: float) -> DiagnosisPart:
    began = monotonic()
    try:
        async with asyncio.timeout(limit):
            facts, problems = await look()
    except TimeoutError:
        error = f"no answer within {limit:g} s"
    except StoreError as failed:
        error = str(failed)
    except Exception as failed:  # noqa: BLE001 - the other parts are told all the same
        # Only its class: the text of another package's error may hold a password.
        error = f"it failed: {type(failed).__name__}"
    else:
        took = monotonic() - began
        return DiagnosisPart(name=name, facts=facts, problems=tuple(problems), took=took)
    return DiagnosisPart(name=name, error=error, took=monotonic() - began)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


async def compare_clocks(store: "Store") -> tuple[float, float]:
    """The database's clock minus this machine's, and by how much that may be wrong (seconds)."""
    # The database reads its clock between the two, and nothing tells when: the middle is wrong by
    # half of the time between them at most.
    before = datetime.now(timezone.utc)
    now = await store.server.now()
    after = datetime.now(timezone.utc)
    half = (after - before) / 2
    return (now - (before + half)).total_seconds(), half.total_seconds()

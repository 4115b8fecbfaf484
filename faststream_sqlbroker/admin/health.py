"""Check the database, its tables and their contents, and this process.

Each part of a diagnosis has a time limit and fails separately.
"""

import asyncio
import platform
from collections.abc import Awaitable, Callable, Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from time import monotonic
from typing import TYPE_CHECKING, Any

from faststream_sqlbroker.admin.filters import MAX_AGE_SECONDS, check_limit
from faststream_sqlbroker.admin.operations import AdminOperations
from faststream_sqlbroker.core.access import Activities, Activity
from faststream_sqlbroker.core.health import (
    OLD_TRANSACTION,
    Diagnosis,
    DiagnosisPart,
    Health,
    find_clock_problems,
    find_dead_row_problems,
    find_pool_problems,
    find_subscriber_problems,
    find_transaction_problems,
)
from faststream_sqlbroker.core.stored import InvalidCursorError
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import Duration, parse_positive
from faststream_sqlbroker.core.verification import Verification
from faststream_sqlbroker.exceptions import AccessError, SetupError, StoreError
from faststream_sqlbroker.schema.migrate import HEAD

if TYPE_CHECKING:
    from faststream_sqlbroker.database.store import Store

MAX_DRAINED = 20
"""Maximum number of drained subscribers to name."""
PACKAGES = ("sqlbroker", "faststream", "sqlalchemy", "anyio", "alembic", "starlette", "uvicorn")
"""Packages whose versions are shown, if installed, besides the driver's."""
CheckResult = tuple[Mapping[str, Any], list[str]]
"""Facts that a check of the diagnosis has found, and problems with their remedies."""
Check = Callable[[], Awaitable[CheckResult]]
MAX_DAMAGES = 10_000
"""Maximum number of damages that one call lists; more are only counted."""


class HealthReport(AdminOperations):
    """Health checks of the database, the tables, and this process."""

    async def health(self, *, old_transaction: Duration = OLD_TRANSACTION) -> Health:
        """Check the server, the tables, the rights, the clocks, the pool and this process's
        subscribers.

        Nothing is written to the database, and no table of messages is read. `Health.problems`
        lists the problems, one line each with a remedy. Values that a database does not provide, or
        not to this user, are None, and `Health.database.hidden` names the missing right. SQLite
        provides only its version.

        Args:
            old_transaction: The age from which an open transaction of any session is a problem:
                seconds, a timedelta or text like "5m".

        Raises:
            SetupError: `old_transaction` is not a duration, or not longer than 0.
        """
        max_transaction_age = parse_positive("old_transaction", old_transaction)
        process = self._hooks.get_process()
        difference, uncertainty = await compare_clocks(self._store)
        used, limit = self._store.pool_use
        lacks: list[Any] = []
        # Rights cannot be tested on a read-only server; all other checks work there.
        if (writes := await self._hooks.find_write_problem()) is None:
            lacks.extend(
                (await self._store.access.find_missing_rights(self._required_activities)).missing
            )
        schema = tuple(await self._store.server.find_differences())
        return Health(
            database=await self._store.server.read_health(),
            clock_difference=difference,
            clock_doubt=uncertainty,
            pool_used=used,
            pool_limit=limit,
            process=process,
            writes=writes,
            lacks=tuple(map(str, lacks)),
            schema=schema,
            differing_windows=() if schema else await self._list_differing_windows(),
            drained=() if schema else await self._list_drained(),
            old_transaction=max_transaction_age,
        )

    @property
    def _required_activities(self) -> Activities:
        """The activities of this process; without any, the activities of operators."""
        return self._hooks.get_process().activities or frozenset({Activity.OPERATE})

    async def _list_differing_windows(self) -> tuple[str, ...]:
        """Return the export windows that retention does not prune.

        The archive's rows of these windows differ from the record of the export, or an export found
        the windows' files in the lake damaged. Without the right to read the records, the result is
        empty.
        """
        try:
            windows = await self._store.retention.loaded_windows.list_differing()
        except AccessError:
            return ()  # a producer needs no right on the records
        return tuple(f"window {window} of lake {lake!r}" for lake, window in windows)

    async def _list_drained(self) -> tuple[str, ...]:
        """Return up to `MAX_DRAINED` names of subscribers that an operator has drained."""
        try:
            return tuple(await self._store.live_subscribers.list_drained(MAX_DRAINED))
        except AccessError:
            return ()  # A producer needs no right on the registrations.

    async def diagnosis(self, *, timeout: Duration = 5.0) -> Diagnosis:
        """Check all parts: database, tables, rights, clock, pool, listener, subscribers, relays,
        versions.

        Relays are the brokers that results are forwarded to; versions are those of packages.
        Nothing is written to the database, and no password is shown. A part that fails or takes too
        long says so; the other parts are still checked.

        Args:
            timeout: Time limit of each part; all parts run at the same time: seconds, a timedelta
                or text like "5s".

        Raises:
            SetupError: `timeout` is not a duration, or not longer than 0.
        """
        limit = parse_positive("timeout", timeout)
        checks: dict[str, Check] = {
            "database": self._check_database,
            "schema": self._check_schema,
            "rights": self._check_user_rights,
            "clock": self._check_clock,
            "pool": self._check_pool,
            "listener": self._check_listener,
            "subscribers": self._check_subscribers,
            "relays": self._check_relays,
            "versions": self._check_versions,
        }
        parts = await asyncio.gather(
            *(_run_check(name, check, limit) for name, check in checks.items())
        )
        return Diagnosis(tuple(parts))

    async def _check_database(self) -> CheckResult:
        """Report server and address; find old transactions, dead rows and a read-only database."""
        health = await self._store.server.read_health()
        url = self._store.engine.url
        details = {
            "name": self._store.database_name,
            "version": health.version,
            "driver": self._store.driver,
            "host": url.host,
            "port": url.port,
            "database": url.database,
            "open_transactions": len(health.transactions),
            "hidden": health.hidden,
        }
        problems = [
            *find_transaction_problems(health.transactions),
            *find_dead_row_problems(health),
        ]
        writes = await self._hooks.find_write_problem()
        return details, problems if writes is None else [writes, *problems]

    async def _check_schema(self) -> CheckResult:
        """Compare the tables in the database with the tables that this package needs."""
        tables = self._store.tables
        database_version = await self._store.server.read_schema_version()
        details = {
            "version": database_version,
            "needed": HEAD,
            "schema": tables.config.schema,
            "tables": [table.name for table in tables.broker_tables],
        }
        return details, await self._store.server.find_differences()

    async def _check_user_rights(self) -> CheckResult:
        """Find rights that the database user lacks; "asked" are the checked activities.

        An activity, such as publishing or consuming, is a set of statements with their rights.
        """
        access = await self._store.access.find_missing_rights(self._required_activities)
        details = {
            "user": access.user,
            "asked": sorted(activity.value for activity in self._required_activities),
        }
        return details, [str(lack) for lack in access.missing]

    async def _check_clock(self) -> CheckResult:
        """Compare the clocks; "doubt" is the uncertainty of the difference, both in seconds.

        The answer to a query has taken some time, so the difference is not known exactly.
        """
        difference, uncertainty = await compare_clocks(self._store)
        details = {"difference": round(difference, 3), "doubt": round(uncertainty, 3)}
        return details, list(find_clock_problems(difference, uncertainty))

    async def _check_pool(self) -> CheckResult:
        """Compare the pool's connections in use, its limit, and the number the broker may use.

        The pool is SQLAlchemy's; the application may use it too.
        """
        used, limit = self._store.pool_use
        details = {"used": used, "limit": limit, "of_the_broker": self._store.max_connections}
        return details, list(find_pool_problems(used, limit))

    async def _check_listener(self) -> CheckResult:
        """Check PostgreSQL's LISTEN connection; `listening` is None if it is not used.

        Other processes notify this connection of new messages, so that they start at once.
        """
        listening = self._hooks.get_process_info().listening
        text = (
            "wake-ups of other processes do not arrive, so their messages are found only by "
            "polling: see the log for why LISTEN fails"
        )
        problems = [text] if listening is False else []
        return {"listening": listening}, problems

    async def _check_subscribers(self) -> CheckResult:
        """Report this process's subscribers, with the number of messages that each has leased."""
        process = self._hooks.get_process()
        details = {
            "running": self._hooks.get_process_info().is_running,
            "subscribers": [
                {
                    "queues": list(subscriber.queues),
                    "worker": subscriber.worker,
                    "held": subscriber.held,
                }
                for subscriber in process.subscribers
            ],
        }
        return details, list(find_subscriber_problems(process.subscribers))

    async def _check_relays(self) -> CheckResult:
        """Check that the brokers to which results are forwarded can publish.

        A relay is a publisher of another broker that receives the responses of handlers. Before
        this broker starts, relays need not be started either.
        """
        relays = self._hooks.get_process_info().relays
        problems = [
            f"{name} cannot publish: start its broker together with this broker"
            for name, can_publish in relays.items()
            if not can_publish
        ]
        return dict(relays), problems if self._hooks.get_process_info().is_running else []

    async def _check_versions(self) -> CheckResult:
        """Report the versions of Python, the driver and packages; this finds no problems."""
        names = (*PACKAGES, self._store.driver)
        versions = {
            name: installed for name in names if (installed := _get_version(name)) is not None
        }
        return {"python": platform.python_version(), **versions}, []

    async def verify(
        self,
        *,
        after: str | None = None,
        rows: int = 1_000_000,
        time_limit: Duration = "10m",
        lease_over: Duration = "10m",
        limit: int = 100,
    ) -> Verification:
        """Search the tables for rows that contradict each other or are impossible.

        The search covers live messages, the archive, jobs of operators, and the records of exports
        to a lake (`record_as`), compared with the rows of the archive. Nothing is written. A
        transaction reads at most 2 000 rows, so the broker can run. `health` compares the tables'
        definitions.

        Args:
            after: `after` of the previous call, to continue from its end.
            rows: Stop after this many rows, with `after` set; 1 or more.
            time_limit: Stop after this time as well.
            lease_over: Report leases that expired at least this long ago: any live subscriber of
                the queue releases expired leases within seconds. A lease whose holder is alive is
                not reported, because a handler's transaction may last longer than its lease.
            limit: Damages to list; 1 to 10 000. All damages are counted.

        Raises:
            ValueError: `rows` is less than 1.
            SetupError: an argument is not valid.
        """
        check_limit(rows)
        if not 1 <= limit <= MAX_DAMAGES:
            raise SetupError(f"limit must be 1 to {MAX_DAMAGES}, got {limit!r}")
        min_lease_age = parse_positive("lease_over", lease_over)
        if min_lease_age > MAX_AGE_SECONDS:
            raise SetupError(
                f"lease_over must be at most 100 years, got {format_value(lease_over)}"
            )
        try:
            return await self._store.verifier.verify(
                after,
                rows=rows,
                seconds=parse_positive("time_limit", time_limit),
                lease_over=min_lease_age,
                limit=limit,
            )
        except InvalidCursorError:
            raise SetupError(
                "after must be the value that the previous call returned, got "
                f"{format_value(after)}"
            ) from None


async def _run_check(name: str, check: Check, time_limit: float) -> DiagnosisPart:
    """Run a check of the diagnosis; a failure or timeout becomes the error of this part.

    A diagnosis is made when something is broken, so the other parts must still be reported.
    """
    started_at = monotonic()
    try:
        async with asyncio.timeout(time_limit):
            details, problems = await check()
    except TimeoutError:
        error = f"no answer within {time_limit:g} s"
    except StoreError as failed:
        error = str(failed)
    except Exception as failed:  # noqa: BLE001 - the other parts are still reported
        # Trap: show only the class, because the text of another package's error may contain a
        # password.
        error = f"failed with {type(failed).__name__}"
    else:
        duration = monotonic() - started_at
        return DiagnosisPart(name=name, facts=details, problems=tuple(problems), took=duration)
    return DiagnosisPart(name=name, error=error, took=monotonic() - started_at)


def _get_version(package: str) -> str | None:
    """Return the version of a package; None if not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


async def compare_clocks(store: "Store") -> tuple[float, float]:
    """Return the database's clock minus this machine's, and the uncertainty (both in seconds).

    The true difference is at most the uncertainty away from the returned one.
    """
    # The database reads its clock at an unknown time between `sent_at` and `received_at`. The
    # middle of both is wrong by at most half of the time between them.
    sent_at = datetime.now(timezone.utc)
    now = await store.server.read_now()
    received_at = datetime.now(timezone.utc)
    half_elapsed = (received_at - sent_at) / 2
    return (now - (sent_at + half_elapsed)).total_seconds(), half_elapsed.total_seconds()

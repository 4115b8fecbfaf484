"""A look at all that the broker depends on; each part is bounded in time and fails alone."""

import asyncio
import platform
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from time import monotonic
from typing import Any

from faststream_sqlbroker.admin.health import compare_clocks
from faststream_sqlbroker.admin.operations import Operations
from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.diagnosis import Diagnosis, DiagnosisPart
from faststream_sqlbroker.core.health import DatabaseHealth, Health, ProcessHealth
from faststream_sqlbroker.core.times import Duration, positive_seconds
from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.schema.migrate import HEAD

PACKAGES = ("sqlbroker", "faststream", "sqlalchemy", "anyio", "alembic", "starlette", "uvicorn")
"""Whose versions are told, besides the driver's, where they are installed."""
NOTHING_WRONG = Health(
    database=DatabaseHealth(version=""),
    clock_difference=0.0,
    clock_doubt=0.0,
    pool_used=None,
    pool_limit=None,
    process=ProcessHealth(),
    lacks=(),
    schema=(),
)
"""With one field replaced, it tells what is wrong with that."""
Found = tuple[Mapping[str, Any], list[str]]
Look = Callable[[], Awaitable[Found]]


class DiagnosisReport(Operations):
    """What this process depends on, and how it is."""

    async def diagnosis(self, *, timeout: Duration = 5.0) -> Diagnosis:
        """Look at the database, the tables, the rights, the clock, the pool, the listener, the
        subscribers, the brokers that answers go to and the versions of packages.

        Nothing is written, and no password is told. A part that fails or takes too long says so;
        the others go on.

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
        findings = replace(NOTHING_WRONG, database=found).findings()
        return facts, [*findings["transactions"], *findings["dead rows"]]

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
        needed = self._process().activities or frozenset({Activity.OPERATE})
        access = await self._store.access.find_lacks(needed)
        facts = {"user": access.who, "asked": sorted(each.value for each in needed)}
        return facts, [str(lack) for lack in access.lacks]

    async def _of_clock(self) -> Found:
        difference, doubt = await compare_clocks(self._store)
        found = replace(NOTHING_WRONG, clock_difference=difference, clock_doubt=doubt)
        facts = {"difference": round(difference, 3), "doubt": round(doubt, 3)}
        return facts, found.findings()["clock"]

    async def _of_pool(self) -> Found:
        used, limit = self._store.pool_use
        found = replace(NOTHING_WRONG, pool_used=used, pool_limit=limit)
        facts = {"used": used, "limit": limit, "of_the_broker": self._store.max_connections}
        return facts, found.findings()["pool"]

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
        return facts, replace(NOTHING_WRONG, process=process).findings()["subscribers"]

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

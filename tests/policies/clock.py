"""The database's clock in the hands of a test: nothing of the broker knows, its SQL is the same.

PostgreSQL finds `statement_timestamp` in another schema first, MySQL and MariaDB have a variable
for it, SQLite lets a connection have a `julianday` of its own.
"""

from datetime import datetime, timezone
from typing import Any

from sqlalchemy import event, make_url, text
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from faststream_sqlbroker.core.clock import Clock as Time
from tests import unthreaded
from tests.compiled import Compiled

START = datetime(2030, 1, 1, tzinfo=timezone.utc)
MICROSECONDS = 1_000_000
_SCHEMA = """
CREATE SCHEMA IF NOT EXISTS test_clock;
CREATE TABLE test_clock.shown (us bigint);
INSERT INTO test_clock.shown VALUES (0);
CREATE FUNCTION test_clock.statement_timestamp() RETURNS timestamptz LANGUAGE sql STABLE
AS $$ SELECT timestamptz 'epoch' + us * interval '1 microsecond' FROM test_clock.shown $$
"""


class Clock:
    """Stands still until it is set; whole milliseconds, as SQLite's has no more."""

    def __init__(self, url: str, *, threads: bool = True) -> None:
        """For the database at `url`, which has no tables yet.

        Without `threads`, SQLite's statements run in the event loop, one at a time.
        """
        self.now = round(START.timestamp()) * MICROSECONDS
        self._postgresql = url.startswith("postgresql")
        options: dict[str, Any] = {}
        if self._postgresql:
            path = "public, test_clock, pg_catalog"
            options = {"connect_args": {"server_settings": {"search_path": path}}}
        elif url.startswith("sqlite") and not threads:
            options = {"connect_args": {"async_creator_fn": unthreaded.connect}}
        kept = {"compiled_cache": Compiled.of(make_url(url).get_backend_name())}
        self.engine: AsyncEngine = create_async_engine(url, execution_options=kept, **options)
        if url.startswith("sqlite"):
            event.listen(self.engine.sync_engine, "connect", self._connected)
        elif not self._postgresql:
            event.listen(self.engine.sync_engine, "before_cursor_execute", self._set_variable)

    def of_process(self) -> Time:
        """A process's clock that goes with this one: how long a claim takes must not matter."""
        made = Time()
        made.monotonic = lambda: self.now / MICROSECONDS
        return made

    async def prepare(self) -> None:
        """Before the tables are made: their defaults read the clock."""
        if self._postgresql:
            async with self.engine.begin() as connection:
                for statement in _SCHEMA.split(";\n"):
                    await connection.execute(text(statement))
        await self.set(self.now)

    async def set(self, now: int) -> None:
        """Microseconds since 1970."""
        self.now = now
        if self._postgresql:
            async with self.engine.begin() as connection:
                await connection.execute(
                    text("UPDATE test_clock.shown SET us = :now"), {"now": now}
                )

    def _connected(self, connection: Any, _record: Any) -> None:
        connection.create_function("julianday", 1, lambda _: 2440587.5 + self.now / 86_400_000_000)

    def _set_variable(self, connection: Any, cursor: Any, *_: Any) -> None:
        """Of a session, which then keeps it."""
        if connection.info.get("shown") != self.now:
            cursor.execute(f"SET timestamp = {self.now / MICROSECONDS:.6f}")
            connection.info["shown"] = self.now

"""What a process sends while it has nothing to do, counted in a time of the test's."""

from collections import Counter
from typing import Any

from sqlalchemy import event

from faststream_sqlbroker import SqlBroker
from tests.clock import VirtualTime
from tests.helpers import eventually

TURNS = ("BEGIN", "COMMIT", "ROLLBACK")


class Statements(Counter[str]):
    """The statements that `broker` sends, by their beginnings; BEGIN and COMMIT are not counted."""

    def __init__(self, broker: SqlBroker) -> None:
        """Create it before the first connection is made."""
        super().__init__()
        engine = broker.engine.sync_engine
        event.listen(engine, "before_cursor_execute", self._executed)
        event.listen(engine, "connect", self._connected)

    def _executed(self, _connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        self[" ".join(statement.split())[:120]] += 1

    def _connected(self, connection: Any, _record: Any) -> None:
        driver = getattr(connection, "driver_connection", None)
        # What asyncpg sends without SQLAlchemy, such as the checks of the LISTEN connection.
        if hasattr(driver, "add_query_logger"):
            driver.add_query_logger(self._sent)

    def _sent(self, record: Any) -> None:
        if not record.query.startswith(TURNS):
            self[record.query[:120]] += 1


async def pass_time(broker: SqlBroker, time: VirtualTime, seconds: float) -> None:
    """Let virtual time pass, from timer to timer; at each, everything that was sent is answered."""
    listening = 1 if broker._wakeups.is_listening else 0

    def answered() -> bool:
        in_use, _ = broker._store.pool_use
        return in_use is None or in_use <= listening

    end = time.now + seconds
    while time.now < end:
        await time.advance(max(0.0, min(time.next_moment, end) - time.now))
        await eventually(answered, step=0.0)

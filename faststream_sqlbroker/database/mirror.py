"""Messages that were published with a lookup value; each operation is one transaction."""

from sqlalchemy import Connection

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.mirror import MirroredMessage
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import mirror
from faststream_sqlbroker.database.parts.audit import note_action


class MirrorStore:
    """Reads them, and writes their info.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect

    async def count(self, lookup: str | None, info: str | None) -> int:
        """The live messages that match."""
        return await self._database.run(
            lambda c: mirror.count(c, self._dialect, lookup, info), Activity.OPERATE, write=False
        )

    async def find(self, lookup: str | None, info: str | None, limit: int) -> list[MirroredMessage]:
        """Up to `limit` of them, by id."""
        return await self._database.run(
            lambda c: mirror.find(c, self._dialect, lookup, info, limit),
            Activity.OPERATE,
            Activity.INSPECT,
            write=False,
        )

    async def set_info(
        self, lookup: str, message_id: int | None, info: str | None, by: str | None = None
    ) -> int:
        """Replace the info of all with this lookup value, or of one; how many.

        Unless `by` is None, the audit names who did.
        """

        def work(connection: Connection) -> int:
            count = mirror.set_info(connection, self._dialect, lookup, message_id, info)
            if count and by is not None:
                given = {"lookup": lookup, "message_id": message_id}
                note_action(connection, self._dialect, "set_info", by, given, done=count)
            return count

        return await self._database.run(work, Activity.OPERATE)

"""The random bits that tell one database's messages from another's: a row of the policy state.

The statements are the same on every database.
"""

from sqlalchemy import Connection, Table, select

from faststream_sqlbroker.core.correlation import is_database_id, new_database_id
from faststream_sqlbroker.database.parts.policy_state import upsert

SCOPE = "database"
KEY = "id"
"""Of the one row; the bits are in `info`, also as "id"."""


def read_database_id(connection: Connection, table: Table) -> str | None:
    """The bits; None if none were drawn yet, or another program has changed them."""
    return _read(connection, table, lock=False)


def make_database_id(connection: Connection, table: Table) -> str | None:
    """The bits, which are drawn now if there are none; None as `read_database_id`."""
    if (found := _read(connection, table, lock=False)) is not None:
        return found
    # A race: another process may have drawn them since. Then its row stays.
    drawn = {"scope": SCOPE, "key": KEY, "info": {"id": new_database_id()}}
    upsert(connection, table, [drawn], replaced=("scope",))
    return _read(connection, table, lock=True)


def _read(connection: Connection, table: Table, *, lock: bool) -> str | None:
    row = select(table.c.info).where(table.c.scope == SCOPE, table.c.key == KEY)
    info = connection.execute(row.with_for_update() if lock else row).scalar()
    value = info.get("id") if isinstance(info, dict) else None
    return value if is_database_id(value) else None

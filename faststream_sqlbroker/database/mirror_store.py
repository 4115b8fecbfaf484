"""Messages that were published with a lookup value; each operation is one transaction."""

from typing import Any

from sqlalchemy import (
    ColumnElement,
    Connection,
    LargeBinary,
    Select,
    Table,
    cast,
    func,
    select,
    update,
)

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.mirror import MirroredMessage
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.database.engine import StoreSubject
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.parts.audit import record_action
from faststream_sqlbroker.database.parts.claimed_rows import load_payload
from faststream_sqlbroker.database.parts.mirror_rows import MIRROR
from faststream_sqlbroker.schema.types import MYSQL


class MirrorStore(StoreSubject):
    """Live messages with a lookup value, and their info.

    Raises (from every operation):
        TransientStoreError, StoreError: as `Store`.
    """

    async def count(self, lookup: str | None, info: str | None) -> int:
        """Count the live messages with this lookup value and info; None matches every value."""
        statement = build_count_statement(self._dialect, lookup, info)

        def count(connection: Connection) -> int:
            return int(connection.execute(statement).scalar_one())

        return await self._database.run(count, Activity.OPERATE, write=False)

    async def find(self, lookup: str | None, info: str | None, limit: int) -> list[MirroredMessage]:
        """Find up to `limit` live messages with this lookup value and info, ordered by id.

        None for `lookup` or `info` matches every value.
        """
        state = self._dialect.tables.policy_state.c
        message = self._dialect.tables.message.c
        columns = (
            message.id,
            message.queue,
            message.headers,
            message.payload,
            message.publish_count,
            message.next_attempt_at,
            message.created_at,
            state.created_at.label("entered_at"),
            state.scope,
            state.info,
        )
        statement = _select_matching(self._dialect, lookup, info, *columns)
        statement = statement.order_by(message.id).limit(limit)

        def find(connection: Connection) -> list[MirroredMessage]:
            return [_to_mirrored_message(row) for row in connection.execute(statement)]

        return await self._database.run(find, Activity.OPERATE, Activity.INSPECT, write=False)

    async def set_info(
        self, lookup: str, message_id: int | None, info: str | None, by: str | None = None
    ) -> int:
        """Replace the info of messages with this lookup value; return the count.

        A mirror record is the row that stores the lookup value and the info of a message, and the
        message's id as its counter. With `message_id`, only that message is changed. Unless `by` is
        None, the audit names the operator.
        """
        state = self._dialect.tables.policy_state
        message = self._dialect.tables.message.c
        live = select(message.id).where(message.id == state.c.counter)
        conditions = [state.c.scope == MIRROR + lookup, live.exists()]
        if message_id is not None:
            conditions.append(state.c.key == str(message_id))
        statement = update(state).where(*conditions).values(info={"text": info})
        arguments = {"lookup": lookup, "message_id": message_id}

        def set_info(connection: Connection) -> int:
            count = connection.execute(statement).rowcount
            if count and by is not None:
                record_action(connection, self._dialect, "set_info", by, arguments, done=count)
            return count

        return await self._database.run(set_info, Activity.OPERATE)


def build_count_statement(
    dialect: DialectOperations, lookup: str | None, info: str | None
) -> Select[Any]:
    """Build the statement of `MirrorStore.count`; a test checks the query plan."""
    return _select_matching(dialect, lookup, info, func.count())


def _select_matching(
    dialect: DialectOperations, lookup: str | None, info: str | None, *columns: ColumnElement[Any]
) -> Select[Any]:
    """Select `columns` of the live messages whose mirror record matches `lookup` and `info`.

    A mirror record is a row of the policy state with the scope `MIRROR` + lookup value; its counter
    is the message's id. None for `lookup` or `info` matches every value.
    """
    state: Table = dialect.tables.policy_state
    message: Table = dialect.tables.message
    # Both conditions are ranges of the primary key; ";" is the character after ":".
    if lookup is None:
        conditions = [state.c.scope > MIRROR, state.c.scope < MIRROR[:-1] + ";"]
    else:
        conditions = [state.c.scope == MIRROR + lookup]
    if info is not None:
        conditions.append(_compare_text(dialect, state.c.info["text"].as_string(), info))
    joined = state.join(message, message.c.id == state.c.counter)
    return select(*columns).select_from(joined).where(*conditions)


def _compare_text(dialect: DialectOperations, column: Any, text: str) -> Any:
    """Return the condition that the text `column` equals `text` exactly, on every database."""
    # MySQL considers texts that differ only in trailing spaces equal, so compare bytes.
    if dialect.name in MYSQL:
        return cast(column, LargeBinary) == text.encode()
    return column == text


def _to_mirrored_message(row: Any) -> MirroredMessage:
    """Convert the joined row of a live message and a mirror record.

    A mirror record is the row that stores the message's lookup value (in the scope) and info.
    """
    return MirroredMessage(
        id=row.id,
        queue=row.queue,
        lookup=row.scope.removeprefix(MIRROR),
        info=row.info["text"],
        entry_time=row.entered_at,
        publish_time=row.created_at,
        publish_after=row.next_attempt_at,
        publish_count=row.publish_count,
        headers=load_headers(row.headers),
        payload=load_payload(row.payload),
    )

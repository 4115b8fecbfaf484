"""Publish messages of HTTP clients through the broker's middlewares, like `publish`."""

import json
from collections.abc import Sequence
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, cast

from faststream_sqlbroker.adapter.messages import DefaultCodec
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.parser import CORRELATION_ID
from faststream_sqlbroker.response import SqlBrokerPublishCommand, SqlBrokerResponse

_ENCODED = {"queue", "payload", "headers"}
OPTIONS = tuple(field.name for field in fields(NewMessage) if field.name not in _ENCODED)
"""Fields of a row that are also options of a publish."""


class HttpPublish:
    """Publishes the rows of a request in a single transaction."""

    def __init__(self, broker: Any) -> None:
        """Use the middlewares and the current producer of `broker`."""
        self._broker = broker
        self._producer = broker.config.producer

    async def __call__(
        self, rows: Sequence[NewMessage], destination: str | None = None
    ) -> list[int | None]:
        """Write `rows` and return their ids, with None for duplicates.

        A row is a duplicate if its queue already has a message with its dedup_id.

        Middlewares see a single publish: of a message for one row to its own queue, otherwise of a
        batch to `destination` (default: the first row's queue) whose bodies are
        `SqlBrokerResponse`s. If a middleware does not pass the publish on, nothing is written and
        all ids are None.

        Raises:
            PublishError: a middleware created a message that cannot be stored.
            QueueFullError: a queue is full; nothing was written.
            StoreError: the database refused the rows or could not be reached.
            RuntimeError: a middleware changed the number of messages; nothing was written.
        """
        if not self._broker.middlewares:
            return cast("list[int | None]", await self._producer.write(rows))
        ids: list[int | None] = [None] * len(rows)

        async def write(cmd: SqlBrokerPublishCommand) -> Any:
            new_rows = await self._make_rows(cmd, len(rows))
            # The return value of a middleware is its own; the client gets the ids of the written
            # rows.
            ids[:] = await self._producer.write(new_rows)
            return ids if is_batch else ids[0]

        is_batch = len(rows) > 1 or destination not in {None, rows[0].queue}
        cmd = (
            _make_batch_command(rows, destination or rows[0].queue)
            if is_batch
            else _make_single_command(rows[0])
        )
        # The body is already encoded. A replacement by a middleware is encoded as JSON, text or
        # bytes: the broker's codec is not used for publishes over HTTP.
        cmd.codec = DefaultCodec()
        producer: Any = SimpleNamespace(publish=write, publish_batch=write)
        if is_batch:
            await self._broker._basic_publish_batch(cmd, producer=producer)  # noqa: SLF001
        else:
            await self._broker._basic_publish(cmd, producer=producer)  # noqa: SLF001
        return ids

    async def _make_rows(self, cmd: SqlBrokerPublishCommand, count: int) -> list[NewMessage]:
        """Convert the command to rows after the middlewares have seen it.

        A middleware may have changed bodies, headers and options. The HTTP answer has one id for
        each requested message, so their number must not change.
        """
        rows: list[NewMessage] = await self._producer.make_rows(cmd)
        if len(rows) != count:
            raise RuntimeError(
                f"a middleware turned a request of {count} messages into {len(rows)}: over HTTP it "
                "may change messages or drop the whole publish, but must keep their number"
            )
        return rows


def _make_single_command(row: NewMessage) -> SqlBrokerPublishCommand:
    return SqlBrokerPublishCommand(row.payload, **_get_publish_arguments(row))


def _make_batch_command(rows: Sequence[NewMessage], destination: str) -> SqlBrokerPublishCommand:
    bodies = [SqlBrokerResponse(row.payload, **_get_publish_arguments(row)) for row in rows]
    return SqlBrokerPublishCommand(*bodies, queue=destination)


def _get_publish_arguments(row: NewMessage) -> dict[str, Any]:
    """Return the arguments of a publish command that reproduces `row` without its body.

    Middlewares expect a command, but the HTTP request was already converted to a row.
    """
    headers, correlation_id = _split_headers(row)
    options = {name: getattr(row, name) for name in OPTIONS}
    return {
        "queue": row.queue,
        "headers": headers,
        "correlation_id": correlation_id,
        **options,
    }


def _split_headers(row: NewMessage) -> tuple[dict[str, Any], str | None]:
    """Return the headers and the correlation id, which a command stores separately.

    A correlation id that is not text stays a header, because commands take only text.
    """
    headers: dict[str, Any] = {} if row.headers is None else json.loads(row.headers)
    correlation_id = headers.pop(CORRELATION_ID, None)
    if correlation_id is not None and not isinstance(correlation_id, str):
        headers[CORRELATION_ID] = correlation_id
        return headers, None
    return headers, correlation_id

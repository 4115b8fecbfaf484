"""Publishes of HTTP clients, which pass the broker's middlewares as those of `publish` do."""

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
OPTIONS = tuple(one.name for one in fields(NewMessage) if one.name not in _ENCODED)
"""Of a row, by the names that a publish has for them, too."""


class HttpPublish:
    """Writes rows that a request has made, in one transaction."""

    def __init__(self, broker: Any) -> None:
        """Through the middlewares of `broker`, and by the producer that it has now."""
        self._broker = broker
        self._producer = broker.config.producer

    async def __call__(
        self, rows: Sequence[NewMessage], destination: str | None = None
    ) -> list[int | None]:
        """Write `rows`; their ids, None for one whose dedup_id its queue has already.

        Middlewares see one publish: of a message for one row to its own queue, else of a batch to
        `destination` (default: the first row's queue) whose bodies are `SqlBrokerResponse`s. If
        one of them does not go on, nothing is written and all ids are None.

        Raises:
            PublishError: a middleware has made a message that cannot be stored.
            QueueFullError: a queue is full: none is written.
            StoreError: the database refused or could not be reached.
            RuntimeError: a middleware has changed the number of messages; nothing was written.
        """
        if not self._broker.middlewares:
            return cast("list[int | None]", await self._producer.write(rows))
        ids: list[int | None] = [None] * len(rows)

        async def write(cmd: SqlBrokerPublishCommand) -> Any:
            made = await self._rows(cmd, len(rows))
            # What a middleware returns is its own: the client is told what was written.
            ids[:] = await self._producer.write(made)
            return ids if several else ids[0]

        several = len(rows) > 1 or destination not in {None, rows[0].queue}
        cmd = _batch(rows, destination or rows[0].queue) if several else _single(rows[0])
        # The body is encoded. What a middleware puts in its place is encoded as JSON, text or
        # bytes: the broker's own codec has no part in publishes over HTTP.
        cmd.codec = DefaultCodec()
        producer: Any = SimpleNamespace(publish=write, publish_batch=write)
        if several:
            await self._broker._basic_publish_batch(cmd, producer=producer)  # noqa: SLF001
        else:
            await self._broker._basic_publish(cmd, producer=producer)  # noqa: SLF001
        return ids

    async def _rows(self, cmd: SqlBrokerPublishCommand, count: int) -> list[NewMessage]:
        rows: list[NewMessage] = await self._producer.make_rows(cmd)
        if len(rows) != count:
            raise RuntimeError(
                f"a middleware has made {len(rows)} messages of the {count} of a request: over "
                "HTTP it may change messages, or drop the whole publish, but not their number"
            )
        return rows


def _single(row: NewMessage) -> SqlBrokerPublishCommand:
    return SqlBrokerPublishCommand(row.payload, **_given(row))


def _batch(rows: Sequence[NewMessage], destination: str) -> SqlBrokerPublishCommand:
    bodies = [SqlBrokerResponse(row.payload, **_given(row)) for row in rows]
    return SqlBrokerPublishCommand(*bodies, queue=destination)


def _given(row: NewMessage) -> dict[str, Any]:
    headers, correlation_id = _headers(row)
    options = {name: getattr(row, name) for name in OPTIONS}
    return {
        "queue": row.queue,
        "headers": headers,
        "correlation_id": correlation_id,
        **options,
    }


def _headers(row: NewMessage) -> tuple[dict[str, Any], str | None]:
    """The headers, and the correlation id, which a command has apart from them."""
    headers: dict[str, Any] = {} if row.headers is None else json.loads(row.headers)
    found = headers.pop(CORRELATION_ID, None)
    if found is not None and not isinstance(found, str):
        headers[CORRELATION_ID] = found
        return headers, None
    return headers, found

"""Channels, their consumers and queues with tokens: where their rows are in the policy state."""

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Table, and_, or_, select

from faststream_sqlbroker.core.channels import QueueRole, Registered
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.query import Query

Place = tuple[str, str]
"""Scope and key of a row."""
CONSUMER = "consumer:"
"""The scope of a channel's consumers is this and its id; the key is the consumer's."""
READ_AT_ONCE = 1_000
"""Consumers of all channels that one statement reads."""


def place_of_channel(channel: str) -> Place:
    """Of a channel."""
    return "channel", channel


def place_of_consumer(channel: str, consumer: str) -> Place:
    """Of a consumer."""
    return CONSUMER + channel, consumer


def place_of_role(queue: str, role: QueueRole) -> Place:
    """Of a queue's token for `role`."""
    return f"queue:{role}", queue


def finding(dialect: Operations, *places: Place) -> Query[list[Registered | None]]:
    """What is at these one or two places, in this order."""

    def read(rows: Iterable[Sequence[Any]]) -> list[Registered | None]:
        found = {(scope, key): registered(key, info) for scope, key, info in rows}
        return [found.get(place) for place in places]

    binds = {}
    for number, (scope, key) in enumerate(places, 1):
        binds[f"scope{number}"] = scope
        binds[f"key{number}"] = key
    name = "registered" if len(places) == 1 else "both_registered"
    return Query(dialect.sql[name], binds, read)


def pulled(connection: Connection, table: Table) -> list[tuple[str, str]]:
    """Channel and id of all pull consumers."""
    c = table.c
    # A range, which the primary key serves on every database; ";" comes after ":".
    ours: list[Any] = [c.scope > CONSUMER, c.scope < CONSUMER[:-1] + ";"]
    found: list[tuple[str, str]] = []
    behind: list[Any] = []
    # Push ones are read, too: no index knows the type, and there are few of both.
    while True:
        statement = select(c.scope, c.key, c.info).where(*ours, *behind)
        statement = statement.order_by(c.scope, c.key).limit(READ_AT_ONCE)
        rows = connection.execute(statement).all()
        found += [
            (row.scope.removeprefix(CONSUMER), row.key)
            for row in rows
            if (row.info or {}).get("type") == "pull"
        ]
        if len(rows) < READ_AT_ONCE:
            return found
        last = rows[-1]
        behind = [or_(c.scope > last.scope, and_(c.scope == last.scope, c.key > last.key))]


def consumed_over_http(connection: Connection, table: Table) -> set[str]:
    """Return the queues with a token to take their messages."""
    scope, _ = place_of_role("", "consume")
    return set(connection.execute(select(table.c.key).where(table.c.scope == scope)).scalars())


def registered(key: str, info: Any) -> Registered:
    """The channel, consumer or token of a queue as its row has it."""
    # The driver may give the JSON as its text.
    fields = load_headers(info)
    return Registered(key, str(fields.get("token", "")), str(fields.get("type", "")))

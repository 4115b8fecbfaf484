"""Channels, their consumers and queues with tokens: the keys of their rows in the policy state."""

from collections.abc import Iterable, Sequence
from typing import Any

from sqlalchemy import Connection, Table, and_, or_, select

from faststream_sqlbroker.core.channels import QueueRole, RegisteredEndpoint
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.database.operations import DialectOperations
from faststream_sqlbroker.database.query import Query

StateKey = tuple[str, str]
"""Scope and key of a row of the policy state."""
CONSUMER = "consumer:"
"""The scope of a channel's consumers is this and its id; the key is the consumer's."""
CONSUMER_PAGE = 1_000
"""Consumers of all channels that one statement reads."""


def get_channel_key(channel: str) -> StateKey:
    """Return the key of a channel."""
    return "channel", channel


def get_consumer_key(channel: str, consumer: str) -> StateKey:
    """Return the key of a consumer."""
    return CONSUMER + channel, consumer


def get_role_key(queue: str, role: QueueRole) -> StateKey:
    """Return the key of a queue's token for `role`."""
    return f"queue:{role}", queue


def create_lookup(
    dialect: DialectOperations, *keys: StateKey
) -> Query[list[RegisteredEndpoint | None]]:
    """Create a query that finds the registrations of `keys`: a single key or two.

    The result has them in the order of `keys`, with None for a key without a row. A request over
    HTTP needs this lookup, so it is a single statement.
    """

    def parse(rows: Iterable[Sequence[Any]]) -> list[RegisteredEndpoint | None]:
        registrations = {(scope, key): parse_registration(key, info) for scope, key, info in rows}
        return [registrations.get(state_key) for state_key in keys]

    binds = {}
    for number, (scope, key) in enumerate(keys, 1):
        binds[f"scope{number}"] = scope
        binds[f"key{number}"] = key
    name = "registered" if len(keys) == 1 else "both_registered"
    return Query(dialect.sql[name], binds, parse)


def list_pull_consumers(connection: Connection, table: Table) -> list[tuple[str, str]]:
    """Return channel and id of all pull consumers.

    Reads the registrations of all channels page by page.
    """
    c = table.c
    # A range of scopes, which the primary key serves on every database; ";" comes after ":".
    scope_range: list[Any] = [c.scope > CONSUMER, c.scope < CONSUMER[:-1] + ";"]
    consumers: list[tuple[str, str]] = []
    after: list[Any] = []
    # Push consumers are read, too: no index contains the type, and there are few of both.
    while True:
        statement = select(c.scope, c.key, c.info).where(*scope_range, *after)
        statement = statement.order_by(c.scope, c.key).limit(CONSUMER_PAGE)
        rows = connection.execute(statement).all()
        consumers += [
            (row.scope.removeprefix(CONSUMER), row.key)
            for row in rows
            if (row.info or {}).get("type") == "pull"
        ]
        if len(rows) < CONSUMER_PAGE:
            return consumers
        last = rows[-1]
        after = [or_(c.scope > last.scope, and_(c.scope == last.scope, c.key > last.key))]


def list_http_queues(connection: Connection, table: Table) -> set[str]:
    """Return the queues that have a token to consume their messages."""
    scope, _ = get_role_key("", "consume")
    return set(connection.execute(select(table.c.key).where(table.c.scope == scope)).scalars())


def parse_registration(key: str, info: Any) -> RegisteredEndpoint:
    """Return the channel, the consumer or the queue's token stored in a row."""
    # The driver may return the JSON as text.
    fields = load_headers(info)
    return RegisteredEndpoint(key, str(fields.get("token", "")), str(fields.get("type", "")))

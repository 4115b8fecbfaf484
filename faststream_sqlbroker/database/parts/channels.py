"""Channels and consumers: rows of the policy state, which nothing removes but their owner."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sqlalchemy import (
    Connection,
    Table,
    and_,
    func,
    or_,
    select,
    update,
)

from faststream_sqlbroker.core.channels import Registered, hashed_token, new_token
from faststream_sqlbroker.core.text import load_headers
from faststream_sqlbroker.database.operations import Operations
from faststream_sqlbroker.database.parts.policy_state import insert_new
from faststream_sqlbroker.database.query import Query
from faststream_sqlbroker.exceptions import SetupError

CHANNEL = "channel"
"""Scope of channels; the key is the id."""
CONSUMER = "consumer:"
"""The scope of a channel's consumers is this and its id; the key is the consumer's."""
MOST_CONSUMERS = 1_000
"""Consumers of a channel."""
READ_AT_ONCE = 1_000
"""Consumers of all channels that one statement reads."""


def place_of(queue: str) -> tuple[str, str]:
    """Scope and key of the consumer whose jobs are in `queue`."""
    channel, _, consumer = queue.partition("/")
    return CONSUMER + channel, consumer


def finding(dialect: Operations, *places: tuple[str, str]) -> Query[list[Registered | None]]:
    """The channels or consumers with these one or two scopes and keys, in this order."""

    def read(rows: Iterable[Sequence[Any]]) -> list[Registered | None]:
        found = {(scope, key): registered(key, info) for scope, key, info in rows}
        return [found.get(place) for place in places]

    binds = {}
    for number, (scope, key) in enumerate(places, 1):
        binds[f"scope{number}"] = scope
        binds[f"key{number}"] = key
    name = "registered" if len(places) == 1 else "both_registered"
    return Query(dialect.sql[name], binds, read)


def put(
    connection: Connection,
    table: Table,
    scope: str,
    key: str,
    *,
    token: str | None,
    changes: Mapping[str, Any],
    rotate: bool,
) -> Registered:
    """Make the channel or consumer, or change the one that is there; its row stays locked.

    A new one gets `token`, or a random one; with `rotate`, so does one that is there. A token that
    is given replaces the one that is there.

    Raises:
        SetupError: a channel has too many consumers.
    """
    c = table.c
    made = token or new_token()
    where = (c.scope == scope, c.key == key)
    locking = select(c.info).where(*where).with_for_update()
    info = connection.execute(locking).scalar_one_or_none()
    created = False
    if info is None:
        _refuse_too_many(connection, table, scope)
        new = {"token": hashed_token(made), **changes}
        # The race: another process may make it at the same time. Then its row stays, and this
        # one's token is none.
        row = {"scope": scope, "key": key, "info": new}
        insert_new(connection, table, [row])
        info = connection.execute(locking).scalar_one()
        created = info["token"] == new["token"]
    replaced = created or rotate or token is not None
    kept = {"token": hashed_token(made)} if replaced else {}
    wanted = {**info, **kept, **changes}
    if wanted != info:
        connection.execute(update(table).where(*where).values(info=wanted))
    found = registered(key, wanted)
    told = made if token is None and replaced else None
    changed = created or wanted != info
    earlier = registered(key, info).type
    return Registered(found.id, found.token_hash, found.type, told, created, changed, earlier)


def _refuse_too_many(connection: Connection, table: Table, scope: str) -> None:
    """Refuse a consumer that no broadcast would reach.

    Raises:
        SetupError: its channel has as many as it can have.
    """
    if not scope.startswith(CONSUMER):
        return
    count = select(func.count()).select_from(table).where(table.c.scope == scope)
    if connection.execute(count).scalar_one() >= MOST_CONSUMERS:
        raise SetupError(f"a channel has at most {MOST_CONSUMERS} consumers: make another channel")


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


def registered(key: str, info: Any) -> Registered:
    """The channel or consumer as its row has it."""
    # The driver may give the JSON as its text.
    fields = load_headers(info)
    return Registered(key, str(fields.get("token", "")), str(fields.get("type", "")))

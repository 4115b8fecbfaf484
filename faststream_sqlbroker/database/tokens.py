"""What clients over HTTP show tokens for: channels, their consumers, and queues.

Each is a row of the policy state with the hash of its token, which nothing removes but its owner.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, func, select, update

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.channels import (
    QueueRole,
    Registered,
    hashed_token,
    new_token,
    queue_of,
)
from faststream_sqlbroker.core.jobs import Job
from faststream_sqlbroker.database.engine import Database
from faststream_sqlbroker.database.parts import audit
from faststream_sqlbroker.database.parts.channels import (
    CONSUMER,
    Place,
    finding,
    place_of_channel,
    place_of_consumer,
    place_of_role,
    pulled,
    registered,
)
from faststream_sqlbroker.database.parts.policy_state import insert_new
from faststream_sqlbroker.database.parts.pull_jobs import end_leases
from faststream_sqlbroker.exceptions import SetupError

MOST_CONSUMERS = 1_000
"""Consumers of a channel."""


class TokenStore:
    """Finds them, and makes them with a note in the audit of who did.

    A new one gets the `token` that is given, or a random one; with `rotate`, so does one that is
    there. A token that is given replaces the one that is there.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._dialect = database.dialect
        self._table = database.tables.policy_state

    async def find(self, channel: str, *consumer: str) -> list[Registered | None]:
        """The channel, and its consumer if it is given, in one look."""
        places = [place_of_consumer(channel, each) for each in consumer]
        return await self._find(place_of_channel(channel), *places)

    async def find_role(self, queue: str, role: QueueRole) -> list[Registered | None]:
        """The queue's token for `role`."""
        return await self._find(place_of_role(queue, role))

    async def _find(self, *places: Place) -> list[Registered | None]:
        query = finding(self._dialect, *places)
        return await self._database.run(query, Activity.STATE, write=False)

    async def consumers(self, channel: str) -> list[Registered]:
        """The consumers of a channel, by id."""
        c = self._table.c
        of_channel = select(c.key, c.info).where(c.scope == CONSUMER + channel)
        listed = of_channel.order_by(c.key).limit(MOST_CONSUMERS)

        def read(connection: Connection) -> list[Registered]:
            return [registered(row.key, row.info) for row in connection.execute(listed)]

        return await self._database.run(read, Activity.STATE, write=False)

    async def pulled(self) -> list[str]:
        """The queues of all pull consumers."""
        found = await self._database.run(
            lambda c: pulled(c, self._table), Activity.STATE, write=False
        )
        return [queue_of(*each) for each in found]

    async def put_queue(
        self,
        queue: str,
        role: QueueRole,
        *,
        by: str,
        token: str | None = None,
        rotate: bool = False,
    ) -> Registered:
        """Make the queue's token for `role`, or replace it."""

        def work(connection: Connection) -> Registered:
            found = self._put(connection, place_of_role(queue, role), {}, token, rotate)
            arguments = {"queue": queue, "role": role}
            self._note(connection, found, "put_queue_token", by, arguments)
            return found

        return await self._database.run(work, Activity.STATE)

    async def put_channel(
        self,
        channel: str,
        consumer: str | None = None,
        *,
        by: str,
        kind: str = "",
        token: str | None = None,
        rotate: bool = False,
    ) -> Registered | None:
        """Make or change the channel, or its consumer of the type `kind`.

        None: there is no such channel.
        """
        place = place_of_channel(channel)
        changes = {}
        if consumer is not None:
            place = place_of_consumer(channel, consumer)
            changes = {"type": kind}

        def work(connection: Connection) -> Registered | None:
            # A consumer of no channel could never be reached.
            of_channel = finding(self._dialect, place_of_channel(channel))
            if consumer is not None and of_channel(connection) == [None]:
                return None
            found = self._put(connection, place, changes, token, rotate)
            # Its clients can end nothing any more, and a lease may last for years.
            if consumer is not None and (found.earlier_type, kind) == ("pull", "push"):
                end_leases(connection, self._dialect, queue_of(channel, consumer), ended=False)
            arguments = {
                "channel": channel,
                "consumer": consumer,
                "type": kind or None,
                "new_token": found.new_token is not None or token is not None,
            }
            action = "put_channel" if consumer is None else "put_consumer"
            self._note(connection, found, action, by, arguments)
            return found

        return await self._database.run(work, Activity.STATE)

    def _put(
        self,
        connection: Connection,
        place: Place,
        changes: Mapping[str, Any],
        token: str | None,
        rotate: bool,
    ) -> Registered:
        """What is at `place` now; its row stays locked.

        Raises:
            SetupError: a channel has too many consumers.
        """
        scope, key = place
        c = self._table.c
        made = token or new_token()
        where = (c.scope == scope, c.key == key)
        locking = select(c.info).where(*where).with_for_update()
        info = connection.execute(locking).scalar_one_or_none()
        created = False
        if info is None:
            self._refuse_too_many(connection, scope)
            new = {"token": hashed_token(made), **changes}
            # The race: another process may make it at the same time. Then its row stays, and this
            # one's token is none.
            insert_new(connection, self._table, [{"scope": scope, "key": key, "info": new}])
            info = connection.execute(locking).scalar_one()
            created = info["token"] == new["token"]
        replaced = created or rotate or token is not None
        kept = {"token": hashed_token(made)} if replaced else {}
        wanted = {**info, **kept, **changes}
        if wanted != info:
            connection.execute(update(self._table).where(*where).values(info=wanted))
        found = registered(key, wanted)
        told = made if token is None and replaced else None
        changed = created or wanted != info
        earlier = registered(key, info).type
        return Registered(found.id, found.token_hash, found.type, told, created, changed, earlier)

    def _refuse_too_many(self, connection: Connection, scope: str) -> None:
        """Refuse a consumer that no broadcast would reach.

        Raises:
            SetupError: its channel has as many as it can have.
        """
        if not scope.startswith(CONSUMER):
            return
        count = select(func.count()).select_from(self._table).where(self._table.c.scope == scope)
        if connection.execute(count).scalar_one() >= MOST_CONSUMERS:
            text = f"a channel has at most {MOST_CONSUMERS} consumers: make another channel"
            raise SetupError(text)

    def _note(
        self,
        connection: Connection,
        found: Registered,
        action: str,
        by: str,
        arguments: Mapping[str, Any],
    ) -> None:
        if found.changed:
            job = Job(action=action, by=by, arguments=arguments, state="ended", expected=1, done=1)
            audit.add(connection, self._table, job, self._dialect.now(connection))

"""Tokens of HTTP clients: for channels, their consumers, and queues.

Each is a row of the policy state with the hash of its token, which only its owner removes.
"""

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Connection, func, select, update

from faststream_sqlbroker.core.access import Activity
from faststream_sqlbroker.core.bulk_jobs import Job
from faststream_sqlbroker.core.channels import (
    QueueRole,
    RegisteredEndpoint,
    build_queue_name,
    create_token,
    hash_token,
)
from faststream_sqlbroker.database.engine import StoreSubject
from faststream_sqlbroker.database.parts import audit
from faststream_sqlbroker.database.parts.channel_rows import (
    CONSUMER,
    StateKey,
    create_lookup,
    get_channel_key,
    get_consumer_key,
    get_role_key,
    list_pull_consumers,
    parse_registration,
)
from faststream_sqlbroker.database.parts.policy_state import insert_new
from faststream_sqlbroker.database.parts.pull_job_rows import release_leases
from faststream_sqlbroker.exceptions import SetupError

MAX_CONSUMERS = 1_000
"""Consumers of a channel."""


class TokenStore(StoreSubject):
    """Tokens of channels, consumers and queues; changes are recorded in the audit.

    A new entry gets the `token` that is passed, or a random token; with `rotate`, so does an
    existing entry. A token that is passed replaces the existing token.

    Raises (from every operation):
        TransientStoreError, UnknownOutcomeError, StoreError: as `Store`.
    """

    async def find(self, channel: str, *consumer: str) -> list[RegisteredEndpoint | None]:
        """Find the channel, and the consumer if named, in a single query.

        Returns an entry for each, None for an entry that does not exist.
        """
        row_keys = [get_consumer_key(channel, consumer_id) for consumer_id in consumer]
        return await self._find(get_channel_key(channel), *row_keys)

    async def find_role(self, queue: str, role: QueueRole) -> list[RegisteredEndpoint | None]:
        """Find the queue's token for `role`."""
        return await self._find(get_role_key(queue, role))

    async def _find(self, *places: StateKey) -> list[RegisteredEndpoint | None]:
        query = create_lookup(self._dialect, *places)
        return await self._database.run(query, Activity.STATE, write=False)

    async def list_consumers(self, channel: str) -> list[RegisteredEndpoint]:
        """List the consumers of a channel, by id; at most `MAX_CONSUMERS`."""
        c = self._table.c
        of_channel = select(c.key, c.info).where(c.scope == CONSUMER + channel)
        statement = of_channel.order_by(c.key).limit(MAX_CONSUMERS)

        def read_rows(connection: Connection) -> list[RegisteredEndpoint]:
            return [parse_registration(row.key, row.info) for row in connection.execute(statement)]

        return await self._database.run(read_rows, Activity.STATE, write=False)

    async def list_pulled_queues(self) -> list[str]:
        """List the queues of all pull consumers."""
        consumers = await self._database.run(
            lambda c: list_pull_consumers(c, self._table), Activity.STATE, write=False
        )
        return [build_queue_name(*consumer) for consumer in consumers]

    async def set_queue_token(
        self,
        queue: str,
        role: QueueRole,
        *,
        by: str,
        token: str | None = None,
        rotate: bool = False,
    ) -> RegisteredEndpoint:
        """Create or replace the queue's token for `role`.

        A role is what a client may do with the queue: publish or consume. The entry has a new token
        only if the token was drawn here.
        """

        def work(connection: Connection) -> RegisteredEndpoint:
            entry = self._set_entry(connection, get_role_key(queue, role), {}, token, rotate)
            arguments = {"queue": queue, "role": role}
            self._record_change(connection, entry, "put_queue_token", by, arguments)
            return entry

        return await self._database.run(work, Activity.STATE)

    async def set_channel(
        self,
        channel: str,
        consumer: str | None = None,
        *,
        by: str,
        kind: str = "",
        token: str | None = None,
        rotate: bool = False,
    ) -> RegisteredEndpoint | None:
        """Create or change the channel, or the `consumer` of the type `kind`.

        A consumer that changes from pull to push loses its leases: its clients can no longer end
        their jobs. Returns None if a consumer's channel does not exist.
        """
        row_key = get_channel_key(channel)
        changes = {}
        if consumer is not None:
            row_key = get_consumer_key(channel, consumer)
            changes = {"type": kind}

        def work(connection: Connection) -> RegisteredEndpoint | None:
            # A consumer without a channel could never be reached.
            of_channel = create_lookup(self._dialect, get_channel_key(channel))
            if consumer is not None and of_channel(connection) == [None]:
                return None
            entry = self._set_entry(connection, row_key, changes, token, rotate)
            # Its clients can no longer end their jobs, and a lease may last for years.
            if consumer is not None and (entry.previous_type, kind) == ("pull", "push"):
                release_leases(
                    connection, self._dialect, build_queue_name(channel, consumer), ended=False
                )
            arguments = {
                "channel": channel,
                "consumer": consumer,
                "type": kind or None,
                "new_token": entry.new_token is not None or token is not None,
            }
            action = "put_channel" if consumer is None else "put_consumer"
            self._record_change(connection, entry, action, by, arguments)
            return entry

        return await self._database.run(work, Activity.STATE)

    def _set_entry(
        self,
        connection: Connection,
        row_key: StateKey,
        changes: Mapping[str, Any],
        token: str | None,
        rotate: bool,
    ) -> RegisteredEndpoint:
        """Create or change the entry at `row_key`; return the entry, with a new token if drawn.

        The database stores only the hash of a token, so a random token is returned once, here. The
        row stays locked until the transaction ends.

        Raises:
            SetupError: a channel has too many consumers.
        """
        scope, key = row_key
        c = self._table.c
        raw_token = token or create_token()
        where = (c.scope == scope, c.key == key)
        locking = select(c.info).where(*where).with_for_update()
        info = connection.execute(locking).scalar_one_or_none()
        created = False
        if info is None:
            self._refuse_too_many(connection, scope)
            new_info = {"token": hash_token(raw_token), **changes}
            # Race: another process may create the entry at the same time. Then its row stays, and
            # the token created here is discarded.
            insert_new(connection, self._table, [{"scope": scope, "key": key, "info": new_info}])
            info = connection.execute(locking).scalar_one()
            created = info["token"] == new_info["token"]
        replaced = created or rotate or token is not None
        new_hash = {"token": hash_token(raw_token)} if replaced else {}
        new_entry = {**info, **new_hash, **changes}
        if new_entry != info:
            connection.execute(update(self._table).where(*where).values(info=new_entry))
        entry = parse_registration(key, new_entry)
        new_token_value = raw_token if token is None and replaced else None
        changed = created or new_entry != info
        earlier_type = parse_registration(key, info).type
        return RegisteredEndpoint(
            entry.id, entry.token_hash, entry.type, new_token_value, created, changed, earlier_type
        )

    def _refuse_too_many(self, connection: Connection, scope: str) -> None:
        """Refuse another consumer of a full channel, because no broadcast would reach the consumer.

        Raises:
            SetupError: the channel has `MAX_CONSUMERS` consumers.
        """
        if not scope.startswith(CONSUMER):
            return
        count = select(func.count()).select_from(self._table).where(self._table.c.scope == scope)
        if connection.execute(count).scalar_one() >= MAX_CONSUMERS:
            message = f"a channel has at most {MAX_CONSUMERS} consumers: create another channel"
            raise SetupError(message)

    def _record_change(
        self,
        connection: Connection,
        entry: RegisteredEndpoint,
        action: str,
        by: str,
        arguments: Mapping[str, Any],
    ) -> None:
        """Add an audit entry, if the channel, consumer or queue `entry` was created or changed."""
        if entry.changed:
            job = Job(action=action, by=by, arguments=arguments, state="ended", expected=1, done=1)
            audit.add_job(connection, self._table, job, self._dialect.now(connection))

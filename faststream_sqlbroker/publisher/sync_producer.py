"""`SqlProducer`: publish from synchronous code, without a broker and without an event loop."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sqlalchemy import URL, Engine, create_engine
from typing_extensions import Unpack

from faststream_sqlbroker.adapter.broker import FastDependsConfig
from faststream_sqlbroker.adapter.messages import DefaultCodec
from faststream_sqlbroker.adapter.values import EMPTY
from faststream_sqlbroker.core.checks import validate_integer
from faststream_sqlbroker.core.depth import MaxDepth, validate_depths
from faststream_sqlbroker.core.rows import NewMessage
from faststream_sqlbroker.database.django import is_django_connection
from faststream_sqlbroker.database.pool import ensure_transactional
from faststream_sqlbroker.database.sync_store import SyncStore
from faststream_sqlbroker.exceptions import MissingExtraError, PublishError, SetupError
from faststream_sqlbroker.flow.publish import align_ids, filter_admitted
from faststream_sqlbroker.flow.publish_limits import PublishLimits
from faststream_sqlbroker.flow.publish_on_ack import get_due_queues
from faststream_sqlbroker.publisher.producer import encode_sync, make_command_row
from faststream_sqlbroker.publisher.rows import check_not_one_list
from faststream_sqlbroker.response import MessageOptions, SqlBrokerPublishCommand
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables

if TYPE_CHECKING:
    from fast_depends.library.serializer import SerializerProto
    from sqlalchemy import Connection
    from sqlalchemy.orm import Session

    from faststream_sqlbroker.adapter.messages import CodecProto


@dataclass(slots=True)
class RunningTests:
    """The number of running tests of this process that have no real database."""

    count: int = 0


tests = RunningTests()
"""Incremented by `TestSqlBroker`."""
LOGGER = logging.getLogger("faststream_sqlbroker.producer")


class SqlProducer:
    """Publishes from synchronous code: Django, Flask, scripts. No async driver is needed.

    A producer may be shared by threads. It runs no middleware and requires only the rights of a
    producer.
    """

    def __init__(
        self,
        database: Any,
        *,
        schema: SqlBrokerSchemaConfig | None = None,
        notify: bool = False,
        max_payload: int | None = None,
        max_depth: "Mapping[str, MaxDepth | int] | None" = None,
        codec: "CodecProto | None" = None,
        serializer: "SerializerProto | None" = EMPTY,
        id_generator: Callable[[], str] | None = None,
    ) -> None:
        """Create a producer, without connecting to the database yet.

        Args:
            database: A synchronous Engine, or a URL of one; or one of Django's connections, such as
                `django.db.connection`: messages are then written in Django's transaction.
            schema: Names of the tables.
            notify: PostgreSQL: notify listening subscribers at the COMMIT, so that they do not
                depend on polling. PostgreSQL commits transactions with a notification one at a
                time. No effect on other databases.
            max_payload: As for `SqlBroker`.
            max_depth: As for `SqlBroker`, except that nothing waits here: a limit that would wait
                raises.
            codec: Encodes bodies; it must await nothing.
            serializer: FastDepends' serializer.
            id_generator: Creates the correlation id of a message that is published without one;
                None stores none.

        Raises:
            SetupError: `database` is of another type, has an asynchronous driver or no transactions
                (AUTOCOMMIT), or a limit is not valid.
            MissingExtraError: the URL's driver is not installed.
        """
        tables = build_tables(schema or SqlBrokerSchemaConfig())
        self._store = SyncStore(_check_database(database), tables)
        self._notify = notify
        self._codec = codec or DefaultCodec()
        self._serializer = FastDependsConfig(serializer=serializer)._serializer  # noqa: SLF001
        self._id_generator = id_generator
        depths = validate_depths(max_depth)
        if max_payload is not None:
            validate_integer("max_payload", max_payload, other=" of bytes, or None")
        self._limits: PublishLimits | None = None
        if depths or max_payload is not None:
            self._limits = PublishLimits(self._store, depths, max_payload, log=_log)

    def publish(
        self,
        message: Any = None,
        queue: str = "",
        *,
        connection: "Connection | None" = None,
        session: "Session | None" = None,
        **options: Unpack[MessageOptions],
    ) -> int | None:
        """Publish a message and return the id.

        With `connection` or `session`, and with a connection of Django, the message is part of the
        caller's transaction, which is neither begun, committed nor flushed here. Otherwise it is
        committed when this method returns.

        Args:
            message: The body: bytes and str unchanged, anything else as JSON.
            queue: Full name of the queue.
            connection: A synchronous Connection to the same database.
            session: A synchronous Session on that database. Pass at most one of the two.
            options: See `MessageOptions`.

        Returns:
            The message's id; None if the queue already has a message with the same dedup_id, or if
            the queue is full and its `max_depth` drops messages.

        Raises:
            PublishError: a value cannot be stored, a connection cannot be used, or a TestSqlBroker
                without a real database runs; nothing was written.
            QueueFullError: the queue has reached its `max_depth`; nothing was written.
            StoreError: the database refused the message or could not be reached. If the answer to a
                COMMIT was lost, the message may be written.
            SetupError: the codec awaits something.
        """
        [message_id] = self._publish((message,), queue, connection, session, options)
        return message_id

    def publish_batch(
        self,
        *messages: Any,
        queue: str = "",
        connection: "Connection | None" = None,
        session: "Session | None" = None,
        **options: Unpack[MessageOptions],
    ) -> list[int | None]:
        """Publish several messages in a single transaction: either all are stored, or none.

        Args:
            messages: Bodies, or `SqlBrokerResponse`s with their own options. Without messages
                nothing happens.
            queue: Full name of the queue.
            connection: As for `publish`.
            session: As for `publish`.
            options: Options of all messages; see `MessageOptions`.

        Returns:
            The ids in the order of the messages; an id is None in the same cases as with `publish`.

        Raises:
            PublishError: as for `publish`; or the only argument is a list of messages.
            QueueFullError: as for `publish`.
            StoreError: as for `publish`.
            SetupError: as for `publish`.
        """
        if not messages:
            return []
        check_not_one_list(messages)
        return self._publish(messages, queue, connection, session, options)

    def _publish(
        self,
        bodies: Sequence[Any],
        queue: str,
        connection: "Connection | None",
        session: "Session | None",
        options: Mapping[str, Any],
    ) -> list[int | None]:
        """Check the options, create all rows, and write all in a single transaction.

        `tests.count` is not zero while a TestSqlBroker without with_real=True is active, whose test
        would not see a message in a real database.
        """
        if tests.count:
            raise PublishError(
                "a SqlProducer publishes to a real database, which TestSqlBroker does not use, so "
                "no handler would get the message: replace the producer in the test, or pass "
                "with_real=True to TestSqlBroker"
            )
        if "with_ack" in options:
            raise PublishError("with_ack is only for handlers of a broker: omit it")
        if connection is not None and session is not None:
            raise PublishError("give connection= or session=, not both")
        transaction = session if connection is None else connection
        if transaction is not None and self._store.uses_django:
            raise PublishError(
                "this producer writes in the transaction of Django's connection: omit connection= "
                "and session=, or create the SqlProducer from an Engine"
            )
        # Create all rows before a connection is opened, so that invalid messages do not cost one.
        rows = [self._make_row(body, queue, options) for body in bodies]
        if self._limits is not None:
            self._limits.check_payload(rows)
        with self._store.open(transaction) as open_connection:
            return self._write(open_connection, rows)

    def _make_row(self, body: Any, queue: str, options: Mapping[str, Any]) -> NewMessage:
        """Encode a body and create the row, without an event loop."""
        cmd = SqlBrokerPublishCommand(body, queue=queue, **options)
        if self._id_generator is not None:
            cmd.id_generator = self._id_generator
        return make_command_row(cmd, 0, *encode_sync(self._codec, cmd.body, self._serializer))

    def _write(self, connection: "Connection", rows: list[NewMessage]) -> list[int | None]:
        """Write the rows that `max_depth` admits; a dropped row has None instead of an id.

        `max_depth` limits the due messages of a queue. Nothing can wait here for a full queue.
        """
        if self._limits is None:
            return self._insert(connection, rows)
        admitted = self._limits.admit_sync(rows, connection=connection)
        if admitted is None:
            return self._insert(connection, rows)
        return align_ids(admitted, self._insert(connection, filter_admitted(rows, admitted)))

    def _insert(self, connection: "Connection", rows: list[NewMessage]) -> list[int | None]:
        """Insert the rows and notify the subscribers of due messages.

        Without a notification, subscribers find the messages at their next poll; those with
        max_fetch_interval=None are notified by the table's triggers.
        """
        if not rows:
            return []
        ids = self._store.insert(connection, rows)
        if self._notify:
            self._store.notify(connection, sorted(get_due_queues(rows)))
        return ids


def _check_database(database: Any) -> Any:
    """Return `database` as an Engine with transactions, or as a connection of Django."""
    if is_django_connection(database):
        return database
    engine = _create_engine(database) if isinstance(database, str | URL) else database
    if not isinstance(engine, Engine) or engine.dialect.is_async:
        # Only the type is shown: the value may hold a password.
        got = type(database).__name__
        driver = f" with {engine.dialect.driver}" if isinstance(engine, Engine) else ""
        raise SetupError(
            "SqlProducer needs a synchronous Engine, a database URL or a Django connection such as "
            f"django.db.connection, got {got}{driver}"
        )
    return ensure_transactional(engine, None)


def _create_engine(url: str | URL) -> Engine:
    """Create a synchronous engine from a URL; describe errors without the URL's password."""
    try:
        return create_engine(url)
    except ModuleNotFoundError as error:
        raise MissingExtraError(f"the driver {error.name!r} is not installed") from error
    except Exception as error:  # noqa: BLE001 - a dialect may raise anything
        # The error may quote a part of the password, so it is neither shown nor chained.
        raise SetupError(
            "cannot create an engine from the database URL: use a URL like "
            f"postgresql+psycopg://user@host/name ({type(error).__name__})"
        ) from None


def _log(level: int, text: str, *, exc_info: BaseException | None = None) -> None:
    LOGGER.log(level, text, exc_info=exc_info)

"""All errors that the broker raises on purpose; each is also a FastStreamException.

SqlBrokerError
├── SetupError                  invalid options or use; nothing was written (also FastStream's)
│   ├── MissingExtraError       an optional package is not installed
│   ├── ConfigError             a YAML file has mistakes; the text lists the position of each
│   ├── SchemaError             the tables are not those that this version needs
│   └── RightsError             the database user lacks rights that this process needs
├── PublishError                the message cannot be stored as given (also a ValueError)
│   └── MessageTooLargeError    the message exceeds max_payload or a limit of the database (also a
│                               StoreError)
├── QueueFullError              the queue has as many due messages as max_depth allows
├── NotSupportedError           this database or driver lacks the feature (also FastStream's)
├── TransactionEndedError       a handler's transaction ended before its ack
├── LeaseLostError              a reservation lost its lease; its outcome was not written
├── BrokerStoppedError          the broker was stopped while a request waited for its reply
├── LockLostError               a lock lost its lease; another holder may have it
├── LockNotAcquiredError        another holder kept the lock for the whole waiting time
├── HttpError                   a server refused a request of `faststream_sqlbroker.client`
├── ExportMismatchError         an export wrote other data than the database holds
├── ConcurrentLoadError         two loads used one state at the same time
└── StoreError                  the database answered with an error
    ├── AccessError             a right or a table is missing
    └── TransientStoreError     worth repeating: connection, deadlock, serialization, busy, disk
        └── UnknownOutcomeError the answer to a COMMIT was lost; it may have been committed
"""

from collections.abc import Sequence
from typing import Any

# The only import of FastStream outside of the outer layer. `except
# faststream.exceptions.SetupError` needs real base classes, and FastStream is always installed:
# `__init__` imports the broker.
from faststream.exceptions import FastStreamException, FeatureNotSupportedException
from faststream.exceptions import SetupError as FastStreamSetupError


class SqlBrokerError(FastStreamException):
    """Base of every error of this package."""


class SetupError(SqlBrokerError, FastStreamSetupError):
    """Invalid options or wrong use, raised before anything is written."""


class MissingExtraError(SetupError, ImportError):
    """A missing optional package; the message names the extra to install."""


class ConfigError(SetupError):
    """Mistakes in a YAML file.

    Attributes:
        mistakes: All mistakes, each with `line`, `column`, `where` (the keys that lead to it) and
            `text`.
    """

    def __init__(self, path: object, mistakes: Sequence[Any]) -> None:
        head = f"{path} has {len(mistakes)} mistake{'s' if len(mistakes) > 1 else ''}:"
        super().__init__("\n".join((head, *(f"  {mistake}" for mistake in mistakes))))
        self.mistakes = tuple(mistakes)


class SchemaError(SetupError):
    """Differences between the tables and the schema that this version needs.

    The message names each difference and how to remove it.
    """


class RightsError(SetupError):
    """Rights that this process needs and the database user lacks.

    The message names each right and the GRANT that gives it.
    """


class PublishError(SqlBrokerError, ValueError):
    """A message that cannot be stored as given, so it was not published."""


class QueueFullError(SqlBrokerError):
    """A queue with as many due messages as its `max_depth` allows; no message was published.

    Attributes:
        queue: The name of the queue.
    """

    def __init__(self, queue: str, text: str) -> None:
        super().__init__(text)
        self.queue = queue


class NotSupportedError(SqlBrokerError, FeatureNotSupportedException):
    """A feature that this database or driver lacks; the message names the alternatives."""


class TransactionEndedError(SqlBrokerError):
    """A handler's transaction (transactional=True) that ended before the ack."""


class LeaseLostError(SqlBrokerError):
    """A lost lease. No change was written; another worker may have the message."""


class BrokerStoppedError(SqlBrokerError):
    """A stop of the broker while a request waited for its reply, which may still be written."""


class LockLostError(SqlBrokerError):
    """A lock whose lease was lost or not renewed in time; another holder may have the lock."""


class LockNotAcquiredError(SqlBrokerError):
    """A lock that another holder kept for the whole waiting time."""


class HttpError(SqlBrokerError):
    """A request of `faststream_sqlbroker.client` that the server refused.

    Attributes:
        status: The HTTP status code of the response.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"the server answered {status}: {text}")
        self.status = status


class ExportMismatchError(SqlBrokerError):
    """A difference between the written data and the source; what was written is not used.

    Attributes:
        window: Name of the window.
        expected: Row count and checksum of the source, as text.
        found: Row count and checksum of the written data, as text.
    """

    def __init__(self, window: str, expected: str, found: str, advice: str) -> None:
        super().__init__(f"window {window}: expected {expected}; found {found}. {advice}")
        self.window = window
        self.expected = expected
        self.found = found


class ConcurrentLoadError(SqlBrokerError):
    """Two simultaneous loads of the same state; the state is that of the other load."""


class StoreError(SqlBrokerError):
    """A statement that the database refused; repeating the same statement would fail again."""


class AccessError(StoreError):
    """A statement that needs a right the database user lacks, or a table that does not exist.

    The text names the right, the user and the GRANT, if the database could be queried for them.

    Attributes:
        only_answers: True if the database refused outcomes only because messages published with
            some of them need a missing right.
        every_answer: True if, in addition, the user cannot publish any message.
    """

    only_answers = False
    every_answer = False


class MessageTooLargeError(PublishError, StoreError):
    """A message over the database's limits or the broker's `max_payload`; it was not sent.

    The database limits the size of a statement or a row.
    """


class TransientStoreError(StoreError):
    """A failed statement that may succeed when repeated.

    Causes are a lost connection, a deadlock, a serialization failure, a busy database or a full
    disk.
    """


class UnknownOutcomeError(TransientStoreError):
    """A connection lost during a COMMIT: the work may or may not be committed."""

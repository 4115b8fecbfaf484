"""Every error the broker raises on purpose; each is a FastStreamException, too.

SqlBrokerError
├── SetupError                  wrong options or wrong use; nothing was written (also FastStream's)
│   ├── MissingExtraError       an optional package is not installed
│   ├── ConfigError             a file of YAML has mistakes; the text has the place of each
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
├── HttpError                   a server has refused a request of `faststream_sqlbroker.client`
├── ExportMismatchError         an export wrote other data than the database holds
├── ConcurrentLoadError         two loads used one state at the same time
└── StoreError                  the database answered with an error
    ├── AccessError             a right or a table is missing
    └── TransientStoreError     worth repeating: connection, deadlock, serialization, busy, disk
        └── UnknownOutcomeError the answer to a COMMIT was lost; it may have been committed
"""

from collections.abc import Sequence
from typing import Any

# The one import of FastStream below its shell. `except faststream.exceptions.SetupError` needs real
# base classes, and FastStream is there whenever this package is: its `__init__` imports the broker.
from faststream.exceptions import FastStreamException, FeatureNotSupportedException
from faststream.exceptions import SetupError as FastStreamSetupError


class SqlBrokerError(FastStreamException):
    """Base of every error of this package."""


class SetupError(SqlBrokerError, FastStreamSetupError):
    """Wrong options or wrong use; raised before anything is written."""


class MissingExtraError(SetupError, ImportError):
    """An optional package is missing; the message names the extra that installs it."""


class ConfigError(SetupError):
    """A file of YAML has mistakes.

    Attributes:
        mistakes: All that were found, each with `line`, `column`, `where` (the keys that lead to
            it) and `text`.
    """

    def __init__(self, path: object, mistakes: Sequence[Any]) -> None:
        head = f"{path} has {len(mistakes)} mistake{'s' if len(mistakes) > 1 else ''}:"
        super().__init__("\n".join((head, *(f"  {mistake}" for mistake in mistakes))))
        self.mistakes = tuple(mistakes)


class SchemaError(SetupError):
    """The tables differ from what this version needs.

    The message names each difference and how to remove it.
    """


class RightsError(SetupError):
    """The database user lacks rights that this process needs.

    The message names each right and the GRANT that gives it.
    """


class PublishError(SqlBrokerError, ValueError):
    """The message cannot be stored as given; nothing was written."""


class QueueFullError(SqlBrokerError):
    """The queue has as many due messages as its `max_depth` allows; nothing was written.

    Attributes:
        queue: Its name.
    """

    def __init__(self, queue: str, text: str) -> None:
        super().__init__(text)
        self.queue = queue


class NotSupportedError(SqlBrokerError, FeatureNotSupportedException):
    """This database or driver cannot do what was asked; the message says which can."""


class TransactionEndedError(SqlBrokerError):
    """A handler's transaction (transactional=True) ended before the ack could join it."""


class LeaseLostError(SqlBrokerError):
    """A reservation lost its lease. Nothing was written; another worker may have the message."""


class BrokerStoppedError(SqlBrokerError):
    """The broker was stopped while a request waited for its reply; one may still be written."""


class LockLostError(SqlBrokerError):
    """A lock lost its lease, or could not renew it in time: another holder may have the lock."""


class LockNotAcquiredError(SqlBrokerError):
    """Another holder kept the lock for the whole waiting time."""


class HttpError(SqlBrokerError):
    """A server has refused a request of `faststream_sqlbroker.client`.

    Attributes:
        status: The code of its answer.
    """

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"the server answered {status}: {text}")
        self.status = status


class ExportMismatchError(SqlBrokerError):
    """The written data differs from its source; the export's state has not advanced.

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
    """Another load of the same state ran at the same time; the state is that of the other load."""


class StoreError(SqlBrokerError):
    """The database refused a statement; repeating it unchanged would fail again."""


class AccessError(StoreError):
    """The statement needs a right that the database user lacks, or a table that does not exist.

    The text names the right, the user and the GRANT, if the database could be asked for them.

    Attributes:
        only_answers: The database refused outcomes only because messages published with some of
            them need a right that is missing.
        every_answer: In addition, the user can publish no message at all.
    """

    only_answers = False
    every_answer = False


class MessageTooLargeError(PublishError, StoreError):
    """The message exceeds the database's limit on a statement or a row, or the `max_payload` of the
    broker; it was not sent.
    """


class TransientStoreError(StoreError):
    """The statement may succeed when repeated.

    Causes are a lost connection, a deadlock, a serialization failure, a busy database, a full disk.
    """


class UnknownOutcomeError(TransientStoreError):
    """The connection broke while a COMMIT was under way: the work may or may not be committed."""

"""Every error the broker raises on purpose; each is a FastStreamException, too.

SqlBrokerError ├── SetupError            FastStream's, too: wrong options or wrong use, found before
anything is written │   ├── MissingExtraError an optional package is not installed │   ├──
SchemaError       the tables in the database are not the ones this version needs │   └── RightsError
the database user lacks rights that this process needs ├── PublishError          a message that
cannot be stored (also a ValueError) │   └── MessageTooLargeError  larger than the database takes
(also a StoreError) ├── NotSupportedError     FastStream's FeatureNotSupportedException, too: what
this database or driver cannot have ├── TransactionEndedError a handler's transaction has ended
before its ack ├── LeaseLostError        a reservation's lease is gone: what it ended in was not
written ├── LockLostError         a lock's lease is gone: somebody else may have it ├──
LockNotAcquiredError  somebody else has the lock, for longer than was waited ├── ExportMismatchError
what an export wrote is not what the database has ├── ConcurrentLoadError   two loads of one state
at the same time └── StoreError            the database answered with an error
    ├── AccessError           a right, or a table, is missing
    ├── TransientStoreError   worth repeating: connection, deadlock, serialization, busy, disk full
    └── UnknownOutcomeError   the answer to a COMMIT was lost: it may have been committed
"""

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


class SchemaError(SetupError):
    """The tables differ from what this version needs; the message names each difference and its
    cure.
    """


class RightsError(SetupError):
    """The database user lacks rights that this process needs; the message names each and the GRANT
    that mends it.
    """


class PublishError(SqlBrokerError, ValueError):
    """The message cannot be stored as given; nothing was written."""


class NotSupportedError(SqlBrokerError, FeatureNotSupportedException):
    """This database or driver cannot do what was asked; the message says which can."""


class TransactionEndedError(SqlBrokerError):
    """The transaction that a handler was given (transactional=True) has ended before its ack."""


class LeaseLostError(SqlBrokerError):
    """The lease of a reservation is gone; nothing was written, and the message belongs to somebody
    else.
    """


class LockLostError(SqlBrokerError):
    """The lease of a lock is gone, or must be taken to be: somebody else may have it since."""


class LockNotAcquiredError(SqlBrokerError):
    """Somebody else has the lock, and kept it for as long as was waited."""


class ExportMismatchError(SqlBrokerError):
    """What was written is not what it was written from; the export's state has not moved.

    Attributes:
        window: Name of the window.
        expected: Figures of the source, as text.
        found: Figures of what was written, as text.
    """

    def __init__(self, window: str, expected: str, found: str, advice: str) -> None:
        super().__init__(f"window {window}: expected {expected}; found {found}. {advice}")
        self.window, self.expected, self.found = window, expected, found


class ConcurrentLoadError(SqlBrokerError):
    """Another load of the same state ran at the same time; the state is as that one left it."""


class StoreError(SqlBrokerError):
    """The database refused a statement; repeating it unchanged would fail again."""


class AccessError(StoreError):
    """The statement needs a right that the database user lacks, or a table that is not there.

    The text names the right, the user and the GRANT, where the database could be asked for them.

    Attributes:
        only_answers: Whether outcomes were refused, and only for the right to publish what goes
            with some of them.
        every_answer: Whether, moreover, none can be published whatever it is.
    """

    only_answers = False
    every_answer = False


class MessageTooLargeError(PublishError, StoreError):
    """The message is larger than the database takes in one statement or row; it was not sent."""


class TransientStoreError(StoreError):
    """The statement may succeed when repeated: connection, deadlock, serialization, busy or full
    disk.
    """


class UnknownOutcomeError(TransientStoreError):
    """The connection broke while a COMMIT was under way: the work may or may not be committed."""

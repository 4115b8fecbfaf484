"""`Admin`: all operations in one object."""

from faststream_sqlbroker.admin.archive import ArchiveOperations
from faststream_sqlbroker.admin.findings import FindingsReport
from faststream_sqlbroker.admin.jobs import JobOperations
from faststream_sqlbroker.admin.locks import LockOperations
from faststream_sqlbroker.admin.repairs import MessageOperations, PublishOperations


class Admin(
    FindingsReport,
    MessageOperations,
    PublishOperations,
    JobOperations,
    LockOperations,
    ArchiveOperations,
):
    """The operations of `broker.admin`; the database is needed, a started broker is not.

    Raises (from every operation):
        TransientStoreError: the database could not be reached or was busy; try again.
        StoreError: the database refused the statement.
        NotSupportedError: the operation changes something, and the caller is a handler with
            transactional=True on SQLite.
    """

"""`Admin`: all operations in one object."""

from faststream_sqlbroker.admin.archive import Archive
from faststream_sqlbroker.admin.findings import FindingsReport
from faststream_sqlbroker.admin.jobs import Jobs
from faststream_sqlbroker.admin.locks import Locks
from faststream_sqlbroker.admin.repairs import Publishing, Repairs


class Admin(
    FindingsReport,
    Repairs,
    Publishing,
    Jobs,
    Locks,
    Archive,
):
    """The operations of `broker.admin`; they need the database, but no started broker.

    Raises (from every operation):
        TransientStoreError: the database could not be reached or was busy; try again.
        StoreError: the database refused the statement.
        NotSupportedError: it changes something, and the caller is a handler with transactional=True
            on SQLite.
    """

"""`Admin`: all operations in one object."""

from faststream_sqlbroker.admin.dead_letters import DeadLetterGroups
from faststream_sqlbroker.admin.diagnosis import DiagnosisReport
from faststream_sqlbroker.admin.health import HealthReport
from faststream_sqlbroker.admin.jobs import Jobs
from faststream_sqlbroker.admin.locks import Locks
from faststream_sqlbroker.admin.messages import Messages
from faststream_sqlbroker.admin.mirror import Mirror
from faststream_sqlbroker.admin.partitions import ArchivePartitioning
from faststream_sqlbroker.admin.pauses import Pauses
from faststream_sqlbroker.admin.policies import Policies
from faststream_sqlbroker.admin.publishing import Publishing
from faststream_sqlbroker.admin.queues import Queues
from faststream_sqlbroker.admin.repairs import Repairs
from faststream_sqlbroker.admin.retention import ArchivePruning
from faststream_sqlbroker.admin.schedules import Schedules
from faststream_sqlbroker.admin.unknown import Unknown
from faststream_sqlbroker.admin.verification import Verifying
from faststream_sqlbroker.admin.workers import Workers


class Admin(
    Queues,
    Pauses,
    Workers,
    Messages,
    DeadLetterGroups,
    Repairs,
    Publishing,
    Jobs,
    Policies,
    Schedules,
    Unknown,
    Locks,
    Mirror,
    HealthReport,
    DiagnosisReport,
    ArchivePruning,
    ArchivePartitioning,
    Verifying,
):
    """The operations of `broker.admin`; they need the database, but no started broker.

    Raises (from every operation):
        TransientStoreError: the database could not be reached or was busy; try again.
        StoreError: the database refused the statement.
        NotSupportedError: it changes something, and the caller is a handler with transactional=True
            on SQLite.
    """

"""Operations for people who run the broker, one file for each subject."""

from faststream_sqlbroker.admin.admin import Admin
from faststream_sqlbroker.admin.findings import Findings
from faststream_sqlbroker.core.bulk_jobs import Failure, Job
from faststream_sqlbroker.core.findings import Finding
from faststream_sqlbroker.core.health import (
    DatabaseHealth,
    Diagnosis,
    DiagnosisPart,
    Health,
    OpenTransaction,
    ProcessHealth,
    SubscriberHealth,
    TableHealth,
)
from faststream_sqlbroker.core.mirror import MirroredMessage
from faststream_sqlbroker.core.orders import Repair
from faststream_sqlbroker.core.overview import Count, DeadLetterGroup, DeadLetters, QueueOverview
from faststream_sqlbroker.core.policy_waits import PoliciedQueue, PolicyWait
from faststream_sqlbroker.core.rows import UnknownOutcome
from faststream_sqlbroker.core.status import (
    Explanation,
    HeldLock,
    LiveSubscriber,
    PausedQueue,
    Reason,
    Schedule,
)
from faststream_sqlbroker.core.stored import (
    Event,
    MessageDetail,
    MessagePage,
    Progress,
    StoredMessage,
)
from faststream_sqlbroker.core.verification import Damage, Note, Verification

__all__ = (
    "Admin",
    "Count",
    "Damage",
    "DatabaseHealth",
    "DeadLetterGroup",
    "DeadLetters",
    "Diagnosis",
    "DiagnosisPart",
    "Event",
    "Explanation",
    "Failure",
    "Finding",
    "Findings",
    "Health",
    "HeldLock",
    "Job",
    "LiveSubscriber",
    "MessageDetail",
    "MessagePage",
    "MirroredMessage",
    "Note",
    "OpenTransaction",
    "PausedQueue",
    "PoliciedQueue",
    "PolicyWait",
    "ProcessHealth",
    "Progress",
    "QueueOverview",
    "Reason",
    "Repair",
    "Schedule",
    "StoredMessage",
    "SubscriberHealth",
    "TableHealth",
    "UnknownOutcome",
    "Verification",
)

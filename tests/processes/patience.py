"""What all workers of fleets have in common: their leases say whose they are, and no stop of theirs
is cut off.

A test ends the leases of those that it has killed. So no lease of the others need be short, and
none is over before its time when a machine stands still.
"""

import os
from pathlib import Path
from types import SimpleNamespace
from uuid import UUID

from faststream_sqlbroker.flow import consumer
from faststream_sqlbroker.flow.deliver import worker_ends
from faststream_sqlbroker.flow.fleet import heartbeat, lookout, registration

PATIENCE = 60.0
"""Seconds for each part of a stop that has a limit of its own."""
TRUST = 0.5
"""Seconds after which a process finds a lease that was ended by SQL."""
PID_BYTES = 4


def be_patient() -> None:
    """In the process of a worker, before it makes its broker."""
    registration.os = SimpleNamespace(urandom=_named)  # type: ignore[attr-defined]
    consumer.FINAL_FLUSH_TIMEOUT = worker_ends.CANCEL_GRACE = PATIENCE
    heartbeat.LEAVE_TIMEOUT = PATIENCE
    lookout.MAX_LEASE_INFO_AGE = TRUST


def _named(size: int) -> bytes:
    return os.getpid().to_bytes(PID_BYTES) + os.urandom(size - PID_BYTES)


def listening(folder: Path, pid: int) -> Path:
    """The file that tells that process `pid`, which notes its starts in `folder`, listens to
    SIGTERM."""
    return folder.parent / f"listening-{pid}"


def note_listening(folder: str | Path) -> None:
    """Tell that this process listens to SIGTERM. FastStream does before its first hook."""
    listening(Path(folder), os.getpid()).touch()


def holder_of(token: UUID) -> int:
    """The process that has made a lease token."""
    return int.from_bytes(token.bytes[:PID_BYTES])

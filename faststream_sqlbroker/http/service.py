"""The parts of a broker that the HTTP application needs; `broker.asgi` fills them in."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from faststream_sqlbroker.admin import Admin
from faststream_sqlbroker.core.health import ProcessHealth
from faststream_sqlbroker.core.overview import JobCounts
from faststream_sqlbroker.flow.tasks.pull_jobs import PullJobs
from faststream_sqlbroker.flow.tasks.queue_jobs import RemoteConsumer


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One broker, as seen by the application."""

    ping: Callable[[float], Awaitable[bool]]
    """Returns True if the database answers within a number of seconds, and all loops work."""
    write_problem: Callable[[], str | None]
    """Returns why the database accepts no writes, as found by `ping`, or None."""
    differences: Callable[[], Awaitable[list[str]]]
    """Returns the differences between the tables and the required tables."""
    process: Callable[[], ProcessHealth]
    """Returns the subscribers of this process."""
    is_started: Callable[[], bool]
    """Returns True if the broker runs, or has nothing to run."""
    is_stopped: Callable[[], bool]
    """Returns True if the broker was stopped, and neither connected nor started since."""
    log: Callable[..., None]
    """Logs a text at a level."""
    admin: Callable[[], Admin]
    """Returns the operations of `broker.admin`."""
    pulled: Callable[[], Awaitable[list[str]]]
    """Returns the queues of pull consumers."""
    job_counts: Callable[[Sequence[str]], Awaitable[list[JobCounts]]]
    """Returns the jobs by state of each queue."""
    jobs: Callable[[], PullJobs] | None = None
    """Returns the channels; None if channels are not served."""
    queues: Callable[[], RemoteConsumer] | None = None
    """Returns the queues for clients; None if queues are not served."""
    exposition: Callable[[], tuple[bytes, str]] | None = None
    """Returns the content of /metrics and its content type; None without metrics."""

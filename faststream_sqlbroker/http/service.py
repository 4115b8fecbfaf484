"""What the HTTP application needs of a broker; `broker.asgi` fills it in."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from faststream_sqlbroker.admin import Admin
from faststream_sqlbroker.core.health import ProcessHealth
from faststream_sqlbroker.core.overview import JobCounts
from faststream_sqlbroker.flow.tasks.pull_jobs import PullJobs
from faststream_sqlbroker.flow.tasks.queue_jobs import QueueJobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """One broker, as the application sees it."""

    ping: Callable[[float], Awaitable[bool]]
    """Whether the database answers within so many seconds, and all loops work."""
    write_problem: Callable[[], str | None]
    """Why the database takes no writes, as far as `ping` has found out."""
    differences: Callable[[], Awaitable[list[str]]]
    """How the tables differ from those that are needed."""
    process: Callable[[], ProcessHealth]
    """This process's subscribers."""
    is_started: Callable[[], bool]
    """Whether the broker runs, or has nothing to run."""
    is_stopped: Callable[[], bool]
    """Whether the broker was stopped, and neither connected nor started since."""
    log: Callable[..., None]
    """Called with a level and a text."""
    admin: Callable[[], Admin]
    """The operations of `broker.admin`."""
    pulled: Callable[[], Awaitable[list[str]]]
    """The queues of pull consumers."""
    job_counts: Callable[[Sequence[str]], Awaitable[list[JobCounts]]]
    """The jobs by state of each of these."""
    jobs: Callable[[], PullJobs] | None = None
    """The channels; None: there are none."""
    queues: Callable[[], QueueJobs] | None = None
    """Queues for clients; None: there are none."""
    exposition: Callable[[], tuple[bytes, str]] | None = None
    """What /metrics shows, and its content type; None: there are no metrics."""

"""The broker over HTTP: an ASGI application, and health probes on a separate port."""

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from faststream_sqlbroker.core.metrics import Recorder
from faststream_sqlbroker.core.retry import default_retry_strategy, get_max_attempts
from faststream_sqlbroker.core.settle import SettleRules
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import MissingExtraError, SetupError
from faststream_sqlbroker.flow.fleet.write_path import WritePath
from faststream_sqlbroker.flow.tasks.direct_claim import DirectClaimer
from faststream_sqlbroker.flow.wakeup import Wakeups
from faststream_sqlbroker.subscriber import option_checks

if TYPE_CHECKING:
    from faststream_sqlbroker.core.channels import Channels, Queues
    from faststream_sqlbroker.core.health import ProcessHealth
    from faststream_sqlbroker.core.overview import JobCounts
    from faststream_sqlbroker.core.stored import Redact
    from faststream_sqlbroker.flow.tasks.pull_jobs import PullJobs
    from faststream_sqlbroker.flow.tasks.queue_jobs import RemoteConsumer
    from faststream_sqlbroker.http.app import HttpApp

MAX_PORT_NUMBER = 65_535
"""The highest TCP port."""
MAX_PORT_RANGE = 100
"""Maximum number of ports in a range: more than the processes of one machine."""
ALL_ADDRESSES = "0.0.0.0"  # noqa: S104 - an orchestrator asks from another machine
_ADDRESS = re.compile(
    r"((\[(?P<host>[^\]]+)\]|(?P<name>[^:\[\]]+)):)?(?P<port>[0-9]{1,5})(-(?P<last>[0-9]{1,5}))?",
    re.ASCII,
)
J = TypeVar("J", "PullJobs", "RemoteConsumer")


class SqlBrokerServing:
    """Serves HTTP; the required packages are imported only when used."""

    _store: Store
    config: Any
    _under_test: Any
    _wakeups: Wakeups
    _direct_claimer: DirectClaimer
    _recorder: Recorder | None
    _log_of_loops: Callable[..., None]
    _get_process_health: "Callable[[], ProcessHealth]"
    running: bool
    subscribers: Any
    admin: Any
    ping: Any
    _write_path: WritePath

    def _create_probes(self, health_port: "int | str | None", metrics: Any) -> None:
        """Create the server of probes, if requested; called before FastStream's `__init__`.

        Probes are /health/live, /health/ready and /metrics, which orchestrators and Prometheus
        query.
        """
        # Writes the text of /metrics; None if the recorder of metrics cannot.
        self._exposition = getattr(metrics, "exposition", None)
        self._probes: Any = None
        self._http_jobs: list[PullJobs | RemoteConsumer] = []
        self._serving_ended = False
        if health_port is not None:
            address = parse_probe_address(health_port)
            http, server = _import_http()
            self._probes = server.ProbeServer(http.probe_app(self._make_service(http)), *address)

    def asgi(
        self,
        auth: Any,
        *,
        channels: "Channels | None" = None,
        queues: "Queues | None" = None,
        max_body: int = 1024 * 1024,
        body_timeout: Duration = 10.0,
        max_failures: int = 10,
        proxies: Sequence[str] = (),
        csrf_secret: str | None = None,
        dashboard: Literal["full", "read_only", "off"] = "full",
        show_bodies: bool = True,
        redact: "Redact | None" = None,
    ) -> "HttpApp":
        """Return an ASGI application of this broker.

        Requires the extra `http`, but no started broker.

        Mount it in FastAPI or Starlette (`app.mount("/broker", broker.asgi(auth))`) or in
        AsgiFastStream (`asgi_routes=[broker.asgi(auth).at("/broker")]`), or run it as a separate
        application.

        Args:
            auth: The accepted logins: `BasicAuth`, `ProxyAuth`, a function of the request (or a
                coroutine function) that returns a `User` or None, or a list of them.
            channels: Channels whose pull consumers fetch their jobs here; None disables them.
            queues: Queues that clients publish to and consume from; None disables them.
            max_body: Maximum size of a request's body, in bytes.
            body_timeout: Maximum time for a body to arrive: seconds, a timedelta or text like
                "10s".
            max_failures: Failed logins per minute of one address with one name, ten times as many
                of one address in total, and wrong tokens per minute of one address. Beyond this the
                address is refused (429) until the minute is over, except for passwords that were
                correct from this address within the last hour, for tokens that were correct before,
                and for random tokens (43 characters or more).
            proxies: Addresses and networks of proxies whose X-Forwarded-For determines the address
                of a client, by which failures are counted.
            csrf_secret: Key of CSRF tokens, 16 characters or more, the same for all processes
                behind one address. None uses a random key of this process.
            dashboard: The web pages for operators: "full", "read_only" (no actions), or "off".
            show_bodies: Show headers and bodies of messages on these pages and in the records of
                `/v1/mirror`. Otherwise the pages also hide errors, which may quote a body, and
                refuse searches by either.
            redact: Changes each message before a page shows it, such as `lambda m: replace(m,
                body="***")`. Records of `/v1/mirror` then have no body, headers and info.

        Raises:
            SetupError: there is no authentication, or an option is not valid.
            MissingExtraError: the extra is not installed.
        """
        http, _ = _import_http()
        options = http.HttpOptions(
            max_body=max_body,
            body_timeout=body_timeout,
            max_failures=max_failures,
            proxies=proxies,
            csrf_secret=csrf_secret,
            dashboard=dashboard,
            show_bodies=show_bodies,
            redact=redact,
        )
        authentication = http.authentication(auth)
        app: HttpApp = http.HttpApp(
            self._make_service(http, channels=channels, queues=queues), authentication, options
        )
        return app

    def _make_standalone_app(
        self,
        auth: Any,
        channels: "Channels | None" = None,
        queues: "Queues | None" = None,
        **options: Any,
    ) -> "HttpApp":
        """Create the application of `sqlbroker serve`, whose process handles no messages."""
        http, _ = _import_http()
        service = self._make_service(http, is_standalone=True, channels=channels, queues=queues)
        app: HttpApp = http.HttpApp(service, auth, http.HttpOptions(**options))
        return app

    def _make_service(
        self,
        http: Any,
        *,
        is_standalone: bool = False,
        channels: "Channels | None" = None,
        queues: "Queues | None" = None,
    ) -> Any:
        """Create the broker's interface for the HTTP application.

        `is_standalone` is set by `sqlbroker serve`, whose broker is never started and counts as
        started.
        """
        return http.Service(
            ping=self.ping,
            write_problem=lambda: self._write_path.problem,
            differences=self._list_schema_differences,
            process=self._get_process_health,
            is_started=lambda: (
                not self._serving_ended and (is_standalone or self.running or not self.subscribers)
            ),
            is_stopped=lambda: self._serving_ended,
            log=self._log_of_loops,
            admin=lambda: self.admin,
            pulled=self._list_pulled,
            job_counts=self._count_jobs,
            jobs=None if channels is None else self._make_pull_jobs(channels),
            queues=None if queues is None else self._make_queue_jobs(queues),
            exposition=self._exposition,
        )

    def _make_queue_jobs(self, queues: "Queues") -> "Callable[[], RemoteConsumer]":
        """Return a function that returns the HTTP API of queues, for the current store.

        A RemoteConsumer claims and settles messages for HTTP clients. The options are checked here,
        before the application serves requests.

        Raises:
            SetupError: an option is not valid.
        """
        strategy = queues.retry_strategy
        strategy = default_retry_strategy() if strategy == "auto" else strategy
        option_checks.check_retry_strategy(strategy)
        max_deliveries = option_checks.parse_max_deliveries(
            queues.max_deliveries, get_max_attempts(strategy)
        )

        from faststream_sqlbroker.flow.tasks.queue_jobs import RemoteConsumer  # noqa: PLC0415

        return self._make_for_each_store(
            RemoteConsumer,
            queues,
            lambda: {
                "claimer": self._direct_claimer,
                "rules": SettleRules(retry_strategy=strategy),
                "max_deliveries": max_deliveries,
            },
        )

    def _make_pull_jobs(self, channels: "Channels") -> "Callable[[], PullJobs]":
        """Return a function that returns the jobs of HTTP pull consumers, for the current store.

        A pull consumer is an HTTP client that fetches jobs: messages of the queue
        `channel/consumer`.

        Raises:
            SetupError: the channels do not fit the broker.
        """
        from faststream_sqlbroker.flow.tasks.pull_jobs import PullJobs  # noqa: PLC0415

        return self._make_for_each_store(
            PullJobs, channels, lambda: {"subscribed": self._get_subscribed_queues}
        )

    def _make_for_each_store(
        self, kind: Callable[..., J], options: object, more: Callable[[], dict[str, Any]]
    ) -> Callable[[], J]:
        """Return a function that returns the object of the current store.

        `kind` creates the object once for each store, for the first store immediately, so that
        invalid options fail here. A test replaces the store of a broker after the HTTP application
        was created. `more` returns further arguments of `kind`.
        """
        from faststream_sqlbroker.broker.http_publish import HttpPublish  # noqa: PLC0415

        by_store: dict[Store, J] = {}

        def get_current() -> J:
            """Return the object of the current store, created on first use."""
            if self._store not in by_store:
                by_store[self._store] = kind(
                    self._store,
                    self._wakeups,
                    HttpPublish(self),
                    options,
                    log=self._log_of_loops,
                    recorder=self._recorder,
                    # A test advances its own time and polls explicitly.
                    has_poll_loop=self._under_test is None,
                    **more(),
                )
                self._http_jobs.append(by_store[self._store])
            return by_store[self._store]

        get_current()
        return get_current

    def _get_subscribed_queues(self) -> dict[str, str]:
        """Return the handler's name for each queue that has a subscriber in this process."""
        return {
            queue: subscriber.specification.call_name
            for subscriber in self.subscribers
            for queue in getattr(subscriber, "queues", ())
        }

    async def _check_pull_queues(self) -> None:
        """Check at the start that no subscriber has the queue of an existing pull consumer.

        A pull consumer is an HTTP client that fetches jobs from its own queue; a handler would take
        them away.

        Raises:
            SetupError: a subscriber has such a queue.
        """
        subscribed = self._get_subscribed_queues()
        for queue in subscribed:
            # Most names cannot belong to a pull consumer; then nothing is imported or queried.
            if "/" not in queue:
                continue
            from faststream_sqlbroker.core.channels import parse_queue_name  # noqa: PLC0415
            from faststream_sqlbroker.flow.tasks.pull_jobs import refuse_subscriber  # noqa: PLC0415

            if (ids := parse_queue_name(queue)) is not None and await self._is_pulled(*ids):
                refuse_subscriber(queue, subscribed)

    async def _is_pulled(self, channel: str, consumer: str) -> bool:
        """Return True if the stored consumer is pulled, unless declared as push here.

        A pull consumer fetches its jobs over HTTP; those of a push consumer go to a subscriber of
        its queue. Such a declaration is applied now, because the stored consumer may still be a
        pull consumer.
        """
        [_, existing] = await self._store.tokens.find(channel, consumer)
        if existing is None or existing.type != "pull":
            return False
        from faststream_sqlbroker.flow.tasks.pull_jobs import PullJobs  # noqa: PLC0415

        for jobs in self._http_jobs:
            if not isinstance(jobs, PullJobs) or jobs.store is not self._store:
                continue
            if jobs.is_push(channel, consumer):
                # The configuration wins. The first request would apply it, which is too late.
                await jobs.setup()
                return False
        return True

    async def _list_pulled(self) -> list[str]:
        return await self._store.tokens.list_pulled_queues()

    async def _count_jobs(self, queues: Sequence[str]) -> "list[JobCounts]":
        return await self._store.overviews.count_jobs(queues)

    async def _list_schema_differences(self) -> list[str]:
        # Read the current store: a test may have replaced it.
        return await self._store.server.find_differences()

    async def _start_with_probes(self, start: Callable[[], Awaitable[None]]) -> None:
        """Start serving probes, then call `start`; stop serving if `start` fails.

        An orchestrator sees in this way that the process lives while a slow `start` still runs.

        Raises:
            SetupError: the port cannot be used.
        """
        self._serving_ended = False
        if self._probes is not None:
            port = await self._probes.start()
            self._log_of_loops(logging.INFO, f"probes are served on port {port}")
        try:
            await start()
        except BaseException:
            await self._stop_probes()
            raise
        for jobs in self._http_jobs:
            # A test may have replaced the store that these jobs were created for.
            if jobs.store is self._store:
                jobs.start()

    async def _stop_serving(self) -> None:
        """Stop the jobs of the HTTP API and the probes; later requests to the API get a 503."""
        # First, because a request during the stop would restart the stopped parts.
        self._serving_ended = True
        for jobs in self._http_jobs:
            await jobs.stop()
        await self._stop_probes()

    async def _stop_probes(self) -> None:
        if self._probes is not None:
            await self._probes.stop()


def parse_probe_address(value: int | str) -> tuple[str, int, int]:
    """Return host, first port and last port of the option `health_port`.

    A number stands for a port on all addresses.

    Raises:
        SetupError: the value is neither a port nor host:port nor a range of ports.
    """
    host: str | None = None
    port: Any = value
    last: Any = value
    if isinstance(value, str) and (match := _ADDRESS.fullmatch(value)):
        host = match["host"] or match["name"]
        port = int(match["port"])
        last = int(match["last"] or port)
    ports = range(MAX_PORT_NUMBER + 1)
    if type(port) is int and port in ports and last in ports[port : port + MAX_PORT_RANGE]:
        return host or ALL_ADDRESSES, port, last
    raise SetupError(
        f"health_port must be a port from 0 to {MAX_PORT_NUMBER}, 'host:port', or a range of at "
        f"most {MAX_PORT_RANGE} ports such as '8081-8084', got {value!r}"
    )


def _import_http() -> tuple[Any, Any]:
    """Return the modules of the application and the server from the package `http`.

    Raises:
        MissingExtraError: the extra is not installed.
    """
    try:
        from faststream_sqlbroker.http import app, server  # noqa: PLC0415 - an extra
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        # Any other missing module is a defect, which the extra would not repair.
        if missing not in {"uvicorn", "jinja2"}:
            raise
        msg = f"HTTP needs '{missing}', which is not installed: pip install 'sqlbroker[http]'"
        raise MissingExtraError(msg) from error
    return app, server

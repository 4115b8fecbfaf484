"""The broker over HTTP: an ASGI application, and probes on a port of their own."""

import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from faststream_sqlbroker.core.metrics import Recorder
from faststream_sqlbroker.core.retry import default_retry_strategy, most_attempts
from faststream_sqlbroker.core.settle import SettleRules
from faststream_sqlbroker.core.times import Duration
from faststream_sqlbroker.database.store import Store
from faststream_sqlbroker.exceptions import MissingExtraError, SetupError
from faststream_sqlbroker.flow.fleet.write_path import WritePath
from faststream_sqlbroker.flow.tasks.direct_claim import DirectClaimer
from faststream_sqlbroker.flow.wakeup import Wakeups
from faststream_sqlbroker.subscriber import checks

if TYPE_CHECKING:
    from faststream_sqlbroker.core.channels import Channels, Queues
    from faststream_sqlbroker.core.health import ProcessHealth
    from faststream_sqlbroker.core.overview import JobCounts
    from faststream_sqlbroker.core.stored import Redact
    from faststream_sqlbroker.flow.tasks.pull_jobs import PullJobs
    from faststream_sqlbroker.flow.tasks.queue_jobs import QueueJobs
    from faststream_sqlbroker.http.app import HttpApp

HIGHEST_PORT = 65_535
"""Of TCP."""
MOST_PORTS = 100
"""Of a range: more than one machine has processes."""
EVERYWHERE = "0.0.0.0"  # noqa: S104 - an orchestrator asks from another machine
_ADDRESS = re.compile(
    r"((\[(?P<host>[^\]]+)\]|(?P<name>[^:\[\]]+)):)?(?P<port>[0-9]{1,5})(-(?P<last>[0-9]{1,5}))?",
    re.ASCII,
)
J = TypeVar("J", "PullJobs", "QueueJobs")


class SqlBrokerServing:
    """Serves HTTP; its packages are imported only where it does."""

    _store: Store
    config: Any
    _under_test: Any
    _wakeups: Wakeups
    _direct_claimer: DirectClaimer
    _recorder: Recorder | None
    _log_of_loops: Callable[..., None]
    _process_health: "Callable[[], ProcessHealth]"
    running: bool
    subscribers: Any
    admin: Any
    ping: Any
    _write_path: WritePath

    def _serve_probes(self, health_port: "int | str | None", metrics: Any) -> None:
        """Note where probes are served; called before FastStream's `__init__`."""
        self._exposition = getattr(metrics, "exposition", None)
        self._probes: Any = None
        self._jobs_of_http: list[PullJobs | QueueJobs] = []
        self._serving_ended = False
        if health_port is not None:
            address = probe_address(health_port)
            http, server = _http()
            self._probes = server.ProbeServer(http.probe_app(self._service(http)), *address)

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
        """An ASGI application of this broker; it needs the extra `http`, and no started broker.

        Mount it in FastAPI or Starlette (`app.mount("/broker", broker.asgi(auth))`), in
        AsgiFastStream (`asgi_routes=[broker.asgi(auth).at("/broker")]`), or run it alone.

        Args:
            auth: Who may ask: `BasicAuth`, `ProxyAuth`, a function of the request (which may be a
                coroutine function) that returns a `User` or None, or a list of them.
            channels: Channels whose pull consumers take their jobs here; None: there are none.
            queues: Queues that clients publish into and take messages from; None: there are none.
            max_body: Most bytes of a request's body.
            body_timeout: Longest time in which a body must have arrived: seconds, a timedelta or
                text like "10s".
            max_failures: Failed logins a minute of one address with one name, and ten times as many
                of one address; and wrong tokens a minute of one address. After them it is refused
                (429) until the minute is over, but for passwords that were right from this address
                within an hour, for tokens that were right before, and for random tokens (43
                characters or more).
            proxies: Addresses and networks of proxies whose X-Forwarded-For tells the address of a
                client, by which failures are counted.
            csrf_secret: 16 characters or more that CSRF tokens are made of, the same for all
                processes behind one address. None: this process's own.
            dashboard: The pages for people: "full", "read_only" (no actions), or "off".
            show_bodies: Whether these pages, and the records of `/v1/mirror`, show headers and
                bodies of messages; without them pages show no errors, which may quote a body, and
                refuse searches by either.
            redact: Changes each message before a page shows it, such as
                `lambda m: replace(m, body="***")`. Records of `/v1/mirror` have no body, headers
                and info then.

        Raises:
            SetupError: there is no authentication, or an option is not valid.
            MissingExtraError: the extra is not installed.
        """
        http, _ = _http()
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
        known = http.authentication(auth)
        app: HttpApp = http.HttpApp(
            self._service(http, channels=channels, queues=queues), known, options
        )
        return app

    def _asgi_alone(
        self,
        auth: Any,
        channels: "Channels | None" = None,
        queues: "Queues | None" = None,
        **options: Any,
    ) -> "HttpApp":
        """The application of `sqlbroker serve`, whose process handles no messages."""
        http, _ = _http()
        service = self._service(http, alone=True, channels=channels, queues=queues)
        app: HttpApp = http.HttpApp(service, auth, http.HttpOptions(**options))
        return app

    def _service(
        self,
        http: Any,
        *,
        alone: bool = False,
        channels: "Channels | None" = None,
        queues: "Queues | None" = None,
    ) -> Any:
        return http.Service(
            ping=self.ping,
            write_problem=lambda: self._write_path.problem,
            differences=self._differences,
            process=self._process_health,
            is_started=lambda: (
                not self._serving_ended and (alone or self.running or not self.subscribers)
            ),
            is_stopped=lambda: self._serving_ended,
            log=self._log_of_loops,
            admin=lambda: self.admin,
            pulled=self._pulled,
            job_counts=self._job_counts,
            jobs=None if channels is None else self._pull_jobs(channels),
            queues=None if queues is None else self._queue_jobs(queues),
            exposition=self._exposition,
        )

    def _queue_jobs(self, queues: "Queues") -> "Callable[[], QueueJobs]":
        """The messages of queues.

        Raises:
            SetupError: an option is not valid.
        """
        strategy = queues.retry_strategy
        strategy = default_retry_strategy() if strategy == "auto" else strategy
        checks.retry_strategy(strategy)
        most = checks.most_deliveries(queues.max_deliveries, most_attempts(strategy))

        from faststream_sqlbroker.flow.tasks.queue_jobs import QueueJobs  # noqa: PLC0415

        return self._of_each_store(
            QueueJobs,
            queues,
            lambda: {
                "claimer": self._direct_claimer,
                "rules": SettleRules(retry_strategy=strategy),
                "most_deliveries": most,
            },
        )

    def _pull_jobs(self, channels: "Channels") -> "Callable[[], PullJobs]":
        """The jobs of the channels.

        Raises:
            SetupError: the channels do not fit the broker.
        """
        from faststream_sqlbroker.flow.tasks.pull_jobs import PullJobs  # noqa: PLC0415

        return self._of_each_store(
            PullJobs, channels, lambda: {"subscribed": self._subscribed_queues}
        )

    def _of_each_store(
        self, kind: Callable[..., J], options: object, more: Callable[[], dict[str, Any]]
    ) -> Callable[[], J]:
        """What `kind` makes for the store that the broker has: a test puts its own in its place.
        It is made once for each, now for the first.
        """
        from faststream_sqlbroker.broker.http_publish import HttpPublish  # noqa: PLC0415

        made: dict[Store, J] = {}

        def current() -> J:
            if self._store not in made:
                made[self._store] = kind(
                    self._store,
                    self._wakeups,
                    HttpPublish(self),
                    options,
                    log=self._log_of_loops,
                    recorder=self._recorder,
                    # A test moves its time, and asks for what it wants to see.
                    looks=self._under_test is None,
                    **more(),
                )
                self._jobs_of_http.append(made[self._store])
            return made[self._store]

        current()
        return current

    def _subscribed_queues(self) -> dict[str, str]:
        return {
            queue: each.specification.call_name
            for each in self.subscribers
            for queue in getattr(each, "queues", ())
        }

    async def _refuse_pull_queues(self) -> None:
        """Called at the start, for consumers that were made before.

        Raises:
            SetupError: a subscriber has the queue of a pull consumer.
        """
        subscribed = self._subscribed_queues()
        for queue in subscribed:
            # Most names cannot be such a queue, so mostly nothing is imported and nothing asked.
            if "/" not in queue:
                continue
            from faststream_sqlbroker.core.channels import ids_of  # noqa: PLC0415
            from faststream_sqlbroker.flow.tasks.pull_jobs import refuse_subscriber  # noqa: PLC0415

            if (ids := ids_of(queue)) is not None and await self._is_pulled(*ids):
                refuse_subscriber(queue, subscribed)

    async def _is_pulled(self, channel: str, consumer: str) -> bool:
        [_, found] = await self._store.tokens.find(channel, consumer)
        if found is None or found.type != "pull":
            return False
        from faststream_sqlbroker.flow.tasks.pull_jobs import PullJobs  # noqa: PLC0415

        for jobs in self._jobs_of_http:
            if not isinstance(jobs, PullJobs) or jobs.store is not self._store:
                continue
            if jobs.makes_push(channel, consumer):
                # The configuration wins; it would be made at the first request, which is too late.
                await jobs.begin()
                return False
        return True

    async def _pulled(self) -> list[str]:
        return await self._store.tokens.pulled()

    async def _job_counts(self, queues: Sequence[str]) -> "list[JobCounts]":
        return await self._store.overviews.jobs(queues)

    async def _differences(self) -> list[str]:
        # Of the store that is there then: a test may have put another one in its place.
        return await self._store.server.differences()

    async def _with_probes(self, start: Callable[[], Awaitable[None]]) -> None:
        """Serve probes from before `start` on, unless it fails.

        Raises:
            SetupError: their port cannot be taken.
        """
        self._serving_ended = False
        if self._probes is not None:
            port = await self._probes.start()
            self._log_of_loops(logging.INFO, f"probes are served on port {port}")
        try:
            await start()
        except BaseException:
            await self._end_probes()
            raise
        for jobs in self._jobs_of_http:
            # A test has put another store in the place of the one that some were made for.
            if jobs.store is self._store:
                jobs.start()

    async def _end_serving(self) -> None:
        # First: a request during the stop would start again what has just ended.
        self._serving_ended = True
        for jobs in self._jobs_of_http:
            await jobs.stop()
        await self._end_probes()

    async def _end_probes(self) -> None:
        if self._probes is not None:
            await self._probes.stop()


def probe_address(value: int | str) -> tuple[str, int, int]:
    """Host, first and last port of the option `health_port`; a number is of all addresses.

    Raises:
        SetupError: it is neither a port nor host:port nor a range of them.
    """
    host: str | None = None
    port: Any = value
    last: Any = value
    if isinstance(value, str) and (found := _ADDRESS.fullmatch(value)):
        host = found["host"] or found["name"]
        port = int(found["port"])
        last = int(found["last"] or port)
    ports = range(HIGHEST_PORT + 1)
    if type(port) is int and port in ports and last in ports[port : port + MOST_PORTS]:
        return host or EVERYWHERE, port, last
    raise SetupError(
        f"health_port must be a port from 0 to {HIGHEST_PORT}, 'host:port', or a range of at "
        f"most {MOST_PORTS} ports such as '8081-8084', got {value!r}"
    )


def _http() -> tuple[Any, Any]:
    """The application and the server of the package `http`.

    Raises:
        MissingExtraError: the extra is not installed.
    """
    try:
        from faststream_sqlbroker.http import app, server  # noqa: PLC0415 - an extra
    except ImportError as error:
        missing = (error.name or "").split(".")[0]
        if missing not in {"uvicorn", "jinja2"}:
            raise
        msg = f"HTTP needs '{missing}', which is not installed: pip install 'sqlbroker[http]'"
        raise MissingExtraError(msg) from error
    return app, server

"""The HTTP application of a broker."""

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from faststream_sqlbroker.core.checks import check_bool, check_choice, validate_integer
from faststream_sqlbroker.core.stored import Redact
from faststream_sqlbroker.core.text import format_value
from faststream_sqlbroker.core.times import Duration, parse_positive
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.http import channel_models as models
from faststream_sqlbroker.http.api import PUBLIC, USER, AccessRule, Api, Caller
from faststream_sqlbroker.http.channel_routes import ChannelRoutes
from faststream_sqlbroker.http.csrf import Csrf
from faststream_sqlbroker.http.dashboard import DashboardRoutes
from faststream_sqlbroker.http.dashboard.asked import DashboardSettings
from faststream_sqlbroker.http.diagnosis import DiagnosisRoutes
from faststream_sqlbroker.http.gate import AccessControl
from faststream_sqlbroker.http.local import LocalOnly
from faststream_sqlbroker.http.mirror_routes import BODY_FIELDS, INFO_FIELDS, MirrorRoutes
from faststream_sqlbroker.http.mounting import (
    App,
    PathPrefix,
    Receive,
    Scope,
    Send,
    mount_below,
    parse_prefix,
)
from faststream_sqlbroker.http.probes import Probes
from faststream_sqlbroker.http.proxies import parse_networks
from faststream_sqlbroker.http.queue_routes import QueueRoutes
from faststream_sqlbroker.http.responses import BodyLimits, Problem
from faststream_sqlbroker.http.service import Service
from faststream_sqlbroker.http.shield import DOCUMENT_PATH, SecurityMiddleware, create_handlers
from faststream_sqlbroker.http.users import Authentication, Role

MIN_SECRET = 16
"""Minimum characters of the secret behind CSRF tokens."""
PROBE_PATHS = ("/health/live", "/health/ready")
"""Path suffixes that are served even after the broker has stopped."""
STOPPED_MESSAGE = "the broker of this process has stopped: use another process, or try again later"
DashboardMode = Literal["full", "read_only", "off"]
DASHBOARD_MODES = get_args(DashboardMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """The validated options of `broker.asgi`.

    Raises:
        SetupError: an option is not valid.
    """

    max_body: int = 1024 * 1024
    body_timeout: Duration = 10.0
    max_failures: int = 10
    proxies: Sequence[str] = ()
    csrf_secret: str | None = None
    dashboard: DashboardMode = "full"
    show_bodies: bool = True
    redact: Redact | None = None

    def __post_init__(self) -> None:
        """Validate the options."""
        validate_integer("max_body", self.max_body, other=" of bytes")
        parse_positive("body_timeout", self.body_timeout)
        validate_integer("max_failures", self.max_failures)
        parse_networks(self.proxies)
        check_choice("dashboard", self.dashboard, DASHBOARD_MODES)
        check_bool("show_bodies", self.show_bodies)
        if self.redact is not None and not callable(self.redact):
            raise SetupError(
                f"redact must be a function of a message, got {format_value(self.redact)}"
            )
        secret = self.csrf_secret
        if secret is not None and (not isinstance(secret, str) or len(secret) < MIN_SECRET):
            raise SetupError(f"csrf_secret must be text of {MIN_SECRET} characters or more")

    @property
    def limits(self) -> BodyLimits:
        """Limits of request bodies."""
        return BodyLimits(self.max_body, parse_positive("body_timeout", self.body_timeout))

    @property
    def hidden_fields(self) -> tuple[str, ...]:
        """Fields of mirrored records that are null, to match the dashboard.

        `redact` changes messages but not records, so with a hook their fields are hidden.
        """
        if self.redact is not None:
            return (*BODY_FIELDS, *INFO_FIELDS)
        return () if self.show_bodies else BODY_FIELDS

    @property
    def csrf(self) -> Csrf:
        """CSRF tokens, by default with a random secret of this process."""
        secret = self.csrf_secret
        return Csrf(secrets.token_bytes(32) if secret is None else secret.encode())


class HttpApp:
    """An ASGI application: mount it, or run it alone.

    `app.mount("/broker", broker.asgi(auth))` in FastAPI and Starlette,
    `asgi_routes=[broker.asgi(auth).at("/broker")]` in AsgiFastStream.
    """

    def __init__(self, service: Service, auth: Any, options: HttpOptions) -> None:
        """Serve `service` to the users of `auth`, a result of `authentication`."""
        csrf = options.csrf
        local_only = isinstance(auth, LocalOnly)
        self._service = service
        self._access_control = AccessControl(
            [auth.user] if local_only else authentication(auth),
            csrf,
            service,
            max_failures=options.max_failures,
            proxies=parse_networks(options.proxies),
        )
        error_handlers = create_handlers(service.log)
        self.api = api = Api(
            options.limits, exception_handlers=error_handlers, lifespan=self._lifespan
        )
        viewers = self._create_access_rule(Role.VIEWER)
        admin = self._create_access_rule(Role.ADMIN)
        # Routes are tried in order, so the frequent requests of clients come first.
        if service.jobs is not None:
            ChannelRoutes(service.jobs, self._access_control, options.limits).add_to(api, admin)
        self._queues: QueueRoutes | None = None
        if service.queues is not None:
            self._queues = QueueRoutes(service.queues, self._access_control)
            self._queues.add_to(api, admin)
        Probes(service).add_to(api, viewers)
        token = {200: models.CsrfToken}
        api.add("GET /csrf-token", self.csrf_token, viewers, token, part="probes")
        api.add(
            f"GET {DOCUMENT_PATH}", self.openapi, viewers, {200: "application/json"}, part="probes"
        )
        MirrorRoutes(service.admin, options.hidden_fields).add_to(api, self._create_access_rule)
        DiagnosisRoutes(service.admin).add_to(api, admin)
        if options.dashboard != "off":
            dashboard = self._create_dashboard(service, options, csrf)
            api.router.routes += dashboard.create_routes()
            api.add_exception_handler(HTTPException, dashboard.handle_unknown_path)
        self._app: App = SecurityMiddleware(self._serve_unless_stopped, local_only=local_only)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a connection of an ASGI server, or of a surrounding application."""
        service = self._service
        if scope["type"] == "http" and service.jobs is not None and not service.is_stopped():
            # A mounted application gets no lifespan event, so the loop that queues expired jobs
            # again starts with the first request; later calls have no effect.
            service.jobs().start()
        await self._app(scope, receive, send)

    async def _serve_unless_stopped(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer 503 after the broker has stopped, except on the paths of probes.

        The process may live on without its broker: then it is alive, and the readiness probe
        reports that it is not ready.
        """
        is_stopped = scope["type"] == "http" and self._service.is_stopped()
        if is_stopped and not scope["path"].endswith(PROBE_PATHS):
            await Problem(503, STOPPED_MESSAGE).to_response()(scope, receive, send)
            return
        await self.api(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Start and stop the background work of channels and queues.

        The loop of channels queues jobs again whose leases have expired; queues answer waiting
        requests at the stop. Only an application that runs alone gets lifespan events. A mounted
        application starts its loops with requests, see `__call__`.
        """
        active_jobs = [
            get_jobs()
            for get_jobs in (self._service.jobs, self._service.queues)
            if get_jobs is not None
        ]
        for jobs in active_jobs:
            jobs.start()
        try:
            yield
        finally:
            for jobs in active_jobs:
                await jobs.stop()

    def at(self, prefix: str) -> tuple[str, App]:
        """Return an entry of AsgiFastStream's `asgi_routes` for all paths below `prefix`.

        AsgiFastStream has no mounts; the prefix therefore equals each path below it.

        Raises:
            SetupError: `prefix` does not begin with a slash.
        """
        path = parse_prefix(prefix)
        return PathPrefix(path), mount_below(path, self)

    def end_waits(self) -> None:
        """Answer all requests that wait for messages; called by a server that stops."""
        if self._queues is not None:
            self._queues.end_waits()

    def document(self, root: str = "") -> dict[str, Any]:
        """Return the OpenAPI document of the application mounted at `root`."""
        return self.api.get_document(root)

    async def openapi(self, request: Request) -> Response:
        """Return the OpenAPI document."""
        # The mount path is only known during a request.
        return JSONResponse(self.document(request.scope.get("root_path", "")))

    async def csrf_token(self, user: Caller) -> Response:
        """Return the token that a browser must send with each write."""
        return JSONResponse({"token": self._access_control.create_csrf_token(user)})

    def _create_access_rule(self, role: Role) -> AccessRule:
        return AccessRule((USER,), partial(self._access_control.authorize, role=role))

    def _create_dashboard(
        self, service: Service, options: HttpOptions, csrf: Csrf
    ) -> DashboardRoutes:
        settings = DashboardSettings(
            options.dashboard == "full", options.show_bodies, options.redact
        )
        return DashboardRoutes(service, self._access_control, csrf, options.limits, settings)


def probe_app(service: Service) -> App:
    """Create an application of the probes alone, without authentication, for an internal port."""
    api = Api(BodyLimits(0, 0.0), exception_handlers=create_handlers(service.log))
    Probes(service).add_to(api, PUBLIC)
    return SecurityMiddleware(api, local_only=False)


def authentication(auth: Any) -> list[Authentication]:
    """Return the authentication functions: the method `user` of an object, a function, or several.

    A request is accepted by the first function that knows its user.

    Raises:
        SetupError: `auth` has another type, or is None.
    """
    if isinstance(auth, LocalOnly):
        raise SetupError("only `sqlbroker serve --insecure` runs without authentication")
    if isinstance(auth, list | tuple) and auth:
        return [authenticator for part in auth for authenticator in authentication(part)]
    authenticate = getattr(auth, "user", auth)
    if callable(authenticate) and not isinstance(auth, type):
        return [authenticate]
    raise SetupError(
        "HTTP needs authentication: pass BasicAuth([Login(...)]), ProxyAuth(...), a function that "
        f"returns a User or None, or a list of them; got {format_value(auth)}"
    )

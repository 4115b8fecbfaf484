"""The HTTP application of a broker, put together."""

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

from faststream_sqlbroker.core.checks import flag, one_of, whole_number
from faststream_sqlbroker.core.stored import Redact
from faststream_sqlbroker.core.text import short
from faststream_sqlbroker.core.times import Duration, positive_seconds
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.http import channel_models as models
from faststream_sqlbroker.http.answers import BodyLimits, Problem
from faststream_sqlbroker.http.api import OPEN, USER, Api, Caller, Door
from faststream_sqlbroker.http.channels import ChannelRoutes
from faststream_sqlbroker.http.csrf import Csrf
from faststream_sqlbroker.http.dashboard import DashboardRoutes
from faststream_sqlbroker.http.dashboard.asked import Settings
from faststream_sqlbroker.http.diagnosis import DiagnosisRoutes
from faststream_sqlbroker.http.gate import Gate
from faststream_sqlbroker.http.local import LocalOnly
from faststream_sqlbroker.http.mirror import OF_BODIES, OF_INFOS, MirrorRoutes
from faststream_sqlbroker.http.mounting import (
    App,
    Below,
    Receive,
    Scope,
    Send,
    below,
    checked_prefix,
)
from faststream_sqlbroker.http.probes import Probes
from faststream_sqlbroker.http.proxies import networks
from faststream_sqlbroker.http.queues import QueueRoutes
from faststream_sqlbroker.http.service import Service
from faststream_sqlbroker.http.shield import DOCUMENT, Shield, handlers
from faststream_sqlbroker.http.users import Authentication, Role

SHORTEST_SECRET = 16
"""Characters of the secret that CSRF tokens are made of."""
PROBES = ("/health/live", "/health/ready")
"""The ends of paths that are answered after the broker's stop, too."""
STOPPED = "the broker of this process is stopped: ask another process, or try again later"
DashboardMode = Literal["full", "read_only", "off"]
DASHBOARD_MODES = get_args(DashboardMode)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpOptions:
    """The options of `broker.asgi`, checked.

    Raises:
        SetupError: one of them is not valid.
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
        """Check them."""
        whole_number("max_body", self.max_body, other=" of bytes")
        positive_seconds("body_timeout", self.body_timeout)
        whole_number("max_failures", self.max_failures)
        networks(self.proxies)
        one_of("dashboard", self.dashboard, DASHBOARD_MODES)
        flag("show_bodies", self.show_bodies)
        if self.redact is not None and not callable(self.redact):
            raise SetupError(f"redact must be a function of a message, got {short(self.redact)}")
        secret = self.csrf_secret
        if secret is not None and (not isinstance(secret, str) or len(secret) < SHORTEST_SECRET):
            raise SetupError(f"csrf_secret must be text of {SHORTEST_SECRET} characters or more")

    @property
    def limits(self) -> BodyLimits:
        """Of a body."""
        return BodyLimits(self.max_body, positive_seconds("body_timeout", self.body_timeout))

    @property
    def hidden(self) -> tuple[str, ...]:
        """Fields of records that are not shown, as the dashboard shows neither; `redact` changes
        messages, and a record is none.
        """
        if self.redact is not None:
            return (*OF_BODIES, *OF_INFOS)
        return () if self.show_bodies else OF_BODIES

    @property
    def csrf(self) -> Csrf:
        """With a secret of this process's own unless one is given."""
        secret = self.csrf_secret
        return Csrf(secrets.token_bytes(32) if secret is None else secret.encode())


class HttpApp:
    """An ASGI application: mount it, or run it alone.

    `app.mount("/broker", broker.asgi(auth))` in FastAPI and Starlette,
    `asgi_routes=[broker.asgi(auth).at("/broker")]` in AsgiFastStream.
    """

    def __init__(self, service: Service, auth: Any, options: HttpOptions) -> None:
        """Serve `service` to those whom `auth` knows, which `authentication` has checked."""
        csrf = options.csrf
        local_only = isinstance(auth, LocalOnly)
        self._service = service
        self._gate = Gate(
            [auth.user] if local_only else authentication(auth),
            csrf,
            service,
            max_failures=options.max_failures,
            proxies=networks(options.proxies),
        )
        answers = handlers(service.log)
        self.api = api = Api(options.limits, exception_handlers=answers, lifespan=self._lifespan)
        viewers = self._door(Role.VIEWER)
        admin = self._door(Role.ADMIN)
        # Routes are tried in their order, so those of clients come first.
        if service.jobs is not None:
            ChannelRoutes(service.jobs, self._gate, options.limits).add_to(api, admin)
        self._queues: QueueRoutes | None = None
        if service.queues is not None:
            self._queues = QueueRoutes(service.queues, self._gate)
            self._queues.add_to(api, admin)
        Probes(service).add_to(api, viewers)
        token = {200: models.CsrfToken}
        api.add("GET /csrf-token", self.csrf_token, viewers, token, part="probes")
        api.add(f"GET {DOCUMENT}", self.openapi, viewers, {200: "application/json"}, part="probes")
        MirrorRoutes(service.admin, options.hidden).add_to(api, self._door)
        DiagnosisRoutes(service.admin).add_to(api, admin)
        if options.dashboard != "off":
            dashboard = self._dashboard(service, options, csrf)
            api.router.routes += dashboard.routes()
            api.add_exception_handler(HTTPException, dashboard.unknown_path)
        self._app: App = Shield(self._unless_stopped, local_only=local_only)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        service = self._service
        if scope["type"] == "http" and service.jobs is not None and not service.is_stopped():
            # A mounted application is not told when the server starts.
            service.jobs().start()
        await self._app(scope, receive, send)

    async def _unless_stopped(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The process is alive without its broker; whether it is ready says its probe.
        stopped = scope["type"] == "http" and self._service.is_stopped()
        if stopped and not scope["path"].endswith(PROBES):
            await Problem(503, STOPPED).response()(scope, receive, send)
            return
        await self.api(scope, receive, send)

    @asynccontextmanager
    async def _lifespan(self, _app: Starlette) -> AsyncIterator[None]:
        """Of an application that runs alone."""
        found = [each() for each in (self._service.jobs, self._service.queues) if each is not None]
        for jobs in found:
            jobs.start()
        try:
            yield
        finally:
            for jobs in found:
                await jobs.stop()

    def at(self, prefix: str) -> tuple[str, App]:
        """An entry of AsgiFastStream's `asgi_routes`, for all paths below `prefix`.

        Raises:
            SetupError: `prefix` does not begin with a slash.
        """
        path = checked_prefix(prefix)
        return Below(path), below(path, self)

    def end_waits(self) -> None:
        """Answer all requests that wait for messages; a server that stops calls it."""
        if self._queues is not None:
            self._queues.end_waits()

    def document(self, root: str = "") -> dict[str, Any]:
        """The OpenAPI document of what is served, mounted at `root`."""
        return self.api.document(root)

    async def openapi(self, request: Request) -> Response:
        """This document."""
        # Only now the path is known at which it is mounted.
        return JSONResponse(self.document(request.scope.get("root_path", "")))

    async def csrf_token(self, user: Caller) -> Response:
        """What a browser sends with each write."""
        return JSONResponse({"token": self._gate.token(user)})

    def _door(self, role: Role) -> Door:
        """Lets users with `role` in."""
        return Door((USER,), partial(self._gate.enter, role=role))

    def _dashboard(self, service: Service, options: HttpOptions, csrf: Csrf) -> DashboardRoutes:
        settings = Settings(options.dashboard == "full", options.show_bodies, options.redact)
        return DashboardRoutes(service, self._gate, csrf, options.limits, settings)


def probe_app(service: Service) -> App:
    """The probes alone, without authentication: for a port that only the cluster reaches."""
    api = Api(BodyLimits(0, 0.0), exception_handlers=handlers(service.log))
    Probes(service).add_to(api, OPEN)
    return Shield(api, local_only=False)


def authentication(auth: Any) -> list[Authentication]:
    """Return the ways to authenticate: the method `user` of an object, a function, or several.

    Raises:
        SetupError: `auth` is none of these; above all None.
    """
    if isinstance(auth, LocalOnly):
        raise SetupError("only `sqlbroker serve --insecure` does without authentication")
    if isinstance(auth, list | tuple) and auth:
        return [way for part in auth for way in authentication(part)]
    authenticate = getattr(auth, "user", auth)
    if callable(authenticate) and not isinstance(auth, type):
        return [authenticate]
    raise SetupError(
        "HTTP needs authentication: give BasicAuth([Login(...)]), ProxyAuth(...), a function that "
        f"returns a User or None, or a list of them; got {short(auth)}"
    )

"""Routes of the dashboard, and rendering of its pages."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from faststream_sqlbroker.exceptions import SqlBrokerError
from faststream_sqlbroker.http.csrf import Csrf
from faststream_sqlbroker.http.dashboard import fleet, pages
from faststream_sqlbroker.http.dashboard.actions import ACTIONS, Action, BulkJobs
from faststream_sqlbroker.http.dashboard.asked import (
    NOTES,
    DashboardRequest,
    DashboardSettings,
    PageContent,
)
from faststream_sqlbroker.http.dashboard.live import LiveResponse, LiveUpdates
from faststream_sqlbroker.http.dashboard.rendering import create_environment
from faststream_sqlbroker.http.dashboard.shared import QueryCache, create_shared_queries
from faststream_sqlbroker.http.gate import AccessControl
from faststream_sqlbroker.http.responses import BodyLimits, Problem
from faststream_sqlbroker.http.service import Service
from faststream_sqlbroker.http.shield import create_path_problem, log_problem
from faststream_sqlbroker.http.users import Role, User, parse_role

STATIC = Path(__file__).parent / "static"
Page = Callable[[DashboardRequest, LiveUpdates], Awaitable[PageContent]]
REFRESH_HEADER = "X-Refreshed"
"""Header of requests by which an open page refreshes itself."""
DIAGNOSIS = "/ui/diagnosis"
MENU: Sequence[tuple[str, Page, str, str]] = (
    ("/", pages.load_overview, "Overview", "o"),
    ("/ui/queues", pages.load_queues, "Queues", "q"),
    ("/ui/messages", pages.load_messages, "Messages", "m"),
    ("/ui/dead-letters", fleet.load_dead_letters, "Dead letters", "d"),
    ("/ui/schedules", fleet.load_schedules, "Schedules", "s"),
    ("/ui/policies", fleet.load_policies, "Policies", "p"),
    ("/ui/locks", fleet.load_locks, "Locks", "l"),
    ("/ui/workers", fleet.load_workers, "Workers", "w"),
    ("/ui/channels", fleet.load_channels, "Pull consumers", "c"),
    ("/ui/mirror", fleet.load_mirror, "Lookup", "f"),
    ("/ui/jobs", fleet.load_jobs, "Bulk jobs", "j"),
    ("/ui/audit", fleet.load_audit, "Audit", "a"),
    ("/ui/verify", fleet.load_verify, "Verify", "v"),
    (DIAGNOSIS, fleet.load_diagnosis, "Diagnosis", "i"),
)
"""Pages of the menu: address, page, name, and the key after `g`. The last page is for
administrators only.
"""
PAGES: Mapping[str, Page] = {path: page for path, page, *_ in MENU} | {
    "/ui/queue": pages.load_queue,
    "/ui/messages/{message}": pages.load_message,
    "/ui/jobs/{job}": fleet.load_job,
}


class DashboardRoutes:
    """Serves the pages, their static files, and the actions."""

    def __init__(
        self,
        service: Service,
        access_control: AccessControl,
        csrf: Csrf,
        limits: BodyLimits,
        settings: DashboardSettings,
    ) -> None:
        self._service = service
        self._access_control = access_control
        self._limits = limits
        self._settings = settings
        self._templates = create_environment()
        self._bulk = BulkJobs(csrf, service.log)
        self._shared = create_shared_queries(service.admin)
        self._live = LiveUpdates(self._shared.queues.refresh, pages.compute_totals)
        self._page_cache: QueryCache[PageContent] = QueryCache()

    def create_routes(self) -> list[BaseRoute]:
        """Create all routes; a read-only dashboard has no action routes."""
        page_routes = [
            Route(path, self._create_page_handler(page), methods=["GET"])
            for path, page in PAGES.items()
        ]
        # In read-only mode these paths do not exist, even for administrators.
        actions = ACTIONS | self._bulk.actions
        action_routes = [
            Route(path, self._create_action_handler(action), methods=["POST"])
            for path, action in actions.items()
        ]
        return [
            *page_routes,
            *(action_routes if self._settings.writes else ()),
            Route("/ui/live", self._stream_updates, methods=["GET"]),
            # Static files contain no data, so no user is needed.
            Mount("/ui/static", StaticFiles(directory=STATIC)),
        ]

    def _create_page_handler(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that authorises a viewer, and loads and renders the page."""

        async def handle(request: Request) -> Response:
            user = await self._access_control.authorize(request, Role.VIEWER)
            page_request = self._create_page_request(request, user, {})
            return self._render_page(page_request, await self._load_page(page_request, page))

        return self._render_errors(handle)

    async def _load_page(self, page_request: DashboardRequest, page: Page) -> PageContent:
        """Load a page: a new result when opened, a shared result when an open page refreshes.

        Many open pages refresh at the same time, and need not query the database each.
        """
        if page is fleet.load_verify:
            return await page(page_request, self._live)  # Only runs on request.
        query = sorted(
            parameter
            for parameter in page_request.request.query_params.multi_items()
            if parameter[0] != "note"
        )
        # A page may depend on the user's role, but not on the user.
        key = (_get_path(page_request.request), tuple(query), page_request.user.role)
        refresh = REFRESH_HEADER not in page_request.request.headers
        return await self._page_cache.get(
            key, lambda: page(page_request, self._live), refresh=refresh
        )

    def _create_action_handler(self, action: Action) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that authorises an operator, runs the action and redirects.

        Redirecting keeps a reload of the next page from repeating the action. A dry run returns a
        page instead. Afterwards all shared results are dropped, also if the action failed, because
        it may have changed something.
        """

        async def handle(request: Request) -> Response:
            user, fields = await self._access_control.authorize_form(
                request, Role.OPERATOR, self._limits
            )
            page_request = self._create_page_request(request, user, fields)
            try:
                result = await action(page_request)
            finally:
                self._shared.invalidate()
                self._page_cache.clear()
            if isinstance(result, PageContent):
                return self._render_page(page_request, result)
            separator = "&" if "?" in result.path else "?"
            # Without a host, because the request's Host is arbitrary.
            address = f"{_get_root(request)}{result.path}{separator}note={result.note}"
            return RedirectResponse(address, 303)

        return self._render_errors(handle)

    async def _stream_updates(self, request: Request) -> Response:
        """Send live numbers to an open page for some seconds; then the page asks again."""
        await self._access_control.authorize(request, Role.VIEWER)
        self._live.check()
        return LiveResponse(self._live.stream())

    def _render_errors(
        self, handler: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Return a handler that renders errors as pages, for people with a browser."""

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except Problem as problem:
                return self._render_error(request, problem)
            except SqlBrokerError as error:
                return self._render_error(request, log_problem(self._service.log, request, error))

        return handle

    async def handle_unknown_path(self, request: Request, error: Exception) -> Response:
        """Return the response to an unknown path or method: a page for browsers, or JSON."""
        problem = create_path_problem(request, error)
        path = _get_path(request)
        wants_page = "text/html" in request.headers.get("accept", "").lower()
        if wants_page and (path == "/ui" or path.startswith("/ui/")):
            return self._render_error(request, problem)
        return problem.to_response()

    def _create_page_request(
        self, request: Request, user: User, fields: Mapping[str, str]
    ) -> DashboardRequest:
        """Return the input of a page or an action; `fields` of a form override the query."""
        return DashboardRequest(
            request=request,
            user=user,
            admin=self._service.admin(),
            settings=self._settings,
            shared=self._shared,
            list_pull_queues=self._service.pulled,
            count_jobs=self._service.job_counts,
            # Forms pass names in the query string, where all characters can be escaped.
            fields={**request.query_params, **fields},
        )

    def _render_page(self, page_request: DashboardRequest, content: PageContent) -> Response:
        """Render a page with the values that all pages need, such as user, role and CSRF token.

        `note` in the address, the result of an action, is a key of `NOTES`, so a link cannot bring
        its own text.
        """
        values = {
            "user": page_request.user,
            "role": parse_role(page_request.user.role).name.lower(),
            "writes": page_request.writes,
            "settings": page_request.settings,
            "csrf": self._access_control.create_csrf_token(page_request.user),
            "note": NOTES.get(page_request.get_field("note") or ""),
            **content.values,
        }
        return self._render_template(page_request.request, content.template, values)

    def _render_error(self, request: Request, problem: Problem) -> Response:
        """Render a problem as a page without user and actions: the caller may be unknown."""
        values = {"problem": problem, "user": None, "writes": False, "note": None}
        response = self._render_template(request, "error.html", values)
        response.status_code = problem.status
        response.headers.update(problem.headers)
        return response

    def _render_template(
        self, request: Request, template: str, values: Mapping[str, Any]
    ) -> Response:
        """Render a template with the menu, and with the paths that all pages need."""
        is_admin = values.get("role") == "admin"
        menu = [(path, *labels) for path, _, *labels in MENU if is_admin or path != DIAGNOSIS]
        text = self._templates.get_template(template).render(
            **values, root=_get_root(request), path=_get_path(request), menu=menu
        )
        # JSON in ASCII can contain half of a surrogate pair, which UTF-8 cannot encode.
        return HTMLResponse(text.encode(errors="backslashreplace"))


def _get_root(request: Request) -> str:
    """Return the path at which the application is mounted."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def _get_path(request: Request) -> str:
    """Return the path of the page below the root."""
    # Not from `request.url`, which contains an arbitrary Host.
    return str(request.scope["path"]).removeprefix(_get_root(request))

"""The paths of the dashboard, and how its answers become pages."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles

from faststream_sqlbroker.exceptions import SqlBrokerError
from faststream_sqlbroker.http.answers import BodyLimits, Problem
from faststream_sqlbroker.http.csrf import Csrf
from faststream_sqlbroker.http.dashboard import fleet, pages
from faststream_sqlbroker.http.dashboard.actions import ACTIONS, Action, Bulk
from faststream_sqlbroker.http.dashboard.asked import NOTES, Asked, Settings, Shown
from faststream_sqlbroker.http.dashboard.live import Live, LiveResponse
from faststream_sqlbroker.http.dashboard.rendering import environment
from faststream_sqlbroker.http.dashboard.shared import Answers, lately_of
from faststream_sqlbroker.http.gate import Gate
from faststream_sqlbroker.http.service import Service
from faststream_sqlbroker.http.shield import told_problem, unknown_problem
from faststream_sqlbroker.http.users import Role, User, role_of

STATIC = Path(__file__).parent / "static"
Page = Callable[[Asked, Live], Awaitable[Shown]]
REFRESHED = "X-Refreshed"
"""The header of a page that is read again while it is open."""
DIAGNOSIS = "/ui/diagnosis"
MENU: Sequence[tuple[str, Page, str, str]] = (
    ("/", pages.overview, "Overview", "o"),
    ("/ui/queues", pages.queues, "Queues", "q"),
    ("/ui/messages", pages.messages, "Messages", "m"),
    ("/ui/dead-letters", fleet.dead_letters, "Dead letters", "d"),
    ("/ui/schedules", fleet.schedules, "Schedules", "s"),
    ("/ui/policies", fleet.policies, "Policies", "p"),
    ("/ui/locks", fleet.locks, "Locks", "l"),
    ("/ui/workers", fleet.workers, "Workers", "w"),
    ("/ui/channels", fleet.channels, "Pull consumers", "c"),
    ("/ui/mirror", fleet.mirror, "Lookup", "f"),
    ("/ui/jobs", fleet.jobs, "Bulk jobs", "j"),
    ("/ui/audit", fleet.audit, "Audit", "a"),
    ("/ui/verify", fleet.verify, "Verify", "v"),
    (DIAGNOSIS, fleet.diagnosis, "Diagnosis", "i"),
)
"""The pages of the menu, the last for administrators only: address, page, name, and the key that
follows `g`."""
PAGES: Mapping[str, Page] = {path: page for path, page, *_ in MENU} | {
    "/ui/queue": pages.queue,
    "/ui/messages/{message}": pages.message,
    "/ui/jobs/{job}": fleet.job,
}


class DashboardRoutes:
    """Serves the pages, what belongs to them, and the actions on them."""

    def __init__(
        self, service: Service, gate: Gate, csrf: Csrf, limits: BodyLimits, settings: Settings
    ) -> None:
        self._service = service
        self._gate = gate
        self._limits = limits
        self._settings = settings
        self._templates = environment()
        self._bulk = Bulk(csrf, service.log)
        self._lately = lately_of(service.admin)
        self._live = Live(self._lately.queues.renew, pages.totals)
        self._answers: Answers[Shown] = Answers()

    def routes(self) -> list[BaseRoute]:
        """All paths; without those of actions if the dashboard is read-only."""
        shown = [Route(path, self._page(page), methods=["GET"]) for path, page in PAGES.items()]
        # In the read-only mode there is no such path, not for administrators either.
        actions = ACTIONS | self._bulk.actions
        done = [Route(path, self._action(a), methods=["POST"]) for path, a in actions.items()]
        return [
            *shown,
            *(done if self._settings.writes else ()),
            Route("/ui/live", self._stream, methods=["GET"]),
            # The same for all, and nothing of any queue: no user is needed to read it.
            Mount("/ui/static", StaticFiles(directory=STATIC)),
        ]

    def _page(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            user = await self._gate.enter(request, Role.VIEWER)
            asked = self._asked(request, user, {})
            return self._shown(asked, await self._found(asked, page))

        return self._guarded(answer)

    async def _found(self, asked: Asked, page: Page) -> Shown:
        """What a page shows: anew for who opens it, shared by all whose open pages refresh."""
        if page is fleet.verify:
            return await page(asked, self._live)  # It reads only what its user asks for.
        query = sorted(
            each for each in asked.request.query_params.multi_items() if each[0] != "note"
        )
        # What a page shows may depend on the role, but on nothing else of its user.
        question = (_path(asked.request), tuple(query), asked.user.role)
        renew = REFRESHED not in asked.request.headers
        return await self._answers.get(question, lambda: page(asked, self._live), renew=renew)

    def _action(self, action: Action) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            user, fields = await self._gate.enter_form(request, Role.OPERATOR, self._limits)
            asked = self._asked(request, user, fields)
            try:
                found = await action(asked)
            finally:
                self._lately.forget()
                self._answers.forget()
            if isinstance(found, Shown):
                return self._shown(asked, found)
            mark = "&" if "?" in found.path else "?"
            # Without a host: that of the request may be anything.
            address = f"{_root(request)}{found.path}{mark}note={found.note}"
            return RedirectResponse(address, 303)

        return self._guarded(answer)

    async def _stream(self, request: Request) -> Response:
        await self._gate.enter(request, Role.VIEWER)
        self._live.check()
        return LiveResponse(self._live.stream())

    def _guarded(
        self, answer: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Errors are pages, too."""

        async def guarded(request: Request) -> Response:
            try:
                return await answer(request)
            except Problem as problem:
                return self._error(request, problem)
            except SqlBrokerError as error:
                return self._error(request, told_problem(self._service.log, request, error))

        return guarded

    async def unknown_path(self, request: Request, error: Exception) -> Response:
        """The answer to a path or method that does not exist: a page for a browser that looks for
        one, as JSON else.
        """
        problem = unknown_problem(request, error)
        path = _path(request)
        wants_page = "text/html" in request.headers.get("accept", "").lower()
        if wants_page and (path == "/ui" or path.startswith("/ui/")):
            return self._error(request, problem)
        return problem.response()

    def _asked(self, request: Request, user: User, fields: Mapping[str, str]) -> Asked:
        return Asked(
            request=request,
            user=user,
            admin=self._service.admin(),
            settings=self._settings,
            lately=self._lately,
            pulled=self._service.pulled,
            job_counts=self._service.job_counts,
            # Forms have names in their address, where all characters are escaped.
            fields={**request.query_params, **fields},
        )

    def _shown(self, asked: Asked, shown: Shown) -> Response:
        values = {
            "user": asked.user,
            "role": role_of(asked.user.role).name.lower(),
            "writes": asked.writes,
            "settings": asked.settings,
            "csrf": self._gate.token(asked.user),
            "note": NOTES.get(asked.given("note") or ""),
            **shown.values,
        }
        return self._rendered(asked.request, shown.template, values)

    def _error(self, request: Request, problem: Problem) -> Response:
        values = {"problem": problem, "user": None, "writes": False, "note": None}
        found = self._rendered(request, "error.html", values)
        found.status_code = problem.status
        found.headers.update(problem.headers)
        return found

    def _rendered(self, request: Request, template: str, values: Mapping[str, Any]) -> Response:
        is_admin = values.get("role") == "admin"
        menu = [(path, *shown) for path, _, *shown in MENU if is_admin or path != DIAGNOSIS]
        text = self._templates.get_template(template).render(
            **values, root=_root(request), path=_path(request), menu=menu
        )
        # JSON in ASCII can name half of a pair of surrogates, which is no character of UTF-8.
        return HTMLResponse(text.encode(errors="backslashreplace"))


def _root(request: Request) -> str:
    """The path that the application is mounted at."""
    return str(request.scope.get("root_path", "")).rstrip("/")


def _path(request: Request) -> str:
    """The path of the page, below that."""
    # Not that of `request.url`, which is made of whatever Host says.
    return str(request.scope["path"]).removeprefix(_root(request))

"""The diagnosis over HTTP: as JSON, and as a page that needs neither style nor script."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.responses import HTMLResponse, JSONResponse, Response

from faststream_sqlbroker.admin import Admin
from faststream_sqlbroker.core.health import Diagnosis
from faststream_sqlbroker.core.text import visible
from faststream_sqlbroker.http.api import Api, Door

LIMIT = 5.0
"""Seconds that each part may take."""


class DiagnosisRoutes:
    """For administrators: it names hosts, tables and rights."""

    def __init__(self, admin: Callable[[], Admin]) -> None:
        self._admin = admin
        self._turn = asyncio.Lock()

    def add_to(self, api: Api, admin: Door) -> None:
        """Serve both; `admin` lets administrators in."""
        kinds = {200: "application/json"}
        api.add("GET /v1/diagnosis", self.diagnosis, admin, kinds, part="probes")
        api.add("GET /diagnosis", self.page, admin, {200: "text/html"}, part=None)

    async def diagnosis(self) -> Response:
        """All that the broker depends on."""
        return JSONResponse((await self._look()).as_json)

    async def page(self) -> Response:
        """The same for people."""
        return HTMLResponse(page(await self._look()))

    async def _look(self) -> Diagnosis:
        # One at a time: each takes several connections.
        async with self._turn:
            return await self._admin().diagnosis(timeout=LIMIT)


def page(found: Diagnosis) -> str:
    """The diagnosis as HTML; all that is not ours is escaped."""
    # Not before: the dashboard imports this module.
    from faststream_sqlbroker.http.dashboard.rendering import environment  # noqa: PLC0415

    state = "all is well" if found.ok else "something is wrong"
    template = environment().get_template("plain_diagnosis.html")
    return template.render(found=found, state=state, text=_text)


def _text(value: Any) -> str:
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return visible(shown)

"""The diagnosis over HTTP: as JSON, and as a page without style and script."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from starlette.responses import HTMLResponse, JSONResponse, Response

from faststream_sqlbroker.admin import Admin
from faststream_sqlbroker.core.health import Diagnosis
from faststream_sqlbroker.core.text import replace_invisible
from faststream_sqlbroker.http.api import AccessRule, Api

LIMIT = 5.0
"""Seconds for each part."""


class DiagnosisRoutes:
    """Serves the diagnosis to administrators only: the result names hosts, tables and rights."""

    def __init__(self, admin: Callable[[], Admin]) -> None:
        self._admin = admin
        self._lock = asyncio.Lock()

    def add_to(self, api: Api, admin: AccessRule) -> None:
        """Add both routes; `admin` admits administrators."""
        responses = {200: "application/json"}
        api.add("GET /v1/diagnosis", self.diagnosis, admin, responses, part="probes")
        api.add("GET /diagnosis", self.page, admin, {200: "text/html"}, part=None)

    async def diagnosis(self) -> Response:
        """Check everything that the broker depends on."""
        return JSONResponse((await self._run_diagnosis()).as_json)

    async def page(self) -> Response:
        """Return the diagnosis as HTML."""
        return HTMLResponse(render_page(await self._run_diagnosis()))

    async def _run_diagnosis(self) -> Diagnosis:
        """Run the diagnosis. Runs are sequential, because each takes several connections."""
        async with self._lock:
            return await self._admin().diagnosis(timeout=LIMIT)


def render_page(diagnosis: Diagnosis) -> str:
    """Render the diagnosis as HTML; all values are escaped."""
    # Imported late, because the dashboard imports this module.
    from faststream_sqlbroker.http.dashboard.rendering import create_environment  # noqa: PLC0415

    state = "no problems found" if diagnosis.ok else "problems found"
    template = create_environment().get_template("plain_diagnosis.html")
    return template.render(found=diagnosis, state=state, text=_format_value)


def _format_value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return replace_invisible(text)

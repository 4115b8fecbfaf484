"""The diagnosis over HTTP: as JSON, and as a page that needs neither style nor script."""

import asyncio
import json
from collections.abc import Callable
from html import escape
from typing import Any

from starlette.responses import HTMLResponse, JSONResponse, Response

from faststream_sqlbroker.admin import Admin
from faststream_sqlbroker.core.health import Diagnosis, DiagnosisPart
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
    state = "all is well" if found.ok else "something is wrong"
    parts = "".join(_section(part) for part in found.parts)
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Diagnosis: {state}</title></head>\n"
        f"<body><main><h1>Diagnosis: {state}</h1>\n{parts}</main></body></html>\n"
    )


def _section(part: DiagnosisPart) -> str:
    told = [part.error] if part.error is not None else list(part.problems)
    wrong = "".join(f"<li>{_text(each)}</li>" for each in told)
    rows = "".join(
        f'<tr><th scope="row">{_text(name)}</th><td>{_text(value)}</td></tr>'
        for name, value in part.facts.items()
    )
    return (
        f"<section><h2>{_text(part.name)}: {'well' if part.ok else 'wrong'}</h2>"
        f"{f'<ul>{wrong}</ul>' if wrong else ''}"
        f"{f'<table><tbody>{rows}</tbody></table>' if rows else ''}"
        f"<p>looked at in {part.took * 1000:.0f} ms</p></section>\n"
    )


def _text(value: Any) -> str:
    shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return escape(visible(shown))

"""Whether this process is alive and ready, and its metrics: for orchestrators and Prometheus."""

import asyncio
from collections.abc import Iterable
from time import monotonic
from typing import Any

from starlette.responses import JSONResponse, Response

from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.http import channel_models as models
from faststream_sqlbroker.http.answers import Problem
from faststream_sqlbroker.http.api import OPEN, Api, Door
from faststream_sqlbroker.http.service import Service

LIMIT = 3.0
"""Seconds that a look may take: orchestrators mostly wait for one more."""
KEPT = 1.0
"""Seconds for which an answer is given again: anyone may ask, and each look costs statements."""
SCHEMA_KEPT = 30.0
"""Seconds for which the tables are not compared again: that reads the server's catalog."""


class Probes:
    """Answers probes. They say nothing of queues: anyone may ask."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turn = asyncio.Lock()
        self._found: tuple[float, dict[str, Any]] | None = None
        self._schema: tuple[float, bool] | None = None

    def add_to(self, api: Api, viewers: Door) -> None:
        """Serve all of them; `viewers` lets those in who may see the metrics: they name queues."""
        ready = dict.fromkeys((200, 503), models.Ready)
        api.add("GET /health/live", self.live, OPEN, {200: models.Live}, part="probes")
        api.add("GET /health/ready", self.ready, OPEN, ready, part="probes")
        api.add("GET /metrics", self.metrics, viewers, {200: "text/plain"}, 404, part="probes")

    async def live(self) -> Response:
        """Whether the event loop answers: all that a restart could mend, so not the database."""
        return JSONResponse({"status": "live"})

    async def ready(self) -> Response:
        """200 if the broker has started, its loops work, the tables are there, and the database
        takes writes; else 503.
        """
        found = await self._look()
        return JSONResponse(found, 200 if found["status"] == "ready" else 503)

    async def metrics(self) -> Response:
        """The registry, as Prometheus reads it; 404 if there is none."""
        if self._service.exposition is None:
            text = (
                "this broker has no metrics: give it SqlBrokerPrometheusMetrics(registry) as "
                "SqlBroker(metrics=...), which `sqlbroker serve` takes by --app module:name; or "
                "write metrics: true below broker in the file of `sqlbroker serve --config`"
            )
            raise Problem(404, text)
        # It takes locks of the registry: not in the event loop's thread.
        shown, kind = await asyncio.to_thread(self._service.exposition)
        return Response(shown, headers={"Content-Type": kind})

    async def _look(self) -> dict[str, Any]:
        async with self._turn:
            if self._found is None or monotonic() - self._found[0] > KEPT:
                found = await self._looked()
                self._found = (monotonic(), found)
            return self._found[1]

    async def _looked(self) -> dict[str, Any]:
        service = self._service
        answers = await service.ping(LIMIT)
        running = service.process().subscribers
        checks = {
            "started": service.is_started(),
            "database": answers,
            "schema": answers and await self._has_tables(),
            "subscribers": all(each.healthy for each in running),
        }
        return {
            "status": "ready" if all(checks.values()) else "not ready",
            "checks": checks,
            "reason": None if answers else service.write_problem(),
            "last_claim_ago": _longest(each.last_claim_ago for each in running),
            "last_flush_ago": _longest(each.last_flush_ago for each in running),
        }

    async def _has_tables(self) -> bool:
        known = self._schema
        if known is None or not known[1] or monotonic() - known[0] > SCHEMA_KEPT:
            try:
                async with asyncio.timeout(LIMIT):
                    same = not await self._service.differences()
            except (StoreError, TimeoutError):
                return False
            known = self._schema = (monotonic(), same)
        return known[1]


def _longest(seconds: Iterable[float | None]) -> float | None:
    return max((round(each, 3) for each in seconds if each is not None), default=None)

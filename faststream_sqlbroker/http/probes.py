"""Whether this process is alive and ready, and its metrics: for orchestrators and Prometheus."""

import asyncio
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Readiness:
    """What a look has found."""

    checks: dict[str, bool]
    last_claim_ago: float | None
    """Seconds, of the subscriber whose last claim is longest ago; None: there is none."""
    last_flush_ago: float | None

    @property
    def ready(self) -> bool:
        """Whether all is well."""
        return all(self.checks.values())


class Probes:
    """Answers probes. They say nothing of queues: anyone may ask."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._turn = asyncio.Lock()
        self._found: tuple[float, Readiness] | None = None
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
        """200 if the broker has started, its loops work, and the tables are there; else 503."""
        found = await self._look()
        status = "ready" if found.ready else "not ready"
        shown: dict[str, Any] = {"status": status, "checks": found.checks}
        for name in ("last_claim_ago", "last_flush_ago"):
            seconds = getattr(found, name)
            shown[name] = None if seconds is None else round(seconds, 3)
        return JSONResponse(shown, 200 if found.ready else 503)

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

    async def _look(self) -> Readiness:
        async with self._turn:
            if self._found is None or monotonic() - self._found[0] > KEPT:
                found = await self._looked()
                self._found = (monotonic(), found)
            return self._found[1]

    async def _looked(self) -> Readiness:
        service = self._service
        answers = await service.ping(LIMIT)
        running = service.process().subscribers
        claims = [each.last_claim_ago for each in running if each.last_claim_ago is not None]
        flushes = [each.last_flush_ago for each in running if each.last_flush_ago is not None]
        checks = {
            "started": service.is_started(),
            "database": answers,
            "schema": answers and await self._has_tables(),
            "subscribers": all(each.healthy for each in running),
        }
        return Readiness(checks, max(claims, default=None), max(flushes, default=None))

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

"""Liveness, readiness and metrics of this process, for orchestrators and Prometheus."""

import asyncio
from collections.abc import Iterable
from time import monotonic
from typing import Any

from starlette.responses import JSONResponse, Response

from faststream_sqlbroker.exceptions import StoreError
from faststream_sqlbroker.http import channel_models as models
from faststream_sqlbroker.http.api import PUBLIC, AccessRule, Api
from faststream_sqlbroker.http.responses import Problem
from faststream_sqlbroker.http.service import Service

LIMIT = 3.0
"""Seconds for a check; orchestrators usually wait for one second more."""
CACHE_SECONDS = 1.0
"""Seconds for which a result is returned again: anyone may ask, and each check runs statements."""
SCHEMA_CACHE_SECONDS = 30.0
"""Seconds for which the tables are not compared again, because that reads the server's catalog."""


class Probes:
    """Handles probes. Readiness reveals nothing about queues, because anyone may ask."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = asyncio.Lock()
        self._cached_result: tuple[float, dict[str, Any]] | None = None
        self._cached_schema: tuple[float, bool] | None = None

    def add_to(self, api: Api, viewers: AccessRule) -> None:
        """Add all routes; `viewers` admits users who may see the metrics, which name queues."""
        ready_responses = dict.fromkeys((200, 503), models.Ready)
        api.add("GET /health/live", self.live, PUBLIC, {200: models.Live}, part="probes")
        api.add("GET /health/ready", self.ready, PUBLIC, ready_responses, part="probes")
        api.add("GET /metrics", self.metrics, viewers, {200: "text/plain"}, 404, part="probes")

    async def live(self) -> Response:
        """Return 200 while the event loop responds; a restart would not repair the database."""
        return JSONResponse({"status": "live"})

    async def ready(self) -> Response:
        """Return 200 if the broker has started, its loops work, the tables fit and the database
        accepts writes, else 503.
        """
        result = await self._get_readiness()
        return JSONResponse(result, 200 if result["status"] == "ready" else 503)

    async def metrics(self) -> Response:
        """Return the metrics for Prometheus, or 404 if the broker has no metrics."""
        if self._service.exposition is None:
            text = (
                "this broker has no metrics: pass SqlBroker(metrics=SqlBrokerPrometheusMetrics("
                "registry)), and serve it with `sqlbroker serve --app module:name`; or write "
                "metrics: true below broker in the file of `sqlbroker serve --config`"
            )
            raise Problem(404, text)
        # Run in a thread, because the exposition takes locks of the registry.
        content, content_type = await asyncio.to_thread(self._service.exposition)
        return Response(content, headers={"Content-Type": content_type})

    async def _get_readiness(self) -> dict[str, Any]:
        """Return the response body of the readiness probe, checked at most once a second.

        Probes that arrive during a check wait for its result.
        """
        async with self._lock:
            if self._cached_result is None or monotonic() - self._cached_result[0] > CACHE_SECONDS:
                result = await self._check_readiness()
                self._cached_result = (monotonic(), result)
            return self._cached_result[1]

    async def _check_readiness(self) -> dict[str, Any]:
        """Check database, tables and loops for the readiness probe of an orchestrator.

        `reason` is only set if the database refuses writes.
        """
        service = self._service
        is_reachable = await service.ping(LIMIT)
        subscribers = service.process().subscribers
        checks = {
            "started": service.is_started(),
            "database": is_reachable,
            "schema": is_reachable and await self._has_tables(),
            "subscribers": all(subscriber.healthy for subscriber in subscribers),
        }
        return {
            "status": "ready" if all(checks.values()) else "not ready",
            "checks": checks,
            "reason": None if is_reachable else service.write_problem(),
            "last_claim_ago": _get_max_seconds(
                subscriber.last_claim_ago for subscriber in subscribers
            ),
            "last_flush_ago": _get_max_seconds(
                subscriber.last_flush_ago for subscriber in subscribers
            ),
        }

    async def _has_tables(self) -> bool:
        """Return True if the tables fit this version.

        Comparing the tables is slow, so a good result is cached. A bad result is not: a migration
        makes the process ready at the next probe.
        """
        cached = self._cached_schema
        if cached is None or not cached[1] or monotonic() - cached[0] > SCHEMA_CACHE_SECONDS:
            try:
                async with asyncio.timeout(LIMIT):
                    is_current = not await self._service.differences()
            except (StoreError, TimeoutError):
                return False
            cached = self._cached_schema = (monotonic(), is_current)
        return cached[1]


def _get_max_seconds(seconds: Iterable[float | None]) -> float | None:
    return max((round(value, 3) for value in seconds if value is not None), default=None)

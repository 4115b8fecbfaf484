"""`./dev dashboard`: a shop with live traffic, until a signal ends it."""

from pathlib import Path

import httpx

from tests.helpers import eventually
from tests.http.running import running


async def test_the_demo_trades_and_shows_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    async with (
        running(log, "-m", "docs.examples.dashboard_demo", "--port", "0") as base,
        httpx.AsyncClient(base_url=base, timeout=60) as client,
    ):

        async def trades() -> bool:
            page = (await client.get("/ui/messages?archived=on&state=COMPLETED")).text
            return "/ui/queue?name=orders" in page

        async def names_the_problem() -> bool:
            return "did you mean &#39;orders&#39;?" in (await client.get("/")).text

        await eventually(trades, step=0.2)
        await eventually(names_the_problem, step=0.2)

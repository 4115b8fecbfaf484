"""The dashboard in a real browser: an incident from its first sign to the audit.

`./dev screenshots` lets the tour of all views write docs/pictures/dashboard-*.webp.
"""

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import uvicorn
from playwright.async_api import Browser, BrowserContext, Page, async_playwright

from faststream_sqlbroker import NoRetryStrategy, SqlBroker
from faststream_sqlbroker.core.channels import Channels
from faststream_sqlbroker.core.policies import Throttle
from faststream_sqlbroker.http.dashboard import routes
from faststream_sqlbroker.http.server import InnerServer, bind_socket
from tests.helpers import eventually
from tests.http.conftest import PASSWORDS, as_user, logins, on_sqlite
from tests.http.dashboard.conftest import ended
from tests.http.dashboard.pictures import HIDE, picture
from tools.browser import chromium
from tools.private import CannotDownloadError, CannotStartError

pytestmark = [
    pytest.mark.capability("HTTP: a dashboard"),
    # A busy machine needs long for a browser, and apt for bringing it.
    pytest.mark.timeout(600),
    on_sqlite,
]
WIDE = {"width": 1180, "height": 720}
PHONE = {"width": 360, "height": 740}
VIEWS = {
    "overview": "/",
    "queues": "/ui/queues",
    "queue": "/ui/queue?name=invoices",
    "messages": "/ui/messages",
    "schedules": "/ui/schedules",
    "policies": "/ui/policies",
    "locks": "/ui/locks",
    "workers": "/ui/workers",
    "channels": "/ui/channels",
    "lookup": "/ui/mirror?lookup=ada",
    "verify": "/ui/verify?run=on",
    "diagnosis": "/ui/diagnosis",
}
"""By the name of its picture, each page that can be opened at once."""
OTHERS = (
    "/ui/messages/999",
    "/ui/messages?state=FAILED&reason=max_attempts",
    "/ui/queue?name=parcels/carrier",
    "/ui/queue?name=unknown",
    "/ui/dead-letters?queue=unknown",
)
"""More of what pages can show; the first is none."""
CONTRASTS = """() => {
  const numbers = (colour) => colour.match(/[0-9.]+/g).map(Number);
  const light = (colour) => {
    const [r, g, b] = numbers(colour).slice(0, 3).map((v) => v / 255)
      .map((v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const found = getComputedStyle(at).backgroundColor;
      const [, , , alpha] = numbers(found);
      if (alpha === undefined || alpha === 1) return found;
    }
    return getComputedStyle(document.documentElement).colorScheme === "dark"
      ? "rgb(0, 0, 0)" : "rgb(255, 255, 255)";
  };
  const low = [];
  for (const element of document.body.querySelectorAll("*")) {
    const text = [...element.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
    if (!text && !["INPUT", "SELECT"].includes(element.tagName)) continue;
    const style = getComputedStyle(element);
    const inDrawing = element.tagName === "text";
    const front = inDrawing ? style.fill : style.color;
    const back = inDrawing
      ? getComputedStyle(element.parentElement.querySelector("rect")).fill : ground(element);
    const [a, b] = [light(front), light(back)].sort((x, y) => y - x);
    const ratio = (a + 0.05) / (b + 0.05);
    if (ratio < 4.5) low.push([element.outerHTML.slice(0, 80), front, back, ratio]);
  }
  return low;
}"""
"""The texts of a page whose contrast with their ground is below 4.5."""
UNLABELLED = """() => [...document.querySelectorAll("input:not([type=hidden]), select")]
  .filter((each) => !each.labels.length || !each.labels[0].textContent.trim())
  .map((each) => each.outerHTML)"""
SCRIPT = (routes.STATIC / "dashboard.js").read_text()
HURRIED = SCRIPT.replace("REFRESH = 5000", "REFRESH = 1000")
"""The script with a short pause between two readings of a page."""
KEYS = (routes.STATIC / "keys.js").read_text()
PATIENT = KEYS.replace("SOON = 1500", "SOON = 600000")
"""The script that takes two keys for one combination however long the machine pauses between them.
"""
WIDER = """() => document.documentElement.scrollWidth - document.documentElement.clientWidth"""


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    """Debian's Chromium; nothing is downloaded by Playwright."""
    try:
        path = await asyncio.to_thread(chromium)
    except CannotStartError as error:
        if os.environ.get("CI") and not isinstance(error, CannotDownloadError):
            pytest.fail(str(error))
        pytest.skip(str(error))
    async with async_playwright() as playwright:
        # Its default is 30 s; a busy machine may need longer.
        found = await playwright.chromium.launch(executable_path=path, timeout=200_000)
        yield found
        await found.close()


@asynccontextmanager
async def serving(broker: SqlBroker, **options: Any) -> AsyncIterator[str]:
    """The address of the broker's application, served by uvicorn."""
    app = broker.asgi(logins(), channels=Channels(), **options)
    listener = bind_socket("port", "127.0.0.1", 0)
    config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = InnerServer(config)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def looking(
    browser: Browser, address: str, user: str = "ola", *, hurried: bool = True, **options: Any
) -> AsyncIterator[tuple[Page, list[str]]]:
    """A page of a user who is logged in, and what went wrong in its console; who is not hurried
    reads a page anew as seldom as users."""
    context: BrowserContext = await browser.new_context(
        base_url=address,
        http_credentials={"username": user, "password": PASSWORDS[user]},
        **{"viewport": WIDE, **options},
    )
    context.set_default_timeout(60_000)
    page = await context.new_page()
    assert HURRIED != SCRIPT
    assert PATIENT != KEYS
    if hurried:
        await page.route("**/dashboard.js", lambda route: route.fulfill(body=HURRIED))
    await page.route("**/keys.js", lambda route: route.fulfill(body=PATIENT))
    wrong: list[str] = []
    page.on("console", lambda said: wrong.append(said.text) if said.type == "error" else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    yield page, wrong
    await context.close()


class Shop:
    """A broker with a bug that can be mended."""

    def __init__(self, broker: SqlBroker) -> None:
        self.broker = broker
        self.mended = False
        self.handled: list[int] = []

        @broker.subscriber("invoices", retry_strategy=NoRetryStrategy())
        async def invoice(body: dict) -> None:
            if not self.mended:
                raise TimeoutError("the printer does not answer")
            self.handled.append(body["id"])

        @broker.subscriber("emails", policies=[Throttle(1, timedelta(hours=1))])
        async def email(_body: dict) -> None: ...

    async def open(self) -> int:
        """Publish, and let messages fail; the id of one that has."""
        broker = self.broker
        broker.publish_on_schedule("nightly", "30 3 * * 1-5", "reports", {})
        failed = [await broker.publish({"id": n}, "invoices", key="ada") for n in range(3)]
        for _ in range(3):
            await broker.publish({"to": "ada"}, "emails")
        await broker.publish({}, "invioces")
        await broker.publish({"id": 9}, "reports", delay="2h", lookup="ada", info="March")
        await broker.start()
        for number in failed:
            await ended(broker, number)
        return failed[0]

    async def pull(self, address: str) -> None:
        """Let a pull consumer have a job in each state."""
        channel = "/channel/parcels"
        jobs = f"{channel}/consumer/carrier"
        async with httpx.AsyncClient(base_url=address, auth=as_user("ann"), timeout=60) as client:
            tokens = {"X-Broker-Channel-Token": (await client.put(channel)).json()["Token"]}
            made = await client.put(jobs, data={"type": "pull"})
            tokens["X-Broker-Consumer-Token"] = made.json()["Token"]
            for number in range(4):
                await client.post(f"{channel}/broadcast", json={"id": number}, headers=tokens)
            queued = (await client.get(f"{jobs}/queued-jobs", headers=tokens)).json()["Result"]
            for job, states in zip(queued, (["DELIVERED"], ["DEAD"], []), strict=False):
                for state in ("INFLIGHT", *states):
                    path = f"{jobs}/job/{job['ID']}"
                    done = await client.post(path, json={"NextState": state}, headers=tokens)
                    assert done.status_code == 202, done.text


@pytest.fixture
async def shop(broker: SqlBroker) -> Shop:
    return Shop(broker)


async def test_an_incident_from_the_first_sign_to_the_audit(shop: Shop, browser: Browser) -> None:
    failed = await shop.open()
    async with serving(shop.broker) as address, looking(browser, address) as (page, wrong):
        await page.goto("/")
        await page.get_by_text("did you mean 'invoices'?").wait_for()
        await page.get_by_role("link", name="dead letters by error").click()
        await page.get_by_role("heading", name="3 messages: TimeoutError").wait_for()
        await page.goto(f"/ui/messages/{failed}")
        await page.get_by_text("FAILED").first.wait_for()
        shop.mended = True
        await page.go_back()
        await page.get_by_role("button", name="Dry run of a redrive", exact=True).click()
        await page.get_by_text("3 messages match now. No message has been changed yet.").wait_for()
        await page.get_by_role("button", name="redrive: 3 messages").click()
        await page.get_by_text("The job has started.").wait_for()
        # The page follows the job by itself.
        await page.get_by_text("3 of 3 done, 0 skipped").wait_for()
        await eventually(lambda: sorted(shop.handled) == [0, 1, 2], timeout=60)
        await page.get_by_role("link", name="Audit").click()
        row = page.get_by_role("row").filter(has_text="redrive")
        assert "ola" in await row.inner_text()
        await page.get_by_role("link", name="Queues").click()
        await page.get_by_role("button", name="Pause invoices").click()
        await page.get_by_text("The queue is paused.").wait_for()
        await page.get_by_role("button", name="Resume").click()
        await page.get_by_text("The queue is resumed.").wait_for()
        assert not wrong, wrong


async def test_numbers_change_while_a_page_is_open(shop: Shop, browser: Browser) -> None:
    await shop.broker.publish({}, "reports")
    async with serving(shop.broker) as address, looking(browser, address) as (page, wrong):
        await page.goto("/ui/queues")
        await page.get_by_text("· live").wait_for()
        await shop.broker.publish({}, "reports")
        row = page.get_by_role("row").filter(has_text="reports")
        await row.get_by_role("cell", name="2", exact=True).first.wait_for()
        line = row.locator("polyline")
        await eventually(lambda: line.get_attribute("points"), timeout=60)
        # So does all else: a new queue in the list, and what another page has no numbers of.
        await shop.broker.publish({}, "brand new")
        await page.get_by_role("row").filter(has_text="brand new").wait_for()
        shop.broker.publish_on_schedule("nightly", "30 3 * * 1-5", "reports", {})
        await page.goto("/ui/schedules")
        await page.get_by_text("No process has declared a schedule.").wait_for()
        await shop.broker.start()
        await page.get_by_role("row").filter(has_text="nightly").wait_for()
        # A hidden tab asks for nothing.
        async with page.expect_event("requestfailed", lambda each: "/ui/live" in each.url):
            await page.evaluate(HIDE, True)
        async with page.expect_request("**/ui/live"):
            await page.evaluate(HIDE, False)
        assert not wrong, wrong


async def test_keys_lead_to_pages_rows_and_help(shop: Shop, browser: Browser) -> None:
    waiting = [await shop.broker.publish({}, "later", delay="1h") for _ in range(2)]
    newest, older = reversed(waiting)
    async with serving(shop.broker) as address, looking(browser, address) as (page, wrong):
        await page.goto("/")
        await page.keyboard.press("g")
        await page.keyboard.press("m")
        await page.wait_for_url("**/ui/messages")  # loaded, with its scripts
        chosen = "document.activeElement.textContent"
        for key, text in [("j", newest), ("j", older), ("j", older), ("k", newest)]:
            await page.keyboard.press(key)
            assert await page.evaluate(chosen) == str(text)
        await page.keyboard.press("/")
        assert await page.evaluate("document.activeElement.id") == "s-queue"
        # In a field keys are text.
        await page.keyboard.type("gj?/")
        assert await page.get_by_label("Queue", exact=True).input_value() == "gj?/"
        assert not await page.locator("dialog").is_visible()
        await page.get_by_role("heading", name="Messages", exact=True).click()
        for key in ("Control+j", "Alt+j", "Meta+j"):
            await page.keyboard.press(key)
            assert await page.evaluate("document.activeElement.tagName") != "A"
        await page.keyboard.press("?")
        await page.get_by_role("dialog").get_by_text("the next row of a table").wait_for()
        await page.keyboard.press("j")
        await page.keyboard.press("Escape")
        await page.get_by_role("dialog").wait_for(state="hidden")
        await page.keyboard.press("k")
        assert await page.evaluate(chosen) == str(older)
        await page.keyboard.press("Enter")
        await page.get_by_role("heading", name=f"Message {older}").wait_for()
        assert not wrong, wrong


class Tour:
    """Opens view after view, and refuses what cannot be read by all."""

    def __init__(self, page: Page) -> None:
        self.page = page
        self.seen: set[str] = set()

    async def open(self, path: str, name: str | None = None) -> None:
        """Go there; `name` is that of its picture."""
        await self.page.goto(path)
        await self.look(name or path, pictured=name is not None)

    async def look(self, name: str, *, pictured: bool = True) -> None:
        """Check the page that is open, and make its picture."""
        page = self.page
        self.seen.add(urlsplit(page.url).path)
        await page.wait_for_load_state()  # A page that a click has opened may lack its style yet.
        await self.contrasts(name)
        assert not await page.evaluate(UNLABELLED), name
        assert await page.locator("main h1").count() == 1, name
        if pictured:
            await picture(page, name)
        await page.set_viewport_size(PHONE)
        assert await page.evaluate(WIDER) == 0, name
        if name == "overview":
            await picture(page, "phone")
        await page.set_viewport_size(WIDE)

    async def contrasts(self, name: str) -> None:
        """Check them in both schemes, which differ in nothing else; the page is light then."""
        for scheme in ("dark", "light"):
            await self.page.emulate_media(color_scheme=scheme)
            assert not await self.page.evaluate(CONTRASTS), (name, scheme)
            if (name, scheme) == ("queue", "dark"):
                await picture(self.page, "dark")


async def test_every_page_can_be_read_by_all(shop: Shop, browser: Browser) -> None:
    failed = await shop.open()
    async with (
        serving(shop.broker) as address,
        shop.broker.lock("month-end report", lease="10m"),
        looking(browser, address, "ann", hurried=False) as (page, wrong),
    ):
        await shop.pull(address)
        tour = Tour(page)
        for name, path in VIEWS.items():
            await tour.open(path, name)
        await tour.open(f"/ui/messages/{failed}", "message")
        for path in OTHERS:
            await tour.open(path)
        await tour.open("/ui/dead-letters", "dead-letters")
        shop.mended = True
        await page.get_by_role("button", name="Dry run of a redrive", exact=True).click()
        await page.get_by_text("3 messages match now.").wait_for()
        await tour.look("plan")
        await page.get_by_role("button", name="redrive: 3 messages").click()
        await page.get_by_text("3 of 3 done, 0 skipped").wait_for()
        await tour.look("job")
        await tour.open("/ui/jobs", "jobs")
        await tour.open("/ui/audit", "audit")
        await page.keyboard.press("?")
        await page.get_by_role("dialog").get_by_text("the next row of a table").wait_for()
        await tour.contrasts("help")
        for each in routes.PAGES:
            path = re.compile(re.sub(r"{\w+}", "[^/]+", each))
            assert any(path.fullmatch(one) for one in tour.seen), f"{each} was not looked at"
        # The first key goes to the link that skips the menu, and it is seen.
        await page.goto("/")
        await page.keyboard.press("Tab")
        assert await page.evaluate("document.activeElement.className") == "skip"
        outline = "getComputedStyle(document.activeElement).outlineStyle"
        assert await page.evaluate(outline) == "solid"
        missing = [text for text in wrong if "404" not in text]
        assert not missing, missing


async def test_without_javascript_pages_read_and_act(shop: Shop, browser: Browser) -> None:
    number = await shop.broker.publish({"id": 1}, "later", delay="1h")
    async with (
        serving(shop.broker) as address,
        looking(browser, address, java_script_enabled=False) as (page, wrong),
    ):
        await page.goto("/")
        await page.get_by_role("link", name="Messages").click()
        await page.get_by_label("Queue", exact=True).fill("later")
        await page.get_by_role("button", name="Search").click()
        assert "queue=later" in page.url
        await page.get_by_role("link", name=str(number), exact=True).click()
        await page.get_by_label("To queue").fill("soon")
        await page.get_by_role("button", name="Move").click()
        await page.get_by_text("Done.").wait_for()
        detail = await shop.broker.admin.message(number)
        assert detail is not None
        assert detail.message.queue == "soon"
        assert not wrong, wrong

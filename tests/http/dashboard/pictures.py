"""Pictures of pages for the documentation: small, and the same each time as far as can be."""

import base64
import os
from pathlib import Path

from playwright.async_api import Page

PICTURES = os.environ.get("SQLBROKER_SCREENSHOTS")
"""The folder for pictures; without it none are made."""
LARGEST = 70_000
"""Bytes of one; 21 of them stay below 1.5 MB."""
QUALITY = 70
HIDE = """(value) => {
  Object.defineProperty(document, "hidden", { value, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
"""What a browser does when a tab is hidden or shown."""
STILL = """() => {
  const two = (number) => String(number).padStart(2, "0");
  for (const each of document.querySelectorAll("time")) {
    const [, hours, seconds] = each.dateTime.match(/T(\\d\\d:\\d\\d):(\\d\\d(?:\\.\\d+)?)/);
    const ahead = (new Date(each.dateTime) - Date.now()) / 1000;
    const day = "2026-01-31";
    const later = two(8 + Math.round(ahead / 3600));
    // A whole minute is a schedule's. A lease ends soon, and what is delayed is so by hours.
    if (seconds === "00") each.textContent = `2026-02-02 ${hours}:00 UTC`;
    else if (ahead > 600) each.textContent = `${day} ${later}:15:07 UTC`;
    else each.textContent = `${day} 08:15:${ahead > 5 ? 37 : "07"} UTC`;
  }
  const names = [];
  const worker = (_, tail) => {
    if (!tail) return "shop-1:4711";
    if (!names.includes(tail)) names.push(tail);
    return `shop-1:4711:8d51c09e4ab7f2${two(names.indexOf(tail) + 1)}`;
  };
  const changes = [
    [/\\b[A-Za-z][\\w.-]*:\\d{2,}(:[0-9a-f]{16})?\\b/g, worker],
    [/\\d{4}-\\d\\d-\\d\\d \\d\\d:\\d\\d:\\d\\d UTC \\(\\d+ s/g, "2026-01-31 08:15:07 UTC (4 s"],
    [/\\b\\d{8}-\\d{6}-\\d{6}-[0-9a-f]{4}\\b/g, "20260131-081511-520000-2ea3"],
    [/^\\d\\d-\\d\\d \\d\\d:\\d\\d:\\d\\d$/g, "01-31 08:15:07"],
    [/[+-]\\d\\.\\d{3} s from (.*) \\d\\.\\d{3} s/g, "+0.000 s from $1 0.001 s"],
    [/\\/tmp\\/\\S+\\//g, "/srv/shop/"],
  ];
  const texts = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const text = texts.currentNode;
    if (text.parentElement.closest("time, script")) continue;
    for (const [from, to] of changes) {
      const found = text.data.replace(from, to);
      if (found !== text.data) text.data = found;
    }
  }
  for (const each of document.querySelectorAll("[data-cell], [data-total]")) {
    const name = each.dataset.cell || each.dataset.total;
    const ready = each.closest("[data-queue]")?.querySelector("[data-cell=ready]").textContent;
    // Messages that came a while ago, and wait.
    const line = ready === "0" ? "0,23 120,23" : "0,23 60,23 64,1 120,1";
    if (name === "points") each.setAttribute("points", line);
    if (name === "oldest" || (name === "age" && ready !== "0")) each.textContent = "2 s";
  }
  document.getElementById("live").textContent = "· live";
}"""
"""Puts what differs from day to day and from machine to machine to one value, on the page alone."""


ALIKE = """async (both) => {
  const [a, b] = await Promise.all(both.map(async (data) => {
    const image = new Image();
    image.src = `data:image/webp;base64,${data}`;
    await image.decode();
    const canvas = new OffscreenCanvas(image.width, image.height).getContext("2d");
    canvas.drawImage(image, 0, 0);
    return canvas.getImageData(0, 0, image.width, image.height).data;
  }));
  return a.length === b.length && a.every((value, n) => Math.abs(value - b[n]) < 48);
}"""
"""Whether no difference is seen: edges are smoothed a little differently each time."""


async def picture(page: Page, name: str) -> None:
    """Write the picture of what is seen of the page, if pictures are wanted."""
    if PICTURES is None:
        return
    await page.evaluate(HIDE, True)
    await page.evaluate(STILL)
    # Playwright itself writes no WebP.
    browser = await page.context.new_cdp_session(page)
    bottom = await page.evaluate("document.querySelector('main').getBoundingClientRect().bottom")
    size = page.viewport_size
    assert size is not None
    height = min(bottom, size["height"])
    clip = {"x": 0, "y": 0, "width": size["width"], "height": height, "scale": 1}
    options = {"format": "webp", "quality": QUALITY, "clip": clip}
    found = await browser.send("Page.captureScreenshot", options)
    await browser.detach()
    await page.evaluate(HIDE, False)
    data = base64.b64decode(found["data"])
    assert len(data) <= LARGEST, (name, len(data))
    path = Path(PICTURES, f"dashboard-{name}.webp")
    if not path.exists() or not await _alike(page, path.read_bytes(), data):
        path.write_bytes(data)


async def _alike(page: Page, before: bytes, now: bytes) -> bool:
    both = [base64.b64encode(each).decode() for each in (before, now)]
    # Of its own: the dashboard's pages may show no picture of another address.
    blank = await page.context.new_page()
    found: bool = await blank.evaluate(ALIKE, both)
    await blank.close()
    return found

// Numbers change while a page is open. Every page is complete without this file.
"use strict";

const REFRESH = 5000; // Milliseconds between two readings of a page whose parts change.
const address = document.body.dataset.live;
const sign = document.getElementById("live");
let source = null;
let failures = 0;
let refreshed = Date.now();
let stale = false; // True if the list of queues, or the status of a queue, has changed.

function say(text) {
  if (sign && sign.textContent !== text) sign.textContent = text;
}

function fill(element, row) {
  for (const cell of element.querySelectorAll("[data-cell]")) {
    const value = row[cell.dataset.cell];
    if (value === undefined) continue;
    if (cell.tagName === "polyline") cell.setAttribute("points", value);
    else if (cell.textContent !== value) cell.textContent = value;
  }
}

function show(update) {
  say(update.problem ? "· not live: " + update.problem : "· live");
  for (const element of document.querySelectorAll("[data-queue]")) {
    const row = update.rows[decodeURIComponent(element.dataset.queue)];
    if (row === undefined) continue;
    fill(element, row);
    if (element.dataset.status !== undefined && element.dataset.status !== row.status) stale = true;
  }
  for (const cell of document.querySelectorAll("[data-total]")) {
    const value = update.totals[cell.dataset.total];
    if (value !== undefined) cell.textContent = value;
  }
  const table = document.querySelector("[data-queues]");
  if (table && Number(table.dataset.queues) !== update.queues) stale = true;
  refresh();
}

// Request the page again, and replace the parts that are not live numbers of queues.
async function refresh() {
  const parts = document.querySelectorAll(stale ? "[data-part]" : '[data-part=""]');
  if (!parts.length || Date.now() - refreshed < REFRESH) return;
  refreshed = Date.now();
  const url = new URL(location.href);
  url.searchParams.delete("note");
  let page;
  try {
    const answer = await fetch(url, { headers: { Accept: "text/html", "X-Refreshed": "1" } });
    if (!answer.ok) return;
    stale = false;
    page = new DOMParser().parseFromString(await answer.text(), "text/html");
  } catch {
    return;
  }
  for (const part of parts) replace(part, page.getElementById(part.id));
}

// Replace a part, unless the reader has selected text in the page, filled in a field of the part,
// or focused an element that the new part does not have.
function replace(part, fresh) {
  if (!fresh || fresh.innerHTML === part.innerHTML || !document.getSelection().isCollapsed) return;
  const filled = [...part.querySelectorAll("input")].some(
    (each) => each.value !== each.defaultValue || each.checked !== each.defaultChecked,
  );
  if (filled) return;
  const focused = part.contains(document.activeElement) ? document.activeElement : null;
  const again = focused && [...fresh.querySelectorAll("a[href]")].find((each) => each.href === focused.href);
  if (focused && !again) return;
  const scrolled = [...part.querySelectorAll(".scroll")].map((each) => each.scrollLeft);
  part.replaceWith(fresh);
  fresh.querySelectorAll(".scroll").forEach((each, n) => (each.scrollLeft = scrolled[n] || 0));
  if (again) again.focus({ preventScroll: true });
}

function begin() {
  if (!address || source || document.hidden) return;
  source = new EventSource(address);
  source.onmessage = (event) => {
    failures = 0;
    show(JSON.parse(event.data));
  };
  // A stream ends after some seconds, and the browser opens another one.
  source.onerror = () => {
    failures += 1;
    if (failures > 1 || source.readyState === EventSource.CLOSED) say("· not live");
  };
}

function end() {
  if (source) source.close();
  source = null;
}

document.addEventListener("visibilitychange", () => (document.hidden ? end() : begin()));
begin();

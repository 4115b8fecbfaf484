// Keys: g and a letter for a page, j and k in tables, / for the search, ? for help.
"use strict";

const SOON = 1500; // Milliseconds in which the letter must follow g.
const help = document.getElementById("keys");
let asked = 0; // When g was pressed; 0 after another key.

function rows() {
  return [...document.querySelectorAll("main tbody tr")];
}

// Focus the link of the next or previous row, so that Enter opens it; without a link, the row itself.
function choose(step) {
  const all = rows();
  if (!all.length) return;
  const at = all.findIndex((row) => row.contains(document.activeElement));
  const next = at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step;
  const row = all[Math.min(Math.max(next, 0), all.length - 1)];
  const link = row.querySelector("a[href]");
  if (!link) row.tabIndex = -1;
  (link || row).focus();
  row.scrollIntoView({ block: "nearest" });
}

function search() {
  const first = document.querySelector("form[role=search] input");
  if (first) first.focus();
  return Boolean(first);
}

function pressed(key) {
  const follows = Date.now() - asked < SOON;
  asked = 0;
  if (follows) {
    const link = document.querySelector(`nav a[data-key="${CSS.escape(key)}"]`);
    if (link) link.click();
    return Boolean(link);
  }
  if (key === "g") asked = Date.now();
  else if (key === "j") choose(1);
  else if (key === "k") choose(-1);
  else if (key === "?") help.showModal();
  else if (key === "/") return search();
  else return false;
  return true;
}

document.addEventListener("keydown", (event) => {
  const field = event.target.closest("input, select, textarea, [contenteditable]");
  const changed = event.ctrlKey || event.metaKey || event.altKey || event.isComposing;
  if (field || changed || help.open) return;
  if (event.key !== "Shift" && pressed(event.key)) event.preventDefault();
});
document.getElementById("show-keys").hidden = false;
document.getElementById("show-keys").addEventListener("click", () => help.showModal());

"""Pictures of the command line: each view, run in the shop of `docs.pictures.shop`.

What a command prints is drawn by Rich. Its own template loads fonts from another host; ours takes
the reader's monospaced one.
"""

import re
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text
from typer.testing import CliRunner

from docs.pictures import shop
from faststream_sqlbroker.cli.app import AppGroup, app, help_of

WIDTH = 110
"""Characters of a line."""
VIEWS: dict[str, Sequence[str]] = {
    "queues": ("queues",),
    "check": ("check", "--max-age", "10m"),
    "top": ("top", "--count", "1"),
    "messages": ("messages", "--queue", "orders", "--limit", "6"),
    "show": ("show", "4701"),
    "explain": ("explain", "4740"),
    "tail": ("tail", "--since", "20m", "--count", "1"),
    "dead": ("dead", "--since", "3h"),
    "redrive": ("redrive", "--fingerprint", "9f86d081884c7d65", "--dry-run"),
    "replay": ("replay", "bug 7", "--queue", "email", "--dry-run"),
    "jobs": ("jobs",),
    "audit": ("audit",),
    "subscribers": ("subscribers",),
    "policies": ("policies",),
    "unknown": ("unknown",),
    "schedules": ("schedules",),
    "locks": ("locks",),
    "prune": ("prune", "--failed", "1h", "--dry-run"),
    "move": ("move", "4741", "4742", "--to", "orders"),
    "cancel": ("cancel", "--queue", "ordres", "--dry-run"),
    "retry": ("retry", "4741"),
    "postpone": ("postpone", "4741", "1h"),
    "edit": ("edit", "4741", "--priority", "5"),
    "pause": ("pause", "orders"),
    "resume": ("resume", "orders"),
    "drain": ("drain", "shop-7d9f:17:5f1c90ab77d2e403"),
    "undrain": ("undrain", "shop-7d9f:17:5f1c90ab77d2e403"),
    "release": ("release", "shop-7d9f:17:5f1c90ab77d2e403"),
    "release-lock": ("release-lock", "stock-count"),
    "run-schedule": ("run-schedule", "nightly report"),
    "pause-schedule": ("pause-schedule", "nightly report"),
    "resume-schedule": ("resume-schedule", "nightly report"),
    "forget-schedule": ("forget-schedule", "nightly report"),
    "forget-unknown": ("forget-unknown", "4411"),
    "verify": ("verify",),
    "migrate": ("migrate",),
    "sql": ("sql",),
    "publish": ("publish", "orders", '{"order": 17}'),
}
"""The command of each picture, without the program's name."""
BROKER: Any = None
"""Of the shop, while pictures are taken."""
TEMPLATE = re.sub(
    r"@font-face \{\{.*?\}\}\s*|<!-- Generated.*?-->\s*", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL
).replace("Fira Code, monospace", "ui-monospace, monospace")


def svgs() -> dict[str, str]:
    """Each view as SVG."""
    with _open():
        return {name: _svg(name, words, _printed(words)) for name, words in VIEWS.items()}


def page() -> str:
    """The pictures, each below the command and what the command says of itself."""
    helps = {name: help_of(name, module) for name, module in AppGroup.table.items()}
    helps["jobs"] = "List the newest bulk actions."
    parts = []
    for name, words in VIEWS.items():
        picture = f"![What sqlbroker {' '.join(words)} prints.](commands/{name}.svg)"
        parts.append(f"### {words[0]}\n\n{helps[words[0]]}\n\n{picture}\n")
    return "\n".join(parts)


@contextmanager
def _open() -> Iterator[None]:
    global BROKER  # noqa: PLW0603 - commands find a broker by a path of imports
    with tempfile.TemporaryDirectory() as folder:
        BROKER = shop.open_shop(Path(folder))
        try:
            yield
        finally:
            BROKER = None


def _printed(words: Sequence[str]) -> str:
    # The build may ask Rich for colors, as if for a terminal: it would cut the tables then.
    asked = dict.fromkeys(("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"))
    runner = CliRunner(env={"COLUMNS": str(WIDTH), "TERM": "dumb", "NO_COLOR": "1", **asked})
    found = runner.invoke(app, ["--app", "docs.pictures.terminal:BROKER", *words], input="n\n")
    # A refused question and a problem that was found are 1, too.
    if found.exit_code > 1 or (found.exception and not isinstance(found.exception, SystemExit)):
        raise RuntimeError(f"sqlbroker {' '.join(words)}: {found.output}") from found.exception
    return found.output.rstrip("\n")


def _svg(name: str, words: Sequence[str], printed: str) -> str:
    console = Console(
        record=True, width=WIDTH, file=StringIO(), force_terminal=True, color_system="truecolor"
    )
    shown = shlex.join(words)
    console.print(Text(f"$ sqlbroker {shown}", style="bold green"))
    for line in printed.splitlines():
        console.print(Text(line.rstrip()), soft_wrap=False)
    made = console.export_svg(title=f"sqlbroker {words[0]}", code_format=TEMPLATE, unique_id=name)
    return "\n".join(line.rstrip() for line in made.splitlines()) + "\n"

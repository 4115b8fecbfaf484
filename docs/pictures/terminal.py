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
from faststream_sqlbroker.cli.app import COMMANDS, SHORT_COMMANDS, CommandRef, app, find_help

WIDTH = 110
"""Characters of a line."""
VIEWS: dict[str, Sequence[str]] = {
    "queues": ("queues",),
    "check": ("check", "--max-age", "10m"),
    "top": ("queues", "top", "--count", "1"),
    "messages": ("messages", "--queue", "orders", "--limit", "6"),
    "show": ("messages", "show", "4701"),
    "explain": ("messages", "explain", "4740"),
    "tail": ("messages", "tail", "--since", "20m", "--count", "1"),
    "dead": ("dead-letters", "--since", "3h"),
    "redrive": ("dead-letters", "redrive", "--fingerprint", "9f86d081884c7d65", "--dry-run"),
    "replay": ("messages", "replay", "bug 7", "--queue", "email", "--dry-run"),
    "jobs": ("jobs",),
    "audit": ("audit",),
    "subscribers": ("subscribers",),
    "policies": ("queues", "policies"),
    "unknown": ("messages", "unknown"),
    "schedules": ("schedules",),
    "locks": ("locks",),
    "prune": ("tables", "prune", "--failed", "1h", "--dry-run"),
    "move": ("messages", "move", "4741", "4742", "--to", "orders"),
    "cancel": ("messages", "cancel", "--queue", "ordres", "--dry-run"),
    "retry": ("messages", "retry", "4741"),
    "postpone": ("messages", "postpone", "4741", "1h"),
    "edit": ("messages", "edit", "4741", "--priority", "5"),
    "pause": ("queues", "pause", "orders"),
    "resume": ("queues", "resume", "orders"),
    "drain": ("subscribers", "drain", "shop-7d9f:17:5f1c90ab77d2e403"),
    "undrain": ("subscribers", "undrain", "shop-7d9f:17:5f1c90ab77d2e403"),
    "release": ("subscribers", "release", "shop-7d9f:17:5f1c90ab77d2e403", "--force"),
    "release-lock": ("locks", "release", "stock-count"),
    "run-schedule": ("schedules", "run", "nightly report"),
    "pause-schedule": ("schedules", "pause", "nightly report"),
    "resume-schedule": ("schedules", "resume", "nightly report"),
    "forget-schedule": ("schedules", "forget", "nightly report"),
    "forget-unknown": ("messages", "forget-unknown", "4411"),
    "verify": ("tables", "verify"),
    "migrate": ("tables", "migrate"),
    "sql": ("tables", "sql"),
    "publish": ("messages", "publish", "orders", '{"order": 17}'),
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
    """Every command with what it says of itself, and its picture, if it has one."""
    parts = []
    for name, place in COMMANDS.items():
        parts.append(f"## {name}\n\n{find_help(place)}\n")
        if isinstance(place, CommandRef):
            parts += _pictures(place)
            continue
        for word, command in place.commands.items():
            parts += [f"### {name} {word}\n\n{find_help(command)}{_short(command)}\n"]
            parts += _pictures(command)
    return "\n".join(parts)


def place_of(words: Sequence[str]) -> CommandRef:
    """The command that these words run."""
    place = COMMANDS[words[0]]
    if isinstance(place, CommandRef):
        return place
    return place.commands[words[1] if words[1:] and words[1] in place.commands else "list"]


def _short(place: CommandRef) -> str:
    names = [name for name, short in SHORT_COMMANDS.items() if short == place]
    return "".join(f" Also: `sqlbroker {name}`." for name in names)


def _pictures(place: CommandRef) -> list[str]:
    return [
        f"![What sqlbroker {' '.join(words)} prints.](commands/{name}.svg)\n"
        for name, words in VIEWS.items()
        if place_of(words) == place
    ]


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

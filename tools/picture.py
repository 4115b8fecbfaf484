"""The picture of a message's states and the table of its arrows in docs/explanation, from the code.

The site draws no Mermaid: the theme would fetch a script from another host for it.

python -m tools.picture [--check]
"""

import sys
from pathlib import Path

import schemdraw
from schemdraw import elements, flow

from faststream_sqlbroker.core.states import TRANSITIONS
from tools.files import update_block

FOLDER = Path(__file__).parent.parent / "docs" / "explanation"
PICTURE = FOLDER / "states.svg"
PAGE = FOLDER / "states.md"
PLACES = {
    "PENDING": (0, 0),
    "RETRYABLE": (0, -5),
    "PROCESSING": (7, -2.5),
    "COMPLETED": (14, 1),
    "FAILED": (14, -2.5),
    "DISCARDED": (7, -7.5),
}
ARROWS = {
    ("PENDING", "PROCESSING"): ("E", "N", 0.25),
    ("RETRYABLE", "PROCESSING"): ("E", "S", -0.15),
    ("PROCESSING", "COMPLETED"): ("NE", "W", 0.15),
    ("PROCESSING", "FAILED"): ("E", "W", 0.08),
    ("PROCESSING", "PENDING"): ("NW", "SE", 0.1),
    ("PROCESSING", "RETRYABLE"): ("SW", "NE", -0.1),
    ("PROCESSING", "DISCARDED"): ("SE", "NE", 0.3),
    ("PENDING", "DISCARDED"): ("W", "W", -0.9),
    ("RETRYABLE", "DISCARDED"): ("S", "NW", -0.2),
}
"""Where an arrow leaves its state and where it enters the other, and how far it bends."""


def pairs() -> dict[tuple[str | None, str], list[str]]:
    """What leads from one state to another, in the order of the code."""
    found: dict[tuple[str | None, str], list[str]] = {}
    for source, event, target in TRANSITIONS:
        found.setdefault((source and source.name, target.name), []).append(event)
    return found


def picture() -> str:
    """SVG: the states, and an arrow with a number for each row of the table."""
    schemdraw.use("svg")
    schemdraw.svgconfig.text = "text"
    with schemdraw.Drawing(show=False) as drawing:
        drawing.config(fontsize=13, font="sans-serif", lw=1.5, color="#5c6bc0")
        boxes = {
            name: drawing.add(flow.Box(w=3.6, h=1.3).anchor("center").at(place).label(name))
            for name, place in PLACES.items()
        }
        for number, (source, target) in enumerate(pairs(), 1):
            if source is None:
                end = boxes[target].N
                start = (end[0], end[1] + 1.6)
                arrow = elements.Arc2(k=0.12, arrow="->").at(start).to(end)
                drawing.add(elements.Dot(radius=0.15).at(start))
            else:
                leaves, enters, bend = ARROWS[source, target]
                start = getattr(boxes[source], leaves)
                end = getattr(boxes[target], enters)
                arrow = elements.Arc2(k=bend, arrow="->").at(start).to(end)
            drawing.add(arrow.label(str(number)))
    return str(drawing.get_imagedata("svg").decode()) + "\n"


def table() -> str:
    """Markdown: a row for each arrow."""
    rows = [
        f"| {number} | {source or ''} | {target} | {'; '.join(events)} |"
        for number, ((source, target), events) in enumerate(pairs().items(), 1)
    ]
    return "\n".join(["| arrow | from | to | by |", "|---|---|---|---|", *rows]) + "\n"


def write_picture(*, check: bool) -> int:
    """Bring the picture up to date, or say that it is not; the exit code."""
    wanted = picture()
    if PICTURE.exists() and PICTURE.read_text() == wanted:
        return 0
    if check:
        print(f"{PICTURE.name} differs from the code: run `just generate`")
        return 1
    PICTURE.write_text(wanted)
    print(f"wrote {PICTURE.name}")
    return 0


if __name__ == "__main__":
    check = "--check" in sys.argv
    sys.exit(write_picture(check=check) | update_block(PAGE, "arrows", table(), check=check))

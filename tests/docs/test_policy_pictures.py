"""The pictures of the policies: what the code draws of real runs, legible, and told in words."""

import asyncio
import re
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest

from docs.pictures import __main__ as pictures
from docs.pictures.drawing import FONT, REASONS, SCHEMES, description, svg
from docs.pictures.streams import STREAMS, Seen, Stream, run
from faststream_sqlbroker.core.policies import Policy
from tools.files import with_block, write_or_compare

SVG = "{http://www.w3.org/2000/svg}"
LEAST_CONTRAST = 4.5
"""WCAG 2, level AA, for text."""


@pytest.fixture(scope="module")
def seen() -> dict[str, Seen]:
    """What became of each stream, by its name."""

    async def all_of_them() -> dict[str, Seen]:
        return {stream.name: await run(stream) for stream in STREAMS}

    return asyncio.run(all_of_them())


def test_the_pictures_and_the_page_are_what_the_code_draws(seen: dict[str, Seen]) -> None:
    """`just generate` writes them; the diff is the review."""
    files = {pictures.FOLDER / f"{s.name}.svg": svg(s, seen[s.name]) for s in STREAMS}
    assert write_or_compare(files, pictures.FOLDER, check=True, suffix="svg") == []
    page = pictures.PAGE.read_text()
    for stream in STREAMS:
        told = f"![{description(stream, seen[stream.name])}](policies/{stream.name}.svg)\n"
        assert f"<!-- {stream.name} -->" in page
        assert with_block(page, stream.name, told) == page


def test_every_policy_has_a_picture() -> None:
    shown = {type(policy) for stream in STREAMS for policy in stream.policies}
    assert shown == set(Policy.__args__)


def test_no_message_of_a_stream_is_lost(seen: dict[str, Seen]) -> None:
    """Each starts, or ends for a reason that is named; unless its window opens later."""
    for stream in STREAMS:
        found = seen[stream.name]
        started = {start.number for start in found.starts}
        ended = {end.number for end in found.ends}
        assert not started & ended
        left = set(range(1, len(stream.arrivals) + 1)) - started - ended
        late = {n for n in left if stream.arrivals[n - 1].at > stream.length - 4}
        assert left == late, stream.name
        assert {end.reason for end in found.ends} <= REASONS.keys()


@pytest.mark.parametrize("stream", STREAMS, ids=lambda stream: stream.name)
def test_a_picture_is_whole_and_nothing_is_covered(stream: Stream, seen: dict[str, Seen]) -> None:
    root = ET.fromstring(svg(stream, seen[stream.name]))
    assert root.get("aria-label") == description(stream, seen[stream.name])
    _, _, width, height = (float(part) for part in root.get("viewBox", "").split())
    texts = [(float(t.get("x", 0)), float(t.get("y", 0))) for t in root.iter(f"{SVG}text")]
    assert all(0 <= x <= width and 0 < y < height for x, y in texts)
    numbers = [t for t in root.iter(f"{SVG}text") if (t.text or "").isdigit()]
    places = sorted((float(t.get("y", 0)), float(t.get("x", 0))) for t in numbers)
    for (y, x), (next_y, next_x) in pairwise(places):
        assert y != next_y or next_x - x >= 20, f"marks cover each other at {x}, {y}"
    assert "http" not in re.sub(r'xmlns="[^"]*"', "", svg(stream, seen[stream.name]))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_colours_are_legible(scheme: str) -> None:
    colours = SCHEMES[scheme]
    pairs = [
        *((name, ground) for name in ("ink", "quiet") for ground in ("ground", "shade")),
        *(("on", mark) for mark in ("a", "b")),
        *((mark, "ground") for mark in ("a", "b")),
    ]
    for one, other in pairs:
        assert contrast(colours[one], colours[other]) >= LEAST_CONTRAST, (one, other)
    assert "sans-serif" in FONT


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG 2."""
    bright, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def luminance(colour: str) -> float:
    """The relative luminance of "#rrggbb"."""
    parts = [int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue

"""Time zones by name, and the error on a machine without zones."""

import sys
import zoneinfo
from collections.abc import Iterator
from datetime import time
from zoneinfo import ZoneInfo

import pytest

from faststream_sqlbroker import SetupError, Window
from faststream_sqlbroker.core.policies.stored import dump_policies, read_policies
from faststream_sqlbroker.core.times import find_zone
from faststream_sqlbroker.flow.tasks.cron import Cron


@pytest.fixture
def no_zones(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a slim image without the package tzdata."""
    # Also its folders, such as tzdata.zoneinfo.Europe, that other tests have imported.
    loaded = [name for name in sys.modules if name.startswith("tzdata.")]
    for name in {"tzdata", "tzdata.zoneinfo", *loaded}:
        monkeypatch.setitem(sys.modules, name, None)
    zoneinfo.reset_tzpath([])
    ZoneInfo.clear_cache()
    yield
    zoneinfo.reset_tzpath()
    ZoneInfo.clear_cache()


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_a_machine_without_zones_says_what_to_install(no_zones: None, zone: str) -> None:
    with pytest.raises(
        SetupError,
        match=rf"Window's tz cannot be '{zone}'.* no time zone database.*pip install tzdata",
    ):
        Window("09:00", "17:00", tz=zone)
    with pytest.raises(SetupError, match=r"a schedule's tz cannot be .* pip install tzdata"):
        Cron("* * * * *", zone)


@pytest.mark.parametrize("zone", ["Europe/Berlinn", "", "../etc/passwd", 5, None, b"UTC"])
def test_an_unknown_zone_is_refused(zone: object) -> None:
    with pytest.raises(SetupError, match=r"x tz cannot be .* use a name of the IANA database"):
        find_zone(zone, "x")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "window",
    [
        Window(time(9, 0, 30), time(17, 0, 15)),
        Window(time(22, 0, 0, 5), time(0, 0, 1), tz="Europe/Berlin", days=["mon"]),
        Window(time(0, 0, 30), "24:00"),
    ],
    ids=str,
)
def test_a_window_with_seconds_is_read_as_it_is_written(window: Window) -> None:
    """Other processes know a subscriber's window by its JSON, and explain by it."""
    assert read_policies(dump_policies([window])) == (window,)

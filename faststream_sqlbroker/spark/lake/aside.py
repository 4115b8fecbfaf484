"""Put back the windows that dead runs of an export have set aside, before their folders go."""

from collections.abc import Callable, Mapping

from faststream_sqlbroker.spark.lake.entries import Entry
from faststream_sqlbroker.spark.lake.folders import Folders
from faststream_sqlbroker.spark.lake.windows import parse_window

ASIDE = "_sqlbroker/replaced"
"""Has a folder for each run, with a folder for each window that the run replaces."""


def put_back(
    folders: Folders,
    entries: Mapping[str, Entry],
    size: str,
    holds: Callable[[str, Entry], bool],
    confirm: Callable[[], None],
) -> None:
    """Move set-aside windows back whose places do not hold the files that the state has recorded.

    Only what is found is removed, one by one: a run that was overtaken and does not know it yet may
    set a window aside in this moment. What is recorded nowhere stays aside.

    Args:
        folders: Of the lake.
        entries: What the state has recorded, by window.
        size: Of the windows: "day" or "hour".
        holds: Whether the rows of a folder have an entry's figures.
        confirm: Raises where another run has begun; called before anything is changed.
    """

    def recorded(folder: str, entry: Entry) -> bool:
        sizes = folders.sizes(folder)
        return (len(sizes), sum(sizes)) == (entry.files, entry.bytes) and holds(folder, entry)

    for run in folders.names(ASIDE):
        for name in folders.names(f"{ASIDE}/{run}"):
            if (entry := entries.get(name)) is None:
                continue
            aside = f"{ASIDE}/{run}/{name}"
            place = parse_window(name, size).folder
            if recorded(place, entry):
                confirm()
                folders.delete(aside)
            elif recorded(aside, entry):
                confirm()
                folders.delete(place)
                folders.move(aside, place)
        folders.delete_empty(f"{ASIDE}/{run}")
    folders.delete_empty(ASIDE)

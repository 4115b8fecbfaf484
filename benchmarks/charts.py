"""Charts of what is kept in benchmarks/results, one SVG file a command: bars, or lines where rows
or bytes vary."""

import math
import sys
from itertools import takewhile
from typing import Any

from benchmarks.compare import Spread
from benchmarks.harness import RESULTS, Result
from benchmarks.report import AXES, FIGURES, TITLES, Content, taken

COLUMNS = 2
WIDTH = 6.5
"""Inches of one chart."""

HEIGHT = 2.8
"""Inches of one chart."""

MISSING = (
    "The charts need matplotlib, the extra `bench`: pip install -c constraints.txt -e '.[bench]'"
)

Runs = dict[str, list[Result]]


def _pyplot() -> Any:
    """Matplotlib's, drawing to files that are the same for the same figures."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 - measuring does without
    except ModuleNotFoundError:
        sys.exit(MISSING)
    mpl.use("svg")
    mpl.rcParams.update({"svg.hashsalt": "faststream-sqlbroker", "font.size": 9, "axes.grid": True})
    from matplotlib import pyplot as plt  # noqa: PLC0415 - after its settings

    return plt


def render(contents: dict[str, Content]) -> dict[str, str]:
    """Draw what each command has measured; the files' names in benchmarks/results, by command."""
    plt = _pyplot()
    names = {}
    for which, content in contents.items():
        suites = content["suites"]
        columns = min(COLUMNS, len(suites))
        rows = math.ceil(len(suites) / columns)
        size = (columns * WIDTH, rows * HEIGHT)
        figure, axes = plt.subplots(
            rows, columns, figsize=size, squeeze=False, layout="constrained"
        )
        for axis in axes.flat[len(suites) :]:
            axis.remove()
        for axis, (suite, told) in zip(axes.flat, suites.items(), strict=False):
            (_bars if told["axis"] is None else _lines)(axis, content["results"][suite], told)
            axis.set_title(suite, loc="left")
        figure.suptitle(f"{TITLES[which]}: medians, and the spread of the rounds")
        names[which] = f"{which}.svg"
        figure.savefig(RESULTS / names[which], metadata={"Date": None})
        plt.close(figure)
    return names


def _alike(shows: list[str]) -> list[str]:
    """The figures that fit on one axis: the first ones, as long as their unit is the same."""
    return list(takewhile(lambda name: FIGURES[name].unit == FIGURES[shows[0]].unit, shows))


def _colours(variants: list[str]) -> list[str]:
    """Our bars stand out where a chart has others too."""
    ours = [variant.startswith("ours") for variant in variants]
    return ["C0" if one or not any(ours) else "0.6" for one in ours]


def _errors(spreads: list[Spread]) -> list[list[float]]:
    return [[s.median - s.low for s in spreads], [s.high - s.median for s in spreads]]


def _measured(runs: Runs, name: str) -> dict[str, Spread]:
    return {
        variant: found for variant, of in runs.items() if (found := taken(of, name)) is not None
    }


def _bars(axis: Any, runs: Runs, told: dict[str, Any]) -> None:
    """A group of bars for each variant, the first at the top."""
    names = _alike(told["shows"])
    places = {variant: n for n, variant in enumerate(runs)}
    thick = 0.8 / len(names)
    for n, name in enumerate(names):
        found = _measured(runs, name)
        spreads = list(found.values())
        at = [places[variant] + thick * (n - (len(names) - 1) / 2) for variant in found]
        style: dict[str, Any] = {
            "height": thick,
            "label": FIGURES[name].title,
            "zorder": 2,
            "capsize": 2,
        }
        if len(names) == 1:
            style["color"] = _colours(list(found))
        axis.barh(at, [s.median for s in spreads], xerr=_errors(spreads), **style)
    axis.set_yticks(list(places.values()), list(places))
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    _say(axis, names, axis.set_xlabel)


def _lines(axis: Any, runs: Runs, told: dict[str, Any]) -> None:
    """One line for each figure over what varies."""
    names = _alike(told["shows"])
    for name in names:
        found = _measured(runs, name)
        spreads = list(found.values())
        x = [runs[variant][0][told["axis"]] for variant in found]
        style = {"marker": "o", "capsize": 3, "label": FIGURES[name].title}
        axis.errorbar(x, [s.median for s in spreads], yerr=_errors(spreads), **style)
    axis.set_xscale("log")
    axis.set_ylim(bottom=0)
    axis.set_xlabel(AXES[told["axis"]])
    _say(axis, names, axis.set_ylabel)


def _say(axis: Any, names: list[str], label: Any) -> None:
    """The unit at the axis, and a legend if there are several figures."""
    label(FIGURES[names[0]].unit)
    if len(names) > 1:
        axis.legend(fontsize=7)

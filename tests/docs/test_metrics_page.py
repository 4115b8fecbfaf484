"""The dashboard and the alert rules name metrics, labels and values that are exported."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from faststream_sqlbroker.core.metrics import FLEET_GAUGES, METRICS, OUTCOMES, Kind
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.fleet.sampling import LOCK
from faststream_sqlbroker.prometheus import SqlBrokerPrometheusMiddleware
from faststream_sqlbroker.prometheus.metrics import get_exported_name

DOCS = Path(__file__).parent.parent.parent / "docs"
DASHBOARD = json.loads((DOCS / "monitoring" / "dashboard.json").read_text())
RULES = yaml.safe_load((DOCS / "monitoring" / "alerts.yml").read_text())
PAGE = (DOCS / "howto" / "metrics.md").read_text()

TARGET = {"instance", "job"}
"""Labels that Prometheus adds to what it scrapes."""
OPERATING = (DOCS / "howto" / "operating.md").read_text()
LEVELS = {
    kind: level
    for kinds, level in re.findall(
        r"^\| (`[^|]*) \| ((?:error|warning)[^|]*) \|", OPERATING, re.MULTILINE
    )
    for kind in re.findall("`([^`]+)`", kinds)
}
"""Of each kind of finding, as the table of them tells it."""
KINDS = set(LEVELS)
WANTED = {"paused", "waits for policy"}
"""Those that an operator or an application has asked for."""
MEASURED = {"late"}
"""Those that alerts have metrics of their own for."""
VALUES = {
    "kind": KINDS,
    "level": {"error", "warning"},
    "outcome": {*OUTCOMES, "lost", "unknown"},
    "stage": set(Inflight().count_stages()),
    "wait": {"claim", "slot", "rest"},
}
"""Of labels whose values are known."""
SELECTOR = re.compile(r"\b((?:sqlbroker|faststream)_\w+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'(\w+)(?:=~|!~|!=|=)"([^"]*)"')
GROUPING = re.compile(r"\b(?:by|on|without|ignoring) \(([^)]*)\)")


def series() -> dict[str, set[str]]:
    """The labels of each series that can be scraped, by its name."""
    found: dict[str, set[str]] = {}
    for metric in METRICS:
        name = get_exported_name(metric)
        labels = {*metric.labels, *TARGET}
        if metric.kind is Kind.HISTOGRAM:
            found |= {f"{name}_bucket": {*labels, "le"}, f"{name}_sum": labels}
            found[f"{name}_count"] = labels
        else:
            found[name] = labels
    registry = CollectorRegistry()
    SqlBrokerPrometheusMiddleware(registry=registry)
    for collector in list(registry._collector_to_names):
        labels = {*collector._labelnames, *TARGET}  # type: ignore[attr-defined]
        for name in registry._collector_to_names[collector]:
            found[name] = {*labels, "le"} if name.endswith("_bucket") else labels
    return found


def alerts() -> list[dict[str, Any]]:
    return [rule for group in RULES["groups"] for rule in group["rules"]]


def panels() -> Iterator[dict[str, Any]]:
    for panel in DASHBOARD["panels"]:
        if panel["type"] != "row":
            yield panel


def expressions() -> list[tuple[str, str]]:
    """Each with where it stands."""
    found = [(rule["alert"], rule["expr"]) for rule in alerts()]
    for panel in panels():
        found += [(panel["title"], target["expr"]) for target in panel["targets"]]
    return found


@pytest.mark.parametrize(
    "expression", [e for _, e in expressions()], ids=[name for name, _ in expressions()]
)
def test_an_expression_asks_for_what_is_exported(expression: str) -> None:
    known = series()
    asked = SELECTOR.findall(expression)
    assert asked
    labels: set[str] = set()
    for name, matchers in asked:
        assert name in known, f"{name} is not exported"
        labels |= known[name]
        for label, value in MATCHER.findall(matchers):
            assert label in known[name], f"{name} has no label {label}"
            if not value.startswith("$"):
                assert set(value.split("|")) <= VALUES.get(label, set(value.split("|")))
            if label == "le":
                [metric] = [m for m in METRICS if name == f"{get_exported_name(m)}_bucket"]
                assert float(value) in metric.buckets
    for group in GROUPING.findall(expression):
        assert {each.strip() for each in group.split(",")} <= labels
    assert expression.count("(") == expression.count(")")


def test_texts_use_labels_that_their_expressions_keep() -> None:
    named = [
        (rule["expr"], re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        for rule in alerts()
    ]
    for panel in panels():
        named += [
            (target["expr"], re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            for target in panel["targets"]
        ]
    assert len(named) > 20
    for expression, labels in named:
        groups = GROUPING.findall(expression)
        kept = {each.strip() for group in groups for each in group.split(",")} or TARGET
        assert set(labels) <= kept, expression


def test_what_one_process_tells_is_never_summed() -> None:
    """Two may tell it for a moment."""
    names = "|".join(get_exported_name(metric) for metric in FLEET_GAUGES)
    for where, expression in expressions():
        for found in re.finditer(rf"(.{{0,20}}){names}", expression):
            assert "sum" not in (found[1] or ""), where


def test_the_dashboard_shows_every_metric() -> None:
    shown = " ".join(expression for _, expression in expressions())
    assert [m.name for m in METRICS if get_exported_name(m) not in shown] == []
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in panels()]
    assert len(set(places)) == len(places)
    assert all(p["gridPos"]["x"] + p["gridPos"]["w"] <= 24 for p in panels())


def test_the_page_says_what_to_do_about_every_alert() -> None:
    said = set(re.findall(r"`(SqlBroker\w+)`", PAGE))
    assert {rule["alert"] for rule in alerts()} <= said
    for rule in alerts():
        assert rule["labels"]["severity"] in {"warning", "critical"}


def test_each_kind_of_finding_has_an_alert() -> None:
    named = {
        kind
        for _, expression in expressions()
        for selector in re.findall(r"sqlbroker_findings\{([^}]*)\}", expression)
        for how, kinds in re.findall(r'kind(=~|=|!~)"([^"]*)"', selector)
        for kind in (KINDS - set(kinds.split("|")) if how == "!~" else kinds.split("|"))
        if how != "!~" or kind not in WANTED
    }
    assert len(KINDS) > 15
    assert named >= KINDS - WANTED - MEASURED


def test_a_warning_pages_no_one_as_an_error_does() -> None:
    """Of a kind that is either, a critical alert names the level."""
    either = {kind for kind, level in LEVELS.items() if "or warning" in level}
    assert len(either) == 2
    for rule in alerts():
        if any(f'kind="{kind}"' in rule["expr"] for kind in either):
            level = "warning" if rule["labels"]["severity"] == "warning" else "error"
            assert f'level="{level}"' in rule["expr"], rule["alert"]


def test_the_page_names_the_lock() -> None:
    assert f"`{LOCK}`" in PAGE

"""The tables of docs/reference, from the docstrings and the definitions in the code.

python -m tools.reference [--check]
"""

import sys
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import griffe
from sqlalchemy.dialects import mysql, postgresql, sqlite
from sqlalchemy.engine import Dialect
from sqlalchemy.schema import Column

import faststream_sqlbroker as package
from faststream_sqlbroker import exceptions
from faststream_sqlbroker.broker.registrator import EndpointOptions, PublisherOptions
from faststream_sqlbroker.core.metrics import METRICS, OUTCOMES
from faststream_sqlbroker.core.reasons import MEANINGS
from faststream_sqlbroker.opentelemetry import metrics as opentelemetry
from faststream_sqlbroker.prometheus import metrics as prometheus
from faststream_sqlbroker.response import PublishOptions
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from faststream_sqlbroker.subscriber.options import SubscriberOptions
from pyspark_sqlbroker.load.columns import ARCHIVE_FIELDS, MESSAGE_FIELDS
from tools.files import update_block

FOLDER = Path(__file__).parent.parent / "docs" / "reference"
STRATEGIES = (
    package.ConstantRetryStrategy,
    package.ConstantWithJitterRetryStrategy,
    package.LinearRetryStrategy,
    package.ExponentialBackoffRetryStrategy,
    package.ExponentialBackoffWithJitterRetryStrategy,
    package.NoRetryStrategy,
)
POLICIES = (
    package.Delay,
    package.Debounce,
    package.KeepLast,
    package.Throttle,
    package.Window,
    package.Concurrency,
    package.Once,
    package.BlockingWait,
)
DIALECTS: dict[str, Dialect] = {
    "PostgreSQL": postgresql.dialect(),  # type: ignore[no-untyped-call]
    "MySQL, MariaDB": mysql.dialect(),
    "SQLite": sqlite.dialect(),
}
OTHER_COLUMNS = {
    "lease_token": "the fence: required to settle the message",
    "policy_marks": "bits: the policies that have handled the message",
    "claimable": "1 if the message can be claimed; generated, replaces a partial index",
}
"""Columns that the readers of the archive do not return."""


@cache
def _loaded() -> griffe.Object:
    return griffe.load("faststream_sqlbroker", search_paths=[FOLDER.parent.parent])  # type: ignore[return-value]


def _source(thing: type) -> Any:
    """Return griffe's description of a class, with its docstrings."""
    path = f"{thing.__module__}.{thing.__qualname__}"
    return _loaded()[path.removeprefix("faststream_sqlbroker.")]


def _line(text: str) -> str:
    """Return a docstring as a single line for the cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    names = list(head)
    lines = [names, ["---"] * len(names), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("| --- ", "|---")


def _code(value: object) -> str:
    return "" if value is None else f"`{value}`".replace("|", "\\|")


def _arguments(function: Any) -> list[list[str]]:
    """Return name, default and meaning of the arguments that `function` documents."""
    sections = [s for s in function.docstring.parse("google") if s.kind.value == "parameters"]
    return [
        [_code(a.name), _default(function, a.name), _line(a.description)]
        for section in sections
        for a in section.value
    ]


def _default(function: Any, name: str) -> str:
    """Return the default for a cell of the table: the value of a constant, "not set" for None.

    The cell is empty if the argument is required, or if its default is only a marker such as EMPTY.
    """
    text = str(function.parameters[name].default or "")
    if text.isidentifier() and text.isupper():
        text = repr(getattr(import_module(function.module.path), text))
    if text == "None":
        return "not set"
    return "" if text in {"", "EMPTY"} or text.startswith("<") else _code(text)


def _attributes(*classes: type) -> list[list[str]]:
    """Return name and docstring of each attribute."""
    return [
        [_code(name), _line(member.docstring.value)]
        for each in classes
        for name, member in _source(each).all_members.items()
        if member.is_attribute
    ]


def broker() -> str:
    """The arguments of `SqlBroker`."""
    return _table(
        ("argument", "default", "meaning"), _arguments(_source(package.SqlBroker)["__init__"])
    )


def options() -> str:
    """A subscriber's options."""
    return _table(("option", "meaning"), _attributes(SubscriberOptions))


def endpoint() -> str:
    """A subscriber's options that FastStream has for every broker."""
    return _table(("option", "meaning"), _attributes(EndpointOptions))


def publish() -> str:
    """The options of `publish`."""
    return _table(("option", "meaning"), _attributes(PublishOptions))


def publisher() -> str:
    """The options of `broker.publisher`."""
    return _table(("option", "meaning"), _attributes(PublisherOptions))


def strategies() -> str:
    """Retry strategies with their arguments."""
    rows = []
    for each in STRATEGIES:
        fields = [f for f in vars(each)["__dataclass_fields__"].values() if f.name[0] != "_"]
        own = [f.name for f in fields if f.name not in LIMITS]
        rows.append([_code(each.__name__), ", ".join(map(_code, own)), _line(each.__doc__ or "")])
    return _table(("strategy", "own arguments", "delay after attempt *n*"), rows)


LIMITS = ("max_attempts", "max_total_delay_seconds", "retry_on", "no_retry_on")
"""Arguments of all strategies; their own table is in retry.md."""


def policies() -> str:
    """Policies with their arguments."""
    rows = []
    for each in POLICIES:
        function = _source(each)["__init__"]
        for parameter in list(function.parameters)[1:]:
            meanings = {row[0]: row[2] for row in _arguments(function)}
            name = _code(parameter.name)
            first = _line(function.docstring.value.split("\n\n")[0])
            default = _default(function, parameter.name)
            rows.append([_code(each.__name__), name, default, meanings.get(name, first)])
    return _table(("policy", "argument", "default", "meaning"), rows)


def reasons() -> str:
    """Why messages end without success."""
    rows = ([_code(code), m.states, m.text, m.related] for code, m in MEANINGS.items())
    return _table(("code", "state", "meaning", "`related_id`"), rows)


def metrics() -> str:
    """The broker's own metrics, under both their names."""
    rows = (
        [
            f"`{prometheus.get_exported_name(m)}`<br>`{opentelemetry.get_exported_name(m)}`",
            m.kind.value,
            ", ".join(map(_code, m.labels)),
            m.unit,
            _line(m.description),
        ]
        for m in METRICS
    )
    return _table(("Prometheus, OpenTelemetry", "type", "labels", "unit", "meaning"), rows)


def outcomes() -> str:
    """The values of the label `outcome`."""
    rows = ([_code(name), f"The message: {text}."] for name, text in OUTCOMES.items())
    return _table(("outcome", "meaning"), rows)


def buckets() -> str:
    """The upper bounds of the histograms."""
    rows = (
        [_code(m.name), ", ".join(f"{bound:g}" for bound in m.buckets)]
        for m in METRICS
        if m.buckets
    )
    return _table(("histogram", "upper bounds in seconds"), rows)


def errors() -> str:
    """Every error, the class that it derives from, and when it is raised."""
    found = [
        each
        for each in vars(exceptions).values()
        if isinstance(each, type) and issubclass(each, package.SqlBrokerError)
    ]
    rows = (
        [
            _code(each.__name__),
            ", ".join(_code(base.__name__) for base in each.__bases__),
            _line((each.__doc__ or "").split("\n\n")[0]),
        ]
        for each in found
    )
    return _table(("error", "is a", "meaning"), rows)


def columns() -> str:
    """The columns of the message table and of its archive."""
    kinds = {name: _columns(mysql=name.startswith("MySQL")) for name in DIALECTS}
    meanings = OTHER_COLUMNS | {f.name: f.description for f in (*MESSAGE_FIELDS, *ARCHIVE_FIELDS)}
    rows = []
    for name, (_, where) in kinds["MySQL, MariaDB"].items():
        types = []
        for database, dialect in DIALECTS.items():
            column = kinds[database].get(name)
            text = "" if column is None else column[0].type.compile(dialect)
            types.append(_code(text.partition(" CHARACTER SET")[0]) if text else "")
        rows.append([_code(name), where, *types, meanings[name]])
    return _table(("column", "table", *DIALECTS, "holds"), rows)


def _columns(*, mysql: bool) -> dict[str, tuple[Column[Any], str]]:
    """Return each column, and the table or tables that have it, by name."""
    tables = build_tables(SqlBrokerSchemaConfig(), dialect_name="mysql" if mysql else "postgresql")
    found: dict[str, tuple[Column[Any], str]] = {c.name: (c, "message") for c in tables.message.c}
    for c in () if tables.archive is None else tables.archive.c:
        found[c.name] = (c, "both" if c.name in found else "archive")
    return found


BLOCKS: dict[tuple[str, str], Callable[[], str]] = {
    ("broker.md", "arguments"): broker,
    ("subscriber.md", "options"): options,
    ("subscriber.md", "endpoint"): endpoint,
    ("publisher.md", "publish"): publish,
    ("publisher.md", "publisher"): publisher,
    ("retry.md", "strategies"): strategies,
    ("policies.md", "arguments"): policies,
    ("reasons.md", "reasons"): reasons,
    ("metrics.md", "metrics"): metrics,
    ("metrics.md", "outcomes"): outcomes,
    ("metrics.md", "buckets"): buckets,
    ("errors.md", "errors"): errors,
    ("tables.md", "columns"): columns,
}
"""Functions that render the generated blocks, by page and name of the block."""


if __name__ == "__main__":
    check = "--check" in sys.argv
    sys.exit(
        max(
            [
                update_block(FOLDER / page, name, make(), check=check)
                for (page, name), make in BLOCKS.items()
            ]
        )
    )

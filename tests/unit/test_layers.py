"""The rules of the layout that no linter checks: imports, clocks."""

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "faststream_sqlbroker"
READERS = ROOT / "pyspark_sqlbroker"
FILES = sorted((*PACKAGE.rglob("*.py"), *READERS.rglob("*.py")))

LAYERS = (
    "core",
    "schema",
    "database",
    "flow",
    "adapter",
    "publisher",
    "subscriber",
    "broker",
)
"""From the ground up."""

INHERENT_CYCLES = [
    {
        "faststream_sqlbroker.annotations",
        "faststream_sqlbroker.broker.broker",
        "faststream_sqlbroker.broker.config",
        "faststream_sqlbroker.broker.publishing",
        "faststream_sqlbroker.broker.reserving",
    }
]
"""The annotations name the broker's class, and the broker names the annotations in its context and
in an error. ARCHITECTURE.md says so."""

WALL_CLOCKS = {"time.time", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}


TIMED_LAYERS = ("database/policies", "flow", "subscriber", "broker")
"""Their parts get the time from the broker's clock (`core.clock`)."""
REAL_TIME = {
    ("broker/start_stop.py", "asyncio.wait"): "what a running start gets during a stop",
    ("flow/consumer.py", "loop.time"): "limits of a stop",
    ("flow/deliver/worker_ends.py", "asyncio.wait"): "what running handlers get during a stop",
    ("flow/loop.py", "asyncio.wait"): "what a running tick gets during a stop",
    ("flow/loop.py", "asyncio.timeout_at"): "the limit of what a stop writes",
    ("flow/tasks/schedules.py", "asyncio.wait"): "what running functions get during a stop",
    ("flow/tasks/schedules.py", "asyncio.timeout"): "the limit of a statement",
    ("flow/fleet/heartbeat.py", "asyncio.timeout"): "the limit of a statement",
    ("flow/tasks/requests.py", "asyncio.timeout"): "the limit of what a stop writes",
    ("flow/fleet/rights.py", "asyncio.timeout"): "the limit of a statement",
    ("flow/fleet/write_path.py", "asyncio.timeout"): "the limit of a statement",
    ("flow/loop.py", "asyncio.timeout"): "the limit of a statement",
    ("flow/shielded.py", "asyncio.wait"): "the limit of a statement whose caller was cancelled",
    ("flow/shielded.py", "loop.time"): "the same",
    ("subscriber/pulling.py", "asyncio.timeout"): "no time of its own: a pause or a stop ends it",
    ("subscriber/running_calls.py", "asyncio.timeout"): "what running handlers get during a stop",
}
"""Work that takes real time has limits of real time; why each is one."""


TRANSACTIONS = {
    "database/engine.py": "the broker's own: the one place",
    "database/rehearsal.py": "the savepoint of a rehearsal, in a transaction of the engine",
    "database/messages/handler.py": "a handler's, which outlasts a call",
    "database/sync_store.py": "without an event loop, on the caller's engine",
    "database/explain/explanations.py": "one snapshot of several statements, which reads only",
    "database/sql/mysql/start.sql": "where a driver in autocommit would commit each statement",
    "database/sqlite/dialect.py": "SQLite's write lock, within a transaction of the engine",
    "cli/schema.py": "an operator's commands, without a broker, and Alembic's migrations",
    "fastapi.py": "the session of a request, which is the application's",
    "testing/database.py": "the file of a test",
}
"""Where transactions begin, and whose they are."""
BEGINS = re.compile(r"^(BEGIN|START TRANSACTION)\b(?!;)")
CONNECTIONS = {
    "cli/schema.py": "an operator's commands, without a broker",
    "testing/database.py": "the file of a test",
    "testing/producer.py": "a publish in the transaction of a test",
    "testing/store.py": "counts the transactions of a test",
    "testing/transactions.py": "what is published in a transaction waits for its COMMIT",
}
"""What uses SQLAlchemy's Connection outside of `database` and `schema`, other than for types."""


def begins(tree: ast.AST) -> bool:
    """Whether a transaction begins here: `begin` of a connection or an engine, or its SQL."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = ast.unparse(node.func.value).rpartition(".")[2].lstrip("_")
            connects = owner in {"connection", "engine", "new_session", "session"}
            if node.func.attr in {"begin", "begin_nested"} and connects:
                return True
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if BEGINS.match(node.value):
                return True
    return False


def direct_time(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What `tree` asks of the process's time or chance by itself, and in which line.

    `asyncio.sleep(0)` waits for no time: it is a turn of the event loop.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name in {"time", "random"}:
                    yield f"import {alias.name}", node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module in {"time", "random"}:
            yield f"import {node.module}", node.lineno
        elif isinstance(node, ast.Attribute) and ast.unparse(node).endswith("loop().time"):
            yield "loop.time", node.lineno
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            owner, _, method = called.rpartition(".")
            if method in {"call_later", "call_at"} and not owner.endswith("clock"):
                yield "loop.call_later", node.lineno
            limited = any(keyword.arg == "timeout" for keyword in node.keywords)
            yields = called == "asyncio.sleep" and ast.unparse(node.args[0]) == "0"
            if called in ASYNCIO_TIME and not yields and (called != "asyncio.wait" or limited):
                yield called, node.lineno


ASYNCIO_TIME = {
    f"asyncio.{name}" for name in ("sleep", "timeout", "timeout_at", "wait_for", "wait")
}


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file; each is read once."""
    return ast.parse(path.read_text())


def name(path: Path) -> str:
    """Below the broker's package, or with the readers' before it."""
    return path.relative_to(ROOT).as_posix().removeprefix(f"{PACKAGE.name}/")


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts).removesuffix(".__init__")


MODULES = {module_name(path) for path in FILES}


def imported(path: Path, *, types: bool = False) -> set[str]:
    """Modules that are imported when `path` is; with `types` also those for type checkers."""
    found: set[str] = set()
    tree = tree_of(path)
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test) and not types
        for child in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inside = {f"{node.module}.{alias.name}" for alias in node.names} & MODULES
            found |= inside or {node.module}
    return found


def cycles(graph: Mapping[str, set[str]]) -> list[set[str]]:
    """The groups of modules that import each other, directly or through others."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        waiting = [start]
        while waiting:
            new = (graph[waiting.pop()] & graph.keys()) - found
            found |= new
            waiting += new
        return found

    reach = {module: reached(module) for module in graph}
    groups: list[set[str]] = []
    for module in sorted(graph):
        group = {other for other in reach[module] if module in reach[other]}
        if group and group not in groups:
            groups.append(group)
    return groups


def test_imports_point_down() -> None:
    upward = []
    count = 0
    for path in FILES:
        layer = name(path).split("/")[0]
        if layer not in LAYERS:
            continue
        count += 1
        above = LAYERS[LAYERS.index(layer) + 1 :]
        for module in imported(path):
            parts = module.split(".")
            if parts[0] == "faststream_sqlbroker" and len(parts) > 1 and parts[1] in above:
                upward.append(f"{name(path)} imports {module}, which lies above")
    assert upward == []
    assert count > 40, "the package has moved"


def test_readers_know_the_tables_alone() -> None:
    """They also run where the broker does not, in Spark's executors."""
    found = {
        module.split(".")[1] if "." in module else module
        for path in READERS.rglob("*.py")
        for module in imported(path, types=True)
        if module.split(".")[0] == PACKAGE.name
    }
    assert found == {"core", "schema", "exceptions"}


def test_imports_have_no_cycles_but_those_that_cannot_be_avoided() -> None:
    """Imports for types count, too: in a cycle no module can be read before the others."""
    graph = {module_name(path): imported(path, types=True) for path in FILES}
    assert cycles(graph) == INHERENT_CYCLES


def test_a_cycle_is_found() -> None:
    graph = {"a": {"b", "x"}, "b": {"c"}, "c": {"a"}, "d": {"a", "e"}, "e": set()}
    assert cycles(graph) == [{"a", "b", "c"}]


def test_transactions_begin_in_one_place_but_for_those_that_are_listed() -> None:
    """`database.engine` bounds them in time, repeats them and tells what became of them."""
    found = {
        name(path)
        for path in FILES
        if not name(path).startswith(("pyspark_sqlbroker/", "schema/")) and begins(tree_of(path))
    }
    found |= {
        name(path)
        for path in PACKAGE.rglob("*.sql")
        if any(BEGINS.match(line) for line in path.read_text().splitlines())
    }
    assert found == set(TRANSACTIONS)


def test_connections_are_used_below_the_loops_only() -> None:
    found = {
        name(path)
        for path in FILES
        if not name(path).startswith(("database/", "schema/", "pyspark_sqlbroker/"))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ImportFrom) and node.module == "sqlalchemy"
        if any(alias.name == "Connection" for alias in node.names) and not for_types(path, node)
    }
    assert found == set(CONNECTIONS)


def for_types(path: Path, node: ast.AST) -> bool:
    """Whether `node` is read by type checkers only."""
    return any(
        isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test) and node in block.body
        for block in ast.walk(tree_of(path))
    )


def test_no_module_reads_the_wall_clock() -> None:
    """The database's clock decides; a process measures lengths of time only."""
    reading = [
        f"{name(path)}:{node.lineno}"
        for path in FILES
        # Where the test's clock begins; and what compares the two clocks.
        if not name(path).startswith(("testing/", "admin/health.py"))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute) and ast.unparse(node) in WALL_CLOCKS
    ]
    assert reading == []


def test_parts_get_the_time_from_the_clock_of_the_broker() -> None:
    """Else a test with virtual time would wait for them."""
    found = {
        (name(path), what): f"{name(path)}:{line} {what}"
        for path in FILES
        if name(path).startswith(TIMED_LAYERS)
        for what, line in direct_time(tree_of(path))
    }
    assert [where for key, where in found.items() if key not in REAL_TIME] == []
    assert REAL_TIME.keys() - found.keys() == set(), "no longer there"


def test_each_direct_call_is_seen() -> None:
    source = """
import asyncio, random, time
from time import monotonic
await asyncio.sleep(0)
await asyncio.wait((task,))
await asyncio.sleep(1)
loop.call_later(1, f)
self._clock.call_later(1, f)
clock = asyncio.get_running_loop().time
await asyncio.wait((task,), timeout=1)
"""
    found = [what for what, _ in direct_time(ast.parse(source))]
    assert sorted(found) == [
        "asyncio.sleep",
        "asyncio.wait",
        "import random",
        "import time",
        "import time",
        "loop.call_later",
        "loop.time",
    ]

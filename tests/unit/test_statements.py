"""The files of statements: all of what they say is used, and nothing else is sent."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from faststream_sqlbroker.database import statements as module
from faststream_sqlbroker.database.dialects import DIALECTS, create_dialect
from faststream_sqlbroker.database.statements import Source, Statements, read_sources
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tools.golden_sql import DRIVERS
from tools.worktree import ROOT

FOLDER = Path(module.__file__).parent / "sql"
FILES = sorted(FOLDER.glob("*/*.sql"))
WORD = re.compile(r"!?(\w+)")
ASSEMBLED = re.compile(
    r"\b(SELECT|INSERT INTO|DELETE FROM|UPDATE $|WHERE|AND|ORDER BY|UNION ALL|EXPLAIN|SAVEPOINT|"
    r"FORCE INDEX|INDEXED BY)\b"
)
ALIKE = {"sqlite/lock.sql"}
"""Files whose variants are alike: SQLite has no row locks, so none is skipped."""
ASSEMBLERS = {
    "rehearsal.py _build_statement": "tries the columns of one right on no row",
    "multi_statement.py get_insert_statement": "repeats a row",
    "operations.py add_index_hint": "makes a hint of SQLAlchemy's",
    "overviews.py build": "repeats a statement for each range",
}
"""What makes SQL of parts outside of the loader, and why."""


def source_of(path: Path) -> Source:
    return read_sources(path.parent.name)[path.stem][0]


def statements(database: str, **config: str | None) -> Statements:
    kind = make_url(f"{database}{DRIVERS.get(database, '')}://").get_dialect()
    return create_dialect(kind(), build_tables(SqlBrokerSchemaConfig(**config))).sql


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_variant_differs_and_every_mark_and_type_counts(path: Path) -> None:
    source = source_of(path)
    variants = ["", *sorted(source.variants)]
    texts = {variant: source.build_text(variant) for variant in variants}
    keyed = {text for variant, text in texts.items() if module.BY_HEADER in variant}
    assert all("{key_column}" in text or "{key_index}" in text for text in keyed)
    plain = [texts[variant] for variant in variants if module.BY_HEADER not in variant]
    if path.relative_to(FOLDER).as_posix() not in ALIKE:
        assert len(set(plain)) == len(plain), "a variant is another one's copy"
    words = {word for variant in variants for word in WORD.findall(variant)}
    for line, mark in source.lines:
        sent = [variant for variant in variants if module._is_included(mark, variant)]
        assert sent, f"no variant sends {line!r}"
        assert not mark or len(sent) < len(variants), f"every variant sends {line!r}: no mark"
        for word in WORD.findall(mark):
            assert any(word in each for each in words), f"no variant has the word {word}"
    for bind in source.types:
        assert any(re.search(rf":{bind}\b", text) for text in texts.values()), bind


@pytest.mark.parametrize("database", DIALECTS)
@pytest.mark.parametrize("archive", ["message_archive", None])
def test_every_statement_can_be_made(database: str, archive: str | None) -> None:
    made = statements(database, message_archive_table_name=archive)
    for name, (source, variant) in read_sources(database).items():
        if archive is None and "{archive" in source.build_text(variant):
            with pytest.raises(KeyError, match="archive"):
                made[name]
            continue
        assert made[name] is made[name], "the driver's shortcut goes by the object"
        assert "{" not in re.sub(r"'[^']*'|ARRAY\[\]", "", str(made[name])), name
        assert "--" not in str(made[name])
        assert not re.search(r"\\$", str(made[name]), re.MULTILINE), "after a space and a backslash"


def test_a_statement_by_the_key_of_a_header_is_the_plain_one_if_it_has_no_key() -> None:
    made = statements("sqlite")
    assert made.get_by_header("policy_now") is made["policy_now"]
    assert made.get_by_header("policy_lock") is made["policy_lock_by_header"]
    assert made.get_by_header("policy_lock") is not made["policy_lock"]


def test_an_unknown_statement_is_an_error() -> None:
    made = statements("sqlite")
    for name in ("nothing", "policy_lock_anew", "claim_"):
        assert not made.has(name)
        with pytest.raises(KeyError, match=name):
            made[name]


def test_mariadb_sends_what_mysql_sends_but_for_its_own_files() -> None:
    mysql, mariadb = statements("mysql"), statements("mariadb")
    own = {path.stem for path in (FOLDER / "mariadb").glob("*.sql")}
    assert own, "else this test shows nothing"
    for stem in own:
        assert not mysql.has(stem) or str(mysql[stem]) != str(mariadb[stem])
    assert str(mysql["claim"]) == str(mariadb["claim"])


def test_names_are_quoted() -> None:
    made = statements("postgresql", message_table_name="order", schema="_Own")
    assert '"_Own"."order"' in str(made["insert_one"])
    assert '\'"_Own"."order"\'' in str(made["insert"]), "the name inside a literal"


def test_only_the_loader_makes_sql_of_parts() -> None:
    found = {
        f"{path.name} {function}"
        for path in (ROOT / "faststream_sqlbroker" / "database").rglob("*.py")
        for function in assemblers(ast.parse(path.read_text()))
    }
    assert found == set(ASSEMBLERS)


def assemblers(tree: ast.AST, owner: str = "") -> Iterator[str]:
    """Functions and names of what is made of SQL, by an f-string, `format`, `replace`, % or +."""
    for node in ast.iter_child_nodes(tree):
        name = owner
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            name = node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and not owner:
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        if any(ASSEMBLED.search(part) for part in parts(node)):
            yield name
        yield from assemblers(node, name)


def parts(node: ast.AST) -> Iterator[str]:
    """The literals that `node` makes a text of."""
    sources: list[ast.AST] = []
    if isinstance(node, ast.JoinedStr):
        sources = list(node.values)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in {"format", "replace"}:
            sources = [node.func.value]
    elif isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Mod)):
        sources = [node.left, node.right]
    for source in sources:
        if isinstance(source, ast.Constant) and isinstance(source.value, str):
            yield source.value


@pytest.mark.parametrize(
    "source",
    [
        'S = f"SELECT 1 FROM {t} WHERE x"',
        'class A:\n    S = f"SELECT 1 FROM {t}"',
        'def f():\n    return "SELECT 1 FROM " + t',
        'def f():\n    return "SELECT %s FROM t" % t',
        'def f():\n    return "SELECT {x} FROM t".format(x=1)',
    ],
)
def test_sql_made_of_parts_is_seen(source: str) -> None:
    assert list(assemblers(ast.parse(source)))

"""The files of statements: all of what they say is used, and nothing else is sent."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from sqlalchemy import make_url

from faststream_sqlbroker.database import statements as module
from faststream_sqlbroker.database.dialects import DIALECTS, dialect_for
from faststream_sqlbroker.database.statements import FOLDER, Source, Statements, find_source
from faststream_sqlbroker.schema.config import SqlBrokerSchemaConfig
from faststream_sqlbroker.schema.tables import build_tables
from tools.golden_sql import DRIVERS
from tools.worktree import ROOT

FILES = sorted(FOLDER.glob("*/*.sql"))
WORD = re.compile(r"!?(\w+)")
ASSEMBLED = re.compile(
    r"\b(SELECT|INSERT INTO|DELETE FROM|UPDATE $|WHERE|AND|ORDER BY|UNION ALL|EXPLAIN|SAVEPOINT|"
    r"FORCE INDEX|INDEXED BY)\b"
)
ASSEMBLERS = {
    "access.py _is_gone": "asks for one table, whose rights nothing else tells",
    "access.py _explain": "asks for the columns of one right",
    "access.py _ask_sqlite": "writes no row of one table",
    "multi_statement.py insert_statement": "repeats a row",
    "operations.py use_index": "makes a hint of SQLAlchemy's",
    "queue_counts.py _together": "repeats a statement for each range",
}
"""The functions outside of the loader that may make SQL of parts, and why."""


def source_of(path: Path) -> Source:
    found = find_source(path.parent.name, path.stem)
    assert found is not None
    return found[0]


def statements(database: str, **config: str | None) -> Statements:
    kind = make_url(f"{database}{DRIVERS.get(database, '')}://").get_dialect()
    return dialect_for(kind(), build_tables(SqlBrokerSchemaConfig(**config))).sql


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_variant_differs_and_every_mark_and_type_counts(path: Path) -> None:
    source = source_of(path)
    variants = ["", *sorted(source.variants)]
    texts = {variant: source.text_of(variant) for variant in variants}
    keyed = {text for variant, text in texts.items() if module.BY_HEADER in variant}
    assert all("{key_column}" in text or "{key_index}" in text for text in keyed)
    plain = [texts[variant] for variant in variants if module.BY_HEADER not in variant]
    if any(mark for _, mark in source.lines):
        assert len(set(plain)) == len(plain), "a variant is another one's copy"
    words = {word for variant in variants for word in WORD.findall(variant)}
    for line, mark in source.lines:
        sent = [variant for variant in variants if module._holds(mark, variant)]
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
    for name in module.list_statements(database):
        source, variant = find_source(database, name) or pytest.fail(name)
        if archive is None and "{archive" in source.text_of(variant):
            with pytest.raises(KeyError, match="archive"):
                made[name]
            continue
        assert made[name] is made[name], "the driver's shortcut goes by the object"
        assert "{" not in re.sub(r"'[^']*'|ARRAY\[\]", "", str(made[name])), name
        assert "--" not in str(made[name])
        assert "\\\n" not in str(made[name]), "a line goes on after one space and a backslash"


def test_a_statement_by_the_key_of_a_header_is_the_plain_one_if_it_has_no_key() -> None:
    made = statements("sqlite")
    assert made.by_header("policy_now") is made["policy_now"]
    assert made.by_header("policy_lock") is made["policy_lock_by_header"]
    assert made.by_header("policy_lock") is not made["policy_lock"]


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
        assert str(mysql[stem]) != str(mariadb[stem])
    assert str(mysql["claim"]) == str(mariadb["claim"])


def test_names_are_quoted_and_a_colon_in_them_is_no_bind() -> None:
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


def assemblers(tree: ast.Module) -> Iterator[str]:
    """Functions with an f-string, a `format` or a `replace` over SQL, also in a function inside."""
    methods = [each for node in tree.body if isinstance(node, ast.ClassDef) for each in node.body]
    for function in [*tree.body, *methods]:
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
            if any(ASSEMBLED.search(part) for node in ast.walk(function) for part in parts(node)):
                yield function.name


def parts(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.JoinedStr):
        yield from (each.value for each in node.values if isinstance(each, ast.Constant))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in {"format", "replace"} and isinstance(node.func.value, ast.Constant):
            yield str(node.func.value.value)

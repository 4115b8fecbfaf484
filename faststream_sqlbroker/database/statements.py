"""The statements of each database, one file each: `sql/<database>/<statement>.sql`.

A file is the statement as it is sent, except:

* `{message}` and other names in braces: the user's tables and their indexes, the columns that are
  read by position, and constants shared with Python;
* `-- :ids bigint[] :lease float`: the types of binds that the driver wants to know; `in` is a list
  of any length. All other lines that begin with `--` are comments, and are not sent;
* `-- variants: others, others by_header`: the same file makes these statements as well, named
  `claim_others` and `claim_others_by_header`. A line that ends in `--? others` is sent by variants
  with that word only, `--? !others` by those without it. Of several words all must hold, of `a|b`
  one;
* a line that ends in a backslash goes on in the next line, after one space.

MariaDB sends MySQL's statements, except those for which it has files of its own.
"""

import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from sqlalchemy import (
    BigInteger,
    BindParameter,
    DateTime,
    Float,
    Integer,
    LargeBinary,
    SmallInteger,
    String,
    Text,
    TextClause,
    Uuid,
    bindparam,
    text,
)
from sqlalchemy.types import TypeEngine

FOLDER = files(__package__) / "sql"
"""The folder of all statements, which may be in a zip."""
FALLBACKS = {"mariadb": "mysql"}
"""The database whose statements another sends where it has no file of its own."""
BY_HEADER = "by_header"
"""The word of variants that use the key that was read from a header, in place of the message's
key: `{key_column}` and `{key_index}`.
"""
_TYPES: dict[str, TypeEngine[Any]] = {
    "bigint": BigInteger(),
    "bytes": LargeBinary(),
    "float": Float(53),
    "int": Integer(),
    "smallint": SmallInteger(),
    "text": Text(),
    "time": DateTime(timezone=True),
    "uuid": Uuid(),
    "varchar": String(),
}
_BIND = re.compile(r":(\w+) (\S+)")
_NAME = re.compile(r"\{(\w+)\}")
_CONTINUATION = re.compile(r" \\\n *")
_VARIANTS = "-- variants: "
_CONDITION = "  --? "


class Source(NamedTuple):
    """The content of a file."""

    types: dict[str, str]
    """The types of binds, by name."""
    lines: list[tuple[str, str]]
    """Each line with its condition, which may be empty."""
    variants: frozenset[str]
    """The suffixes of the variants' names, without the first `_`."""

    def build_text(self, variant: str) -> str:
        """Build the text of a variant, or of the plain statement if `variant` is empty."""
        lines = [line for line, condition in self.lines if _is_included(condition, variant)]
        return _CONTINUATION.sub(" ", "\n".join(lines))


class Statements(dict[str, TextClause]):
    """The statements of a database over the tables of a broker, by name.

    Each is built on first use and stays the same object, because the shortcut past SQLAlchemy's
    compiler identifies statements by it.
    """

    def __init__(self, database: str, names: Mapping[str, str]) -> None:
        """Use the files of `database`; `names` replaces the names in braces."""
        super().__init__()
        self._names = names
        self._sources = read_sources(database)

    def __missing__(self, name: str) -> TextClause:
        source, variant = self._sources[name]
        return self.setdefault(name, self._build(source, variant))

    def has(self, name: str) -> bool:
        """Return True if the database has this statement."""
        return name in self._sources

    def get_by_header(self, name: str) -> TextClause:
        """Return the variant that uses a header's key, or a statement that uses no key."""
        variant = f"{name}_{BY_HEADER}"
        return self[variant if self.has(variant) else name]

    def _build(self, source: Source, variant: str) -> TextClause:
        """Build the statement of a file's variant, with the names and the types of binds.

        Names in braces become tables, columns and constants. A variant "by_header" uses the key
        that was read from a header.
        """
        names = self._names
        if BY_HEADER in variant:
            names = {**names, "key_column": "policy_key", "key_index": names["policy_key_index"]}
        clause = text(_NAME.sub(lambda match: names[match[1]], source.build_text(variant)))
        binds = [
            _create_bind_parameter(name, kind)
            for name, kind in source.types.items()
            if name in clause._bindparams  # noqa: SLF001 - `bindparams` refuses any other
        ]
        return clause.bindparams(*binds) if binds else clause


@cache
def read_sources(database: str) -> dict[str, tuple[Source, str]]:
    """Read the files of a database: the source and the variant of each statement.

    All files are read together, once per process. A process that runs while its package is replaced
    must not mix statements of two versions.
    """
    sources = dict(read_sources(FALLBACKS[database])) if database in FALLBACKS else {}
    for path in FOLDER.joinpath(database).iterdir():
        if path.name.startswith(".") or not path.name.endswith(".sql"):
            continue  # what an editor or a file manager leaves
        source = _parse_source(path.read_text(encoding="utf-8"))
        stem = path.name.removesuffix(".sql")
        sources[stem] = source, ""
        sources |= {f"{stem}_{variant}": (source, variant) for variant in source.variants}
    return sources


def _parse_source(content: str) -> Source:
    """Parse the content of a file: types of binds, lines with conditions, variants.

    A variant is another statement made of the same file: it has the lines without a condition, and
    the lines whose condition (after `--?`) names a word of the variant.
    """
    types = dict[str, str]()
    variants = list[str]()
    lines = list[tuple[str, str]]()
    for line in content.splitlines():
        if line.startswith(_VARIANTS):
            variants += line.removeprefix(_VARIANTS).split(", ")
        elif line.startswith("-- :"):
            types.update(_BIND.findall(line))
        elif not line.lstrip().startswith("--"):
            statement, _, condition = line.partition(_CONDITION)
            lines.append((statement, condition))
    return Source(types, lines, frozenset(variant.replace(" ", "_") for variant in variants))


def _is_included(condition: str, variant: str) -> bool:
    """Return True if a line with this condition belongs to the variant.

    Each word of the condition must be one of the variant's words; `a|b` is either, `!a` its
    absence.
    """
    return all(
        any(_has_word(variant, word) for word in part.split("|")) for part in condition.split()
    )


def _has_word(variant: str, word: str) -> bool:
    pattern_found = f"_{word.removeprefix('!')}_" in f"_{variant}_"
    return pattern_found != word.startswith("!")


def _create_bind_parameter(name: str, kind: str) -> BindParameter[Any]:
    """Create a bind of the type `kind`: "in" is a list of any length, "…[]" an array."""
    if kind == "in":
        return bindparam(name, expanding=True)
    if kind.endswith("[]"):
        from sqlalchemy.dialects.postgresql import ARRAY  # noqa: PLC0415 - PostgreSQL only

        return bindparam(name, type_=ARRAY(_TYPES[kind.removesuffix("[]")]))
    return bindparam(name, type_=_TYPES[kind])

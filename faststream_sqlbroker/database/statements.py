"""The statements of each database, one file each: `sql/<database>/<statement>.sql`.

A file is the statement as it is sent, but for:

* `{message}` and other names in braces: those of the user's tables and of their indexes, the
  columns that are read by their place, and constants that Python knows, too;
* `-- :ids bigint[] :lease float`: the types of binds that the driver wants to know; `in` is a list
  of any length. All other lines that begin with `--` are comments, and are not sent;
* `-- variants: others, others by_header`: the same file makes these statements as well, named
  `claim_others` and `claim_others_by_header`. A line that ends in `--? others` is sent by variants
  with that word only, `--? !others` by those without it. Of several words all must hold, of `a|b`
  one;
* a line that ends in a backslash goes on in the next one, after one space.

MariaDB sends MySQL's statements, but for those that it has files of.
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
"""Also in a zip."""
LIKE = {"mariadb": "mysql"}
"""The database whose statements one sends that has no file of its own."""
BY_HEADER = "by_header"
"""The word of variants that go by the key that was read from a header, in place of the message's
key: `{key_column}` and `{key_index}`."""
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
_MARK = "  --? "


class Source(NamedTuple):
    """One file."""

    types: dict[str, str]
    """The types of binds, by name."""
    lines: list[tuple[str, str]]
    """Each with its mark, which may be empty."""
    variants: frozenset[str]
    """The ends of their names, without the first `_`."""

    def text_of(self, variant: str) -> str:
        """The text of one variant; of the plain statement, if `variant` is empty."""
        lines = [line for line, mark in self.lines if _holds(mark, variant)]
        return _CONTINUATION.sub(" ", "\n".join(lines))


class Statements(dict[str, TextClause]):
    """The statements of one database over the tables of one broker, by name.

    Each is made when it is first asked for, and stays the same object: the shortcut past
    SQLAlchemy's compiler goes by it.
    """

    def __init__(self, database: str, names: Mapping[str, str]) -> None:
        """Take the files of `database`; `names` is what stands for the names in braces."""
        super().__init__()
        self._names = names
        self._sources = read_sources(database)

    def __missing__(self, name: str) -> TextClause:
        source, variant = self._sources[name]
        return self.setdefault(name, self._bind(source, variant))

    def has(self, name: str) -> bool:
        """Whether the database has this statement."""
        return name in self._sources

    def by_header(self, name: str) -> TextClause:
        """The variant that goes by the key of a header, or the statement, if no key is in it."""
        variant = f"{name}_{BY_HEADER}"
        return self[variant if self.has(variant) else name]

    def _bind(self, source: Source, variant: str) -> TextClause:
        names = self._names
        if BY_HEADER in variant:
            names = {**names, "key_column": "policy_key", "key_index": names["policy_key_index"]}
        clause = text(_NAME.sub(lambda match: names[match[1]], source.text_of(variant)))
        binds = [
            _bind_parameter(name, kind)
            for name, kind in source.types.items()
            if name in clause._bindparams  # noqa: SLF001 - `bindparams` refuses any other
        ]
        return clause.bindparams(*binds) if binds else clause


@cache
def read_sources(database: str) -> dict[str, tuple[Source, str]]:
    """The file that makes each statement, by name, and which variant of it that is.

    All files are read at once, and once for a process: one that runs while its package is replaced
    must not send the statements of another version.
    """
    sources = dict(read_sources(LIKE[database])) if database in LIKE else {}
    for path in FOLDER.joinpath(database).iterdir():
        if path.name.startswith(".") or not path.name.endswith(".sql"):
            continue  # what an editor or a file manager leaves
        source = _parse(path.read_text(encoding="utf-8"))
        stem = path.name.removesuffix(".sql")
        sources[stem] = source, ""
        sources |= {f"{stem}_{variant}": (source, variant) for variant in source.variants}
    return sources


def _parse(content: str) -> Source:
    types = dict[str, str]()
    variants = list[str]()
    lines = list[tuple[str, str]]()
    for line in content.splitlines():
        if line.startswith(_VARIANTS):
            variants += line.removeprefix(_VARIANTS).split(", ")
        elif line.startswith("-- :"):
            types.update(_BIND.findall(line))
        elif not line.lstrip().startswith("--"):
            statement, _, mark = line.partition(_MARK)
            lines.append((statement, mark))
    return Source(types, lines, frozenset(variant.replace(" ", "_") for variant in variants))


def _holds(mark: str, variant: str) -> bool:
    """Whether a line with this mark is one of the variant."""
    return all(any(_has_word(variant, word) for word in part.split("|")) for part in mark.split())


def _has_word(variant: str, word: str) -> bool:
    has = f"_{word.removeprefix('!')}_" in f"_{variant}_"
    return has != word.startswith("!")


def _bind_parameter(name: str, kind: str) -> BindParameter[Any]:
    if kind == "in":
        return bindparam(name, expanding=True)
    if kind.endswith("[]"):
        from sqlalchemy.dialects.postgresql import ARRAY  # noqa: PLC0415 - PostgreSQL only

        return bindparam(name, type_=ARRAY(_TYPES[kind.removesuffix("[]")]))
    return bindparam(name, type_=_TYPES[kind])

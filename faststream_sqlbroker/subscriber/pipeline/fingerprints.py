"""Whether the functions of FastStream and FastDepends may be replaced: the environment lets them
be, and they are the ones that are known.

A fingerprint is a digest of a function's syntax tree without annotations, docstrings and layout.
A function with an unknown fingerprint, or without source, may do something else: then FastStream
does that work itself. To make a new version known, read what has changed in it, and add the
digest that `python -m tools.fingerprints` prints to `KNOWN`.
"""

import ast
import contextlib
import hashlib
import inspect
import linecache
import logging
import os
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from importlib.metadata import version
from types import FunctionType
from typing import Any

from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.subscriber.pipeline.replaced import REPLACED


class NotCompiled(Exception):  # noqa: N818 - a reason, which never leaves this package
    """What is asked for is not known here: FastStream does it."""


VARIABLE = "SQLBROKER_PIPELINE"
"""Environment variable that chooses the pipeline of all subscribers."""
COMPILED = "compiled"
GENERIC = "generic"
_LENGTH = 12
"""Hexadecimal digits of a digest that are kept: enough to tell versions apart."""
_UNSEEN = frozenset({"annotation", "returns", "type_comment", "type_params", "kind", "ctx"})
"""Fields of syntax trees without a meaning here; some exist in newer versions of Python only."""


def chosen() -> str:
    """The pipeline that the environment asks for.

    Raises:
        SetupError: it asks for one that does not exist.
    """
    value = os.environ.get(VARIABLE, COMPILED)
    if value not in (COMPILED, GENERIC):
        msg = f"{VARIABLE} is {value!r}: it can be {COMPILED!r} (the default) or {GENERIC!r}"
        raise SetupError(msg)
    return value


def unknown(group: str) -> list[str]:
    """What is not known of the functions of `group`: names of those that are not the library's own;
    or, if all are, the versions, whose functions are other ones.
    """
    found = list(digests(group))
    if strange := [name for name, digest in found if not digest]:
        return strange
    return [] if together(found) in KNOWN[group] else [f"those of {_versions()}"]


def together(found: Iterable[tuple[str, str]]) -> str:
    """One digest of all, by their names."""
    return _hashed(repr(sorted(found)))


def _hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]


def _versions() -> str:
    return f"faststream {version('faststream')} with fast-depends {version('fast-depends')}"


def warn_once(group: str, instead: str, names: Sequence[str], log: Callable[..., None]) -> None:
    """Warn of unknown functions, the first time that this process finds any of `group`."""
    if group in _told:
        return
    _told.add(group)
    text = (
        f"{instead}, as {_versions()} has functions that the compiled pipeline does not know: "
        f"messages take more CPU, nothing else changes ({', '.join(names)})"
    )
    log(logging.WARNING, text)


_told: set[str] = set()
"""Groups that this process has warned of."""


def digests(group: str) -> Iterator[tuple[str, str]]:
    """Name and digest of each function of `group`, as they are now; empty if it is not of the
    library that it is found in.
    """
    for owner, names in REPLACED[group]:
        prefix = owner.__name__.rpartition(".")[2]
        library = _library(getattr(owner, "__module__", owner.__name__))
        for name in names:
            function = _function(owner, name)
            is_own = _library(str(getattr(function, "__module__", None))) == library
            yield f"{prefix}.{name}", _digest(function) if is_own else ""


def _library(module: str) -> str:
    return module.partition(".")[0]


def _function(owner: Any, name: str) -> Any:
    found = inspect.getattr_static(owner, name, None)
    return found.fget if isinstance(found, property) else found


@lru_cache(maxsize=512)
def _digest(function: Any) -> str:
    """The digest of a function; empty if there is no source, or it is no function."""
    if not isinstance(function, FunctionType) or _is_patched(function):
        return ""
    try:
        tree = _tree(function)
    except (OSError, TypeError, SyntaxError):
        return ""
    return _hashed(_text(tree))


def _is_patched(function: FunctionType) -> bool:
    """Whether something of another file wraps it, such as a tracer."""
    own = inspect.unwrap(function).__code__.co_filename
    wrapper: Any = function
    while (inner := getattr(wrapper, "__wrapped__", None)) is not None:
        # FastStream's generators are wrapped by contextlib.
        if wrapper.__code__.co_filename not in (own, contextlib.__file__):
            return True
        wrapper = inner
    return False


def _tree(function: FunctionType) -> ast.Module:
    """The syntax tree of `function`, from the lines that its code is of.

    Raises:
        OSError: it has no source.
    """
    code = inspect.unwrap(function).__code__
    last = max((end for _, end, _, _ in code.co_positions() if end), default=0)
    lines = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 : last]
    if lines:
        # inspect finds the end by reading token after token, which is half of the time of a start.
        with contextlib.suppress(SyntaxError):
            return ast.parse(textwrap.dedent("".join(lines)))
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def _text(node: Any) -> str:
    """A syntax tree as text that is the same in every version of Python."""
    if isinstance(node, list):
        return "[" + ",".join([_text(each) for each in node if not _is_docstring(each)]) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.AnnAssign) and node.value is None:
        return ""
    fields = []
    for name in node._fields:
        # Most of the time of a start: thousands of nodes are read.
        value = None if name in _UNSEEN else getattr(node, name, None)
        if value is not None and value != []:
            fields.append(f"{name}={_text(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _is_docstring(node: Any) -> bool:
    # Any text that stands alone does nothing.
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


KNOWN = {
    "pipeline": ("5ffe6f55a09d",),
    "arguments": ("9be210c32f52",),
    "publishing": ("b7339a5744d2",),
}
"""Of FastStream 0.7.8 with FastDepends 3.0.9, a digest of all functions of each group. Several
where versions differ in a way that does not matter here."""

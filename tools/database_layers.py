"""What only passes things on in the layer of SQL: a reader steps through it in vain."""

import ast
from collections.abc import Iterator

from tools.sources import File, Place, parsed

Function = ast.FunctionDef | ast.AsyncFunctionDef
CONNECTS = {"connection", "engine", "transactions", "database", "checkouts"}
"""Parameters that a connection comes from."""


def transaction_wrappers(file: File) -> Iterator[Place]:
    """Methods whose transaction is one call of a function, with their arguments."""
    kept = _of_schema(file)
    for function in _functions(file):
        body = [each for each in function.body if not _is_docstring(each)]
        if len(body) == 1 and _is_passed_on(body[0], kept):
            yield file.place(function.lineno, function.name)


def split_constructors(file: File) -> Iterator[Place]:
    """Constructors that take what a connection comes from, and its dialect with it."""
    for function in _functions(file):
        if function.name != "__init__":
            continue
        names = {argument.arg for argument in function.args.args}
        if "dialect" in names and names & CONNECTS:
            yield file.place(function.lineno)


def _functions(file: File) -> Iterator[Function]:
    return (node for node in ast.walk(parsed(file)) if isinstance(node, Function))


def _is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _of_schema(file: File) -> set[str]:
    """Functions of `schema`: they work without the broker, too, so they cannot be folded."""
    return {
        alias.name
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.ImportFrom) and ".schema." in (node.module or "")
        for alias in node.names
    }


def _is_passed_on(node: ast.stmt, kept: set[str]) -> bool:
    """`return await self._database.run(lambda c: function(c, argument, ...), ...)`, or of a
    `partial`.
    """
    value = getattr(node, "value", None)
    if isinstance(value, ast.Await):
        value = value.value
    if not (isinstance(value, ast.Call) and ast.unparse(value.func).endswith("_database.run")):
        return False
    work = value.args[0]
    call = work.body if isinstance(work, ast.Lambda) else work
    # An operation of a dialect differs by database: it cannot be folded into its caller.
    if not isinstance(call, ast.Call) or "dialect." in ast.unparse(call.func):
        return False
    if ast.unparse(call.func) in kept:
        return False
    arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
    return all(isinstance(argument, (ast.Name, ast.Attribute)) for argument in arguments)

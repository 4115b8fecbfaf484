"""Classes and static methods of Java that are looked up once.

py4j asks Java for each name at every use of it, as for `functions` and for `col` in each `F.col`:
two of the three questions that a column costs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from py4j.java_gateway import JavaClass, JavaMember, JVMView


@contextmanager
def remembered() -> Iterator[None]:
    """Keep each class and method that was found, as neither changes while a Java runs; what a
    static field holds is asked for again."""
    with pytest.MonkeyPatch.context() as patch:
        for owner in (JVMView, JavaClass):
            patch.setattr(owner, "__getattr__", _remembering(owner.__getattr__))
        yield


def _remembering(look_up: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    def look_up_once(self: Any, name: str) -> Any:
        found = look_up(self, name)
        if isinstance(found, (JavaClass, JavaMember)):
            vars(self)[name] = found
        return found

    return look_up_once

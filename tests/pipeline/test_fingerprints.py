"""A function of FastStream or FastDepends that is not known rules the compiled pipeline out."""

import logging
from functools import wraps
from importlib.metadata import version
from types import SimpleNamespace
from typing import Any

import pytest
from fast_depends.core import CallModel

from faststream_sqlbroker.adapter.pipeline import HandlerItem
from faststream_sqlbroker.subscriber.pipeline import fingerprints
from faststream_sqlbroker.subscriber.pipeline.replaced import ARGUMENTS, PIPELINE, REPLACED
from tests.pipeline.seen import Seen
from tests.pipeline.test_choice import prepared, run_one


@pytest.fixture(autouse=True)
def not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "_warned_groups", set())


def warnings(seen: Seen) -> list[str]:
    return [event[2] for event in seen.events if event[:2] == ("'log'", str(logging.WARNING))]


@pytest.mark.parametrize("group", REPLACED)
def test_the_installed_versions_are_known(group: str) -> None:
    assert fingerprints.find_unknown(group) == []


def test_another_version_of_a_function_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a release of FastStream brings it: it is the library's own, and does something else."""

    async def call(self: Any, /, message: Any, _extra_middlewares: Any) -> Any: ...

    call.__module__ = HandlerItem.__module__
    monkeypatch.setattr(HandlerItem, "call", call)
    [names] = fingerprints.find_unknown(PIPELINE)
    assert names.startswith(f"those of faststream {version('faststream')} with fast-depends")
    assert fingerprints.find_unknown(ARGUMENTS) == []


@pytest.mark.parametrize("group", REPLACED)
def test_lines_found_by_code_are_those_that_inspect_finds(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fingerprints._compute_digest.cache_clear()
    quick = list(fingerprints.iter_digests(group))
    # Without lines of its own it asks inspect.
    monkeypatch.setattr(fingerprints, "linecache", SimpleNamespace(getlines=lambda _: []))
    fingerprints._compute_digest.cache_clear()
    assert list(fingerprints.iter_digests(group)) == quick


async def test_an_unknown_function_of_the_pipeline_means_faststreams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def call(self: Any, /, message: Any, _extra_middlewares: Any) -> Any:
        seen.add("another call")
        return await original(self, message=message, _extra_middlewares=_extra_middlewares)

    original = HandlerItem.call
    seen = Seen()
    subscriber = await prepared(seen)
    monkeypatch.setattr(HandlerItem, "call", call)
    pipeline = subscriber._make_pipeline()
    assert "HandlerItem.call" in pipeline.reason
    assert await run_one(pipeline) is not None
    assert ("'another call'",) in seen.events
    subscriber._make_pipeline()
    [warning] = warnings(seen)
    assert "HandlerItem.call" in warning


def test_a_function_that_a_tracer_wraps_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it tells of the original, as `functools.wraps` makes it."""
    original = HandlerItem.call

    @wraps(original)
    async def traced(*given: Any, **named: Any) -> Any:
        return await original(*given, **named)

    monkeypatch.setattr(HandlerItem, "call", traced)
    assert fingerprints.find_unknown(PIPELINE) == ["HandlerItem.call"]


async def test_an_unknown_function_of_fastdepends_means_its_arguments(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def asolve(self: Any, /, *args: Any, **options: Any) -> Any:
        seen.add("another asolve")
        return await original(self, *args, **options)

    original = CallModel.asolve
    seen = Seen()
    subscriber = await prepared(seen)
    monkeypatch.setattr(CallModel, "asolve", asolve)
    pipeline = subscriber._make_pipeline()
    assert pipeline.is_compiled
    assert "CallModel.asolve" in pipeline.arguments_reason
    assert await run_one(pipeline) is not None
    assert ("'another asolve'",) in seen.events
    assert len(warnings(seen)) == 1


def test_a_function_without_source_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    source = "async def call(self, /, message, _extra_middlewares): ..."
    names: dict[str, Any] = {}
    exec(source, names)
    monkeypatch.setattr(HandlerItem, "call", names["call"])
    assert fingerprints.find_unknown(PIPELINE) == ["HandlerItem.call"]


def test_a_function_that_is_gone_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(CallModel, "asolve")
    assert fingerprints.find_unknown(ARGUMENTS) == ["CallModel.asolve"]


def test_something_that_is_no_function_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CallModel, "asolve", object())
    assert fingerprints.find_unknown(ARGUMENTS) == ["CallModel.asolve"]


def documented() -> Any:
    def add(a: int, b: str) -> int:
        """Documented."""
        # with a comment
        return a + len(b)

    return add


def bare() -> Any:
    def add(a, b): return a + len(b)  # type: ignore[no-untyped-def]  # fmt: skip

    return add


def different() -> Any:
    def add(a: int, b: str) -> int:
        return a - len(b)

    return add


def test_layout_annotations_and_docstrings_do_not_matter() -> None:
    one, same, other = (
        fingerprints._compute_digest(make()) for make in (documented, bare, different)
    )
    assert one == same
    assert one != other

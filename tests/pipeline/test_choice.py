"""Which pipeline a subscriber has: why, from when on, and how that is told."""

import logging
from typing import Any

import pytest
from faststream import BaseMiddleware

from faststream_sqlbroker import SqlBroker
from faststream_sqlbroker.exceptions import SetupError
from faststream_sqlbroker.subscriber.pipeline import fingerprints
from faststream_sqlbroker.subscriber.pipeline.choice import MAX_CHANGES, VARIABLE, HandlerPipeline
from faststream_sqlbroker.subscriber.usecase import QueueSubscriber
from tests.pipeline.axes import HEADERS
from tests.pipeline.running import row_of
from tests.pipeline.seen import Log, Seen


async def prepared(seen: Seen, *, filter: Any = None, **options: Any) -> Any:  # noqa: A002
    """A subscriber whose handler only notes its call."""
    broker = SqlBroker("sqlite+aiosqlite:///unused.db", logger=Log(seen))
    subscriber: Any = broker.subscriber("q", **options)

    async def handler(body: dict) -> None:  # type: ignore[type-arg]
        seen.add("handler", body)

    subscriber(handler, **({} if filter is None else {"filter": filter}))
    await broker.connect()
    await subscriber.prepare()
    subscriber.running = True
    seen.events.clear()
    return subscriber


async def run_one(pipeline: HandlerPipeline) -> Any:
    """The outcome of one message."""
    row = row_of(1, b"{}", HEADERS)
    await pipeline.run(row)
    return row.outcome


def debug_lines(seen: Seen) -> list[str]:
    return [event[2] for event in seen.events if event[:2] == ("'log'", str(logging.DEBUG))]


async def test_the_log_tells_which_pipeline() -> None:
    seen = Seen()
    subscriber = await prepared(seen)
    pipeline = subscriber._make_pipeline()
    assert pipeline.is_compiled
    assert debug_lines(seen) == ["'compiled pipeline'"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"filter": lambda _message: True}, "a filter"),
        ({"parser": lambda row, original: original(row)}, "a custom parser"),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else "",
)
async def test_what_is_not_known_is_left_to_faststream(
    options: dict[str, Any], reason: str
) -> None:
    seen = Seen()
    subscriber = await prepared(seen, **options)
    pipeline = subscriber._make_pipeline()
    assert not pipeline.is_compiled
    assert debug_lines(seen) == [f'"FastStream\'s own pipeline: {reason}"']
    assert await run_one(pipeline) is not None


async def test_two_handlers_are_left_to_faststream() -> None:
    subscriber = await prepared(Seen(), filter=lambda _message: False)

    @subscriber
    async def second(body: dict) -> None: ...  # type: ignore[type-arg]

    await subscriber.prepare()
    pipeline = subscriber._make_pipeline()
    assert pipeline.describe() == "FastStream's own pipeline: several handlers"
    assert await run_one(pipeline) is not None


async def test_the_variable_rules_it_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "generic")
    pipeline = (await prepared(Seen()))._make_pipeline()
    assert pipeline.describe() == "FastStream's own pipeline: SQLBROKER_PIPELINE=generic"


async def test_the_variable_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    subscriber = await prepared(Seen())
    monkeypatch.setenv(VARIABLE, "fast")
    with pytest.raises(SetupError, match="SQLBROKER_PIPELINE must be 'compiled'"):
        subscriber._make_pipeline()
    with pytest.raises(SetupError, match="SQLBROKER_PIPELINE must be 'compiled'"):
        await SqlBroker("sqlite+aiosqlite:///unused.db").connect()


@pytest.mark.parametrize("on", ["the class", "the subscriber"])
@pytest.mark.parametrize("name", ["consume", "process_message", "get_log_context"])
async def test_a_replaced_method_is_called(
    on: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen()
    subscriber = await prepared(seen)
    original = getattr(subscriber, name)

    def replacement(*args: Any) -> Any:
        seen.add("replaced")
        return original(args[-1])

    monkeypatch.setattr(QueueSubscriber if on == "the class" else subscriber, name, replacement)
    pipeline = subscriber._make_pipeline()
    assert not pipeline.is_compiled
    assert await run_one(pipeline) is not None
    assert ("'replaced'",) in seen.events


async def test_a_method_replaced_while_it_runs_is_called() -> None:
    seen = Seen()
    subscriber = await prepared(seen)
    pipeline = subscriber._make_pipeline()

    async def process_message(_row: Any) -> None:
        seen.add("replaced")

    subscriber.process_message = process_message
    await run_one(pipeline)
    assert seen.events[-1] == ("'replaced'",)


async def test_it_is_compiled_anew_after_a_change() -> None:
    seen = Seen()
    subscriber = await prepared(seen)
    pipeline = subscriber._make_pipeline()

    class Watch(BaseMiddleware):
        async def on_receive(self) -> None:
            seen.add("middleware")

    subscriber._outer_config.add_middleware(Watch)
    await run_one(pipeline)
    assert pipeline.is_compiled
    assert ("'middleware'",) in seen.events


async def test_what_changes_all_the_time_is_left_to_faststream() -> None:
    subscriber = await prepared(Seen())
    pipeline = subscriber._make_pipeline()
    for _ in range(MAX_CHANGES + 1):
        subscriber._build_fastdepends_model()
        assert await run_one(pipeline) is not None
    assert not pipeline.is_compiled or not pipeline._guard.is_unchanged()
    changes = pipeline._changes
    assert await run_one(pipeline) is not None
    assert pipeline._changes == changes == MAX_CHANGES


async def test_a_test_of_the_handler_does_not_end_it() -> None:
    subscriber = await prepared(Seen())
    pipeline = subscriber._make_pipeline()
    handler = subscriber.calls[0].handler
    handler.set_test()
    await run_one(pipeline)
    handler.mock.assert_called_once_with({})
    handler.reset_test()
    assert pipeline.is_compiled
    assert pipeline._guard.can_use_compiled()


def test_fingerprints_are_of_functions() -> None:
    assert all(
        digest for group in fingerprints.REPLACED for _, digest in fingerprints.iter_digests(group)
    )

"""The matrix sees a difference that is planted on purpose."""

from collections.abc import Callable
from typing import Any

import pytest

from faststream_sqlbroker.flow import own_context
from faststream_sqlbroker.subscriber.pipeline import choice, dependencies, dependency_models
from faststream_sqlbroker.subscriber.pipeline.acknowledging import Acknowledger
from faststream_sqlbroker.subscriber.pipeline.answers import AnswerPublisher
from faststream_sqlbroker.subscriber.pipeline.context import Scopes
from tests.pipeline.running import Case, compare
from tests.pipeline.test_matrix import FULL, combined, pairs

Plant = Callable[[pytest.MonkeyPatch], None]


def message_left_in_the_context(patch: pytest.MonkeyPatch) -> None:
    class Shared:
        """The caller's context, in place of a copy."""

        def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
            return function(*arguments)

    patch.setattr(own_context, "copy_context", Shared)


def error_of_the_outcome_lost(patch: pytest.MonkeyPatch) -> None:
    async def leave(self: Any, row: Any, message: Any, error: Any) -> bool:
        dealt_with = await original(self, row, message, error)
        outcome = getattr(row, "outcome", None)
        if getattr(outcome, "error", None) is not None:
            row.replace_outcome(type(outcome)())
        return dealt_with

    original = Acknowledger.finish
    patch.setattr(Acknowledger, "finish", leave)


def manual_is_acked(patch: pytest.MonkeyPatch) -> None:
    async def leave_handled(self: Any, row: Any, message: Any) -> None:
        await original(self, row, message)
        await self.ack(message)

    original = Acknowledger.finish_handled
    patch.setattr(Acknowledger, "finish_handled", leave_handled)


def answers_without_correlation(patch: pytest.MonkeyPatch) -> None:
    async def publish(self: Any, message: Any, *args: Any) -> None:
        message.correlation_id = "another"
        await original(self, message, *args)

    original = AnswerPublisher.publish
    patch.setattr(AnswerPublisher, "publish", publish)


def defaults_ignored(patch: pytest.MonkeyPatch) -> None:
    def fields(model: Any) -> Any:
        return tuple((parameter, name, None) for parameter, name, _ in original(model))

    original = dependency_models.get_context_fields
    patch.setattr(dependency_models, "get_context_fields", fields)


def dependencies_not_cached(patch: pytest.MonkeyPatch) -> None:
    async def solve(self: Any, known: Any, stack: Any, _cache: Any) -> Any:
        return await original(self, known, stack, {})

    original = dependencies._Dependency.solve
    patch.setattr(dependencies._Dependency, "solve", solve)


def changes_not_seen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(choice.Guard, "is_unchanged", lambda _self: True)


def dict_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dependency_models.Arguments, "build", lambda _self, values: dict(values))


def wrong_log_columns(patch: pytest.MonkeyPatch) -> None:
    def enter_message(self: Any, log_context: Any, message: Any) -> Any:
        return original(self, {**log_context, "queue": "another"}, message)

    original = Scopes.enter_message
    patch.setattr(Scopes, "enter_message", enter_message)


PLANTED: dict[str, tuple[Plant, str]] = {
    "message left in the context": (message_left_in_the_context, "bodies"),
    "error of the outcome lost": (error_of_the_outcome_lost, "errors and acks"),
    "MANUAL is acked": (manual_is_acked, "errors and acks"),
    "answers without correlation": (answers_without_correlation, "answers"),
    "defaults ignored": (defaults_ignored, "arguments"),
    "dependencies not cached": (dependencies_not_cached, "arguments"),
    "changes not seen": (changes_not_seen, "changes"),
    "arguments not validated": (dict_not_copied, "bodies"),
    "wrong log columns": (wrong_log_columns, "loggers"),
}
"""Each with the cases that have to notice it."""


@pytest.mark.parametrize("name", PLANTED)
async def test_a_planted_difference_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, group = PLANTED[name]
    plant(monkeypatch)
    assert await _differs(list(combined(FULL[group])))


@pytest.mark.parametrize("name", ["error of the outcome lost", "dependencies not cached"])
async def test_the_pairs_see_it_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant, _ = PLANTED[name]
    plant(monkeypatch)
    assert await _differs(pairs())


async def _differs(cases: list[Case]) -> bool:
    for case in cases:
        generic, compiled, _ = await compare(case)
        if generic != compiled:
            return True
    return False

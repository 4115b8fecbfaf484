"""How many rows wait for a worker, and how long their leases are."""

from typing import Any
from unittest.mock import Mock

import pytest

from faststream_sqlbroker.core.clock import Clock
from faststream_sqlbroker.flow.deliver.fetch import Fetcher
from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.prefetch import (
    HORIZON,
    MAX_PREFETCH_WAIT,
    MAX_REMEMBERED_RUNS,
    HandlerTimes,
    get_min_remaining,
    get_prefetch_lease,
)
from faststream_sqlbroker.flow.fleet.registration import Registration
from faststream_sqlbroker.subscriber.options import make_settings
from tests.clock import VirtualTime
from tests.unit.test_inflight import quiet, row

NOW = VirtualTime()
"""It stands still: how long this machine takes is no time of a handler."""


def taking(*seconds: float) -> HandlerTimes:
    times = HandlerTimes(Clock(NOW))
    for each in seconds:
        times.record_end(NOW.now - each, NOW.now)
    return times


def empty() -> Inflight:
    return Inflight(quiet, clock=Clock(NOW))


def fetcher(inflight: Inflight, **options: Any) -> Fetcher:
    settings = make_settings("q", options)
    member = Registration(settings, paused=False, on_change=lambda: None)
    return Fetcher(Mock(), inflight, settings, quiet, member)


def test_nothing_is_known_before_the_first_run_ends() -> None:
    assert HandlerTimes().count_upcoming_starts(4, 4) == 4
    assert HandlerTimes().count_upcoming_starts(4, 1) == 1
    assert HandlerTimes().count_upcoming_starts(4, 0) == 0


def test_slow_handlers_get_what_workers_start_within_the_horizon() -> None:
    assert taking(0.99).count_upcoming_starts(10, 0) == 2
    assert taking(0.99).count_upcoming_starts(10, 7) == 7, "free workers start more at once"
    assert taking(0.05).count_upcoming_starts(2, 0) == pytest.approx(8, abs=1)
    assert taking(30.0).count_upcoming_starts(4, 0) == 0


def test_one_slow_run_in_ten_counts_and_one_in_a_hundred_does_not() -> None:
    assert taking(*[0.001] * 9, 1.0, *[0.001] * 9, 1.0, 1.0).count_upcoming_starts(1, 0) == 0
    assert taking(*[0.001] * 99, 1.0).count_upcoming_starts(1, 0) >= 100


def test_only_the_last_runs_are_remembered() -> None:
    assert (
        taking(*[1.0] * MAX_REMEMBERED_RUNS, *[0.001] * MAX_REMEMBERED_RUNS).count_upcoming_starts(
            1, 0
        )
        >= 100
    )


def test_while_no_run_ends_nothing_is_fetched_ahead() -> None:
    times = taking(0.001)
    times.ended_at = NOW.now - HORIZON - 0.01
    assert times.count_upcoming_starts(4, 0) == 0
    assert times.count_upcoming_starts(4, 1) >= 100, "a worker is free"


@pytest.mark.parametrize(
    ("lease", "waiting", "least"), [(600.0, 20.0, 10.0), (20.0, 20.0, 10.0), (2.0, 2.0, 1.0)]
)
def test_the_lease_of_waiting_rows_is_never_the_longer_one(
    lease: float, waiting: float, least: float
) -> None:
    assert (get_prefetch_lease(lease), get_min_remaining(lease)) == (waiting, least)


def test_f4_stays_the_upper_bound() -> None:
    inflight = empty()
    inflight.times = taking(0.0001)
    assert fetcher(inflight).get_window() == 150
    assert fetcher(inflight, fetch_batch_size=10, max_not_processed_factor=3).get_window() == 30
    assert (
        fetcher(
            inflight, fetch_batch_size=4, max_not_processed_factor=1, max_workers=50
        ).get_window()
        == 4
    )


def test_a_fetch_is_enough_until_the_next() -> None:
    inflight = empty()
    inflight.times = taking(1.0)
    inflight.running = 2
    assert fetcher(inflight, max_workers=2).get_window() == 0
    assert fetcher(
        inflight, max_workers=2, min_fetch_interval=10, max_fetch_interval=10
    ).get_window() in {19, 20}


def test_a_batch_handler_is_given_whole_batches() -> None:
    inflight = empty()
    ours = fetcher(
        inflight, batch=True, max_workers=2, fetch_batch_size=10, max_not_processed_factor=9
    )
    assert ours.get_window() == 20
    inflight.running = 2
    assert ours.get_window() == 0
    inflight.times = taking(0.1)
    assert ours.get_window() in {30, 40}, "four runs begin within the horizon"
    inflight.times = taking(10.0)
    assert ours.get_window() == 0


def test_more_is_asked_for_when_half_of_the_window_is_left() -> None:
    inflight = empty()
    ours = fetcher(inflight, max_workers=100, fetch_batch_size=100)
    inflight.times = taking(0.99)
    inflight.running = 100
    inflight.add([row(n) for n in range(11)])
    assert ours._choose_limit() == 0
    assert inflight.low_water == 10
    inflight.waiting.get_nowait()
    assert ours._choose_limit() == 10
    inflight.times = taking(0.0001)
    assert ours._choose_limit() == 100
    assert inflight.low_water == 100, "half of fetch_batch_size is worth a claim"


def test_rows_that_wait_for_too_long_are_given_back() -> None:
    inflight = empty()
    old = row(1)
    young = row(2)
    inflight.add([old, young])
    old.claimed_monotonic -= MAX_PREFETCH_WAIT + 0.01
    assert inflight.get_stale_wait(MAX_PREFETCH_WAIT) == 0.0
    inflight.release_stale(MAX_PREFETCH_WAIT)
    assert list(inflight.waiting.items) == [young]
    [given_back] = inflight.queued
    assert (given_back.id, given_back.uncharge) == (1, True)
    assert inflight.get_stale_wait(MAX_PREFETCH_WAIT) == MAX_PREFETCH_WAIT


def test_the_shorter_lease_is_renewed_by_its_own_length() -> None:
    inflight = empty()
    waits = row(1)
    runs = row(2)
    waits.prefetched = True
    inflight.add([waits, runs])
    assert inflight.list_due_for_renewal(600.0, None) == []
    for each in (waits, runs):
        each.renewed_monotonic -= 7.0
    assert inflight.list_due_for_renewal(600.0, None) == [waits]
    runs.renewed_monotonic -= 194.0
    assert inflight.list_due_for_renewal(600.0, None) == [waits, runs]

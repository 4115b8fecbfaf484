"""How claims are sized by bytes, and what of a claim is kept."""

from typing import Any

import pytest

from faststream_sqlbroker.flow.deliver.inflight import Inflight
from faststream_sqlbroker.flow.deliver.prefetch import LOG_INTERVAL, PrefetchLimiter
from faststream_sqlbroker.subscriber.options import make_settings
from tests.unit.test_inflight import quiet, row


def sized(*sizes: int) -> list[Any]:
    rows = []
    for number, size in enumerate(sizes, 1):
        one = row(number)
        one.payload = bytes(size)
        rows.append(one)
    return rows


def limited(limit: int | None = 1_000, **options: Any) -> PrefetchLimiter:
    return PrefetchLimiter(make_settings("q", {"max_prefetch_bytes": limit, **options}))


def test_small_bodies_are_not_counted() -> None:
    one = limited(100_000)
    one.record_claim(sized(*[100] * 100))
    assert not one.is_counting
    assert one.max_rows == float("inf")


def test_without_a_limit_nothing_is_counted() -> None:
    for one in (limited(None), PrefetchLimiter()):
        one.record_claim(sized(10**6, 10**6))
        assert not one.is_counting


def test_as_many_are_claimed_as_fit_by_their_mean() -> None:
    one = limited()
    one.record_claim(sized(100, 300))
    assert one.is_counting
    assert one.max_rows == 5
    assert one.get_capacity((0, 0)) == 5
    assert one.get_capacity((300, 1)) == 3
    assert one.get_capacity((950, 4)) == 0


def test_one_fits_whatever_its_size() -> None:
    one = limited()
    one.record_claim(sized(10**6))
    assert one.max_rows == 1
    assert one.get_capacity((0, 0)) == 1
    assert one.count_fitting(sized(10**6, 1), (0, 0)) == 1


def test_the_mean_follows_what_comes() -> None:
    one = limited()
    one.record_claim(sized(10**6))
    for _ in range(20):
        one.record_claim(sized(10))
    assert one.max_rows > 10
    one.record_claim(sized(*[0] * 5))
    assert one.get_capacity((0, 0)) >= 1


@pytest.mark.parametrize(
    ("sizes", "held", "kept"),
    [
        ((500, 500), (0, 0), 2),
        ((500, 501), (0, 0), 1),
        ((1, 1, 5_000, 1), (0, 0), 2),
        ((400, 400), (400, 2), 1),
        ((1_000,), (0, 0), 1),
    ],
)
def test_what_fits_is_kept_up_to_the_first_that_does_not(
    sizes: tuple[int, ...], held: tuple[int, int], kept: int
) -> None:
    one = limited()
    assert one.count_fitting(sized(*sizes), held) == kept
    assert not one.is_draining


def test_one_that_is_too_large_waits_until_nothing_else_does() -> None:
    one = limited()
    one.record_claim(sized(10))
    one.record_claim(sized(5_000, 1))
    assert one.count_fitting(sized(5_000, 1), (10, 1)) == 0
    assert one.is_draining
    assert one.get_capacity((10, 1)) == 0
    assert one.get_capacity((0, 0)) >= 1
    assert one.count_fitting(sized(5_000, 1), (0, 0)) == 1
    assert not one.is_draining


def test_the_log_tells_of_it_once_in_ten_minutes() -> None:
    lines: list[str] = []
    one = limited()

    def log(_level: int, text: str, **_: Any) -> None:
        lines.append(text)

    for now in (0.0, 1.0, LOG_INTERVAL - 1, LOG_INTERVAL + 1):
        one.log_surplus(log, sized(9, 8), now)
    assert [line.partition(" ")[0] for line in lines] == ["2", "6"]
    assert "max_prefetch_bytes=1000 would wait" in lines[0]
    assert "message 1 of queue 'q' with 9 bytes" in lines[0]


def test_surplus_is_given_back_without_its_body() -> None:
    inflight = Inflight(quiet)
    rows = sized(5, 6, 7)
    inflight.add(rows)
    assert inflight.measure_prefetched() == (18, 3)
    inflight.release_surplus(rows[1:])
    assert inflight.measure_prefetched() == (5, 1)
    assert [len(each.payload) for each in rows] == [5, 0, 0]
    assert len(inflight.queued) == 2

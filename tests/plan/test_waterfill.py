from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidInput
from penstock.plan import waterfill_widths


def test_figure_5() -> None:
    assert waterfill_widths([4, 4, 12, 30], devices=5, max_sharing=2, max_devices=4) == [0.5, 0.5, 1, 3]


def test_widths_come_in_the_order_of_the_runtimes() -> None:
    assert waterfill_widths([30, 4, 12, 4], devices=5, max_sharing=2, max_devices=4) == [3, 0.5, 1, 0.5]


def test_the_widest_is_capped() -> None:
    assert waterfill_widths([1, 99], devices=100, max_sharing=3, max_devices=8) == [1, 8]
    assert waterfill_widths([7], devices=5) == [5]


def test_integers_of_an_array_do_not_overflow() -> None:
    # Milliseconds: one and three hours, a quarter and three quarters of 1000 devices. 1000 hours don't fit 32 bits.
    hours = np.array([3_600_000, 10_800_000], dtype=np.int32)
    assert waterfill_widths(hours, devices=1000) == [250, 750]  # type: ignore[arg-type]


def test_rounding_does_not_lose_a_device() -> None:
    # 0.1 + 0.2 + 0.3 in floating point: the shares are exactly 1, 2 and 3 of 6.
    assert waterfill_widths([0.1, 0.2, 0.3], devices=6) == [1, 2, 3]
    assert waterfill_widths([1 / 3] * 3, devices=3, max_sharing=4) == [1, 1, 1]


def test_nothing_and_unknown_runtimes() -> None:
    assert waterfill_widths([], devices=3) == []
    assert waterfill_widths([0, 0], devices=4, max_sharing=2) == [2, 2]


@given(
    st.lists(st.floats(1e-3, 1e6), min_size=1, max_size=40),
    st.integers(1, 64),
    st.integers(1, 8),
    st.integers(1, 16),
)
def test_laws(runtimes: list[float], devices: int, c: int, d: int) -> None:
    widths = waterfill_widths(runtimes, devices=devices, max_sharing=c, max_devices=d)
    total = math.fsum(runtimes)
    assert len(widths) == len(runtimes)
    assert sum(width for width in widths if width >= 1 and c > 1) <= devices
    for runtime, width in zip(runtimes, widths, strict=True):
        share = runtime / total * devices
        assert width == 1 / c or (width == int(width) and 1 <= width <= d)
        if width > 1 / c:
            assert width <= share + 1e-6
            assert width == d or width > share - 1 - 1e-6
        else:
            assert share < 1 + 1e-6 or d == 1 or c == 1
    # Longer trials never get less.
    ordered = sorted(zip(runtimes, widths, strict=True))
    assert [width for _, width in ordered] == sorted(width for _, width in ordered)


@pytest.mark.parametrize(
    ("runtimes", "kwargs", "named"),
    [
        ([1, -2], {"devices": 2}, "-2"),
        ([math.inf], {"devices": 2}, "inf"),
        ([1], {"devices": 0}, "devices"),
        ([1], {"devices": 2, "max_sharing": 0}, "max_sharing"),
        ([1], {"devices": 2, "max_devices": 0}, "max_devices"),
        ([1], {"devices": 2.5}, "devices"),
        ([1], {"devices": math.nan}, "devices is nan"),
        ([1], {"devices": math.inf}, "devices is inf"),
        ([1], {"devices": "x"}, "devices is 'x'"),
        (["a"], {"devices": 2}, "'a'.*seconds"),
        (None, {"devices": 2}, "None.*seconds"),
    ],
)
def test_wrong_input_is_named(runtimes: list[float], kwargs: dict[str, int], named: str) -> None:
    with pytest.raises(InvalidInput, match=named):
        waterfill_widths(runtimes, **kwargs)

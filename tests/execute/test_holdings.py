"""Shares of devices that are held."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core import Share
from penstock.execute._holdings import EPSILON, Holdings


def test_what_is_held_is_not_free() -> None:
    held = Holdings()
    assert held.free("a") == 1.0
    held.hold([Share("a", 0.75), Share("b")])
    assert (held.free("a"), held.free("b"), held.free("c")) == (0.25, 0.0, 1.0)
    assert held.fits([Share("a", 0.25), Share("c")])
    assert not held.fits([Share("a", 0.5)])
    assert not held.fits([Share("c"), Share("b", 0.1)])
    held.release([Share("a", 0.75), Share("b")])
    assert (held.free("a"), held.free("b")) == (1.0, 1.0)


def test_an_exclusive_share_keeps_the_rest() -> None:
    held = Holdings()
    held.hold([Share("a", 0.5)])
    assert not held.fits([Share("a", 0.25)], exclusive=True)
    held.release([Share("a", 0.5)])
    held.hold([Share("a", 0.5)], exclusive=True)
    assert held.free("a") == 0.0
    assert not held.fits([Share("a", 0.25)])
    held.release([Share("a", 0.5)], exclusive=True)
    assert held.fits([Share("a")], exclusive=True)


@given(st.lists(st.integers(2, 12), min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_fractions_given_back_in_any_order_leave_the_whole(parts: list[int], random) -> None:  # type: ignore[no-untyped-def]
    """Exactly, whatever rounding their sums have had; and n parts of 1/n fit."""
    held = Holdings()
    for count in parts:
        shares = [Share("a", 1 / count)] * count
        for share in shares:
            assert held.fits([share])
            held.hold([share])
        assert held.free("a") == 0.0
        assert not held.fits([Share("a", 10 * EPSILON)])
        random.shuffle(shares)
        for share in shares:
            held.release([share])
        assert held.free("a") == 1.0

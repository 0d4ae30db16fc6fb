from __future__ import annotations

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import InvalidInput
from penstock.predict import (
    Overhead,
    OverheadProfile,
    Probe,
    fit_scaling,
    fit_sharing,
    marginal_benefit,
)


def test_runtime_model_of_section_4_2_2() -> None:
    overhead = Overhead(alpha=1.3, beta=1.1, max_sharing=3, max_devices=4)
    assert overhead.runtime_s(10, 1) == 10
    assert overhead.runtime_s(10, 1 / 2) == pytest.approx(13.0)
    assert overhead.runtime_s(10, 1 / 3) == pytest.approx(16.9)
    assert overhead.runtime_s(10, 4) == pytest.approx(10 / 4 * 1.331)


def test_marginal_benefit_by_hand() -> None:
    benefit = marginal_benefit({1: [10.0], 2: [12.0, 14.0], 3: [19.5, 19.5, 19.5]})
    assert benefit[2] == pytest.approx(1 - 1 / 2 * 13 / 10)
    assert benefit[3] == pytest.approx(1 - 2 / 3 * 19.5 / 13)


def test_marginal_benefit_of_free_packing_and_of_taking_turns() -> None:
    free = marginal_benefit({p: [7.0] * p for p in range(1, 6)})
    assert free == pytest.approx({p: 1 / p for p in range(2, 6)})
    turns = marginal_benefit({p: [7.0 * p] * p for p in range(1, 6)})
    assert turns == pytest.approx(dict.fromkeys(range(2, 6), 0.0), abs=1e-12)


def test_tenfold_packing_overhead_switches_packing_off() -> None:
    """Fluid 6.4.2: with 10x overhead, intra-GPU packing is effectively disabled."""
    c, alpha = fit_sharing({1: [1.0], 2: [10.0, 10.0]})
    assert c == 1
    assert alpha == pytest.approx(10)
    assert Overhead(alpha=alpha, max_sharing=4).within_bounds().max_sharing == 1


@given(st.floats(1, 1.99), st.floats(0.01, 100), st.floats(0, 0.2))
def test_sharing_fit_finds_its_own_model(alpha: float, alone_s: float, threshold: float) -> None:
    times = {p: [alone_s * alpha ** (p - 1)] * p for p in range(1, 9)}
    c, fitted = fit_sharing(times, threshold=threshold)
    assert fitted == pytest.approx(alpha)
    assert c == 1 or alpha < c / (c - 1)  # Lemma 4
    # The marginal benefit of the model is 1 - alpha (p-1)/p: c is its last p above the threshold.
    above = [p for p in range(2, 9) if 1 - alpha * (p - 1) / p > threshold + 1e-9]
    surely_not = [p for p in range(2, 9) if 1 - alpha * (p - 1) / p < threshold - 1e-9]
    assert c >= max(above, default=1)
    assert c < min(surely_not, default=9)


@given(st.floats(1, 1.6), st.floats(0.01, 100))
def test_scaling_fit_finds_its_own_model(beta: float, alone_s: float) -> None:
    times = {w: [alone_s / w * beta ** (w - 1)] for w in (1, 2, 4, 8)}
    d, fitted = fit_scaling(times, threshold=0.0)
    assert fitted == pytest.approx(beta)
    assert d == 1 or beta < d / (d - 1)  # every device up to d still helps
    runtimes = [times[w][0] for w in (1, 2, 4, 8) if w <= d]
    assert runtimes == sorted(runtimes, reverse=True)


def test_scaling_stops_where_it_stops_to_help() -> None:
    d, _ = fit_scaling({1: [10.0], 2: [5.5], 4: [3.4], 8: [3.6], 16: [2.0]})
    assert d == 4  # what 16 devices might do behind a step that loses is not trusted


def test_noise_does_not_make_overheads_negative() -> None:
    assert fit_sharing({1: [1.0], 2: [0.98, 0.97]})[1] == 1.0
    assert fit_scaling({1: [1.0], 2: [0.45]})[1] == 1.0


@given(st.floats(1, 3), st.floats(1, 2), st.integers(1, 12), st.integers(1, 12))
def test_within_bounds_leaves_only_what_pays(alpha: float, beta: float, c: int, d: int) -> None:
    overhead = Overhead(alpha, beta, c, d).within_bounds()
    per_trial = [overhead.runtime_s(1, 1 / p) / p for p in range(1, overhead.max_sharing + 1)]
    assert all(a > b for a, b in pairwise(per_trial))
    spread = [overhead.runtime_s(1, w) for w in range(1, overhead.max_devices + 1)]
    assert all(a > b for a, b in pairwise(spread))


class _Machine:
    """A device on which packing costs ``alpha``, with room for ``room`` trials, and scaling costs ``beta``."""

    def __init__(self, alpha: float, beta: float, room: int = 99) -> None:
        self.alpha, self.beta, self.room = alpha, beta, room
        self.asked: list[Probe] = []

    def measure(self, probe: Probe) -> list[float]:
        self.asked.append(probe)
        if probe.kind == "sharing":
            if probe.count > self.room:
                return []
            return [0.2 * self.alpha ** (probe.count - 1)] * probe.count
        return [0.2 / probe.count * self.beta ** (probe.count - 1)]


def _profile(machine: _Machine, **limits: int) -> OverheadProfile:
    profile = OverheadProfile(**limits)
    while (probe := profile.wants) is not None:
        profile.tell(probe, machine.measure(probe))
    return profile


def test_profile_measures_until_one_more_does_not_pay() -> None:
    machine = _Machine(alpha=1.3, beta=1.02)
    result = _profile(machine, max_sharing=8, max_devices=8).result
    # 1 - 1.3 (p-1)/p: 0.35 for p=2, 0.133 for p=3, 0.025 for p=4: below the threshold of 0.05.
    assert [probe.count for probe in machine.asked if probe.kind == "sharing"] == [1, 2, 3, 4]
    assert [probe.count for probe in machine.asked if probe.kind == "scaling"] == [2, 4, 8]
    assert (result.max_sharing, result.max_devices) == (3, 8)
    assert result.alpha == pytest.approx(1.3)
    assert result.beta == pytest.approx(1.02)


def test_profile_on_one_device_does_not_try_two() -> None:
    machine = _Machine(alpha=2.5, beta=1.0)
    result = _profile(machine, max_sharing=8, max_devices=1).result
    assert [probe.kind for probe in machine.asked] == ["sharing", "sharing"]
    assert (result.max_sharing, result.max_devices) == (1, 1)


def test_profile_takes_out_of_memory_for_a_limit() -> None:
    machine = _Machine(alpha=1.05, beta=1.0, room=3)
    result = _profile(machine, max_sharing=8, max_devices=1).result
    assert result.max_sharing == 3
    assert [probe.count for probe in machine.asked] == [1, 2, 3, 4]


def test_profile_is_kept_as_json() -> None:
    profile = _profile(_Machine(alpha=1.2, beta=1.1), max_sharing=4, max_devices=4)
    kept = json.loads(json.dumps(profile.to_json()))
    assert Overhead.from_json(kept["result"]) == profile.result
    assert kept["sharing_s"]["1"] == [0.2]


def test_profile_refuses_answers_it_did_not_ask_for() -> None:
    profile = OverheadProfile()
    with pytest.raises(InvalidInput, match="told of"):
        profile.tell(Probe("sharing", 3), [1.0])
    with pytest.raises(InvalidInput, match="nothing to profile"):
        profile.tell(Probe("sharing", 1), [])


@pytest.mark.parametrize(
    "wrong",
    [
        {"alpha": 0.9},
        {"beta": math.nan},
        {"max_sharing": 0},
        {"max_devices": 1.5},
        {"epsilon_s": -1},
        {"alpha": "a"},
        {"beta": None},
        {"max_sharing": "2"},
        {"max_devices": math.nan},
        {"epsilon_s": "a"},
    ],
)
def test_wrong_overheads_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(InvalidInput, match=next(iter(wrong))):
        Overhead(**wrong)  # type: ignore[arg-type]


def test_wrong_profiles_are_named() -> None:
    with pytest.raises(InvalidInput, match="needs the time for 1"):
        marginal_benefit({2: [1.0]})
    with pytest.raises(InvalidInput, match="without gaps"):
        marginal_benefit({1: [1.0], 3: [1.0]})
    with pytest.raises(InvalidInput, match="positive seconds"):
        fit_scaling({1: [0.0]})

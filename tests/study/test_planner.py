"""Studies with the Fluid planner: all end sooner, with the same results, and no device is given out twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import penstock as pk
from penstock.core import (
    Device,
    Ended,
    Event,
    Free,
    Placement,
    Reported,
    Resize,
    Resized,
    Share,
    Started,
    Submitted,
)
from penstock.core.errors import InvalidInput, Unsupported
from penstock.execute import Job
from penstock.study._ledger import Foresight, Ledger
from penstock.testing.executors import Drive, segment
from penstock.testing.journals import events_in

OVERHEAD = pk.Overhead(alpha=1.3, beta=1.05, max_sharing=2, max_devices=8, epsilon_s=3.0)
SPACE = pk.Space(x=pk.Float(0, 1), y=pk.Float(0, 1))
SCHEDULERS: dict[str, Callable[[], tuple[Any, Any]]] = {
    "Grid": lambda: (pk.Full(), pk.Grid({"x": 5, "y": 5})),
    "Random": lambda: (pk.Full(trials=30), pk.Random()),
    "PBT": lambda: (pk.PBT(population=6, max_epochs=20, interval=5), pk.Random()),
    "Halving": lambda: (pk.Halving(max_epochs=27), pk.Random()),
    "Hyperband": lambda: (pk.Hyperband(max_epochs=27), pk.Random()),
    "synchronous BOHB": lambda: (pk.Hyperband(max_epochs=27), pk.TPE()),
    "ASHA": lambda: (pk.ASHA(max_epochs=27, trials=60), pk.Random()),
    "BOHB": lambda: (pk.ASHA(max_epochs=27, trials=60, brackets=3), pk.TPE()),
}


def curve(run: pk.Run) -> None:
    state = run.load() or {"seen": []}
    for epoch in run.epochs(20):
        state["seen"].append(epoch)
        run.save(state)
        run.report(loss=run.config["x"] + 1 / len(state["seen"]))


def long(run: pk.Run) -> None:
    run.load()
    for epoch in run.epochs(81):
        run.save(None)
        run.report(loss=run.config["x"] + 1 / (epoch + 1))


def seconds(config: Any, epoch: int) -> float:
    return 30 * (0.4 + float(config["y"]))


def study(scheduler: Any, sampler: Any, planner: Any = None, devices: int = 8, **options: Any) -> pk.Study:
    overhead = options.pop("overhead", OVERHEAD)
    executor = pk.Simulated(devices, seconds=seconds, overhead=overhead, failure=options.pop("failure", None))
    return pk.Study(
        options.pop("work", curve),
        SPACE,
        minimize="loss",
        scheduler=scheduler,
        sampler=sampler,
        executor=executor,
        planner=planner,
        store=options.pop("store", False),
        seed=options.pop("seed", 3),
        **options,
    )


def check_devices(events: list[Event], devices: int) -> float:
    """Nobody gets what another has, by the journal; returns the device-seconds held."""
    held: dict[int, tuple[Share, ...]] = {}
    total, last = 0.0, 0.0
    for event in events:
        total += (event.time_s - last) * sum(s.fraction for shares in held.values() for s in shares)
        last = event.time_s
        if isinstance(event, Started | Resized):
            held[event.trial] = event.shares
        elif isinstance(event, Ended):
            held.pop(event.trial, None)
        used: dict[str, float] = {}
        for shares in held.values():
            for share in shares:
                used[share.device] = used.get(share.device, 0.0) + share.fraction
        assert len(used) <= devices
        # Within one instant ends and starts are journalled trial by trial: count when time has passed.
        if used and event is not events[-1] and events[events.index(event) + 1].time_s > event.time_s:
            assert max(used.values()) <= 1 + 1e-9, f"at {event.time_s}: {used}"
    return total


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_ends_sooner_with_the_same_trials(name: str) -> None:
    plain = study(*SCHEDULERS[name]()).run()
    fluid = study(*SCHEDULERS[name](), pk.Fluid()).run()
    fluid.state.validate()
    assert fluid.state.counts.ended == fluid.state.counts.total
    assert plain.state.spent_s > 1.05 * fluid.state.spent_s
    if name in ("Grid", "Random", "Halving", "PBT"):  # decided by results alone, whenever they come
        results = [{r.id: (r.epoch, dict(r.metrics)) for r in s.trials} for s in (plain, fluid)]
        assert results[0] == results[1]


@pytest.mark.parametrize("name", ["Hyperband", "ASHA", "PBT"])
def test_devices_are_never_given_out_twice(name: str, tmp_path: Path) -> None:
    done = study(*SCHEDULERS[name](), pk.Fluid(), store=tmp_path / "s.db").run()
    events = events_in(tmp_path / "s.db")
    used = check_devices(events, 8)
    assert 0 < used <= 8 * done.state.spent_s * (1 + 1e-9)
    widths = [sum(s.fraction for s in e.shares) for e in events if isinstance(e, Started | Resized)]
    assert any(isinstance(event, Resized) for event in events)
    assert max(widths) > 1
    assert min(widths) == (
        1.0 if name == "PBT" else 0.5
    )  # a population of 6 on 8 devices has no need to share


def test_failures_are_retried_and_nobody_is_lost(tmp_path: Path) -> None:
    def failure(trial: int, epoch: int, attempt: int) -> bool:
        return attempt == 0 and (7 * trial + epoch) % 11 == 3

    done = study(*SCHEDULERS["Halving"](), pk.Fluid(), store=tmp_path / "s.db", failure=failure).run()
    plain = study(*SCHEDULERS["Halving"]()).run()
    assert sum(record.retries for record in done.trials) > 3
    assert {r.id: r.metrics for r in done.trials} == {r.id: r.metrics for r in plain.trials}
    check_devices(events_in(tmp_path / "s.db"), 8)


def test_a_resumed_study_ends_as_one_that_was_not_interrupted(tmp_path: Path) -> None:
    whole = study(*SCHEDULERS["Halving"](), pk.Fluid()).run()
    cut = tmp_path / "cut.db"
    half_s = whole.state.spent_s / 2
    study(*SCHEDULERS["Halving"](), pk.Fluid(), store=cut, budget=pk.Budget(time_s=half_s)).run()
    resumed = pk.Study.load(cut, budget=pk.Budget())
    assert isinstance(resumed.planner, pk.Fluid)
    resumed.run()
    assert {r.id: r.metrics for r in resumed.trials} == {r.id: r.metrics for r in whole.trials}


def test_a_bracket_that_a_budget_cuts_short_is_resumed_while_all_devices_are_busy(tmp_path: Path) -> None:
    """That the trials have run out is asked while a device is idle, and the rung made of what there is when none is."""
    path = tmp_path / "s.db"
    scheduler = pk.Hyperband(max_epochs=9, eta=2)
    options: Any = {"budget": pk.Budget(trials=10), "devices": 4, "seed": 2}
    done = study(scheduler, pk.Walk(), pk.Fluid(concurrency=4), store=path, **options).run()
    events = events_in(path)
    cut_short = next(e for e in events if isinstance(e, Submitted) and e.label == "bracket 2, rung 1")
    assert not cut_short.want
    assert pk.Study.load(path).run().state.counts.total == done.state.counts.total == 10
    assert events_in(path) == events


def test_concurrency_is_free_of_the_number_of_devices(tmp_path: Path) -> None:
    study(*SCHEDULERS["ASHA"](), pk.Fluid(concurrency=16), devices=4, store=tmp_path / "s.db").run()
    events = events_in(tmp_path / "s.db")
    assert next(e.want for e in events if isinstance(e, Submitted)) == 16
    under_way, most = set[int](), 0
    for event in events:
        if isinstance(event, Submitted):
            under_way |= {s.trial.id for s in event.segments}
        elif isinstance(event, Ended):
            under_way.discard(event.trial)
        most = max(most, len(under_way))
    assert most == 16


def test_the_best_result_comes_sooner_too_and_not_only_the_end(tmp_path: Path) -> None:
    """Finalists are not held up by the new trials of later brackets (Fluid 6.1: the time to reach a target)."""
    sharing = replace(OVERHEAD, alpha=1.6)  # together two take 0.8 of the time, but each 1.6 times as long
    gains = []
    for seed in range(5):
        found = []
        for planner in (None, pk.Fluid()):
            path = tmp_path / f"{seed} {planner}.db"
            options: dict[str, Any] = {"store": path, "seed": seed, "overhead": sharing, "work": long}
            done = study(pk.Hyperband(max_epochs=81), pk.Random(), planner, **options).run()
            best = done.best.metrics["loss"]
            reports = [e for e in events_in(path) if isinstance(e, Reported)]
            found.append((best, next(e.time_s for e in reports if e.metrics["loss"] == best)))
        (plain, plain_s), (ours, ours_s) = found
        assert ours == plain  # rungs are compared as a whole: what is trained is the same
        gains.append(plain_s / ours_s)
    assert median(gains) > 1.15


def test_brackets_begin_early_enough_to_fill_shared_devices(tmp_path: Path) -> None:
    """While a rung waits for its last trials, the next brackets fill its places; what is trained stays the same."""

    def run(name: str, concurrency: int | None) -> tuple[float, pk.Study]:
        path = tmp_path / f"{name} {concurrency}.db"
        done = study(*SCHEDULERS[name](), pk.Fluid(concurrency=concurrency), store=path).run()
        return next(
            e.time_s for e in events_in(path) if isinstance(e, Submitted) and "bracket 0" in e.label
        ), done

    narrow_s, narrow = run("Hyperband", 16)  # one for each place
    ahead_s, ahead = run("Hyperband", None)
    assert ahead_s < narrow_s
    assert ahead.state.spent_s < 1.02 * narrow.state.spent_s  # places are hardly ever empty in either
    assert {r.id: (r.epoch, r.metrics) for r in ahead.trials} == {
        r.id: (r.epoch, r.metrics) for r in narrow.trials
    }
    # A sampler that learns would know less when it proposes.
    assert run("synchronous BOHB", None)[0] == run("synchronous BOHB", 16)[0]


@pytest.mark.parametrize(("name", "ahead"), [("synchronous BOHB", 8), ("BOHB", 4)])
def test_a_sampler_that_learns_shares_devices_where_rungs_are_compared_as_a_whole(
    name: str, ahead: int, tmp_path: Path
) -> None:
    study(*SCHEDULERS[name](), pk.Fluid(), devices=4, store=tmp_path / "s.db").run()
    first = next(event for event in events_in(tmp_path / "s.db") if isinstance(event, Submitted))
    assert (first.want, len(first.segments)) == (ahead, ahead)


def test_idle_devices_go_to_the_best_trial_or_evenly(tmp_path: Path) -> None:
    # Two trials of the same length on 5 devices, of which one can take 4; by Hydro's rule the better one does.
    overhead = pk.Overhead(beta=1.05, max_devices=4, epsilon_s=1.0)
    widths: dict[str, dict[bool, int]] = {}
    for idle in ("best", "even"):
        done = pk.Study(
            curve,
            SPACE,
            minimize="loss",
            scheduler=pk.Halving(max_epochs=20, min_epochs=20, trials=2),
            sampler=pk.Random(),
            executor=pk.Simulated(5, seconds=30.0, overhead=overhead),
            planner=pk.Fluid(idle=idle),
            store=tmp_path / f"{idle}.db",
            seed=3,
        ).run()
        assert done.best is not None
        widths[idle] = {}
        for event in events_in(tmp_path / f"{idle}.db"):
            if isinstance(event, Started | Resized):
                widths[idle][event.trial == done.best.id] = len(event.shares)
            elif isinstance(event, Ended):
                break
    assert widths["best"] == {True: 4, False: 1}
    assert sorted(widths["even"].values()) == [2, 3]


def test_without_overheads_to_know_simulated_trials_run_one_by_one() -> None:
    fluid = study(*SCHEDULERS["Halving"](), pk.Fluid(), overhead=None).run()
    plain = study(*SCHEDULERS["Halving"](), overhead=None).run()
    assert fluid.state.spent_s <= plain.state.spent_s


# --- the simulated executor's model ------------------------------------------------------------------------------


def drive(tmp_path: Path, **options: Any) -> tuple[pk.Simulated, Drive]:
    executor = pk.Simulated(4, seconds=10.0, **options)
    executor.open(Job(curve, tmp_path, ("loss",)))
    return executor, Drive(executor)


def trial(number: int, until: int = 4) -> Any:
    return segment(number, until=until, config={"x": 0.5, "y": 0.5})


def test_trials_on_one_device_slow_each_other_down_while_they_share_it(tmp_path: Path) -> None:
    _, run = drive(tmp_path, overhead=OVERHEAD)
    for number, until in ((0, 1), (1, 4)):
        run.submit([trial(number, until)])
        run.start([trial(number, until)], [Share("sim:0", 0.5)])
    run.finish(2)
    # Both at 1/1.3 of their speed until the shorter one has ended after 13 s; 30 s alone are left of the other.
    assert run.ended(0).time_s == pytest.approx(13.0)
    assert run.ended(1).time_s == pytest.approx(13.0 + 30.0)


def test_a_wide_trial_is_as_fast_as_the_model_says(tmp_path: Path) -> None:
    _, run = drive(tmp_path, overhead=OVERHEAD)
    run.submit([trial(0)])
    run.start([trial(0)], [Share(f"sim:{i}") for i in range(3)], max_devices=8)
    run.finish(1)
    assert run.ended(0).time_s == pytest.approx(40 / 3 * 1.05**2)  # Fluid 4.2.2: h(1)/w * beta^(w-1)


def test_a_change_takes_place_at_the_next_report_and_costs_epsilon(tmp_path: Path) -> None:
    executor, run = drive(tmp_path, overhead=OVERHEAD)
    run.submit([trial(0)])
    run.start([trial(0)], [Share("sim:0")], max_devices=8)
    run.poll(5.0)
    executor.resize(0, [Share("sim:0"), Share("sim:1")])
    assert {free.device.id for free in executor.free()} == {"sim:2", "sim:3"}
    run.finish(1)
    changes = [event for event in run.events if isinstance(event, Resized)]
    assert changes == [Resized(10.0, 0, (Share("sim:0"), Share("sim:1")))]
    assert run.ended(0).time_s == pytest.approx(10 + 3 + 30 / 2 * 1.05)
    assert len(executor.free()) == 4


def test_a_trial_that_ends_before_it_changes_gives_back_what_was_kept_for_it(tmp_path: Path) -> None:
    executor, run = drive(tmp_path, overhead=OVERHEAD)
    run.submit([trial(0, 1)])
    run.start([trial(0, 1)], [Share("sim:0")], max_devices=8)
    run.poll(0)
    executor.resize(0, [Share("sim:0"), Share("sim:1")])
    run.finish(1)
    assert not any(isinstance(event, Resized) for event in run.events)
    assert [free.fraction for free in executor.free()] == [1.0] * 4


def test_resize_needs_an_executor_that_can(tmp_path: Path) -> None:
    executor, run = drive(tmp_path)
    run.submit([trial(0)])
    run.start([trial(0)], [Share("sim:0")])
    with pytest.raises(Unsupported, match="can't change"):
        executor.resize(0, [Share("sim:1")])


# --- what the engine foresees ------------------------------------------------------------------------------------


def test_the_ledger_learns_alone_times_from_trials_that_share_and_spread() -> None:
    # By the model: two on one device from 0 to 13 s (10 s of work each), then the second alone.
    ledger = Ledger(Foresight(OVERHEAD))
    for number in (0, 1):
        ledger.started(Started(0.0, number, shares=(Share("a", 0.5),)), trial(number))
    ledger.reported(Reported(13.0, 0, 1, {}, 13.0), {})
    ledger.ended(Ended(13.0, 0, pk.TrialStatus.PAUSED, 1))
    ledger.reported(Reported(18.0, 1, 1, {}, 18.0), {})
    assert ledger.times.epoch_s(0, {}) == pytest.approx(10.0)
    assert ledger.times.epoch_s(1, {}) == pytest.approx(10.0 + 5.0)
    # Then over two devices: 2 / 1.05 times as fast, after epsilon.
    ledger.resized(Resized(18.0, 1, (Share("a"), Share("b"))))
    ledger.reported(Reported(18.0 + 3.0 + 15 / 2 * 1.05, 1, 2, {}, 3.0 + 15 / 2 * 1.05), {})
    assert ledger.times.epoch_s(1, {}) == pytest.approx(15.0)
    (running,) = ledger.running(28.875 + 2.0, lambda trials: {})
    assert running.remaining_s == pytest.approx(2 * 15.0 - 2.0 * 2 / 1.05)


def test_the_ledger_tells_of_a_later_change_when_its_epoch_has_come() -> None:
    ledger = Ledger(Foresight(OVERHEAD))
    shares = (Share("a"), Share("b"), Share("c"))
    placement = Placement((trial(0),), shares, max_devices=8)
    ledger.launched([placement])
    ledger.asked([Resize(placement, shares[:1], at_epoch=3)])
    # From the start on, a planner sees what it will give up, and leaves it alone.
    (running,) = ledger.running(0.0, lambda trials: {})
    assert running.changing
    assert running.placement.shares == shares[:1]
    assert running.leaving == shares[1:]
    # The executor took other devices: it keeps the first of those.
    taken = (Share("d"), Share("e"), Share("f"))
    ledger.started(Started(0.0, 0, shares=taken), trial(0))
    ledger.reported(Reported(3.0, 0, 1, {}, 3.0), {})
    assert ledger.take_due() == ()
    ledger.reported(Reported(6.0, 0, 2, {}, 3.0), {})
    assert ledger.take_due() == (Resize(placement, taken[:1], at_epoch=3),)
    assert ledger.take_due() == ()
    ledger.resized(Resized(9.0, 0, taken[:1]))
    (running,) = ledger.running(9.0, lambda trials: {})
    assert not running.changing
    # At the end of the first epoch: told at once, and again when it has started.
    first = Placement((trial(2),), shares, max_devices=8)
    ledger.launched([first])
    ledger.asked([Resize(first, shares[:1], at_epoch=1)])
    assert ledger.take_due() == (Resize(first, shares[:1], at_epoch=1),)
    ledger.started(Started(9.0, 2, shares=shares), trial(2))
    assert ledger.take_due() == (Resize(first, shares[:1], at_epoch=1),)
    # Of one that ends before, nothing is heard.
    ledger.launched([Placement((trial(1),), shares, max_devices=8)])
    ledger.asked([Resize(Placement((trial(1),), shares), shares[:1], at_epoch=4)])
    ledger.started(Started(9.0, 1, shares=shares), trial(1))
    ledger.ended(Ended(10.0, 1, pk.TrialStatus.STOPPED, 1))
    assert ledger.take_due() == ()


def test_the_ledger_keeps_parts_free_for_those_who_will_share() -> None:
    ledger = Ledger(Foresight(OVERHEAD))
    host = Placement((trial(0),), (Share("a", 0.5), Share("b")), max_devices=8)
    other = Placement((trial(1),), (Share("c"), Share("d")), max_devices=8)
    ledger.launched([host, other])
    ledger.asked([Resize(host, host.shares[:1], 3), Resize(other, host.shares[:1], 3)])
    free = [Free(Device("a"), 0.5), Free(Device("e"))]
    assert [item.fraction for item in ledger.unclaimed(free)] == [0.0, 1.0]
    # The host's executor took other devices: so will the other one.
    ledger.started(Started(0.0, 0, shares=(Share("f", 0.5), Share("g"))), trial(0))
    ledger.started(Started(0.0, 1, shares=other.shares), trial(1))
    assert [item.fraction for item in ledger.unclaimed(free)] == [0.5, 1.0]
    there = [Free(Device("f"), 0.5)]
    assert [item.fraction for item in ledger.unclaimed(there)] == [0.0]
    for epoch in (1, 2):
        ledger.reported(Reported(3.0 * epoch, 1, epoch, {}, 3.0), {})
    (due,) = ledger.take_due()
    assert due.shares == (Share("f", 0.5),)
    assert ledger.unclaimed(there) == tuple(there)  # now its executor keeps it


@pytest.mark.parametrize(("devices", "sharing"), [(16, 1), (18, 2)])
def test_trials_hand_devices_over_at_the_epoch_that_was_chosen(
    devices: int, sharing: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A rung of trials known from the one before: who was to narrow at the end of an epoch did so then."""
    asked: set[tuple[int, int]] = set()
    parts: list[float] = []
    ask = Ledger.asked

    def listen(ledger: Ledger, resizes: Sequence[Resize]) -> None:
        asked.update((r.placement.segments[0].trial.id, r.at_epoch) for r in resizes if r.at_epoch)
        parts.extend(r.shares[0].fraction for r in resizes if r.at_epoch)
        ask(ledger, resizes)

    monkeypatch.setattr(Ledger, "asked", listen)
    options: dict[str, Any] = {"devices": devices, "overhead": pk.Overhead(1.28, 1.05, sharing, 8, 3.0)}
    scheduler = pk.Halving(max_epochs=81)
    study(scheduler, pk.Random(), pk.Fluid(), store=tmp_path / "s.db", **options).run()
    events = events_in(tmp_path / "s.db")
    check_devices(events, devices)
    assert len(asked) > 2
    assert (min(parts) < 1) == (sharing > 1)  # some went on in a part of a device
    epoch: dict[int, int] = {}
    wide: dict[int, int] = {}
    narrowed = set()
    for event in events:
        if isinstance(event, Reported):
            epoch[event.trial] = event.epoch
        elif isinstance(event, Started | Resized):
            if isinstance(event, Resized) and len(event.shares) < wide[event.trial]:
                narrowed.add((event.trial, epoch[event.trial]))
            wide[event.trial] = len(event.shares)
    assert narrowed == asked


def test_what_fluid_refuses() -> None:
    with pytest.raises(InvalidInput, match="concurrency"):
        pk.Fluid(concurrency=0)
    with pytest.raises(InvalidInput, match="overhead"):
        pk.Fluid(overhead=1.3)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="idle"):
        pk.Fluid(idle="worst")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="not both"):
        pk.Simulated(2, seconds=lambda config, epoch, placement: 1.0, overhead=OVERHEAD)

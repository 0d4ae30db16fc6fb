"""Every view against what brute force finds in the same events, or against another component's answer."""

import itertools
import json
import math
import random
import statistics

import optuna
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

import penstock as pk
from penstock.core import (
    Ended,
    Event,
    Measurement,
    Noted,
    Reported,
    Resized,
    Segment,
    SessionOpened,
    Share,
    Source,
    Started,
    Submitted,
    Trial,
    TrialStatus,
)
from penstock.core.errors import InvalidInput
from penstock.energy import LimitProfile, PowerProfile, savings
from penstock.goal import Goal, power_w
from penstock.recurring import RecurringJob
from penstock.report import read_journal, sm2_report, views
from penstock.report._journal import fold_journal
from penstock.report._timeline import timeline
from penstock.report.views import Folded, Options
from penstock.report.views._style import log_or_linear
from penstock.report.views._thin import scattered, spaced, thinned
from penstock.space import Float
from penstock.store import open_store
from penstock.testing.journals import SPACE, folded_of, journal

SEEDS = range(12)


def values_of(events: list[Event]) -> dict[int, list[tuple[int, float]]]:
    """By trial, epochs and losses, from the events alone: the first report of an epoch counts."""
    found: dict[int, list[tuple[int, float]]] = {}
    for event in events:
        if isinstance(event, Reported):
            line = found.setdefault(event.trial, [])
            if not line or event.epoch > line[-1][0]:
                line.append((event.epoch, event.metrics["loss"]))
    return found


def failed_in(events: list[Event]) -> set[int]:
    return {
        e.trial for e in events if isinstance(e, Ended) and e.status is TrialStatus.FAILED and not e.retry
    }


def strict_json(data: object) -> None:
    json.dumps(data, allow_nan=False)


# --- overview ---


@pytest.mark.parametrize("seed", SEEDS)
def test_overview_adds_up(seed):
    events = journal(seed)
    told = views.overview(folded_of(events, price_per_kwh=0.3, region="DE"))
    strict_json(told)
    joules = [e.energy.joules for e in events if isinstance(e, Reported) and e.energy is not None]
    assert told["energy"]["value"] == pytest.approx(math.fsum(joules))
    assert told["co2"]["value"] == pytest.approx(math.fsum(joules) / 3.6e6 * 381)
    assert told["cost"]["value"] == pytest.approx(math.fsum(joules) / 3.6e6 * 0.3)
    assert told["energy"]["source"] == "estimated"
    assert told["trials"]["total"] == 20 == sum(n for s, n in told["trials"].items() if s != "total")
    assert told["trials"]["failed"] == len(failed_in(events))
    assert told["epochs"] == sum(map(len, values_of(events).values()))
    ends = {t: line[-1][1] for t, line in values_of(events).items() if t not in failed_in(events)}
    best = min((v, t) for t, v in ends.items() if math.isfinite(v))
    assert (told["best"]["metrics"]["loss"], told["best"]["trial"]) == best


def made(trial: int, config: dict[str, object] | None = None, until: int = 8) -> Submitted:
    return Submitted(0.0, 1, (Segment(Trial(trial, config or {}, 0), until=until),))


def ran(trial: int, epochs: int, begin: float = 0.0, joules: float = 10.0, device: str = "d") -> list[Event]:
    energy = Measurement(joules, "J", Source.MEASURED)
    return [
        Started(begin, trial, 0, (Share(device),)),
        *(
            Reported(begin + e, trial, e, {"loss": 1.0 / e + trial}, 2.0, energy)
            for e in range(1, epochs + 1)
        ),
    ]


def test_saved_is_what_stopped_trials_would_have_drawn_up_to_the_longest():
    # By hand: trials of 8, 2 and 4 epochs at 10 J and 2 s each; 6 + 4 epochs were not run.
    events: list[Event] = [SessionOpened(0.0)]
    for trial, epochs in ((0, 8), (1, 2), (2, 4)):
        status = TrialStatus.COMPLETED if epochs == 8 else TrialStatus.STOPPED
        events += [made(trial), *ran(trial, epochs), Ended(20.0, trial, status, epochs)]
    saved = views.overview(folded_of(events))["saved"]
    assert saved["epochs"] == 10
    assert saved["energy"]["value"] == pytest.approx(100.0)
    assert saved["energy"]["source"] == "estimated"  # measured epochs, but a guess at those that did not run
    assert saved["train_s"] == pytest.approx(20.0)
    assert saved["energy_part"] == pytest.approx(100 / 240)
    assert "3 trials" in saved["baseline"]
    assert "8 epochs" in saved["baseline"]


def test_saved_counts_epochs_however_seldom_trials_report():
    # As above, but each trial reports at every second epoch only, of what two epochs drew.
    energy = Measurement(20.0, "J", Source.MEASURED)
    events: list[Event] = [SessionOpened(0.0)]
    for trial, epochs in ((0, 8), (1, 2), (2, 4)):
        status = TrialStatus.COMPLETED if epochs == 8 else TrialStatus.STOPPED
        events += [made(trial), Started(0.0, trial, 0, (Share("d"),))]
        events += [Reported(1.0, trial, e, {"loss": 1.0}, 4.0, energy) for e in range(2, epochs + 1, 2)]
        events.append(Ended(20.0, trial, status, epochs))
    saved = views.overview(folded_of(events))["saved"]
    assert saved["epochs"] == 10
    assert saved["energy"]["value"] == pytest.approx(100.0)
    assert saved["train_s"] == pytest.approx(20.0)


def test_the_energy_of_an_epoch_is_not_that_of_a_report():
    # Reports after epochs 2, 3 and 6, of what was drawn since the one before.
    events: list[Event] = [SessionOpened(0.0), made(0), Started(0.0, 0, 0, (Share("d"),))]
    for epoch, joules in ((2, 20.0), (3, 11.0), (6, 36.0)):
        energy = Measurement(joules, "J", Source.MEASURED)
        events.append(Reported(float(epoch), 0, epoch, {"loss": 1.0}, 1.0, energy))
    told = views.trial(folded_of(events), 0)
    assert told["curves"]["energy_j"] == {"epoch": [2, 3, 6], "value": [10.0, 11.0, 12.0]}
    assert told["energy"]["value"] == pytest.approx(67.0)


def test_watts_now_are_those_of_running_trials():
    events = [SessionOpened(0.0), made(0), *ran(0, 3, joules=100.0), made(1), *ran(1, 2, joules=30.0)]
    assert views.overview(folded_of(events))["watts"]["value"] == pytest.approx(100 / 2 + 30 / 2)
    events.append(Ended(9.0, 0, TrialStatus.COMPLETED, 3))
    told = views.overview(folded_of(events))["watts"]
    assert told["value"] == pytest.approx(15.0)
    assert told["source"] == "measured"


def test_eta_extrapolates_the_tightest_end():
    events = [SessionOpened(0.0), made(0), *ran(0, 4), Ended(10.0, 0, TrialStatus.COMPLETED, 4)]
    scheduler = {"name": "Full", "trials": 5}
    assert views.overview(folded_of(events, scheduler=scheduler))["eta"]["seconds"] == pytest.approx(40.0)
    told = views.overview(folded_of(events, scheduler=scheduler, budget={"time_s": 30.0}))["eta"]
    assert told["seconds"] == pytest.approx(20.0)
    assert "time_s" in told["because"]
    assert views.overview(folded_of(events))["eta"] is None


# --- history ---


@pytest.mark.parametrize("seed", SEEDS)
def test_history_is_the_running_best_of_reports(seed):
    events = journal(seed)
    told = views.history(folded_of(events), Options(x="epochs"))
    strict_json(told)
    best, expected, epochs, seen = math.inf, [], 0, {}
    for event in events:
        if isinstance(event, Reported) and event.epoch > seen.get(event.trial, 0):
            seen[event.trial] = event.epoch
            epochs += 1
            if event.metrics["loss"] < best:
                best = event.metrics["loss"]
                expected.append((epochs, best))
    steps = list(zip(told["best"]["x"], told["best"]["y"], strict=True))
    assert steps[:-1] == expected
    assert steps[-1][1] == best
    latest = {t: line[-1][1] for t, line in values_of(events).items()}
    shown = dict(zip(told["points"]["trial"], told["points"]["y"], strict=True))
    assert shown == {t: v if math.isfinite(v) else None for t, v in latest.items()}


@pytest.mark.parametrize("x", ["epochs", "trial"])
@pytest.mark.parametrize("seed", SEEDS)
def test_what_violates_a_limit_never_was_the_best(seed, x):
    events = journal(seed)
    latest = {trial: line[-1][1] for trial, line in values_of(events).items()}
    over = sorted(latest, key=latest.__getitem__)[::2]  # the best one, and every other
    notes = [Noted(events[-1].time_s, "limit_violated", {"limit": "power_w <= 90 W"}, t) for t in over]
    limits = [(power_w <= 90).to_json()]
    told = views.history(folded_of([*events, *notes], limits=limits), Options(x=x))
    strict_json(told)
    best, expected, epochs, seen = math.inf, [], 0, {}
    for event in events:
        if isinstance(event, Reported) and event.epoch > seen.get(event.trial, 0):
            seen[event.trial] = event.epoch
            epochs += 1
            if event.trial not in over and event.metrics["loss"] < best:
                best = event.metrics["loss"]
                expected.append((epochs, best))
    if x == "trial":
        expected, best = [], math.inf
        for trial in sorted(set(latest) - set(over) - failed_in(events)):
            if latest[trial] < best:
                best = latest[trial]
                expected.append((trial, best))
    steps = list(zip(told["best"]["x"], told["best"]["y"], strict=True))
    assert steps[:-1] == expected
    assert set(told["points"]["trial"]) == set(latest)  # they are shown


def test_history_by_trial_is_the_best_up_to_each_number(simulated, events):
    told = views.history(simulated, Options(x="trial"))
    latest = {t: line[-1][1] for t, line in values_of(events).items()}
    for x, y in zip(told["best"]["x"], told["best"]["y"], strict=True):
        assert y == min(value for trial, value in latest.items() if trial <= x)


def test_history_turns_round_for_maximize():
    events: list[Event] = [SessionOpened(0.0)]
    for trial, value in enumerate((1.0, 3.0, 2.0)):
        events += [made(trial), Started(trial, trial), Reported(trial + 0.5, trial, 1, {"acc": value})]
    folded = Folded.of("m", Goal.of(None, "acc"), events)
    assert views.history(folded)["best"]["y"] == [1.0, 3.0, 3.0]
    with pytest.raises(InvalidInput, match="objectives"):
        views.history(folded, Options(objective=1))
    with pytest.raises(InvalidInput, match="x takes one of"):
        views.history(folded, Options(x="nonsense"))


# --- curves ---


@pytest.mark.parametrize("seed", SEEDS)
def test_curves_are_the_reports(seed):
    events = journal(seed)
    told = views.curves(folded_of(events))
    strict_json(told)
    shown = {c["trial"]: list(zip(c["epoch"], c["value"], strict=True)) for c in told["curves"]}
    assert shown == {
        trial: [(e, v if math.isfinite(v) else None) for e, v in line]
        for trial, line in values_of(events).items()
    }
    assert told["metrics"] == ["loss", "other"]


def test_a_few_curves_of_many_contain_the_best_and_the_selected(simulated, events):
    latest = {t: line[-1][1] for t, line in values_of(events).items()}
    order = sorted(latest, key=latest.__getitem__)
    told = views.curves(simulated, Options(limit=12, trial=order[30]))
    shown = {c["trial"] for c in told["curves"]}
    assert set(order[:5]) <= shown
    assert {order[30], order[-1]} <= shown
    assert len(shown) <= 13
    entries = [trace for trace in views.curves_figure(told)["data"] if trace["showlegend"]]
    assert len(entries) <= 4  # no wall of legend
    with pytest.raises(InvalidInput, match="reports 'nonsense'"):
        views.curves(simulated, Options(metric="nonsense"))


def test_a_trial_with_a_single_report_is_seen_beside_curves(simulated):
    """Most of what a scheduler stops early has one: a line through one point shows nothing."""
    told = views.curves(simulated)
    single = {curve["trial"] for curve in told["curves"] if len(curve["epoch"]) == 1}
    assert single
    marked = [trace for trace in views.curves_figure(told)["data"] if "markers" in trace["mode"]]
    assert {t for trace in marked for t in trace["customdata"]} == single


@given(st.lists(st.none() | st.floats(-1e6, 1e6), max_size=400), st.integers(2, 60))
def test_thinning_keeps_extremes_and_ends(values, most):
    kept = thinned(values, most)
    assert kept == sorted(set(kept))
    known = [v for v in values if v is not None]
    if len(values) <= most:
        assert kept == list(range(len(values)))
    else:
        assert len(kept) <= max(most, 4)
        assert {0, len(values) - 1} <= set(kept)
    if known:
        shown = [values[i] for i in kept if values[i] is not None]
        assert (min(shown), max(shown)) == (min(known), max(known))


@given(st.integers(0, 2000), st.integers(1, 100))
def test_spaced_is_even(count, most):
    kept = spaced(count, most)
    assert len(kept) == min(count, most)
    gaps = [b - a for a, b in itertools.pairwise(kept)]
    assert not gaps or max(gaps) - min(gaps) <= 1
    assert not count or kept[-1] == count - 1


@given(st.integers(1, 300), st.integers(8, 60), st.integers(0, 10**6), st.booleans())
def test_a_thinned_cloud_keeps_whatever_lies_apart(count, most, seed, log):
    draw = random.Random(seed)
    cloud = [(-draw.random(), -draw.random(), draw.choice("ab")) for _ in range(count)]
    apart = [(100.0, 100.0, "a"), (100.0, -0.5, "a"), (-0.5, 100.0, "b"), (100.0, 100.0, "b")]
    points = cloud + apart
    if log:  # a logarithmic axis: the same distances over a hundred decades
        points = [(10.0**x, 10.0**y, kind) for x, y, kind in points]
    kept = scattered([*points, (None, 1.0, "a"), (1.0, math.nan, "a")], most)
    assert kept == sorted(set(kept))
    assert len(kept) <= most
    if len(points) + 2 <= most:
        assert len(kept) == len(points) + 2
    else:
        assert set(range(count, count + 4)) <= set(kept)
        assert not {count + 4, count + 5} & set(kept)
        assert {points[i][2] for i in kept if i < count} == {kind for _, _, kind in cloud}


# --- table ---


@pytest.mark.parametrize("seed", SEEDS)
def test_table_sorts_and_filters_like_python(seed):
    folded = folded_of(journal(seed))
    plain = {
        record.id: {**record.config, "status": record.status.value, "loss": record.metrics.get("loss")}
        for record in folded.state.trials.values()
    }
    told = views.table(folded, Options(sort="lr", descending=True, filter="lr < 0.01, act = relu"))
    strict_json(told)
    rows = [dict(zip(told["columns"], row, strict=True)) for row in told["rows"]]
    expected = [t for t, row in plain.items() if row["lr"] < 0.01 and row["act"] == "relu"]
    assert [row["trial"] for row in rows] == sorted(expected, key=lambda t: -plain[t]["lr"])
    assert (told["total"], told["matching"]) == (20, len(expected))
    for sign, test in (("=", str.__eq__), ("!=", str.__ne__)):
        found = views.table(folded, Options(filter=f"status {sign} failed"))["matching"]
        assert found == sum(test(row["status"], "failed") for row in plain.values())


def test_table_puts_what_has_no_value_last_either_way(simulated):
    events = [SessionOpened(0.0), *(made(t, {"x": t} if t != 1 else {}) for t in range(3))]
    folded = folded_of(events)
    for descending, expected in ((False, [0, 2, 1]), (True, [2, 0, 1])):
        told = views.table(folded, Options(sort="x", descending=descending))
        assert [row[0] for row in told["rows"]] == expected
    for bad in (Options(sort="nonsense"), Options(filter="nonsense < 3")):
        with pytest.raises(InvalidInput, match="column"):
            views.table(folded, bad)


def test_pages_make_up_the_whole_table(simulated):
    whole = views.table(simulated, Options(sort="loss", limit=1000))["rows"]
    pages = [
        views.table(simulated, Options(sort="loss", limit=7, offset=at))["rows"] for at in range(0, 70, 7)
    ]
    assert [row for page in pages for row in page] == whole
    assert len(whole) == 60


# --- Pareto ---


@pytest.mark.parametrize("seed", SEEDS)
def test_pareto_front_by_brute_force(seed):
    events = journal(seed)
    folded = folded_of(events)
    told = views.pareto(folded)
    strict_json(told)
    points = {}
    for trial, line in values_of(events).items():
        all_mine = [e for e in events if isinstance(e, Reported) and e.trial == trial]
        mine = list(
            {e.epoch: e for e in reversed(all_mine)}.values()
        )  # an epoch that was run again counts once
        joules = [e.energy.joules for e in mine if e.energy is not None]
        if trial not in failed_in(events) and math.isfinite(line[-1][1]) and joules:
            points[trial] = (line[-1][1], math.fsum(joules), math.fsum(e.train_s for e in mine))
    front = {
        a
        for a in points
        if not any(
            all(x <= y + 1e-12 for x, y in zip(points[b], points[a], strict=True)) and points[b] != points[a]
            for b in points
        )
    }
    assert set(told["front"]) == front
    assert {p["trial"] for p in told["points"]} == set(points)


# --- importance ---


def test_importance_is_that_of_optuna_on_the_same_trials():
    draw = random.Random(0)
    events: list[Event] = [SessionOpened(0.0)]
    trials = []
    for trial in range(60):
        x, y, act = draw.random(), draw.randint(1, 64), draw.choice(["relu", "tanh"])
        value = 10 * x + 0.01 * y + (2.0 if act == "tanh" else 0.0)
        config = {"lr": x + 1e-3, "width": y, "act": act, "fixed": 3}
        trials.append((config, value))
        events += [made(trial, config), Started(trial, trial), Reported(trial, trial, 1, {"loss": value})]
    told = views.importance(views.importance_input(folded_of(events)))
    strict_json(told)
    assert next(iter(told["importance"])) == "lr"
    assert list(told["importance"])[-1] == "width"
    assert sum(told["importance"].values()) == pytest.approx(1.0)
    assert told["left_out"] == ["fixed"]
    assert told["method"] == "fANOVA"

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study()
    lows = [config["lr"] for config, _ in trials]
    widths = [config["width"] for config, _ in trials]
    spaces = {
        "lr": optuna.distributions.FloatDistribution(min(lows), max(lows), log=True),
        "width": optuna.distributions.IntDistribution(min(widths), max(widths)),
        "act": optuna.distributions.CategoricalDistribution(["relu", "tanh"]),
    }
    for config, value in trials:
        params = {name: config[name] for name in spaces}
        study.add_trial(optuna.trial.create_trial(params=params, distributions=spaces, value=value))
    theirs = optuna.importance.get_param_importances(study)
    assert list(theirs) == list(told["importance"])
    assert told["importance"]["lr"] == pytest.approx(theirs["lr"], abs=0.1)


def test_importance_says_when_it_can_not_tell():
    told = views.importance(views.importance_input(folded_of([SessionOpened(0.0), made(0), *ran(0, 2)])))
    assert "at least" in told["reason"]
    assert not views.importance_figure(told)["data"]


# --- parallel coordinates ---


@pytest.mark.parametrize("seed", SEEDS)
def test_heights_are_those_of_the_domain(seed):
    events = journal(seed)
    folded = folded_of(events)
    told = views.parallel(folded)
    strict_json(told)
    names = [axis["name"] for axis in told["axes"]]
    domain = Float(1e-4, 1.0, log=True)
    for line in told["lines"]:
        config = folded.state.trials[line["trial"]].config
        heights = dict(zip(names, line["heights"], strict=True))
        assert heights["lr"] == pytest.approx(domain.to_unit(config["lr"]), abs=1e-9)
        assert heights["act"] == (0.25 if config["act"] == "relu" else 0.75)
        assert (heights["momentum"] is None) == ("momentum" not in config)
        assert heights["width"] == pytest.approx((config["width"] - 1) / 63)
    ranks = [line["rank"] for line in told["lines"]]
    assert [line["value"] for line in told["lines"]] == sorted(line["value"] for line in told["lines"])
    assert ranks == sorted(ranks)


# --- devices ---


@pytest.mark.parametrize("seed", SEEDS)
def test_devices_by_asking_at_random_moments(seed):
    events = journal(seed)
    folded = folded_of(events)
    told = views.devices(folded)
    strict_json(told)
    first = events[0].time_s
    spans: list[tuple[str, float, float, int]] = []
    open_at: dict[int, Started] = {}
    sessions: list[list[float]] = []
    for event in events:
        if isinstance(event, SessionOpened):
            sessions.append([event.time_s, event.time_s])
        if isinstance(event, Started):
            open_at[event.trial] = event
        if isinstance(event, Ended) and event.trial in open_at:
            start = open_at.pop(event.trial)
            spans += [(s.device, start.time_s, event.time_s, event.trial) for s in start.shares]
        sessions[-1][1] = max(sessions[-1][1], event.time_s)
    draw = random.Random(seed)
    for row in told["devices"]:
        name = row["device"]
        bars = [bar for bar in told["bars"] if bar["device"] == name]
        for _ in range(200):
            at = draw.uniform(0, told["span_s"])
            running = {t for d, a, b, t in spans if d == name and a < at + first < b}
            assert {
                b["trial"] for b in bars if b["kind"] != "idle" and b["begin_s"] < at < b["end_s"]
            } == running
            idle = any(b["kind"] == "idle" and b["begin_s"] < at < b["end_s"] for b in bars)
            in_session = any(a < at + first < b for a, b in sessions)
            assert idle == (in_session and not running)
        inside = sum(b - a for d, a, b, _ in spans if d == name)  # one at a time in these journals
        assert row["busy_s"] == pytest.approx(inside)
        assert row["utilisation"] == pytest.approx(inside / sum(b - a for a, b in sessions))


def test_kinds_of_bars():
    events: list[Event] = [
        SessionOpened(0.0),
        *(made(t) for t in range(5)),
        Started(0.0, 0, 0, (Share("a"),)),
        Started(0.0, 1, 0, (Share("b", 0.5),)),
        Started(0.0, 2, 0, (Share("c"), Share("d"))),
        Started(0.0, 3, 0, (Share("e"),), 0, (3, 4)),
        Resized(5.0, 2, (Share("c"),)),
        *(Ended(9.0, t, TrialStatus.COMPLETED, 1) for t in range(4)),
    ]
    told = views.devices(folded_of(events))
    kinds = {(bar["device"], bar["kind"], bar["begin_s"], bar["end_s"]) for bar in told["bars"]}
    assert kinds == {
        ("a", "alone", 0.0, 9.0),
        ("b", "packed", 0.0, 9.0),
        ("c", "spread", 0.0, 5.0),
        ("d", "spread", 0.0, 5.0),
        ("c", "alone", 5.0, 9.0),
        ("d", "idle", 5.0, 9.0),
        ("e", "fused", 0.0, 9.0),
    }


def test_shares_of_a_device_lie_side_by_side():
    events: list[Event] = [SessionOpened(0.0), *(made(t) for t in range(4))]
    for trial, (begin, share) in enumerate(((0.0, 0.5), (1.0, 0.25), (2.0, 0.25), (6.0, 0.5))):
        events.append(Started(begin, trial, 0, (Share("a", share),)))
        if trial == 2:
            events.append(Ended(5.0, 0, TrialStatus.COMPLETED, 1))
    bars = views.devices(folded_of(events))["bars"]
    assert {bar["trial"]: bar["offset"] for bar in bars if bar["kind"] == "packed"} == {
        0: 0.0,
        1: 0.5,
        2: 0.75,
        3: 0.0,
    }


def test_devices_agree_with_the_timeline(simulated, events):
    told = timeline(events)
    ours = views.devices(simulated)
    assert [row["device"] for row in ours["devices"]] == list(told.devices)
    assert sum(row["busy_s"] for row in ours["devices"]) == pytest.approx(told.busy_s)
    assert sum(row["work_s"] for row in ours["devices"]) == pytest.approx(told.device_s)
    assert ours["span_s"] == pytest.approx(told.makespan_s)


def test_many_short_bars_are_drawn_as_few_that_cover_the_same():
    events: list[Event] = [SessionOpened(0.0)]
    for trial in range(5000):
        begin = trial * 1.0
        events += [
            made(trial),
            Started(begin, trial, 0, (Share("a"),)),
            Ended(begin + 0.99, trial, TrialStatus.COMPLETED, 1),
        ]
    told = views.devices(folded_of(events))
    busy = [bar for bar in told["bars"] if bar["kind"] == "alone"]
    assert told["joined"]
    assert len(told["bars"]) <= 1500
    assert sum(bar["trials"] for bar in busy) == 5000
    assert min(b["begin_s"] for b in busy) == 0.0
    assert max(b["end_s"] for b in busy) == pytest.approx(4999.99)


# --- power limits ---


def test_power_profiles_agree_with_the_savings_of_the_energy_room():
    seen = [
        LimitProfile(w, power, rate)
        for w, power, rate in ((250.0, 240.0, 10.0), (150.0, 145.0, 9.0), (100.0, 98.0, 6.0))
    ]
    profile = PowerProfile("V100", 1, 250.0, tuple(seen))
    data = {
        "device": "V100",
        "gpus": 1,
        "batch_size": 64,
        "limit_w": 150.0,
        "highest_w": 250.0,
        "profile": [[s.limit_w, s.power_w, s.throughput] for s in seen],
    }
    told = views.power(folded_of([SessionOpened(0.0), Noted(1.0, "power_profile", data)]))
    assert [point["limit_w"] for point in told["profiles"][0]["points"]] == [100.0, 150.0, 250.0]
    for point, one in zip(told["profiles"][0]["points"], reversed(seen), strict=True):
        energy_saved, time_saved = savings(profile, one)
        assert 1 - point["energy"] == pytest.approx(energy_saved)
        assert 1 - point["time"] == pytest.approx(time_saved)
    assert len(views.power_figure(told)["data"]) == 2


# --- recurring ---


def test_recurring_history_and_beliefs(tmp_path):
    path = tmp_path / "r.db"
    draw = random.Random(1)
    with RecurringJob(
        "nightly", batch_sizes=[16, 32, 64], store=path, limits_w=[100.0, 200.0], policy="zeus", eta=0.25
    ) as job:
        costs: dict[int, list[float]] = {}
        runs = []
        for _ in range(14):
            decision = job.decide()
            energy_j, time_s = draw.uniform(900, 1100), draw.uniform(9, 11)
            reached = decision.batch_size != 64
            job.observe(decision, epochs=5, time_s=time_s, energy_j=energy_j, reached=reached)
            runs.append((decision.batch_size, energy_j))
            if reached:
                costs.setdefault(decision.batch_size, []).append(0.25 * energy_j + 0.75 * 200.0 * time_s)
    with open_store(path, write=False) as opened:
        told = views.recurring("nightly", opened.get("recurring/nightly"))
    strict_json(told)
    assert (told["eta"], told["policy"].lower()) == (0.25, "zeus")
    assert [(run["batch_size"], run["energy_j"]) for run in told["runs"]] == runs
    for arm in told["arms"]:
        own = costs.get(arm["batch_size"], [])
        assert arm["reached"] == len(own)
        if len(own) > 1:  # Zeus Alg. 2 with a flat prior: the mean, and the deviation of the mean
            assert arm["mean"] == pytest.approx(statistics.fmean(own))
            assert arm["std"] == pytest.approx(statistics.pstdev(own) / math.sqrt(len(own)))
        elif not own:
            assert arm["mean"] is None
    assert len(views.recurring_figures(told)) == 2


# --- SM2 ---


def sm2_curve(run):
    for epoch in run.epochs():
        size = run.config["batch_size"]
        run.report(loss=size / 64 + 1 / (epoch + 1), sm2_lr=0.1 / size, sm2_stability=1.0, sm2_fraction=0.25)


def test_sm2_rounds_are_those_of_its_report(tmp_path):
    pk.Study(
        sm2_curve,
        pk.Space(batch_size=pk.Choice(8, 16, 32, 64)),
        minimize="loss",
        scheduler=pk.SM2(thorough_epochs=1, final_epochs=2, max_epochs=4),
        executor=pk.Simulated(devices=2),
        store=tmp_path / "s.db",
    ).run()
    theirs = sm2_report(read_journal(tmp_path / "s.db"))
    from penstock.report._journal import fold_journal

    told = views.sm2(fold_journal(tmp_path / "s.db")[0])
    strict_json(told)
    assert [r["number"] for r in told["rounds"]] == [r.number for r in theirs.rounds]
    ours = [(c["trial"], c["score"], c["kept"]) for r in told["rounds"] for c in r["rows"]]
    assert ours == [(c.trial, c.score.total, c.kept) for r in theirs.rounds for c in r.configurations]
    assert told["winner"] == theirs.winner
    assert views.sm2_figure(told)["data"]


def test_other_schedulers_have_no_rounds(simulated):
    assert views.sm2(simulated) is None


# --- limits ---


def test_limits_map():
    limit = power_w <= 90
    events: list[Event] = [SessionOpened(0.0)]
    for trial, (predicted, measured) in enumerate(((80.0, 85.0), (70.0, 95.0), (89.0, None))):
        events += [
            made(trial),
            Noted(0.0, "prediction", {"power_w": [predicted, 2.0]}, trial),
            Started(0.0, trial),
        ]
        if measured is not None:
            events.append(Reported(1.0, trial, 1, {"loss": 1.0, "power_w": measured}))
    folded = folded_of(events, limits=[limit.to_json()])
    told = views.limits(folded)
    strict_json(told)
    rows = told["limits"][0]["rows"]
    assert [(r["predicted"], r["measured"], r["holds"]) for r in rows] == [
        (80.0, 85.0, True),
        (70.0, 95.0, False),
        (89.0, None, True),
    ]
    assert told["limits"][0]["violations"] == 1
    figure = views.limits_figure(told)
    assert figure["layout"]["shapes"][0]["y0"] == 90.0
    assert views.trial(folded, 1)["limits"][0]["measured"] == 95.0


# --- log and trial ---


@pytest.mark.parametrize("seed", SEEDS)
def test_log_is_the_journal_backwards(seed):
    events = journal(seed)
    folded = folded_of(events)
    told = views.log(folded, Options(limit=1000))
    strict_json(told)
    assert [(line["number"], line["kind"]) for line in told["lines"]] == [
        (n, e.kind) for n, e in reversed(list(enumerate(events, 1)))
    ]
    ends = views.log(folded, Options(filter="ended,dropped", limit=1000))["lines"]
    assert len(ends) == sum(e.kind in ("ended", "dropped") for e in events)
    of_three = views.log(folded, Options(trial=3, limit=1000))["lines"]
    assert len(of_three) == sum(
        getattr(e, "trial", None) == 3 or (isinstance(e, Submitted) and e.segments[0].trial.id == 3)
        for e in events
    )
    with pytest.raises(InvalidInput, match="kind"):
        views.log(folded, Options(filter="nonsense"))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_trials_page(seed):
    events = journal(seed)
    folded = folded_of(events)
    for number in range(20):
        told = views.trial(folded, number)
        strict_json(told)
        line = values_of(events).get(number, [])
        assert told["epochs"] == (line[-1][0] if line else 0)
        if line:
            assert told["curves"]["loss"]["epoch"] == [epoch for epoch, _ in line]
        starts = [e for e in events if isinstance(e, Started) and e.trial == number]
        assert [span["begin_s"] for span in told["spans"]] == [e.time_s - events[0].time_s for e in starts]
        assert (told["error"] != "") == any(
            isinstance(e, Ended) and e.trial == number and e.status is TrialStatus.FAILED for e in events
        )
    with pytest.raises(InvalidInput, match="no trial 99"):
        views.trial(folded, 99)


def test_a_value_is_never_shown_with_a_configuration_it_is_not_of(tmp_path):
    """A member of a population that was given another configuration has no result of it before it reports again."""

    def train(run):
        for _ in run.epochs():
            run.save(0)
            run.report(loss=run.config["x"])

    study = pk.Study(
        train,
        pk.Space(x=pk.Float(0, 1)),
        minimize="loss",
        scheduler=pk.PBT(population=8, max_epochs=6, interval=2),
        sampler=pk.Random(),
        executor=pk.Simulated(devices=1),
        budget=pk.Budget(epochs=17, finish=False),
        store=tmp_path / "pbt.db",
        name="left",
    )
    study.run()
    folded, _ = fold_journal(tmp_path / "pbt.db")
    trials = folded.state.trials
    assert any(not record.known for record in trials.values())
    lines = views.parallel(folded)["lines"]
    assert lines
    assert all(line["value"] == trials[line["trial"]].config["x"] for line in lines)
    pairs = views.importance_input(folded)["trials"]
    assert len(pairs) == len(lines)
    assert all(config["x"] == value for config, value in pairs)
    points = views.pareto(folded)["points"]
    assert all(point["values"]["loss"] == trials[point["trial"]].config["x"] for point in points)


def test_an_axis_over_many_decades_has_no_label_for_2_and_5_of_each():
    assert log_or_linear([1.0, 50.0]) == {}
    assert log_or_linear([1e-2, 1e2]) == {"type": "log", "dtick": "D2"}
    assert log_or_linear([1e-29, 1e-16]) == {"type": "log"}  # Plotly finds which fit
    assert log_or_linear([1e-300, 1e300]) == {"type": "log"}


# --- all of them ---


@hypothesis_settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(0, 30))
def test_every_view_of_any_prefix_of_a_journal_is_json(seed, cut):
    events = journal(seed, trials=8)
    folded = folded_of(events[: max(0, len(events) - cut * 4)])
    history = views.history(folded)
    for data in (
        views.overview(folded),
        history,
        views.history_figure(history),
        views.curves_figure(views.curves(folded)),
        views.table(folded),
        views.pareto_figure(views.pareto(folded)),
        views.parallel_figure(views.parallel(folded)),
        views.devices_figure(views.devices(folded)),
        views.power_figure(views.power(folded)),
        views.limits_figure(views.limits(folded)),
        views.log(folded),
    ):
        strict_json(data)


def test_labels_of_the_users_are_no_markup_in_figures():
    events: list[Event] = [
        SessionOpened(0.0),
        made(0, {"<b>x</b>": "<a href='x'>"}),
        Started(0.0, 0, 0, (Share("<i>d"),)),
    ]
    events.append(Reported(1.0, 0, 1, {"<i>loss": 1.0}, 1.0))
    folded = Folded.of("<s>", Goal.of("<i>loss", None), events, {"space": SPACE})
    for figure in (
        views.history_figure(views.history(folded)),
        views.curves_figure(views.curves(folded)),
        views.pareto_figure(views.pareto(folded)),
        views.parallel_figure(views.parallel(folded)),
        views.devices_figure(views.devices(folded)),
    ):
        text = json.dumps(figure).replace("<br>", "").replace("<extra></extra>", "")
        assert "<" not in text


# --- a study with a surrogate ---


def test_energy_comes_second_and_twins_are_on_no_front():
    """Twins draw less than models: the front is one of models, without those that were overtaken."""
    drawn = {
        0: (0.9, 1.0),
        1: (0.95, 2.0),
        2: (0.8, 90.0),
        3: (0.85, 100.0),
        4: (0.99, 95.0),
    }  # accuracy, joules
    parents = {2: 1, 3: 1, 4: 0}
    events: list[Event] = [SessionOpened(0.0)]
    for trial, (accuracy, joules) in drawn.items():
        options = {"model": "target"} if trial in parents else {}
        segment = Segment(Trial(trial, {"lr": 0.1}, 0, parents.get(trial)), until=1, options=options)
        events += [
            Submitted(0.0, 1, (segment,)),
            Started(0.0, trial),
            Reported(1.0, trial, 1, {"accuracy": accuracy}, 1.0, Measurement(joules, "J", Source.MEASURED)),
            Ended(1.0, trial, TrialStatus.COMPLETED, 1),
        ]
    events.append(Noted(2.0, "chosen", {"trials": [1]}))
    folded = Folded.of("s", Goal.of("energy_j", "accuracy"), events)
    told = views.pareto(folded)
    assert (told["quality"], told["who"], told["front"]) == ("accuracy", "trained model", [2, 3])
    assert {point["trial"] for point in told["points"]} == set(drawn)
    assert views.overview(folded)["best"]["trial"] == 3
    assert views.history(folded)["metric"] == "accuracy"
    scheduler = {"name": "Transfer", "inner": {"name": "Full", "trials": 4}, "factor": 8}
    folded.spec["scheduler"] = scheduler
    assert views.overview(folded)["scheduler"] == "Transfer(Full(trials=4), factor=8)"

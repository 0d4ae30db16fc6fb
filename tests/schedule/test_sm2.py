"""SM2 against Algorithm 1 written out, Eq. 2's decisions, Table 1, and a real task trained end to end."""

import json
import math
from dataclasses import dataclass, field, replace

import pytest

from penstock.core import (
    Ended,
    Measurement,
    Reported,
    Segment,
    Source,
    Submitted,
    Trial,
    TrialGroup,
    TrialStatus,
    from_record,
    to_record,
)
from penstock.core.errors import InvalidInput
from penstock.schedule._base import Outcome, Rules
from penstock.schedule._sm2 import SM2, compare, report
from penstock.space import Choice, Float, Space, one_of

SIZES = (16, 32, 64, 128, 256, 512, 1024, 2048)
PAUSED, COMPLETED, FAILED, STOPPED = (
    TrialStatus.PAUSED, TrialStatus.COMPLETED, TrialStatus.FAILED, TrialStatus.STOPPED,
)  # fmt: skip


@dataclass
class Journal:
    """What a driven SM2 did."""

    groups: list[TrialGroup] = field(default_factory=list)
    events: list = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    size: dict[int, int] = field(default_factory=dict)
    thorough: dict[int, int] = field(default_factory=dict)

    @property
    def segments(self):
        return [s for g in self.groups for s in g.segments]


def drive(scheduler, world, *, source=Source.SIMULATED, stop=None, space=None, propose=None, allows=None):
    """Run SM2 in a world: ``world(size, round, explores) -> (value, joules, lr)``; ``value`` None fails."""
    made = []

    def new(n):
        trials = [Trial(len(made) + i, {"weight_decay": 0.1}, 100 + len(made) + i) for i in range(n)]
        made.extend(trials)
        return trials

    order = lambda values: sorted(range(len(values)), key=lambda i: values[i])  # noqa: E731
    scheduler.start(Rules(propose or new, order, space, False, 0, allows=allows))
    journal, running, clock = Journal(), [], 0.0
    while True:
        while (group := scheduler.next(4)) is not None:
            journal.groups.append(group)
            journal.events.append(Submitted(clock, 4, group.segments, group.label))
            running += group.segments
        journal.dropped += scheduler.drops()
        if not running:
            break
        clock += 1.0
        segment = running.pop(0)
        number, size = segment.trial.id, segment.trial.config["batch_size"]
        journal.size[number] = size
        explores = segment.options["mode"] == "explore"
        value, joules, lr = world(size, segment.options["round"], explores)
        status = FAILED if value is None else PAUSED if not segment.last else COMPLETED
        if stop is not None and value is not None and stop(segment):
            status = COMPLETED
        energy = None
        metrics = {}
        if value is not None:
            metrics = {"loss": value, **({"sm2_lr": lr, "sm2_fraction": 0.25} if explores else {})}
            for epoch in range(segment.start + 1, segment.until + 1):
                one = None
                if joules is not None:
                    one = Measurement(joules * (0.25 if explores else 1.0), "J", source)
                    energy = one if energy is None else energy + one
                journal.events.append(Reported(clock, number, epoch, metrics, 1.0, one))
            if not explores:
                journal.thorough[number] = journal.thorough.get(number, 0) + segment.until - segment.start
        journal.events.append(Ended(clock, number, status, segment.until))
        values = None if value is None else (value,)
        scheduler.ended(Outcome(number, status, segment.until, values, metrics, energy))
        journal.dropped += scheduler.drops()
    assert scheduler.done
    assert scheduler.next(4) is None
    return journal


def plain(size, round_, explores):
    """The larger the batch the better in every respect."""
    return 1.0 / size / (1 + round_), 1000.0 / size, 0.01 * size / 16


def test_algorithm_1_with_the_papers_setup():
    """8 batch sizes: 8 explored, 4 trained 5 epochs, 4 explored, 2 trained, 2 explored, 1 trained by tens."""
    scheduler = SM2(SIZES, max_epochs=40, patience=None, side_by_side=True)
    journal = drive(scheduler, plain)
    found = [(g.label, len(g.segments), g.segments[0].start, g.segments[0].until) for g in journal.groups]
    assert found == [
        ("round 0, exploration", 8, 0, 1),
        ("round 0, thorough training", 4, 1, 6),
        ("round 1, exploration", 4, 6, 7),
        ("round 1, thorough training", 2, 7, 12),
        ("round 2, exploration", 2, 12, 13),
        ("round 2, final training", 1, 13, 23),
        ("round 3, final exploration", 1, 23, 24),
        ("round 3, final training", 1, 24, 34),
        ("round 4, final exploration", 1, 34, 35),
        ("round 4, final training", 1, 35, 45),
    ]
    assert journal.thorough == {4: 5, 5: 5, 6: 10, 7: 40}
    assert sorted(journal.dropped) == [0, 1, 2, 3, 4, 5, 6]
    assert journal.segments[-1].last
    assert scheduler.expected == len(journal.segments) == 8 + 4 + 4 + 2 + 2 + 5


@pytest.mark.parametrize("max_epochs", [1, 3, 5, 8, 10, 14, 40])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_nobody_trains_beyond_max_epochs(n, max_epochs):
    """The one that is left has trained for max_epochs exactly, and ends so: what is explored is thrown away."""
    scheduler = SM2(SIZES[:n], max_epochs=max_epochs, patience=None, side_by_side=True)
    scheduler.start(Rules(lambda n: [], lambda values: [], None, False, 0))
    expected = scheduler.expected
    journal = drive(scheduler, plain)
    assert max(journal.thorough.values()) == journal.thorough[n - 1] == max_epochs
    assert len(journal.segments) == expected
    halves = [n]
    while halves[-1] > 1:
        halves.append(-(-halves[-1] // 2))
    explored = [len(group.segments) for group in journal.groups if "exploration" in group.label]
    assert explored[: len(halves) - 1] == halves[:-1]
    assert [s for s in journal.segments if s.last] == journal.segments[-1:]
    assert journal.segments[-1].options["mode"] == "thorough"
    assert sorted(journal.dropped) == list(range(n - 1))


def test_explorations_carry_their_parameters_and_configurations_differ_in_the_batch_size_alone():
    journal = drive(
        SM2((8, 16), lrs=40, lr_range=(1e-4, 0.5), explore_fraction=0.1, side_by_side=True), plain
    )
    first = journal.groups[0].segments
    for segment, size in zip(first, (8, 16), strict=True):
        assert segment.trial.config == {"weight_decay": 0.1, "batch_size": size}
        assert segment.options == {
            "mode": "explore", "round": 0, "lrs": 40, "lr_range": [1e-4, 0.5], "fraction": 0.1,
            "explorations": [0],
        }  # fmt: skip
    assert len({s.trial.seed for s in journal.segments}) == 1
    assert {s.options["mode"] for s in journal.groups[1].segments} == {"thorough"}


@pytest.mark.parametrize(
    ("n", "kept"), [(1, [1]), (2, [2, 1]), (3, [3, 2, 1]), (5, [5, 3, 2, 1]), (16, [16, 8, 4, 2, 1])]
)
def test_the_worse_half_goes_each_round(n, kept):
    journal = drive(SM2(range(1, n + 1), max_epochs=30, patience=None, side_by_side=True), plain)
    explored = [len(g.segments) for g in journal.groups if "exploration" in g.label]
    assert explored[: len(kept)] == kept
    assert set(explored[len(kept) :]) <= {1}


def trade_off(size, round_, explores):
    """512 performs best by a hair, 64 needs a third of the energy."""
    loss = {64: 0.301, 128: 0.310, 256: 0.9, 512: 0.300}[size]
    return loss, {64: 10.0, 128: 20.0, 256: 5.0, 512: 30.0}[size], 0.1


def winner(journal):
    return journal.segments[-1].trial.config["batch_size"]


def test_alpha_decides_between_performance_and_energy():
    sizes = (64, 128, 256, 512)
    assert winner(drive(SM2(sizes, alpha=1.0), trade_off)) == 512
    assert winner(drive(SM2(sizes, alpha=0.5), trade_off)) == 64
    assert winner(drive(SM2(sizes, alpha=0.0, beta=1.0), trade_off)) == 256


@pytest.mark.parametrize(("later", "alpha", "left"), [(0.51, 0.75, 32), (3.0, 0.75, 16), (0.51, 1.0, 16)])
def test_energy_decides_the_last_round_between_those_that_perform_alike(later, alpha, left):
    """Rescaled over all that were explored, not over the two that are left (SM2 4.3, 5.2); worked by hand."""

    def world(size, round_, explores):
        first = {16: 1.0, 32: 1.01, 64: 3.0, 128: 5.0}
        return first[size] if round_ == 0 else {16: 0.5, 32: later}[size], 400.0 if size == 16 else 100.0, 0.1

    scheduler = SM2((16, 32, 64, 128), alpha=alpha, side_by_side=True)
    assert winner(drive(scheduler, world)) == left
    small, large = scheduler.rounds[1].configurations
    # Losses reach from 0.5 to the 5.0 that size 128 had when it was dropped; energies from 100 to 400 J.
    assert (small.score.performance, small.score.energy) == (1.0, 0.0)
    assert large.score.performance == pytest.approx((5.0 - later) / 4.5)
    assert large.score.total == pytest.approx(alpha * (5.0 - later) / 4.5 + (1 - alpha))


def test_beta_decides_between_energy_and_learning_rate():
    def world(size, round_, explores):
        return 0.5, {8: 1.0, 16: 9.0}[size], {8: 0.01, 16: 0.9}[size]

    assert winner(drive(SM2((8, 16), beta=1.0), world)) == 8
    assert winner(drive(SM2((8, 16), beta=0.0), world)) == 16


def test_energy_is_scaled_from_the_explored_part_to_an_epoch():
    """A configuration that explored twice the samples must not look twice as hungry."""
    scheduler = SM2((8, 16), alpha=0.0, beta=1.0, side_by_side=True)
    scheduler.start(Rules(lambda n: [Trial(i, {}, 0) for i in range(n)], sorted, None, False, 0))
    scheduler.next(4)
    for number, joules, part in ((0, 30.0, 0.5), (1, 20.0, 0.25)):
        energy = Measurement(joules, "J", Source.SIMULATED)
        scheduler.ended(Outcome(number, PAUSED, 1, (1.0,), {"sm2_lr": 0.1, "sm2_fraction": part}, energy))
    assert [c.energy_j for c in scheduler.rounds[0].configurations] == [60.0, 80.0]
    assert [c.kept for c in scheduler.rounds[0].configurations] == [True, False]


@pytest.mark.parametrize(
    ("source", "most"),
    [(Source.MEASURED, 1), (Source.ATTRIBUTED, 7), (Source.ESTIMATED, 7), (Source.SIMULATED, 7)],
)
def test_one_after_another_where_energy_is_measured(source, most):
    journal = drive(SM2(SIZES), plain, source=source)
    assert len(journal.groups[0].segments) == 1  # the first shows where energy comes from
    assert max(len(g.segments) for g in journal.groups) == most
    alone = drive(SM2(SIZES, side_by_side=False), plain, source=Source.SIMULATED)
    assert {len(g.segments) for g in alone.groups} == {1}


def test_without_a_meter_performance_and_learning_rate_decide():
    def world(size, round_, explores):
        return 0.5, None, {8: 0.01, 16: 0.9}[size]

    journal = drive(SM2((8, 16)), world)
    assert winner(journal) == 16
    assert report(journal.events, "loss", maximize=False).energy is None


def test_failures_leave_the_race():
    def world(size, round_, explores):
        return (None if size in (2048, 1024) else 1.0 / size), 1.0, 0.1

    journal = drive(SM2(SIZES, max_epochs=20), world)
    assert winner(journal) == 512
    assert not {n for n in journal.dropped if journal.size[n] in (1024, 2048)}  # failed, not dropped
    assert drive(SM2(SIZES), lambda *_: (None, None, None)).thorough == {}


def test_a_failure_in_thorough_training_leaves_the_others():
    def world(size, round_, explores):
        fails = size == 2048 and not explores
        return (None if fails else 1.0 / size), 1.0, 0.1

    assert winner(drive(SM2(SIZES, max_epochs=20), world)) == 1024


def test_patience_ends_the_last_configuration():
    def world(size, round_, explores):
        return [5.0, 4.0, 3.0, 2.0, 2.0, 1.0][min(round_, 5)], 1.0, 0.1

    journal = drive(SM2((8, 16), patience=1, max_epochs=1000), world)
    # Rounds 0.. of the last one: 5, 4, 3, 2, and no better in round 4.
    assert [s.options["round"] for s in journal.segments][-1] == 4
    assert drive(SM2((8, 16), patience=2, max_epochs=1000), world).segments[-1].options["round"] == 7
    assert len(journal.dropped) == 2  # the loser, and the paused winner


def test_a_training_that_finishes_ends_the_search():
    """The task's target is a stopping rule: Alg. 1, line 2."""
    journal = drive(SM2(SIZES), plain, stop=lambda s: s.options["mode"] == "thorough" and s.trial.id == 6)
    assert journal.segments[-1].options["mode"] == "thorough"
    assert journal.segments[-1].options["round"] == 0
    assert set(journal.dropped) | {6} >= {0, 1, 2, 3}


def test_the_sampler_may_give_fewer_or_nothing():
    for source in (Source.MEASURED, Source.SIMULATED):  # asked one by one, or for all that are left
        left = [Trial(i, {}, 0) for i in range(3)]
        few = drive(
            SM2(SIZES), plain, source=source, propose=lambda n, left=left: [left.pop(0) for _ in left[:n]]
        )
        assert set(few.size.values()) == {16, 32, 64}
        assert len(few.thorough) == 2
    assert drive(SM2(SIZES), plain, propose=lambda n: []).groups == []


def test_batch_sizes_come_from_the_space_if_not_given():
    space = Space(batch_size=Choice(32, 64), weight_decay=Float(0, 1))
    assert set(drive(SM2(), plain, space=space).size.values()) == {32, 64}
    with pytest.raises(InvalidInput, match="batch sizes"):
        drive(SM2(), plain, space=Space(weight_decay=Float(0, 1)))
    with pytest.raises(InvalidInput, match=r"batch_sizes has 48, which batch_size=Choice\(32, 64\)"):
        drive(SM2((48, 64)), plain, space=space)


def proposing(space):
    """What a sampler proposes, which knows nothing of the batch sizes that SM2 puts in their place."""
    made = []

    def propose(n):
        made.extend(Trial(len(made), space.sample(len(made)), 0) for _ in range(n))
        return made[-n:]

    return propose


def test_what_hangs_on_the_batch_size_comes_and_goes_with_it():
    space = Space(
        batch_size=Choice(8, 16, 32, 64),
        momentum=Float(0, 1, when=one_of("batch_size", 32, 64)),
        weight_decay=Float(0, 1),
    )
    proposed = proposing(space)
    journal = drive(SM2(side_by_side=True), plain, space=space, propose=proposed)
    configs = [segment.trial.config for segment in journal.groups[0].segments]
    assert [config["batch_size"] for config in configs] == [8, 16, 32, 64]
    assert [space.validate(config) for config in configs] == configs
    assert [config["weight_decay"] for config in configs] == [
        space.sample(i)["weight_decay"] for i in range(4)
    ]
    again = drive(SM2(side_by_side=True), plain, space=space, propose=proposing(space))
    assert again.groups == journal.groups


def test_batch_sizes_that_break_a_limit_are_left_out():
    space = Space(batch_size=Choice(8, 16, 32, 64), width=Choice(1, 2, 4, 8))

    def allows(config):
        return config["batch_size"] * config["width"] <= 64

    for source in (Source.MEASURED, Source.SIMULATED):  # asked one by one, or for all that are left
        journal = drive(SM2(), plain, source=source, space=space, propose=proposing(space), allows=allows)
        configs = [s.trial.config for s in journal.segments if s.start == 0]
        assert [config["batch_size"] for config in configs] == [8, 16, 32, 64]  # the last with width 1
        assert all(map(allows, configs))
        few = drive(
            SM2(), plain, source=source, space=space, propose=proposing(space), allows=lambda c: c["batch_size"] < 32
        )  # fmt: skip
        assert set(few.size.values()) == {8, 16}
        assert len(few.thorough) == 1
    with pytest.raises(InvalidInput, match=r"batch sizes \[8, 16, 32, 64\]"):
        drive(SM2(), plain, space=space, propose=proposing(space), allows=lambda c: False)


def test_a_first_exploration_that_fails_does_not_tell_where_the_energy_comes_from():
    def world(size, round_, explores):
        return (None, None, None) if size == SIZES[0] else plain(size, round_, explores)

    journal = drive(SM2(SIZES), world, source=Source.MEASURED)
    assert {len(g.segments) for g in journal.groups} == {1}
    assert len(drive(SM2(SIZES), world, source=Source.SIMULATED).groups[2].segments) == 6


def test_who_showed_nothing_that_counts_is_dropped():
    scheduler = SM2((8, 16), side_by_side=True, max_epochs=2, final_epochs=2)
    scheduler.start(Rules(lambda n: [Trial(i, {}, 0) for i in range(n)], sorted, None, False, 0))
    for segment in scheduler.next(4).segments:
        values = (1.0,) if segment.trial.id else None  # violates a limit, say
        scheduler.ended(Outcome(segment.trial.id, PAUSED, 1, values, {"sm2_lr": 0.1}))
    assert scheduler.drops() == [0]
    assert [segment.trial.id for segment in scheduler.next(4).segments] == [1]


def test_replay_gives_the_same_groups():
    scheduler = SM2(SIZES, max_epochs=30)
    first = drive(scheduler, trade_free)
    assert (
        drive(scheduler, trade_free).groups
        == first.groups
        == drive(SM2(SIZES, max_epochs=30), trade_free).groups
    )


def trade_free(size, round_, explores):
    return math.sin(size * 7 + round_), 100 + math.cos(size), 0.1 + 0.05 * math.sin(size * 3)


def test_several_objectives_count_by_rank():
    scheduler = SM2((1, 2, 3), alpha=1.0, side_by_side=True)
    best_last = lambda values: [2, 1, 0][: len(values)]  # noqa: E731
    scheduler.start(Rules(lambda n: [Trial(i, {}, 0) for i in range(n)], best_last, None, False, 0))
    scheduler.next(3)
    for number in range(3):
        scheduler.ended(Outcome(number, PAUSED, 1, (1.0, 2.0), {"sm2_lr": 0.1}))
    assert [c.kept for c in scheduler.rounds[0].configurations] == [False, True, True]


def test_the_journal_keeps_the_options_and_old_journals_stay_readable():
    journal = drive(SM2((8, 16)), plain)
    for event in journal.events:
        kind, trial, time_s, data = to_record(event)
        assert from_record(kind, trial, time_s, json.loads(json.dumps(data))) == event
    old = {"want": 1, "label": "", "segments": [{"id": 0, "seed": 1, "last": True, "until": 3, "config": {}}]}
    (segment,) = from_record("submitted", None, 0.0, old).segments
    assert segment == Segment(Trial(0, {}, 1), until=3)
    assert "options" not in to_record(Submitted(0.0, 1, (segment,)))[3]["segments"][0]


def test_the_report_reads_from_the_journal_what_the_scheduler_decided():
    scheduler = SM2(SIZES, max_epochs=30, side_by_side=True)
    journal = drive(scheduler, trade_free)
    told = report(journal.events, "loss", maximize=False)
    assert list(told.rounds) == scheduler.rounds
    whole = sum(e.energy.joules for e in journal.events if isinstance(e, Reported))
    assert told.energy.joules == pytest.approx(whole)
    explored = sum(
        s.options["mode"] == "explore" and 0.25 * (100 + math.cos(journal.size[s.trial.id]))
        for s in journal.segments
    )
    assert told.explored.joules == pytest.approx(explored)
    last = journal.segments[-1].trial.id
    rows = told.epochs[last]
    assert [row.epoch for row in rows] == list(range(1, len(rows) + 1))
    assert [row.epoch for row in rows if row.explored] == [
        s.until for s in journal.segments if s.trial.id == last and s.options["mode"] == "explore"
    ]


def test_parity_counts_one_set_up_for_the_training_and_all_of_them_for_the_study():
    scheduler = SM2((8, 16), max_epochs=10, side_by_side=True)
    journal = drive(scheduler, lambda size, round_, explores: (1.0 / size, 8.0, 0.1))
    setup = Measurement(3.0, "J", Source.SIMULATED)
    events = [replace(e, energy=setup) if isinstance(e, Ended) else e for e in journal.events]
    told = report(events, "loss", maximize=False)
    # Two explorations of 2 J, one training of 10 epochs of 8 J, in 3 segments: Alg. 1 with two configurations.
    assert told.outside.joules == pytest.approx(3 * 3.0)
    assert told.training.joules == pytest.approx(10 * 8.0 + 3.0)
    assert told.parity == pytest.approx((2 * 2.0 + 80.0 + 9.0) / 83.0)


def test_table_1():
    """Percentages and the ResNet's parity as printed; the other two rows are printed inverted (see compare)."""
    resnet, lstm, transformer = (
        compare(49.7, 45.8, 26.0),
        compare(28.0, 14.8, 16.4),
        compare(48.5, 40.7, 69.4),
    )
    assert [round(100 * row.saving) for row in (resnet, lstm, transformer)] == [8, 47, 16]
    assert resnet.parity == pytest.approx(1.76, abs=0.005)
    assert 1 / lstm.parity == pytest.approx(1.11, abs=0.005)
    assert 1 / transformer.parity == pytest.approx(1.70, abs=0.01)
    with pytest.raises(InvalidInput, match="vanilla_j"):
        compare(1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"batch_sizes": []}, "batch_sizes is empty"),
        ({"batch_sizes": [8, 8]}, "repeated"),
        ({"batch_sizes": [0]}, "batch_sizes is 0"),
        ({"batch_sizes": 32}, "batch_sizes is 32"),
        ({"lrs": 1}, "lrs is 1"),
        ({"lr_range": (1.0, 0.1)}, "lr_range"),
        ({"lr_range": 0.1}, "lr_range is 0.1"),
        ({"lr_range": ("low", "high")}, "lr_range is"),
        ({"lr_range": (0.1, 0.2, 0.3)}, "lr_range is"),
        ({"alpha": 1.5}, "alpha is 1.5"),
        ({"beta": -1}, "beta is -1"),
        ({"explore_fraction": 0}, "explore_fraction is 0"),
        ({"thorough_epochs": 0}, "thorough_epochs is 0"),
        ({"patience": 0}, "patience is 0"),
    ],
)
def test_arguments_are_checked(bad, words):
    with pytest.raises(InvalidInput, match=words):
        SM2(**bad)


def test_parameters_are_json():
    data = SM2(SIZES).to_json()
    assert json.loads(json.dumps(data)) == data
    assert data["name"] == "SM2"


def test_a_real_task_end_to_end(tmp_path):
    """Exploration and training of a real network; only the scheduler's options decide what a segment does."""
    torch = pytest.importorskip("torch")
    import io

    from penstock.train import Data, Task

    torch.set_num_threads(1)
    g = torch.Generator().manual_seed(0)
    x = torch.randn(400, 10, generator=g)
    y = (x @ torch.randn(10, 4, generator=g)).argmax(1)
    accuracy = lambda o, t: (o.argmax(1) == t).float().mean()  # noqa: E731
    task = Task(
        lambda: torch.nn.Sequential(torch.nn.Linear(10, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)),
        Data.split(x, y), torch.nn.functional.cross_entropy, metrics={"accuracy": accuracy},
    )  # fmt: skip
    states = {}

    class Run:
        device = "cpu"

        def __init__(self, segment):
            self.config, self.seed = segment.trial.config, segment.trial.seed
            self.config = {k: v for k, v in self.config.items() if k != "weight_decay"}
            self.until, self.options, self.number = segment.until, segment.options, segment.trial.id
            self.start = segment.start

        def epochs(self):
            yield from range(self.start, self.until)

        def report(self, **metrics):
            self.metrics = metrics

        def save(self, state):
            buffer = io.BytesIO()
            torch.save(state, buffer)
            states[self.number] = buffer.getvalue()

        def load(self):
            kept = states.get(self.number)
            return None if kept is None else torch.load(io.BytesIO(kept), weights_only=False)

    scheduler = SM2(
        (4, 16, 64), max_epochs=15, thorough_epochs=2, final_epochs=5, patience=None, side_by_side=True
    )
    rules = Rules(lambda n: [Trial(i, {}, 7) for i in range(n)], sorted, None, False, 0)
    scheduler.start(rules)
    last = {}
    while (group := scheduler.next(1)) is not None:
        for segment in group.segments:
            run = Run(segment)
            task(run)
            last[segment.trial.id] = run.metrics
            status = COMPLETED if segment.last else PAUSED
            steps = 320 / run.config["batch_size"] * (segment.until - segment.start)
            energy = Measurement(steps + 50.0, "J", Source.SIMULATED)
            values = (-run.metrics["accuracy"],)
            scheduler.ended(Outcome(segment.trial.id, status, segment.until, values, run.metrics, energy))
        scheduler.drops()
    final = scheduler.rounds[-1].configurations
    assert len(final) == 1
    assert last[final[0].trial]["accuracy"] > 0.85
    for round_ in scheduler.rounds:
        assert all(1e-4 <= c.lr <= 1.0 for c in round_.configurations)

"""Every pair of capabilities works together, or is refused up front with a reason; what docs/pairs.md says."""

import os
import re
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.core import Resized, Started, Submitted
from penstock.core.errors import InvalidInput
from penstock.energy import V100, Load, SimulatedGpus
from penstock.plan import _fluid, fifo
from penstock.predict import Features, Overhead, Predictor
from penstock.report import View
from penstock.schedule import StopRule

PAGE = Path(__file__).parent.parent.parent / "docs" / "pairs.md"
SPACE = pk.Space(
    width=pk.Choice(16, 32, 64, structural=True),
    batch_size=pk.Choice(8),
    lr=pk.Float(0.01, 0.5, log=True),
)
SIZES = pk.Space({**{name: SPACE[name] for name in SPACE}, "batch_size": pk.Choice(8, 16)})  # what SM2 tunes
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(32, 4, generator=GENERATOR)
Y = (X.sum(1) > 0).long()


def network(width):
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 2))


def data():
    return pk.Data((X[:16], Y[:16]), (X[16:], Y[16:]))


TASK = pk.Task(network, data, F.cross_entropy, optimizer=torch.optim.SGD, epochs=2)


def train(run):
    for epoch in run.epochs(2):
        run.report(loss=run.config["lr"] + 1 / run.config["width"] + 1 / (epoch + 1))


def lanes(run):
    """A training loop of one's own that can be fused."""
    model = network(run.config["width"])
    optimizer = torch.optim.SGD(model.parameters(), lr=run.config["lr"])
    model, optimizer = run.prepare(model, optimizer)
    for _ in run.epochs(2):
        loss = F.cross_entropy(model(X), Y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        run.report(loss=float(loss.detach()))


def load(config):
    return Load(10.0, 0.6, 200 + config["width"], 50.0)


CONFIGS = [SPACE.sample(seed) for seed in range(24)]
WATTS = Predictor.fit("power_w", Features.of(SPACE), CONFIGS, [100.0 + c["width"] for c in CONFIGS], folds=0)
OVERHEAD = Overhead(alpha=1.1, beta=1.1, max_sharing=2, max_devices=2)


def devices(**options):
    return pk.Simulated(2, seconds=10.0, overhead=OVERHEAD, power=SimulatedGpus(load, gpu=V100), **options)


class Listens(StopRule):
    """Stops the second trial after its first epoch."""

    def start(self):
        pass

    def observe(self, trial, epoch, metrics):
        return "as the rule says" if trial == 1 else None


@dataclass
class Seen:
    """What a study left, for the capabilities to find their traces in."""

    study: pk.Study
    events: list
    said: list
    calls: dict

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def chain(self):
        """The sampler, with those inside."""
        found, sampler = [], self.study.sampler
        while sampler is not None:
            found.append(type(sampler).__name__)
            inner = [getattr(sampler, name, None) for name in ("_sampler", "then", "_then")]
            sampler = next((item for item in inner if item is not None), None)
        return found


@dataclass
class Capability:
    """One entry of the table: what it adds to a study's arguments, and how it shows that it was at work."""

    name: str
    kind: str
    options: dict
    trace: object
    work: object = None
    run: bool = True


def sampler(kind, **options):
    name = kind.__name__
    return Capability(f"`{name}`", "sampler", {"sampler": kind(**options)}, lambda seen: name in seen.chain())


def scheduler(made, least=1):
    name = type(made).__name__

    def trace(seen):
        spec = seen.study.spec()["scheduler"]
        return name in (spec["name"], spec.get("inner", {}).get("name")) and len(seen.study.trials) >= least

    return Capability(f"`{name}`", "scheduler", {"scheduler": made}, trace)


def ends(text):
    return lambda seen: any(trial.reason == text for trial in seen.study.trials)


def own_pass(plan):
    CALLS["own"] = CALLS.get("own", 0) + 1
    return fifo(1.0)(plan)


CALLS: dict = {}

CAPABILITIES = [
    sampler(pk.Random),
    sampler(pk.Grid, resolution=2),
    sampler(pk.Walk),
    sampler(pk.TPE),
    sampler(pk.Bayes),
    sampler(pk.OptunaSampler, sampler=optuna.samplers.NSGAIISampler),
    Capability(
        "`warm_start`",
        "warm_start",
        {"warm_start": [{"width": 16, "batch_size": 8, "lr": 0.25}]},
        lambda seen: any(s.trial.config["lr"] == 0.25 for e in seen.of(Submitted) for s in e.segments),
    ),
    scheduler(pk.Full(trials=6, epochs=2), 6),
    scheduler(pk.Halving(max_epochs=2, eta=2, trials=4), 4),
    scheduler(pk.Hyperband(max_epochs=2, eta=2), 3),
    scheduler(pk.ASHA(max_epochs=2, eta=2, trials=4), 4),
    scheduler(pk.PBT(population=3, max_epochs=2, interval=1), 3),
    Capability(
        "`SM2`",
        "scheduler",
        {"scheduler": pk.SM2(lrs=3, thorough_epochs=1, final_epochs=1, max_epochs=2)},
        lambda seen: seen.study.spec()["scheduler"]["name"] == "SM2" and seen.study.best,
        work="task",
    ),
    Capability("stopping rules", "stop", {"stop": [Listens()]}, ends("as the rule says")),
    Capability(
        "two objectives",
        "goal",
        {"minimize": ["loss", "energy_j"]},
        lambda seen: len(seen.study.goal.objectives) == 2 and seen.study.best_trials,
    ),
    Capability(
        "`limits`",
        "limits",
        {
            "limits": [pk.power_w <= 140],
            "predictors": pk.Predictors({"power_w": WATTS}, features=Features.of(SPACE)),
        },
        lambda seen: seen.study.limits and all(t.config["width"] < 64 for t in seen.study.trials),
    ),
    Capability(
        "`fuse`",
        "fuse",
        {"fuse": 2},
        lambda seen: any(isinstance(event, Started) and event.fused for event in seen.events),
    ),
    Capability(
        "`surrogate`",
        "surrogate",
        {"surrogate": pk.Shrink(2, floor=4)},
        lambda seen: seen.study.target_trials and seen.study.best.is_target,
        work="task",
    ),
    Capability("`Fluid`", "planner", {"planner": pk.Fluid()}, lambda seen: seen.calls.get("fluid")),
    Capability("own plan passes", "planner", {"planner": [own_pass]}, lambda seen: seen.calls.get("own")),
    Capability(
        "budget of energy",
        "budget",
        {"budget": pk.Budget(energy_wh=1e6)},
        lambda seen: seen.study.energy is not None and seen.study.state.closed.reason == "finished",
    ),
    Capability(
        "budget of time",
        "budget",
        {"budget": pk.Budget(time_s=1e6)},
        lambda seen: seen.study.state.closed.reason == "finished",
    ),
    Capability(
        "budget of trials",
        "budget",
        {"budget": pk.Budget(trials=6)},
        lambda seen: len(seen.study.trials) - len(seen.study.target_trials) <= 6,
    ),
    Capability(
        "`power_limits`",
        "power_limits",
        {"power_limits": pk.PowerLimits(pk.EtaCost(0.5), slice_s=0.5)},
        lambda seen: any(note.topic == "power_profile" for note in seen.study.state.notes),
    ),
    Capability("meter off", "meter", {"meter": False}, lambda seen: seen.study.energy is None),
    Capability(
        "GPUs imagined by the meter",
        "meter",
        {"meter": SimulatedGpus(load, samples=16), "executor": pk.Local(2)},
        lambda seen: True,
        run=False,
    ),
    Capability('`keep="all"`', "keep", {"keep": "all"}, lambda seen: seen.study.keep == "all"),
    Capability(
        "SQLite store",
        "store",
        {"store": "pair.db"},
        lambda seen: len(pk.Study.load(seen.study.store_url).trials) > 0,
    ),
    Capability("a `Task`", "work", {}, lambda seen: seen.study.work is TASK, work="task"),
    Capability("a function", "work", {}, lambda seen: seen.study.work is train, work="train"),
    Capability(
        "a function with `run.prepare`", "work", {}, lambda seen: seen.study.work is lanes, work="lanes"
    ),
    Capability("a command", "work", {"executor": pk.Local(2)}, lambda seen: True, work="command", run=False),
    Capability(
        "half a device each",
        "executor",
        {"executor": devices(slots_per_trial=0.5)},
        lambda seen: any(isinstance(e, Started | Resized) and e.shares[0].fraction < 1 for e in seen.events),
    ),
    Capability(
        "devices of two kinds",
        "executor",
        {
            "executor": pk.Simulated(
                {"new": 1, "old": 1},
                seconds=10.0,
                kinds={"new": 2.0},
                overhead=OVERHEAD,
                power=SimulatedGpus(load, gpu=V100),
            )
        },
        lambda seen: len(seen.study.state.devices) == 2,
    ),
    Capability("`Local`", "executor", {"executor": pk.Local(2)}, lambda seen: True, run=False),
    Capability(
        "`Local(shared=True)`",
        "executor",
        {"executor": pk.Local(2, shared=True)},
        lambda seen: True,
        run=False,
    ),
    Capability(
        "`Local(bubbles=...)`",
        "executor",
        {"executor": pk.Local(1, bubbles="/dev/shm/llm")},
        lambda seen: True,
        run=False,
    ),
    Capability("`Ray`", "executor", {"executor": pk.Ray()}, lambda seen: True, run=False),
]
WORKS = {
    "train": train,
    "task": TASK,
    "lanes": lanes,
    "command": pk.Command(["python", "train.py", "{lr}"]),
}


class Ear(View):
    """Hears what a study says."""

    def __init__(self):
        self.said, self.events = [], []

    def open(self, name, goal, state, slots):
        pass

    def on(self, event, state):
        self.events.append(event)

    def tick(self, state, expected, busy):
        pass

    def say(self, text):
        self.said.append(text)

    def close(self):
        pass


def tried(*pair, folder):
    """``None``: it works; else why not. Anything but a refusal of Penstock's own is raised."""
    works = {capability.work for capability in pair if capability.work is not None} - {None}
    options = {"minimize": "loss", "scheduler": pk.Full(trials=6, epochs=2), "store": False}
    for capability in pair:
        options |= capability.options
    work = works.pop() if works else "train"
    if works:  # one wants a Task, the other is another kind of work: the user's is tried
        work = next(c.work for c in pair if c.kind == "work")
    options.setdefault("executor", devices())
    if options["store"]:  # of its own: profiles are kept there
        options["store"] = folder / f"{len(list(folder.glob('*.db')))}.db"
    CALLS.clear()
    ear = Ear()
    try:
        space = SIZES if isinstance(options["scheduler"], pk.SM2) else SPACE
        study = pk.Study(WORKS[work], space, seed=3, **options)
        command = work == "command" and isinstance(study.executor, pk.Simulated)  # refused when it is to run
        if command or all(capability.run for capability in pair):
            study.run(view=ear)
    except InvalidInput as error:
        return str(error)
    if not all(capability.run for capability in pair):
        return None
    seen = Seen(study, ear.events, ear.said, dict(CALLS))
    failed = [trial for trial in study.trials if trial.status is pk.TrialStatus.FAILED]
    assert not failed, failed[0].error or failed[0].reason
    for capability in pair:
        if not capability.trace(seen):
            assert ear.said, f"{capability.name} left no trace, and nothing was said"
            return f"(said) {ear.said[0]}"
    return None


def table(found):
    """The page."""
    names = [capability.name for capability in CAPABILITIES]
    reasons: list[str] = []
    rows = []
    for row, one in enumerate(CAPABILITIES):
        cells = []
        for column in range(row):
            verdict = found.get((column, row), "")
            if verdict == "":
                cells.append("")
            elif verdict is None:
                cells.append("yes")
            else:
                if verdict not in reasons:
                    reasons.append(verdict)
                cells.append(f"[{reasons.index(verdict) + 1}]")
        rows.append(
            f"| {row + 1} {one.name} | " + " | ".join(cells + [""] * (len(names) - 1 - len(cells))) + " |"
        )
    head = "| | " + " | ".join(str(i + 1) for i in range(len(names) - 1)) + " |"
    line = "|---|" + "---|" * (len(names) - 1)
    listed = [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]
    return "\n".join(
        [
            "# What goes with what",
            "",
            "Every pair of capabilities, tried by `tests/study/test_pairs.py`, which also writes this page: *yes*, or",
            "the number of the reason why a study that asks for both is refused before anything runs. A pair counts",
            "as working if a small study with both runs to its end on simulated devices, no trial fails, and both have",
            "left their trace in it. Pairs that need real workers (`Local`, `Ray`, a command, GPUs imagined by",
            "the meter) are built here and not run; other tests run the usual ones. An empty cell is one argument",
            "given twice. A `RecurringJob` is no study: it has arguments of its own.",
            "",
            head,
            line,
            *rows,
            "",
            "## Why not",
            "",
            *listed,
            "",
        ]
    )


@pytest.fixture
def counted(monkeypatch):
    place = _fluid._place

    def counting(*arguments):
        CALLS["fluid"] = CALLS.get("fluid", 0) + 1
        return place(*arguments)

    monkeypatch.setattr(_fluid, "_place", counting)


def test_every_pair_works_or_is_refused_with_a_reason(counted, tmp_path):
    found, broken = {}, []
    for capability in CAPABILITIES:
        assert tried(capability, folder=tmp_path) is None, f"{capability.name} alone"
    for (row, one), (column, two) in combinations(enumerate(CAPABILITIES), 2):
        if one.kind == two.kind:
            continue
        try:
            found[row, column] = tried(one, two, folder=tmp_path)
        except Exception as error:
            broken.append(f"{one.name} with {two.name}: {type(error).__name__}: {str(error)[:300]}")
    assert not broken, "\n".join(broken)
    page = table(found)
    if os.environ.get("PENSTOCK_WRITE_PAGES"):
        PAGE.write_text(page)
    assert PAGE.exists(), "Run with PENSTOCK_WRITE_PAGES=1 to write it."
    assert PAGE.read_text() == page, "docs/pairs.md differs: PENSTOCK_WRITE_PAGES=1 writes it."


def test_without_a_word_a_study_chooses_by_its_work_and_says_so():
    longer = pk.Task(network, data, F.cross_entropy, optimizer=torch.optim.SGD, epochs=3)
    options = {"minimize": "loss", "executor": pk.Simulated(2), "store": False}
    study = pk.Study(longer, SPACE, **options)
    assert study.spec()["scheduler"] == pk.ASHA(max_epochs=3, eta=3, trials=100).to_json()
    assert type(study.sampler.then) is pk.TPE
    ear = Ear()
    study.run(view=ear)
    assert ear.said == [study.chosen]
    assert re.match(
        r"Chosen: ASHA with TPE from the middle of the space on \(a Task of 3 epochs.*\); nothing is fused \(.*\); "
        "first come",
        study.chosen,
    )
    assert "\n" not in study.chosen
    assert len(study.trials) == 100
    assert dict(study.trials[0].config) == SPACE.middle
    assert 100 < study.state.epochs < 240  # 300 to their ends
    # Too short for rungs, of unknown length, or as the user says: every trial to its end.
    for work, given in ((TASK, {}), (train, {}), (longer, {"sampler": pk.Random()})):
        assert pk.Study(work, SPACE, **options, **given).spec()["scheduler"] == pk.Full(trials=50).to_json()
    assert (
        pk.Study(longer, SPACE, **options, budget=pk.Budget(trials=4)).spec()["scheduler"]["name"] == "Full"
    )
    for given in (
        {"scheduler": pk.Full(trials=2)},
        {"sampler": pk.Random()},
        {"budget": pk.Budget(trials=4)},
    ):
        assert pk.Study(longer, SPACE, **options, **given).chosen is None
    assert "so few epochs" in pk.Study(TASK, SPACE, **options).chosen


class AtTheRung(StopRule):
    """Gives up the best trial right when its first rung ends."""

    def start(self):
        pass

    def observe(self, trial, epoch, metrics):
        return "given up" if trial == 0 and epoch == 1 else None


@pytest.mark.parametrize(
    "scheduler", [pk.Halving(max_epochs=2, eta=2, trials=4), pk.ASHA(max_epochs=2, eta=2, trials=4)]
)
def test_who_is_given_up_at_the_end_of_a_rung_is_not_promoted(scheduler):
    def best_first(run):
        for _ in run.epochs(2):
            run.report(loss=float(run.trial))

    study = pk.Study(
        best_first,
        SPACE,
        minimize="loss",
        scheduler=scheduler,
        sampler=pk.Random(),
        executor=pk.Simulated(1),
        store=False,
        stop=AtTheRung(),
    ).run()
    assert (study.trials[0].status, study.trials[0].epoch) == (pk.TrialStatus.STOPPED, 1)
    assert study.trials[0].reason == "given up"
    assert study.trials[1].epoch == 2  # the best of the others went on in its place

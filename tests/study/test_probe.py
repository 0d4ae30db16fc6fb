"""Studies that measure before training: journalled, resumed, charged for, and never worse off where it fails."""

import math
import random

import pytest
import torch

import penstock as pk
from penstock.core import Measurement, Noted, Source, Submitted
from penstock.core.errors import InvalidInput
from penstock.core.state import PROBED
from penstock.predict import Features, Predictor
from penstock.report import summary_text
from penstock.store import open_store
from penstock.train._profile import ProfileSample

SPACE = pk.Space(
    width=pk.Int(1, 64, structural=True),
    depth=pk.Int(1, 8, structural=True),
    lr=pk.Float(1e-4, 1, log=True),
)
BOUND_W = 40.0


def watts(config):
    return 20 + 0.5 * config["width"] + 3 * config["depth"] + 4 * math.sin(config["width"] / 3)


def train(run):
    for epoch in run.epochs(2):
        run.report(error=-watts(run.config) + abs(math.log10(run.config["lr"]) + 2) + 1 / (epoch + 1))


def predictors():
    draw = random.Random(5)
    configs = [SPACE.sample(1000 + i) for i in range(30)]
    values = [watts(c) * (1 + 0.02 * draw.gauss(0, 1)) for c in configs]
    model = Predictor.fit("power_w", Features.of(SPACE), configs, values, folds=0, forms=("linear",))
    return pk.Predictors({"power_w": model}, features=Features.of(SPACE))


class Board:
    """Measures exactly; counts the readings of each structure in a file, across the sessions of a study."""

    def __init__(self, log=None, *, leave_after=None):
        self.log, self.leave_after = log, leave_after

    def __call__(self, config):
        if self.log is not None:
            with open(self.log, "a") as file:
                print(config["width"], config["depth"], file=file)
            if self.leave_after is not None and len(self.log.read_text().splitlines()) == self.leave_after:
                raise SystemExit
        return {"power_w": watts(config)}


def study(board=None, **options):
    options.setdefault("store", False)
    options.setdefault("sampler", pk.Bayes())
    options.setdefault("scheduler", pk.Full(trials=12, epochs=2))
    options.setdefault("executor", pk.Simulated(devices=1, seconds=10.0))
    if board is not None:
        options["probe"] = pk.Profile(None, SPACE, measure=board, seconds=0.5)
    return pk.Study(
        train,
        SPACE,
        minimize="error",
        limits=[pk.power_w <= BOUND_W],
        predictors=predictors(),
        seed=2,
        **options,
    )


FIRST = [{"width": 64, "depth": 8, "lr": 0.01}, {"width": 20, "depth": 2, "lr": 0.01}]
WAYS = {
    "Random": {"sampler": pk.Random()},
    "TPE": {"sampler": pk.TPE()},
    "HW-IECI": {"sampler": pk.Bayes()},
    "HW-IECI, two devices": {"sampler": pk.Bayes(), "executor": pk.Simulated(devices=2, seconds=10.0)},
    "HW-IECI, warm start": {"sampler": pk.Bayes(), "warm_start": FIRST},
    "Hyperband": {
        "sampler": pk.Bayes(),
        "scheduler": pk.Hyperband(max_epochs=2),
        "budget": pk.Budget(trials=8),
    },
}


@pytest.mark.parametrize("name", WAYS)
def test_no_training_violates_and_some_were_measured_first(name):
    done = study(Board(), **WAYS[name]).run()
    assert done.trials
    assert all(watts(t.config) <= BOUND_W for t in done.trials)
    assert done.probed > 0
    assert "measured first" in summary_text(done.name, done.goal, done.state, spec=done.spec())


def test_the_best_is_nearer_to_the_limit_than_without():
    with_it, without = study(Board()).run(), study().run()
    assert without.probed == 0
    assert watts(without.best.config) < watts(with_it.best.config) <= BOUND_W


@pytest.mark.parametrize("name", ["Random", "TPE", "HW-IECI", "HW-IECI, two devices", "HW-IECI, warm start"])
def test_a_resumed_study_goes_on_as_if_never_interrupted_and_measures_nothing_twice(name, tmp_path):
    def run(folder, *budgets):
        folder.mkdir()
        log = folder / "readings"
        study(Board(log), **{**WAYS[name], "store": folder / "study.db", "budget": budgets[0]}).run()
        for budget in budgets[1:]:
            pk.Study.load(folder / "study.db", budget=budget).run()
        return pk.Study.load(folder / "study.db"), log.read_text().splitlines()

    whole, read = run(tmp_path / "whole", pk.Budget())
    parts, again = run(tmp_path / "parts", pk.Budget(time_s=60), pk.Budget(time_s=140), pk.Budget())
    assert len(parts.state.sessions) == 3
    assert [t.config for t in parts.trials] == [t.config for t in whole.trials]
    assert again == read
    assert parts.probed == whole.probed > 0


@pytest.mark.parametrize("leave_after", [4, 30])
def test_a_driver_that_dies_while_it_measures_loses_no_reading_that_was_written(leave_after, tmp_path):
    """Readings come in blocks of 8; the block that was being read is all that is read again."""
    whole = study(Board(tmp_path / "whole"), store=tmp_path / "whole.db").run()
    log = tmp_path / "parts"
    with pytest.raises(SystemExit):
        study(Board(log, leave_after=leave_after), store=tmp_path / "parts.db").run()
    parts = pk.Study.load(tmp_path / "parts.db")
    parts.run()
    assert [t.config for t in parts.trials] == [t.config for t in whole.trials]
    extra = len(log.read_text().splitlines()) - len((tmp_path / "whole").read_text().splitlines())
    assert 0 < extra <= 8


def test_readings_are_in_the_journal_before_the_trial_they_are_for(tmp_path):
    study(Board(), store=tmp_path / "study.db").run()
    store = open_store(tmp_path / "study.db", write=False)
    events = [event for _, event in store.read(store.find(None).id)]
    store.close()
    known: set[tuple[int, int]] = set()
    waiting = predictors()
    found = 0
    for event in events:
        if isinstance(event, Noted) and event.topic == PROBED:
            config = event.data["config"]
            known.add((config["width"], config["depth"]))
            assert event.data["readings"]["power_w"] == pytest.approx([watts(config)] * 8)
        if isinstance(event, Submitted):
            for segment in event.segments:
                config = segment.trial.config
                told = waiting.predict("power_w", config)
                if (
                    told.mean + 2.5 * told.doubt > BOUND_W
                ):  # doubtful to the profile, which learned a little since
                    found += (config["width"], config["depth"]) in known
    assert found > 0


def test_what_measuring_takes_is_charged_in_virtual_time(tmp_path):
    """Half a second a reading, and 20 s a trial on the one device."""
    log = tmp_path / "readings"
    done = study(Board(log)).run()
    readings = len(log.read_text().splitlines())
    assert done.state.spent_s == pytest.approx(12 * 20 + 0.5 * readings)


def test_a_board_that_does_not_answer_costs_three_tries_and_changes_nothing():
    asked = []

    def silent(config):
        asked.append(config)
        raise ConnectionError("no route to the board")

    done = study(silent).run()
    assert len(asked) == 3
    assert len(done.trials) == 12
    assert all(watts(t.config) <= BOUND_W for t in done.trials)
    notes = [note for note in done.state.notes if note.topic == PROBED]
    assert all("no route to the board" in note.data["error"] for note in notes)


def network(width):
    return torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.ReLU(), torch.nn.Linear(width, 2))


def data():
    x = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    return pk.Data.split(x, (x.sum(1) > 0).long())


def test_a_real_network_is_built_and_measured_before_it_is_trained():
    """What memory a network of the limit's width needs is measured here, and all that were trained need no more."""
    task = pk.Task(network, data, torch.nn.functional.cross_entropy, epochs=1)
    space = pk.Space(width=pk.Int(2, 400, structural=True), lr=pk.Float(0.001, 0.1, log=True))
    profile = pk.Profile(task, space, seconds=0.001)

    def bytes_of(width):
        (sample,) = profile.read({"width": width, "lr": 0.01})
        return sample.values["memory_bytes"].value

    draw = random.Random(1)
    configs = [{"width": w, "lr": 0.01} for w in range(5, 400, 20)]
    values = [bytes_of(c["width"]) * (1 + 0.08 * draw.gauss(0, 1)) for c in configs]  # a coarse profile
    model = Predictor.fit("memory_bytes", Features.of(space), configs, values, folds=0, forms=("linear",))
    bound = bytes_of(200)
    done = pk.Study(
        task,
        space,
        minimize="loss",
        sampler=pk.Random(),
        scheduler=pk.Full(trials=25, epochs=1),
        limits=[pk.memory_bytes <= bound],
        predictors=pk.Predictors({"memory_bytes": model}, features=Features.of(space)),
        probe=profile,
        executor=pk.Simulated(devices=1),
        store=False,
    ).run()
    assert done.probed > 0
    assert max(t.config["width"] for t in done.trials) <= 200


def test_a_task_that_cannot_be_built_here_is_trained_by_the_predictions_alone():
    def broken(width):
        raise RuntimeError("needs another machine")

    task = pk.Task(broken, data, torch.nn.functional.cross_entropy, epochs=1)
    done = study(probe=pk.Profile(task, SPACE)).run()
    assert len(done.trials) == 12
    assert done.probed == 3
    assert all(watts(t.config) <= BOUND_W for t in done.trials)


def test_where_trials_would_disturb_the_readings_nothing_is_measured():
    task = pk.Task(network, data, torch.nn.functional.cross_entropy, epochs=1)
    here = pk.Profile(task, SPACE)
    assert not study(probe=here, executor=pk.Local(2)).measures
    assert study(probe=here, executor=pk.Local(1)).measures
    assert study(Board(), executor=pk.Local(2)).measures


def test_mistakes_are_told():
    with pytest.raises(InvalidInput, match="probe is of use with limits"):
        pk.Study(train, SPACE, minimize="error", probe=pk.Profile(None, SPACE, measure=Board()))
    with pytest.raises(InvalidInput, match=r"probe takes a profile that can measure.*got True"):
        study(probe=True)
    with pytest.raises(InvalidInput, match="count must be a whole number"):
        pk.Profile(None, SPACE, measure=Board()).read(SPACE.sample(0), 0)


def test_what_measuring_draws_is_the_studys(tmp_path, monkeypatch):
    """Of a device whose every reading draws 5 J: in the total, after a resume, and in a budget."""

    def reads(self, config, drawn):
        drawn.append(Measurement(5.0, "J", Source.MEASURED))
        return ProfileSample(config, {"power_w": Measurement(watts(config), "W", Source.MEASURED)})

    monkeypatch.setattr(pk.Profile, "_try", reads)
    options = {"executor": pk.Local(1), "scheduler": pk.Full(trials=3, epochs=2), "sampler": pk.Random()}
    done = study(Board(), store=tmp_path / "study.db", **options).run()
    notes = [note for note in done.state.notes if note.topic == PROBED]
    readings = sum(len(note.data["readings"]["power_w"]) for note in notes)
    assert readings > 0
    trained_j = sum(trial.energy.joules for trial in done.trials)
    assert done.energy.joules == pytest.approx(5 * readings + trained_j)
    assert done.summary()["energy_j"] == pytest.approx(done.energy.joules)
    assert pk.Study.load(tmp_path / "study.db").energy == done.energy
    less = study(Board(), budget=pk.Budget(energy_wh=5 / 3600), **options).run()
    assert less.state.closed.reason == "budget"
    assert less.state.counts.ended <= 1  # who was measured first has begun


def test_a_simulated_study_draws_nothing_for_measuring(monkeypatch):
    """Its journal follows from its seed alone."""

    def reads(self, config, drawn):
        drawn.append(Measurement(5.0, "J", Source.MEASURED))
        return ProfileSample(config, {"power_w": Measurement(watts(config), "W", Source.MEASURED)})

    monkeypatch.setattr(pk.Profile, "_try", reads)
    assert study(Board()).run().energy is None

"""Profiles: what is measured of a network's inference, and what is predicted from it."""

import itertools
import json
import platform
import time
import xml.etree.ElementTree as ET

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import penstock as pk
from penstock.cli._app import app
from penstock.core import Source
from penstock.core.errors import InvalidInput
from penstock.energy import DeviceKind, Sensor
from penstock.predict import scatter_svg
from penstock.store import open_store
from penstock.train._profile import _cpu_name

SPACE = pk.Space(
    width=pk.Int(8, 256, structural=True),
    depth=pk.Int(1, 3, structural=True),
    lr=pk.Float(1e-3, 1, log=True),
)
ROWS, INPUTS, CLASSES = 32, 20, 4


def data():
    torch.manual_seed(0)
    x = torch.randn(64, INPUTS)
    return pk.Data.split(x, (x[:, 0] > 0).long(), val=0.5)


def network(width, depth):
    layers = [nn.Linear(INPUTS, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def task(model=network):
    return pk.Task(model, data, F.cross_entropy, optimizer=torch.optim.SGD, epochs=2, eval_batch_size=ROWS)


def sizes(config):
    w, d = config["width"], config["depth"]
    return [(INPUTS, w), *[(w, w)] * (d - 1), (w, CLASSES)]


def parameters(config):
    return sum(a * b + b for a, b in sizes(config))


def operations(config):
    return sum(2 * ROWS * a * b for a, b in sizes(config))


@pytest.fixture(scope="module")
def collected():
    made = pk.Profile(task(), SPACE, seconds=0.005)
    return made, made.collect(24, seed=1)


def test_every_structure_is_built_and_measured(collected):
    made, _ = collected
    assert len(made.samples) == 24
    for sample in made.samples:
        assert not sample.error
        assert sample.values["params"].value == parameters(sample.config)
        assert sample.values["flops"].value == operations(sample.config)
        assert sample.values["latency_s"].value > 0
        assert sample.values["latency_s"].source is Source.MEASURED


def test_memory_is_weights_batch_and_the_activations_alive_at_once(collected):
    """By hand: a Linear's input and output are alive together; ReLU out of place holds both sides too."""
    made, _ = collected
    for sample in made.samples:
        width = sample.config["width"]
        still = 4 * (parameters(sample.config) + ROWS * INPUTS)
        value = sample.values["memory_bytes"]
        assert value.source is Source.ESTIMATED  # no allocator tells on a CPU
        # One to three activations of the widest layer, whatever is freed when.
        assert still + 4 * ROWS * width <= value.value <= still + 3 * 4 * ROWS * max(width, CLASSES) + 4096


def test_power_is_estimated_here_or_measured_and_says_so(collected):
    _, found = collected
    if "power_w" in found:
        assert found["power_w"].source in (Source.MEASURED, Source.ESTIMATED)
        assert "power_w: RMSPE" in str(found)


def test_counts_are_exact_and_memory_is_predicted_well(collected):
    _, found = collected
    for seed in range(40, 50):
        config = SPACE.sample(seed)
        assert found.predict("params", config).mean == parameters(config)
        assert found.predict("flops", config).std == 0
    assert found["memory_bytes"].rmspe < 0.07


def test_structures_that_can_not_be_built_are_left_out_with_their_error():
    def picky(width, depth):
        if depth == 3:
            raise RuntimeError("Kernel size can't be greater than actual input size")
        return network(width, depth)

    made = pk.Profile(task(picky), SPACE, seconds=0.001)
    made.collect(16)
    broken = [s for s in made.samples if s.error]
    assert {s.config["depth"] for s in broken} == {3}
    assert "Kernel size" in broken[0].error

    def hopeless(width, depth):
        raise RuntimeError("no such device")

    with pytest.raises(InvalidInput, match=r"0 of 4 structures.*no such device"):
        pk.Profile(task(hopeless), SPACE, seconds=0.001).collect(4)


def test_time_and_energy_of_an_epoch_by_the_same_road():
    made = pk.Profile(task(), SPACE, seconds=0.001, training=True)
    found = made.collect(12)
    assert "epoch_s" in found
    assert all(s.values["epoch_s"].value > 0 for s in made.samples)


def test_another_machine_or_a_simulator_measures_by_a_function():
    made = pk.Profile(
        None, SPACE, measure=lambda c: {"power_w": 5 + 0.1 * c["width"] + c["depth"]}, name="board"
    )
    found = made.collect(30)
    config = {"width": 100, "depth": 2, "lr": 0.1}
    assert found.predict("power_w", config).mean == pytest.approx(17.0, rel=1e-3)
    assert found["power_w"].source is Source.SIMULATED
    assert found["power_w"].rmspe < 0.01


def test_predicted_against_actual_is_a_picture_with_a_point_per_sample(collected):
    _, found = collected
    root = ET.fromstring(scatter_svg(found))
    points = root.findall(".//{http://www.w3.org/2000/svg}circle")
    assert len(points) == sum(found[name].samples for name in found)


def test_profiles_are_kept_per_device_model_and_limit_later_studies_of_the_task(collected, tmp_path):
    """Parameters are counted from the traced network: a study's limit on them is exact."""
    _, found = collected
    path = tmp_path / "studies.db"
    store = open_store(path, write=True)
    key = found.save(store)
    again = pk.Predictors.load(store, found.device, found.task, extra=collected[0].traced)
    store.close()
    assert found.device in key
    config = SPACE.sample(99)
    assert again.predict("memory_bytes", config).mean == pytest.approx(
        found.predict("memory_bytes", config).mean
    )
    done = pk.Study(
        task(),
        SPACE,
        minimize="loss",
        sampler=pk.Random(),
        limits=[pk.params <= 3000, pk.memory_bytes <= "30kB"],
        scheduler=pk.Full(trials=6, epochs=1),
        executor=pk.Simulated(devices=1, seconds=1.0),
        store=path,
    ).run()
    assert len(done.trials) == 6
    assert max(parameters(t.config) for t in done.trials) <= 3000
    assert done.gate.predictors.device == found.device
    assert sum(parameters(SPACE.sample(i)) > 3000 for i in range(100)) > 50  # the limit does bite


FILE = """
import torch, torch.nn.functional as F
from torch import nn
import penstock as pk

def data():
    torch.manual_seed(0)
    return pk.Data.split(torch.randn(64, 8), torch.randint(0, 2, (64,)), val=0.5)

def network(width):
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 2))

task = pk.Task(network, data, F.cross_entropy, optimizer=torch.optim.SGD, epochs=1)
space = pk.Space(width=pk.Int(2, 64, structural=True), lr=pk.Float(0.01, 1, log=True))
"""


def test_the_command_measures_keeps_and_draws(tmp_path):
    (tmp_path / "net.py").write_text(FILE)
    kept, drawn, target = tmp_path / "s.db", tmp_path / "p.svg", f"{tmp_path / 'net.py'}:task"
    words = ["--samples", "12", "--seconds", "0.002", "--store", str(kept), "--plot", str(drawn), "--json"]
    done = CliRunner().invoke(app, ["profile", target, *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert facts["samples"] == 12
    assert facts["quantities"]["memory_bytes"]["source"] == "estimated"
    assert ET.parse(drawn).getroot().tag.endswith("svg")
    store = open_store(kept, write=False)
    assert list(store.keys("predictors/")) == [facts["key"]]
    store.close()
    with pytest.raises(InvalidInput, match="no 'spaces'"):
        CliRunner().invoke(app, ["profile", target, "--space", "spaces"], catch_exceptions=False)


def test_a_network_is_traced_once_for_all_configurations_that_make_it():
    """What the factory does not look at is no part of the key; what it looks at only sometimes is."""
    built = []

    def network(config):
        built.append(config)
        sizes = [config["width"]] * config["layers"]
        if config["layers"] > 1:
            sizes[-1] = config["last"]
        ends = [4, *sizes, 2]
        return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in itertools.pairwise(ends)))

    def params(config):
        sizes = [config["width"]] * config["layers"]
        if config["layers"] > 1:
            sizes[-1] = config["last"]
        ends = [4, *sizes, 2]
        return sum((a + 1) * b for a, b in itertools.pairwise(ends))

    space = pk.Space(
        width=pk.Choice(3, 5), layers=pk.Choice(1, 2), last=pk.Choice(2, 7), lr=pk.Float(1e-3, 1, log=True)
    )
    data = pk.Data(train=(torch.zeros(4, 4), torch.zeros(4, dtype=torch.long)))
    task = pk.Task(network, data, torch.nn.functional.cross_entropy, optimizer=torch.optim.SGD)
    profile = pk.Profile(task, space)
    for number in range(200):
        config = space.sample(number)
        assert profile.traced(config)["params"] == params(config)
    # 4 networks of two layers, 2 of one layer, each twice for "last", and some before the key was known.
    assert len(built) <= 8 + 3


def test_a_name_that_a_configuration_lacks_makes_another_network():
    """Conditional hyperparameters: one that is there sometimes, for factories of both kinds."""

    def by_name(width, last=2):
        return torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, last))

    def by_config(config):
        last = 2
        if "last" in config:
            last = config["last"]
        return torch.nn.Sequential(
            torch.nn.Linear(4, config["width"]), torch.nn.Linear(config["width"], last)
        )

    data = pk.Data(train=(torch.zeros(4, 4), torch.zeros(4, dtype=torch.long)))
    for network in (by_name, by_config):
        task = pk.Task(network, data, F.cross_entropy, optimizer=torch.optim.SGD)
        profile = pk.Profile(task, pk.Space(width=pk.Int(1, 9), last=pk.Int(2, 9)))
        counts = [profile.traced(config)["params"] for config in ({"width": 3}, {"width": 3, "last": 7})]
        assert counts == [5 * 3 + 4 * 2, 5 * 3 + 4 * 7]


def board(config):
    return {"power_w": 5 + 0.1 * config["width"] + config["depth"]}


@pytest.mark.parametrize(
    "error", [KeyError("k"), OSError("no answer"), AssertionError("a"), ZeroDivisionError()]
)
def test_whatever_a_structure_fails_with_is_kept_as_its_sample(error):
    def picky(width, depth):
        if depth == 3:
            raise error
        return network(width, depth)

    built = pk.Profile(task(picky), SPACE, seconds=0.001)
    built.collect(12)

    def measure(config):
        if config["depth"] == 3:
            raise error
        return board(config)

    asked = pk.Profile(None, SPACE, measure=measure)
    found = asked.collect(12)
    for made in (built, asked):
        broken = [s for s in made.samples if s.error]
        assert {s.config["depth"] for s in broken} == {3}
        assert type(error).__name__ in broken[0].error
    config = {"width": 50, "depth": 2, "lr": 0.1}
    assert found.predict("power_w", config).mean == pytest.approx(12.0, rel=0.01)


@pytest.mark.parametrize(
    "wrong", [None, 3, [1.0], {}, {"power_w": "12"}, {"power_w": True}, {3: 1.0}], ids=repr
)
def test_what_measure_returns_is_numbers_by_quantity(wrong):
    with pytest.raises(InvalidInput, match=r"0 of 4 structures.*measure= returned.*power_w"):
        pk.Profile(None, SPACE, measure=lambda config: wrong).collect(4)


def test_readings_that_are_not_above_0_are_left_out_and_told():
    """The rest is the same line, so it is predicted as if they had never been read."""

    def sometimes(config):
        return {"power_w": 0.0 if config["depth"] == 2 else board(config)["power_w"], "latency_s": 0.5}

    made = pk.Profile(None, SPACE, measure=sometimes)
    with pytest.warns(UserWarning, match=r"power_w: \d+ of \d+ readings are not above 0"):
        found = made.collect(30)
    readings = [s.values["power_w"].value for s in [*made.samples, *made.repeats]]
    assert found["power_w"].samples == sum(value > 0 for value in readings) < len(readings)
    assert found["latency_s"].samples == len(readings)
    config = {"width": 100, "depth": 1, "lr": 0.1}
    assert found.predict("power_w", config).mean == pytest.approx(16.0, rel=0.01)


def test_a_quantity_of_which_too_few_readings_are_left_is_an_error():
    numbers = itertools.count()
    with pytest.raises(
        InvalidInput, match=r"power_w: 13 of 15 readings .* \(the first is -1\): 2 are too few"
    ):
        pk.Profile(
            None, SPACE, measure=lambda c: {"power_w": 1.0 if next(numbers) in (3, 4) else -1.0}
        ).collect(10)


CPUINFO = """processor\t: 0
vendor_id\t: AuthenticAMD
model\t\t: 113
model name\t: AMD Ryzen 7   3700X 8-Core Processor
flags\t\t: fpu vme
"""


def test_a_processor_is_told_by_its_model(tmp_path):
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO)
    assert _cpu_name(path) == "AMD Ryzen 7 3700X 8-Core Processor"
    path.write_text("processor\t: 0\nBogoMIPS\t: 100.00\n")  # as on many ARM boards
    kind = platform.processor() or platform.machine()
    assert _cpu_name(path) == kind
    assert _cpu_name(tmp_path / "none") == kind
    assert pk.Profile(task(), SPACE).device_name == _cpu_name()


def test_figures_of_a_real_board_say_so():
    made = pk.Profile(None, SPACE, measure=board, source=Source.MEASURED)
    assert made.collect(12)["power_w"].source is Source.MEASURED
    assert {s.values["power_w"].source for s in made.samples} == {Source.MEASURED}


@pytest.mark.parametrize(
    "wrong",
    [
        {"space": {"width": pk.Int(1, 3)}},
        {"space": None},
        {"seconds": "a"},
        {"seconds": float("nan")},
        {"device": 3},
        {"batch_size": -3},
        {"batch_size": 2.5},
        {"measure": 3},
        {"source": "board", "measure": repr},
        {"source": Source.MEASURED},
        {"folds": "x"},
        {"folds": -1},
        {"seed": "x"},
        {"samples": 0},
    ],
    ids=repr,
)
def test_arguments_are_checked_before_anything_is_measured(wrong):
    def never(width, depth):
        raise AssertionError("built")

    name, value = next(iter(wrong.items()))
    later = {n: wrong.pop(n) for n in ("folds", "seed", "samples") if n in wrong}
    space = wrong.pop("space", SPACE)
    with pytest.raises(InvalidInput) as caught:
        pk.Profile(task(never), space, **wrong).collect(**later)
    assert repr(value) in str(caught.value)
    if name in ("folds", "seed"):
        with pytest.raises(InvalidInput, match=name):
            pk.Profile(None, SPACE, measure=board).fit(**later)


@pytest.mark.parametrize("name", ["p.png", "nodir/p.svg", "folder.svg"])
def test_a_picture_that_can_not_be_drawn_is_told_before_anything_is_measured(tmp_path, monkeypatch, name):
    (tmp_path / "net.py").write_text(FILE)
    (tmp_path / "folder.svg").mkdir()
    monkeypatch.setattr(pk.Profile, "collect", lambda *args, **options: pytest.fail("measured"))
    words = ["profile", f"{tmp_path / 'net.py'}:task", "--plot", str(tmp_path / name)]
    with pytest.raises(InvalidInput, match="--plot"):
        CliRunner().invoke(app, words, catch_exceptions=False)
    assert not (tmp_path / "p.png").exists()


def test_a_picture_that_fails_at_the_end_does_not_take_the_figures_along(tmp_path, monkeypatch):
    (tmp_path / "net.py").write_text(FILE)
    drawn = tmp_path / "p.svg"

    def full(self, *args, **options):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(drawn), "write_text", full)
    words = ["--samples", "6", "--seconds", "0.001", "--json", "--plot", str(drawn)]
    done = CliRunner().invoke(app, ["profile", f"{tmp_path / 'net.py'}:task", *words])
    assert isinstance(done.exception, InvalidInput)
    assert "No space left on device" in str(done.exception)
    assert json.loads(done.stdout)["samples"] == 6


class Constant(Sensor):
    """Ten watts, whatever happens."""

    id = key = name = method = "constant"
    kind, source, uncertainty = DeviceKind.SYSTEM, Source.MEASURED, 0.0

    def energy_j(self):
        return 10.0 * time.monotonic()

    def power_w(self):
        return 10.0


@pytest.mark.parametrize("works", [True, False])
def test_what_a_reading_drew_is_told_also_where_it_failed(works):
    """At a constant power: that times its time, which is between what making a network and all of it took."""

    def made(width, depth):
        time.sleep(0.05)
        if not works:
            raise ValueError("no such network")
        return network(width, depth)

    profile = pk.Profile(task(made), SPACE, seconds=0.01, sensors=[Constant()])
    began_s = time.monotonic()
    samples = profile.read({"width": 8, "depth": 1, "lr": 0.1}, 2)
    whole_s = time.monotonic() - began_s
    assert [bool(sample.error) for sample in samples] == ([False, False] if works else [True])
    assert all(sample.energy.source is Source.MEASURED for sample in samples)
    assert 10 * 0.05 * len(samples) <= sum(sample.energy.joules for sample in samples) <= 10 * whole_s
    told = pk.Profile(None, SPACE, measure=lambda config: {"power_w": 3.0}).read({"width": 8, "depth": 1})
    assert told[0].energy is None

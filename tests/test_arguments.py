"""Arguments of a wrong kind are refused with an error that names the value, not with a bare traceback."""

import random

import numpy as np
import pytest

import penstock as pk
from penstock.core.errors import InvalidInput, SpaceError
from penstock.energy import EstimateSensor, EtaCost, LeastEnergyWithin, Meter, PowerLimits
from penstock.execute import Local, Simulated
from penstock.predict import Overhead
from penstock.sample import Random, WarmStart
from penstock.schedule import PBT
from penstock.train import Command
from penstock.train._worker import Settings, Spec, execute


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        (("2",), {}, "'2'"),
        ((2.5,), {}, "2.5"),
        ((True,), {}, "True"),
        ((0,), {}, "0"),
        ((), {"threads": "x"}, "threads.*'x'"),
        ((), {"threads": 1.5}, "threads.*1.5"),
        ((), {"slots_per_trial": "x"}, "slots_per_trial.*'x'"),
        ((), {"slots_per_trial": None}, "slots_per_trial.*None"),
        ((), {"gpus": "x"}, "gpus.*'x'"),
        ((), {"gpus": -1}, "gpus.*-1"),
        ((), {"gpus": [0, 0]}, r"gpus.*\[0, 0\]"),
        ((), {"gpus": [0, "1"]}, "gpus.*'1'"),
    ],
)
def test_local(arguments, options, named):
    with pytest.raises(InvalidInput, match=named):
        Local(*arguments, **options)


def test_local_takes_numbers_of_numpy():
    assert Local(np.int64(2), threads=np.int32(1)).slots == 2


@pytest.mark.parametrize(
    ("arguments", "options", "named"),
    [
        ((2.5,), {}, "devices.*2.5"),
        ((None,), {}, "devices.*None"),
        (("x",), {}, "devices.*'x'"),
        (({"a": "x"},), {}, "devices.*'a'.*'x'"),
        (({"a": 1.5},), {}, "devices.*'a'.*1.5"),
        ((), {"seconds": "x"}, "seconds.*'x'"),
        ((), {"seconds": None}, "seconds.*None"),
        ((), {"seconds": lambda config: 1}, "seconds is called with"),
        ((), {"seconds": lambda: 1}, "seconds is called with"),
        ((), {"kinds": 5}, "kinds.*5"),
        ((), {"kinds": {"simulated": "x"}}, "speed of 'simulated'.*'x'"),
        ((), {"slots_per_trial": "x"}, "slots_per_trial.*'x'"),
        ((), {"overhead": 5}, "overhead.*5"),
        ((), {"failure": 5}, "failure.*5"),
        ((), {"fused": "x"}, "fused.*'x'"),
    ],
)
def test_simulated(arguments, options, named):
    with pytest.raises(InvalidInput, match=named):
        Simulated(*arguments, **options)


@pytest.mark.parametrize(
    "seconds",
    [1, 0.5, np.float64(2), lambda config, epoch: 1, lambda config, epoch, placement: 1, lambda *_: 1],
)
def test_simulated_takes_its_seconds(seconds):
    assert Simulated(2, seconds=seconds).slots == 2


def test_simulated_takes_an_overhead():
    assert Simulated({"a": 1, "b": np.int64(1)}, overhead=Overhead()).slots == 2


def test_seconds_that_are_no_number(tmp_path):
    def train(run):
        for _ in run.epochs(1):
            run.report(loss=1.0)

    study = pk.Study(
        train,
        pk.Space(x=pk.Float(0, 1)),
        minimize="loss",
        executor=Simulated(1, seconds=lambda config, epoch: "x"),
        budget=pk.Budget(trials=1),
        store=tmp_path / "s.db",
    )
    with pytest.raises(InvalidInput, match="seconds gave 'x' for epoch 0"):
        study.run()


def test_a_command_as_a_list():
    command = Command(["python", "my train.py", "--lr", "{lr}", "--tag={tag}"])
    assert command.arguments({"lr": 0.1, "tag": "a b"}) == [
        "python",
        "my train.py",
        "--lr",
        "0.1",
        "--tag=a b",
    ]
    assert command.fields == {"lr", "tag"}
    assert command.arguments({"tag": "x"}) == ["python", "my train.py", "--tag=x"]


@pytest.mark.parametrize("line", [5, None, ["python", 5], b"python", {"python": 1}, [], ""])
def test_a_command_that_is_none(line):
    with pytest.raises(InvalidInput, match=r"empty|Command takes"):
        Command(line)


@pytest.mark.parametrize("value", ["x", None, True, float("nan"), -1])
def test_rules(value):
    with pytest.raises(InvalidInput, match=f"slowdown.*{value!r}"):
        LeastEnergyWithin(value)
    with pytest.raises(InvalidInput, match=f"eta.*{value!r}"):
        EtaCost(value)
    for name in ("slice_s", "step_w"):
        with pytest.raises(InvalidInput, match=f"{name}.*{value!r}"):
            PowerLimits(EtaCost(), **{name: value})


@pytest.mark.parametrize("sensors", [5, "x", [5], [EstimateSensor(), None]])
def test_meters(sensors):
    with pytest.raises(InvalidInput, match="Meter takes"):
        Meter(sensors)


@pytest.mark.parametrize("configs", [5, "x", {"x": 0.5}])
def test_warm_start(configs):
    with pytest.raises(InvalidInput, match="WarmStart: configs is"):
        WarmStart(configs, then=Random())
    with pytest.raises(InvalidInput, match=r"WarmStart: .*observations"):
        WarmStart(then=Random(), observations=[5])


@pytest.mark.parametrize("factors", [5, "x", None, ["x"], ()])
def test_pbt(factors):
    with pytest.raises(InvalidInput, match="factors"):
        PBT(factors=factors)


SPACE = pk.Space(o=pk.Choice("sgd", "adam"), x=pk.Float(0, 1), n=pk.Int(1, 9))


def test_seeds():
    with pytest.raises(SpaceError, match=r"seed.*'x'"):
        SPACE.sample("x")
    with pytest.raises(SpaceError, match=r"seed.*None"):
        SPACE.repair({}, None)
    assert SPACE.sample(np.int64(3)) == SPACE.sample(3) == SPACE.sample(random.Random(3))


@pytest.mark.parametrize("point", ["x", "xyz", 5, None, ["a", 0.5, 0.5], [0.5, None, 0.5], {"x": 1}, [0.5]])
def test_points(point):
    with pytest.raises(SpaceError, match="point"):
        SPACE.decode(point)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("value", [{"o": "zzz"}, {"x": "zzz"}, {"n": "zzz"}, {"x": None}])
def test_encoding_names_the_domain(value, one_hot):
    ((name, given),) = value.items()
    with pytest.raises(SpaceError, match=f"^{name}={given!r}"):
        SPACE.encode(value, one_hot=one_hot)


@pytest.mark.parametrize("config", [5, None, "o"])
def test_encoding_takes_configurations(config):
    with pytest.raises(SpaceError, match="configuration is a dict"):
        SPACE.encode(config)


@pytest.mark.parametrize(
    "data",
    [
        None,
        5,
        {},
        {"domains": 5},
        {"domains": [5]},
        {"domains": ["xy"]},
        {"domains": [["x", 5]]},
        {"domains": [["x", None]]},
        {"domains": [["x", {}]]},
        {"domains": [["x", {"kind": "float"}]]},
        {"domains": [["x", {"kind": "odd"}]]},
        {"domains": [["x", {"kind": "int", "low": "a", "high": 3}]]},
        {"domains": [["x", {"kind": "choice", "values": 5}]]},
        {"domains": [["x", {"kind": "float", "low": 0, "high": 1, "when": 5}]]},
        {"domains": [["x", {"kind": "float", "low": 0, "high": 1, "when": {"test": []}}]]},
        {"domains": [[["x"], {"kind": "float", "low": 0, "high": 1}]]},
    ],
)
def test_spaces_from_json(data):
    with pytest.raises(SpaceError):
        pk.Space.from_json(data)


@pytest.mark.parametrize("total", ["3", 2.5, True])
def test_epochs_are_whole(tmp_path, total):
    class Sink:
        def reported(self, report):
            pass

        def saved(self, epoch, path):
            pass

        def told(self):
            return None

    def train(run):
        for _ in run.epochs(total):
            run.report(loss=1.0)

    spec = Spec(0, {}, 7, 0, None, True, None, None, 0, 0)
    end = execute(train, spec, Settings(tmp_path, ("loss",)), Sink())
    assert end.status == "failed"
    assert f"run.epochs(total) takes a whole number, got {total!r}" in end.reason


def test_seeds_and_retries_of_numpy(tmp_path):
    def train(run):
        return run.config["x"]

    options = {
        "minimize": "loss",
        "budget": pk.Budget(trials=1),
        "executor": Simulated(1),
        "store": tmp_path / "s.db",
    }
    study = pk.Study(train, {"x": pk.Float(0, 1)}, seed=np.int64(3), retries=np.int32(1), **options).run()
    assert (study.seed, study.retries) == (3, 1)
    assert pk.Study.load(tmp_path / "s.db").seed == 3

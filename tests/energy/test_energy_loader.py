"""EnergyLoader: Zeus Listing 1 around a real DataLoader, on simulated and fake GPUs."""

import json
import multiprocessing
import os
import time

import pytest

from penstock.core import Source, VirtualClock
from penstock.core.errors import InvalidInput
from penstock.energy import V100, V100_LOADS, EstimateSensor, EtaCost, LeastEnergy, NvmlSensor, SimulatedGpu
from penstock.train._energy_loader import EnergyLoader

torch = pytest.importorskip("torch")
RESNET = V100_LOADS["resnet50", 256]
ITERATIONS = 400


def data(batches=ITERATIONS, batch_size=4):
    dataset = torch.utils.data.TensorDataset(torch.zeros(batches * batch_size, 3))
    return torch.utils.data.DataLoader(dataset, batch_size=batch_size)


class Bench:
    """Training on a simulated V100: an iteration takes what the model says at the present limit."""

    def __init__(self, gpus=1, *, iteration_s=0.5, may_set_limit=True):
        self.clock = VirtualClock()
        self.gpus = [
            SimulatedGpu(self.clock, index=index, may_set_limit=may_set_limit) for index in range(gpus)
        ]
        self.iteration_s = iteration_s

    def step(self):
        for gpu in self.gpus:
            gpu.run(RESNET)
        self.clock.advance_to(self.clock.now_s() + self.iteration_s * self.gpus[0].slowdown())
        for gpu in self.gpus:
            gpu.idle()

    def train(self, loader, evaluation_s=10.0):
        for _epoch in loader.epochs():
            for _batch in loader:
                self.step()
            self.clock.advance_to(self.clock.now_s() + evaluation_s)
            yield loader


def brute_force(eta):
    limits = [100 + 25 * i for i in range(7)]
    return min(
        limits,
        key=lambda limit: (eta * V100.power_w(RESNET, limit) + (1 - eta) * 250) * V100.epoch_s(RESNET, limit),
    )


@pytest.mark.parametrize("eta", [0, 0.5, 1])
def test_the_first_epoch_profiles_the_rest_runs_at_the_best(eta):
    bench = Bench()
    loader = EnergyLoader(data(), epochs=3, eta=eta, sensors=bench.gpus, clock=bench.clock)
    limits = []
    for _ in bench.train(loader):
        limits.append(bench.gpus[0].power_limit_w())
        loader.report_metric(0.1)
    assert limits == [brute_force(eta)] * 3
    report = loader.report
    assert (report.epochs, report.stopped) == (3, "epochs")
    assert report.time_s == pytest.approx(bench.clock.now_s())
    assert report.energy.joules == pytest.approx(bench.gpus[0].energy_j())
    assert report.energy.source is Source.SIMULATED
    assert report.cost_j == pytest.approx(eta * report.energy.joules + (1 - eta) * 250 * report.time_s)
    assert report.co2.value == pytest.approx(report.energy.wh / 1000 * 481)
    assert bench.gpus[0].power_limit_w() == 250  # restored
    assert len(loader) == ITERATIONS
    assert loader.batch_size == 4


def test_the_target_ends_it():
    bench = Bench()
    loader = EnergyLoader(data(), epochs=100, target=0.65, sensors=bench.gpus, clock=bench.clock)
    for epoch, _ in enumerate(bench.train(loader)):
        loader.report_metric(0.2 * (epoch + 1))
    assert (loader.report.epochs, loader.report.stopped, loader.report.metric) == (4, "target", 0.8)
    down = EnergyLoader(
        data(), epochs=100, target=40.0, maximize=False, sensors=bench.gpus, clock=bench.clock
    )
    for epoch, _ in enumerate(bench.train(down)):
        down.report_metric(100 / (epoch + 1))  # a word error rate
    assert down.report.epochs == 3


def test_the_cost_threshold_stops_before_it_is_exceeded():
    free = Bench()
    loader = EnergyLoader(data(), epochs=10, sensors=free.gpus, clock=free.clock)
    list(free.train(loader))
    threshold_j = loader.report.cost_j / 2
    bench, said = Bench(), []
    loader = EnergyLoader(
        data(),
        epochs=10,
        cost_threshold_j=threshold_j,
        sensors=bench.gpus,
        clock=bench.clock,
        tell=said.append,
    )
    list(bench.train(loader))
    report = loader.report
    assert report.stopped == "cost"
    assert report.epochs in (4, 5)
    assert report.cost_j <= threshold_j < report.cost_j * (report.epochs + 1) / report.epochs
    assert "Stopped before epoch" in said[0]
    assert bench.gpus[0].power_limit_w() == 250


def test_observer_mode_changes_nothing_in_the_end():
    bench = Bench()
    loader = EnergyLoader(data(), epochs=2, eta=1, observe=True, sensors=bench.gpus, clock=bench.clock)
    for _ in bench.train(loader):
        assert bench.gpus[0].power_limit_w() == 250
    limits = loader.report.limits
    best = brute_force(1)
    assert limits.best.limit_w == best
    saved = 1 - V100.power_w(RESNET, best) * V100.epoch_s(RESNET, best) / (
        V100.power_w(RESNET, 250) * V100.epoch_s(RESNET, 250)
    )
    assert limits.energy_saved == pytest.approx(saved)
    assert "would take" in str(loader.report)


def test_without_permission_it_meters_and_says_so_once():
    bench, said = Bench(may_set_limit=False), []
    loader = EnergyLoader(data(), epochs=2, sensors=bench.gpus, clock=bench.clock, tell=said.append)
    list(bench.train(loader))
    assert len(said) == 1
    assert "Run as root" in said[0]
    assert loader.report.energy.joules == pytest.approx(bench.gpus[0].energy_j())


def test_several_gpus_get_one_limit_and_their_energy_is_summed():
    one, two = Bench(), Bench(2)
    results = []
    for bench in (one, two):
        loader = EnergyLoader(data(), epochs=2, eta=0.5, sensors=bench.gpus, clock=bench.clock)
        for _ in bench.train(loader):
            assert [gpu.power_limit_w() for gpu in bench.gpus] == [brute_force(0.5)] * len(bench.gpus)
        results.append(loader.report)
    assert results[1].energy.joules == pytest.approx(2 * results[0].energy.joules)
    assert results[1].cost_j == pytest.approx(2 * results[0].cost_j)


def test_a_plain_loop_of_two_lines_profiles_too(tmp_path):
    bench = Bench()
    cache = tmp_path / "profiles.json"
    with EnergyLoader(
        data(), rule=LeastEnergy(), sensors=bench.gpus, clock=bench.clock, cache=cache, task="t"
    ) as loader:
        for _ in range(2):
            for _batch in loader:
                bench.step()
        assert bench.gpus[0].power_limit_w() == brute_force(1)
    assert bench.gpus[0].power_limit_w() == 250
    assert loader.report.epochs == 2
    (key,) = json.loads(cache.read_text())
    assert key == "power-profile/Simulated V100/t/4/1"
    with EnergyLoader(
        data(2), rule=EtaCost(1), sensors=bench.gpus, clock=bench.clock, cache=cache, task="t"
    ) as again:
        for _batch in again:
            assert bench.gpus[0].power_limit_w() == brute_force(1)  # from the first iteration


def test_an_exception_in_the_loop_restores_the_limit(gpus):
    stub = gpus(1, virtual=True)
    stub.set_load(240.0)
    sensor = NvmlSensor(0, now=stub.now_s)

    class Clock:
        now_s = stub.now_s

    loader = EnergyLoader(data(), epochs=2, sensors=[sensor], clock=Clock())

    def train():
        for _ in loader.epochs():
            for step, _ in enumerate(loader):
                stub.advance(0.2)
                if step == 200:
                    assert stub.limit_w() < 250
                    raise FloatingPointError("loss is nan")

    with pytest.raises(FloatingPointError):
        train()
    loader.close()
    assert stub.limit_w() == 250
    sensor.close()


def test_a_machine_without_a_gpu_is_metered(monkeypatch):
    loader = EnergyLoader(data(20), epochs=1, eta=1, sensors=[EstimateSensor()])
    for _ in loader.epochs():
        for _ in loader:
            sum(range(10_000))
    assert loader.report.energy.joules > 0
    assert loader.report.limits is None
    assert "estimated" in str(loader.report)
    with pytest.raises(InvalidInput, match="needs MAXPOWER"):
        next(iter(EnergyLoader(data(1), epochs=1, cost_threshold_j=5, sensors=[EstimateSensor()]).epochs()))
    with pytest.raises(InvalidInput, match="was not given"):
        next(EnergyLoader(data(1)).epochs())
    with pytest.raises(InvalidInput, match="at least 1"):
        EnergyLoader(data(1), epochs=0)


def rank_of_two(rank, rendezvous, queue):
    """One process of a job as torchrun starts it."""
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    loader = EnergyLoader(
        data(2), epochs=500, eta=1, cost_threshold_j=600.0, slice_s=0.02, warmup_s=0, settle_s=0
    )
    done, drawn_j = 0, []
    for _epoch in loader.epochs():
        drawn_j.append(0.0 if loader.report.energy is None else loader.report.energy.joules)
        for _batch in loader:
            time.sleep(0.01)
            dist.barrier()
        done += 1
    report = loader.report
    profile = None if report.limits is None else report.limits.profile
    queue.put(
        {
            "rank": rank,
            "epochs": done,
            "stopped": report.stopped,
            "joules": None if report.energy is None else report.energy.joules,
            "before": drawn_j,
            "world_size": None if profile is None else profile.world_size,
            "watts": None if profile is None else profile.at(250.0).power_w,
        }
    )
    dist.destroy_process_group()


def test_ranks_stop_together_and_rank_0_meters_both_gpus(gpus, tmp_path):
    stub = gpus(2)
    stub.set_load(200.0)
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    ranks = [context.Process(target=rank_of_two, args=(r, tmp_path / "meet", queue)) for r in range(2)]
    for rank in ranks:
        rank.start()
    first, second = sorted((queue.get(timeout=300) for _ in ranks), key=lambda result: result["rank"])
    for rank in ranks:
        rank.join()
    assert first["epochs"] == second["epochs"]
    assert 1 <= first["epochs"] < 500
    assert first["stopped"] == second["stopped"] == "cost"
    last_j = first["joules"] - first["before"][-1]
    usual_j = first["before"][-1] / max(1, first["epochs"] - 1)
    # No epoch was begun that was to cost too much; on a busy machine one may cost more than those before it.
    assert 0 < first["joules"] <= 600 + max(0.0, last_j - usual_j)
    assert second["joules"] is None  # the other rank reads nothing
    assert first["world_size"] == 2
    assert first["watts"] == pytest.approx(400, rel=0.3)
    assert [stub.limit_w(index) for index in range(2)] == [250.0, 250.0]


def test_what_was_refused_is_refused_again():
    """No GPU tells MAXPOWER: neither the first nor a second epochs() runs, metered or not."""
    loader = EnergyLoader(
        data(2), epochs=2, cost_threshold_j=10.0, sensors=[EstimateSensor()], clock=VirtualClock()
    )
    for _ in range(2):
        with pytest.raises(InvalidInput, match="needs MAXPOWER"):
            next(loader.epochs())


@pytest.mark.parametrize("loader", [5, None, "batches"])
def test_only_iterables_are_wrapped(loader):
    with pytest.raises(InvalidInput, match=f"iterable of batches.*got {loader!r}"):
        EnergyLoader(loader)


@pytest.mark.parametrize("epochs", [0, "3", 2.5, True])
def test_epochs_are_a_whole_number(epochs):
    with pytest.raises(InvalidInput, match="epochs must be a whole number"):
        EnergyLoader(data(2), epochs=epochs)


def test_the_report_is_there_after_the_last_epoch_of_this_machine_s_own_gpus(gpus):
    """The sensors are let go with the last epoch, and NVML is shut down: Eq. 2 is of what they told before."""
    stub = gpus(2)
    stub.set_load(200.0)
    loader = EnergyLoader(data(2), epochs=2, slice_s=0.01, warmup_s=0, settle_s=0)
    for _epoch in loader.epochs():
        for _batch in loader:
            time.sleep(0.01)
    report = loader.report
    assert (report.epochs, report.stopped) == (2, "epochs")
    assert report.cost_j == pytest.approx(0.5 * report.energy.joules + 0.5 * 2 * 250 * report.time_s)


def test_a_pass_after_the_last_epoch_is_none_of_the_training():
    """To see how well the model does on what it was trained with, say."""
    bench = Bench()
    loader = EnergyLoader(data(20), epochs=2, sensors=bench.gpus, clock=bench.clock)
    list(bench.train(loader))
    told, drawn_j, now_s = loader.report, bench.gpus[0].energy_j(), bench.clock.now_s()
    assert (told.epochs, told.time_s, told.energy.joules) == (2, pytest.approx(now_s), pytest.approx(drawn_j))
    for _ in loader:
        bench.step()
    assert bench.clock.now_s() > now_s
    assert loader.report == told
    with pytest.raises(InvalidInput, match=r"training has ended.*new EnergyLoader"):
        next(loader.epochs())
    assert loader.report == told


@pytest.mark.parametrize("max_power_w", [None, 300.0])
def test_the_cost_threshold_holds_on_several_machines(monkeypatch, max_power_w):
    """The cost is of this machine's two GPUs, whose energy is counted. Limits are left alone: all epochs are alike."""
    for name, value in {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    bench, said = Bench(gpus=2), []
    epoch_s = 20 * 0.5 * V100.slowdown(RESNET, 250)
    epoch_j = 0.5 * 2 * epoch_s * V100.power_w(RESNET, 250) + 0.5 * 2 * (max_power_w or 250) * epoch_s
    loader = EnergyLoader(
        data(20),
        epochs=10,
        cost_threshold_j=3.5 * epoch_j,
        max_power_w=max_power_w,
        sensors=bench.gpus,
        clock=bench.clock,
        tell=said.append,
    )
    list(bench.train(loader, evaluation_s=0.0))
    assert (loader.report.epochs, loader.report.stopped) == (3, "cost")
    assert loader.report.cost_j == pytest.approx(3 * epoch_j)
    assert "left alone" in said[0]

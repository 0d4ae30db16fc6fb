"""Every joule of a segment: set-up, what comes after the loop, and epochs that fail are counted too, once."""

import pickle
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock as pk
from penstock.core import Ended, Reported, Source, VirtualClock
from penstock.core.measurement import measurement
from penstock.energy import (
    V100,
    V100_LOADS,
    EpochMeter,
    EstimateSensor,
    Meter,
    NvmlSensor,
    SharedSensor,
    SimulatedGpu,
)
from penstock.energy._solo import SoloMeter
from penstock.execute import Local
from penstock.execute._base import Job, Launch
from penstock.store import open_store
from penstock.train._worker import Settings, Spec, execute, run_all

BUSY_CORE_W = 6.5
CPU_S = 0.15


def burn(cpu_s=CPU_S):
    until_s = time.process_time() + cpu_s
    while time.process_time() < until_s:
        sum(range(500))


class Reports:
    def __init__(self):
        self.joules = []

    def reported(self, report):
        self.joules.append(None if report[3] is None else report[3][0])

    def saved(self, epoch, path):
        pass

    def told(self):
        return None


def segment(until=1, trial=0):
    return Spec(trial, {}, 7, 0, until, True, None, None, 0, 0)


def inside(run):
    for _ in run.epochs():
        burn()
        run.report(loss=1.0)


def before(run):
    burn()
    for _ in run.epochs():
        run.report(loss=1.0)


def after(run):
    for _ in run.epochs():
        run.report(loss=1.0)
    burn()


def failing(run):
    for _ in run.epochs():
        burn()
        raise RuntimeError("boom")


def unreported(run):
    for epoch in run.epochs():
        if epoch == 0:
            run.report(loss=1.0)
        else:
            burn()


def lacking(run):
    for _ in run.epochs():
        burn()
        run.report(accuracy=1.0)


def without_a_loop(run):
    burn()
    run.report(loss=1.0)


def returning(run):
    burn()
    return 1.0


@pytest.mark.parametrize(
    ("work", "until", "in_epochs"),
    [
        (inside, 1, True),
        (before, 1, False),
        (after, 1, False),
        (failing, 1, False),
        (unreported, 2, False),
        (lacking, 1, False),
        (without_a_loop, 1, True),
        (returning, 1, True),
    ],
)
@pytest.mark.parametrize("kind", [SoloMeter, EpochMeter])
def test_cpu_time_counts_wherever_it_is_burnt(tmp_path, work, until, in_epochs, kind):
    """All of it, against the clock of the process from before it to after it."""
    # An idle core draws nothing here: a busy machine lets time pass wherever it likes.
    sensor, sink = EstimateSensor(cores=1, idle_core_w=0.0), Reports()
    # Without children: those of other tests may end meanwhile.
    sensor.energy_j = lambda: BUSY_CORE_W * time.process_time()
    hook = SoloMeter(sensor) if kind is SoloMeter else EpochMeter(Meter([sensor]))
    begun_j = sensor.energy_j()
    end = execute(work, segment(until), Settings(tmp_path, ("loss",), make_meter=lambda devices: hook), sink)
    drawn_j = sensor.energy_j() - begun_j
    told_j = sum(joules for joules in sink.joules if joules is not None)
    other_j = 0.0 if end.energy is None else measurement(*end.energy).joules
    assert told_j + other_j == pytest.approx(drawn_j, rel=0.15)
    assert (told_j if in_epochs else other_j) > 0.9 * BUSY_CORE_W * CPU_S
    assert (other_j if in_epochs else told_j) < 0.3 * BUSY_CORE_W * CPU_S


@given(
    st.lists(
        st.tuples(st.floats(1e-6, 0.004), st.floats(1e-6, 0.004), st.floats(1e-6, 0.004), st.floats(0, 4)),
        min_size=1,
        max_size=60,
    )
)
def test_short_trials_add_up(trials):
    """Set-up, an epoch and an end, each of microseconds: what all are told is what the CPU clock says."""
    now_s, cpu_s = 100.0, 0.0
    sensor = EstimateSensor(cores=2)
    sensor.energy_j = lambda: sensor.idle_w * now_s + BUSY_CORE_W * cpu_s
    told_j = 0.0

    def spend(length_s, busy):
        nonlocal now_s, cpu_s
        now_s += length_s
        cpu_s += length_s * busy

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.energy._solo.time", SimpleNamespace(monotonic=lambda: now_s))
        hook = SoloMeter(sensor)
        for setup_s, epoch_s, end_s, busy in trials:
            hook.epoch_begin()
            spend(setup_s, busy)
            hook.epoch_begin()
            spend(epoch_s, busy)
            told_j += hook.plain_end()[0]
            spend(end_s, busy)
            other = hook.other()
            told_j += 0.0 if other is None else other[0]
            hook.close()
    true_j = sensor.idle_w * (now_s - 100.0) + BUSY_CORE_W * cpu_s
    # Between two readings watts are those of the last one, at most two milliseconds long; a trial that begins
    # with a reading does not get what was wrong before it.
    slack_j = 0.002 * (4 * BUSY_CORE_W + sensor.idle_w)
    assert told_j == pytest.approx(true_j, abs=(2 + len(trials)) * slack_j)


def test_windows_of_a_gpu_give_the_rest_exactly():
    """Closed form: watts x seconds, of the set-up, the gap, the failed epoch; and nothing is told twice."""
    clock = VirtualClock()
    gpu = SimulatedGpu(clock)
    load = V100_LOADS["resnet50", 256]
    gpu.run(load)
    watts = V100.power_w(load, 250)
    hook = EpochMeter(Meter([gpu], clock=clock))
    assert hook.other() is None

    def wait(seconds):
        clock.advance_to(clock.now_s() + seconds)

    hook.epoch_begin()
    wait(100)
    hook.epoch_begin()
    wait(50)
    assert hook.epoch_end().joules == pytest.approx(50 * watts)
    wait(7)
    assert hook.other()[0] == pytest.approx(107 * watts)
    wait(5)
    hook.epoch_begin()
    wait(20)  # it never ends
    assert hook.other()[0] == pytest.approx(25 * watts)
    assert hook.epoch_end() is None
    hook.close()
    assert hook.other() is None


def test_time_too_short_to_be_told_is_the_next_runs():
    clock = VirtualClock()
    gpu = SimulatedGpu(clock)
    gpu.run(V100_LOADS["resnet50", 256])
    watts = V100.power_w(V100_LOADS["resnet50", 256], 250)
    meter = Meter([gpu], clock=clock)
    told_j, runs = 0.0, 40
    for _ in range(runs):
        hook = EpochMeter(meter)
        for length_s in (0.0002, 0.01):
            hook.epoch_begin()
            clock.advance_to(clock.now_s() + length_s)
        told_j += hook.epoch_end().joules
        other = hook.other()
        told_j += 0.0 if other is None else other[0]
        hook.close()
    assert told_j == pytest.approx(watts * runs * 0.0102, abs=0.0005 * watts)


def test_the_limiter_hears_of_epochs_alone(tmp_path):
    class Limiter:
        def __init__(self):
            self.calls = []

        def __getattr__(self, name):
            return lambda *_: self.calls.append(name)

    clock = VirtualClock()
    limiter = Limiter()
    hook = EpochMeter(Meter([SimulatedGpu(clock)], clock=clock), limiter=limiter)
    hook.epoch_begin()
    clock.advance_to(10)
    hook.epoch_end()
    clock.advance_to(20)
    assert hook.other() is not None
    hook.close()
    assert limiter.calls == ["epoch_begin", "iteration", "epoch_end", "stop"]


def several(run):
    burn(0.03)
    if run.trial == 1:
        for _ in run.epochs():
            burn(0.03)
            raise RuntimeError("boom")
    for _ in run.epochs(2):
        run.report(loss=float(run.trial))
    burn(0.03)


def test_a_studys_energy_is_the_sum_of_all_parts(tmp_path):
    path = tmp_path / "s.db"
    study = pk.Study(
        several,
        pk.Space(x=pk.Float(0, 1)),
        minimize="loss",
        executor=Local(1, threads=1),
        budget=pk.Budget(trials=3),
        store=path,
        name="s",
        retries=0,
    )
    result = study.run()
    parts = {}
    with open_store(path, write=False) as store:
        events = [event for _, event in store.read(store.find("s").id)]
    for event in events:
        if isinstance(event, Reported | Ended) and event.energy is not None:
            parts.setdefault(event.trial, []).append(event.energy.joules)
    assert sorted(parts) == [0, 1, 2]
    for record in result.trials:
        assert record.energy.joules == pytest.approx(sum(parts[record.id]))
        assert record.energy.joules > 0.9 * BUSY_CORE_W * 0.06
    assert result.energy.joules == pytest.approx(sum(map(sum, parts.values())))


# -- what a packed trial weighs


class Weighed:
    def __init__(self):
        self.fractions = []

    def __call__(self, devices):
        return self

    def weigh(self, fraction):
        self.fractions.append(fraction)

    def epoch_begin(self):
        pass

    def epoch_end(self):
        return None

    def close(self):
        pass


def test_the_meter_is_told_the_trials_share(tmp_path):
    meter = Weighed()
    ends = []
    for facts in ({}, {"fraction": 0.25}):
        run_all(
            without_a_loop,
            [segment()],
            Settings(tmp_path, ("loss",), make_meter=meter),
            [Reports()],
            lambda number, end: ends.append(end),
            facts=facts,
        )
    assert meter.fractions == [1.0, 0.25]


@pytest.mark.parametrize(("fraction", "told"), [(1.0, None), (0.25, 0.25)])
def test_local_sends_the_share_along(tmp_path, fraction, told):
    from penstock.core import Placement, Segment, Share, Trial

    executor = Local(1)
    executor.open(Job(work=without_a_loop, files=tmp_path, metrics=("loss",)))
    try:
        placement = Placement((Segment(Trial(0, {}, 7), until=1),), (Share("cpu:0", fraction),))
        flight = executor._book.flight(Launch(placement, (None,), (0,)))
        (errand,) = executor._dispatch.errands(flight)
        assert pickle.loads(errand.message)[4].get("fraction") == told
    finally:
        executor.close()


def test_a_window_shows_its_idle_account(gpus):
    """The device was seen at 40 W doing nothing; at work it draws 200, of which a trial with 3 of 4 parts gets 150."""
    stub = gpus(1)
    mine, other = SharedSensor(NvmlSensor(0), period_s=0.01), SharedSensor(NvmlSensor(0), period_s=0.01)
    stub.set_load(200.0)
    hook = EpochMeter(Meter([mine]))
    hook.weigh(0.75)
    other.join(0.25)
    hook.epoch_begin()
    time.sleep(0.4)
    energy, window = hook.epoch_end(), hook.last
    assert energy.joules == pytest.approx(150 * window.time_s, rel=0.15)
    assert window.idle.joules == pytest.approx(30 * window.time_s, rel=0.15)
    assert window.idle.source is Source.ATTRIBUTED
    mine.close()
    other.close()
    assert Meter([EstimateSensor()]).window().end().idle is None

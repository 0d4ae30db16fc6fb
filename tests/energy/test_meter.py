"""Meters: windows nest, overlap and never answer a silent zero."""

import itertools
import threading
import time
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core import Measurement, Source, VirtualClock
from penstock.core.errors import InvalidInput, SensorError
from penstock.energy import (
    V100,
    V100_LOADS,
    DeviceKind,
    EpochMeter,
    EstimateSensor,
    Meter,
    NvmlSensor,
    ReplaySensor,
    Sensor,
    SimulatedGpu,
    make_meter,
)
from penstock.energy._estimate import cores_allowed
from penstock.energy._solo import SoloMeter

BUSY_CORE_W = 6.5
RESNET = V100_LOADS["resnet50", 256]


@pytest.fixture
def simulated():
    clock = VirtualClock()
    gpu = SimulatedGpu(clock)
    gpu.run(RESNET)
    return clock, gpu, Meter([gpu], clock=clock)


def test_windows_nest_and_overlap(simulated):
    clock, _gpu, meter = simulated
    watts = V100.power_w(RESNET, 250)
    outer = meter.window("outer")
    clock.advance_to(1)
    left = meter.window("left")
    clock.advance_to(3)
    right = meter.window("right")
    clock.advance_to(6)
    left.end()
    clock.advance_to(10)
    right.end()
    outer.end()
    assert [w.time_s for w in (outer, left, right)] == [10, 5, 7]
    assert [w.energy.joules for w in (outer, left, right)] == pytest.approx(
        [10 * watts, 5 * watts, 7 * watts]
    )
    assert outer.power.value == pytest.approx(watts)
    assert outer.energy.source is Source.SIMULATED
    left.end()  # again
    assert left.time_s == 5


def test_a_block_tells_so_far_and_in_all(simulated):
    clock, _gpu, meter = simulated
    watts = V100.power_w(RESNET, 250)
    with meter as m:
        clock.advance_to(2)
        assert m.energy.joules == pytest.approx(2 * watts)
        clock.advance_to(5)
    clock.advance_to(50)
    assert (m.energy.joules, m.time_s) == (pytest.approx(5 * watts), 5)


def test_windows_by_name(simulated):
    clock, _gpu, meter = simulated
    meter.begin("a")
    clock.advance_to(1)
    meter.begin("b")
    clock.advance_to(3)
    assert meter.end("a").time_s == 3
    with pytest.raises(InvalidInput, match="'b' is open already"):
        meter.begin("b")
    assert meter.end("b").time_s == 2
    with pytest.raises(InvalidInput, match="No window 'b'"):
        meter.end("b")


@given(
    watts=st.lists(st.floats(0, 1000), min_size=2, max_size=20),
    cuts=st.lists(st.floats(0, 1), min_size=1, max_size=6),
)
def test_adjacent_windows_sum_to_the_one_around_them(watts, cuts):
    clock = VirtualClock()
    sensor = ReplaySensor(range(len(watts)), watts, clock)
    meter = Meter([sensor], clock=clock)
    outer = meter.window()
    pieces = []
    for cut in [*sorted(cuts), 1.0]:
        with meter.window() as piece:
            clock.advance_to(cut * sensor.length_s)
        pieces.append(piece.energy.joules)
    outer.end()
    trapezoids = sum((a + b) / 2 for a, b in itertools.pairwise(watts))
    assert outer.energy.joules == pytest.approx(trapezoids, abs=1e-6)
    assert sum(pieces) == pytest.approx(trapezoids, abs=1e-6)


def test_threads_have_their_own_windows(gpus):
    stub = gpus(1)
    stub.set_load(200.0)
    sensor = NvmlSensor(0)
    meter = Meter([sensor])
    seen = []

    def work():
        with meter.window() as window:
            time.sleep(0.3)
        seen.append(window.energy.joules / window.time_s)

    threads = [threading.Thread(target=work) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == pytest.approx(
        [200] * 5, rel=0.2
    )  # a thread may have to wait between its clock and the counter
    sensor.close()


def test_a_window_shorter_than_the_counters_step_is_watts_times_time(gpus):
    """A counter renewed every 100 ms reads the same twice: the answer is an estimate, not 0."""
    stub = gpus(1)
    stub.set_load(200.0)
    stub.change(quantum_s=0.1)
    sensor = NvmlSensor(0)
    meter = Meter([sensor])
    short = 0
    while short < 20:
        with meter.window() as window:
            time.sleep(0.001)
        if window.time_s < 0.1:  # it is, but for a machine that is very busy
            short += 1
            assert window.energy.joules == pytest.approx(200 * window.time_s)
            assert window.energy.source is Source.ESTIMATED
    sensor.close()


def test_long_windows_are_surer_than_short_ones(gpus):
    stub = gpus(1, virtual=True)
    sensor = NvmlSensor(0, now=stub.now_s)

    class Clock:
        now_s = stub.now_s

    doubts = []
    for seconds in (1, 10, 1000):
        with Meter([sensor], clock=Clock()) as meter:
            stub.advance(seconds)
        doubts.append(meter.energy.uncertainty)
    assert doubts == pytest.approx([0.05 + 0.1, 0.05 + 0.01, 0.05 + 0.0001])
    sensor.close()


def test_the_weakest_source_wins(simulated):
    clock, gpu, _ = simulated
    meter = Meter([gpu, EstimateSensor()])
    with meter as m:
        clock.advance_to(1)
    assert set(m.devices) == {"gpu:0", meter.sensors[1].id}
    assert m.energy.source is Source.SIMULATED


def test_a_failed_device_fails_the_sum_but_not_the_others():
    clock = VirtualClock()
    good = ReplaySensor([0, 100], [10, 10], clock, name="good")
    short = ReplaySensor([0, 1], [10, 10], clock, name="short")
    with Meter([good, short], clock=clock) as meter:
        clock.advance_to(50)
    assert meter.devices["replay:good"].joules == pytest.approx(500)
    with pytest.raises(SensorError, match="ended at 1 s"):
        meter.energy


def test_watts_that_cant_be_told_matter_to_windows_that_need_them_alone():
    """One counter steps rarely, so that watts are asked for; another steps often enough and has none to tell."""
    clock = VirtualClock()

    class NoWatts(Sensor):
        id = key = name = "exact"
        kind, method, source, uncertainty = DeviceKind.CPU, "a counter", Source.MEASURED, 0.0

        def energy_j(self):
            return 7.0 * clock.now_s()

        def power_w(self):
            raise SensorError("no watts")

    rare = ReplaySensor([0, 100], [10, 10], clock, name="rare")
    rare.resolution_s = 1.0
    window = Meter([rare, NoWatts()], clock=clock).window()
    clock.advance_to(0.5)
    window.end()
    assert not window.failures
    assert window.devices["exact"].joules == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("times_s", "watts"),
    [([0, 1], [1, float("nan")]), ([0, float("nan")], [1, 1]), ([0, 1], [1, float("inf")])],
)
def test_a_trace_has_numbers_only(times_s, watts, tmp_path):
    with pytest.raises(InvalidInput, match=r"finite|rise"):
        ReplaySensor(times_s, watts, VirtualClock())
    (tmp_path / "trace.csv").write_text("time_s,power_w\n0,1\n1\n")
    with pytest.raises(InvalidInput, match="needs numbers in columns"):
        ReplaySensor.from_csv(tmp_path / "trace.csv", VirtualClock())


def test_what_a_meter_refuses(simulated):
    _, gpu, meter = simulated
    with pytest.raises(InvalidInput, match="needs a sensor"):
        Meter([])
    with pytest.raises(InvalidInput, match="counted twice"):
        Meter([gpu, gpu])
    with pytest.raises(InvalidInput, match="id gpu:0"):  # a window could not tell them apart
        Meter([gpu, SimulatedGpu(VirtualClock())])
    with pytest.raises(InvalidInput, match="Nothing has been metered"):
        meter.energy


def test_epochs_of_a_run(simulated):
    """SM2 Eq. 1: the energy of an epoch is its mean power times its time, in Wh per 3600 J."""
    clock, gpu, meter = simulated
    hook = EpochMeter(meter)
    assert hook.epoch_end() is None
    for seconds, limit_w in ((3600, 250), (1800, 100)):
        gpu.set_power_limit_w(limit_w)
        hook.epoch_begin()
        clock.advance_to(clock.now_s() + seconds)
        energy = hook.epoch_end()
        assert energy.wh == pytest.approx(V100.power_w(RESNET, limit_w) * seconds / 3600)


@given(st.lists(st.tuples(st.floats(1e-6, 0.004), st.floats(0, 4)), min_size=1, max_size=200))
def test_epochs_of_microseconds_add_up(epochs):
    """Each draws something, and all together what the CPU clock says, but for two milliseconds at the end."""
    now_s, cpu_s = 100.0, 0.0
    sensor = EstimateSensor(cores=2)
    sensor.energy_j = lambda: sensor.idle_w * now_s + BUSY_CORE_W * cpu_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.energy._solo.time", SimpleNamespace(monotonic=lambda: now_s))
        hook = SoloMeter(sensor)
        parts = []
        for length_s, busy in epochs:  # busy threads, at most the double of the cores
            hook.epoch_begin()
            now_s += length_s
            cpu_s += length_s * busy
            parts.append(hook.epoch_end())
    assert all(part.joules >= sensor.idle_w * epochs[i][0] * (1 - 1e-6) > 0 for i, part in enumerate(parts))
    assert {(part.source, part.uncertainty) for part in parts} == {(Source.ESTIMATED, sensor.uncertainty)}
    true_j = sensor.idle_w * (now_s - 100.0) + BUSY_CORE_W * cpu_s
    slack_j = 0.002 * (4 * BUSY_CORE_W + sensor.idle_w)
    assert sum(part.joules for part in parts) == pytest.approx(true_j, abs=2 * slack_j)


def test_an_epoch_that_cant_be_measured_is_none_and_said_once():
    clock = VirtualClock()
    hook = EpochMeter(Meter([ReplaySensor([0, 1], [10, 10], clock)], clock=clock))
    hook.epoch_begin()
    clock.advance_to(50)
    with pytest.warns(RuntimeWarning, match="not measured from here on"):
        assert hook.epoch_end() is None
    hook.epoch_begin()
    assert hook.epoch_end() is None


def test_the_meter_of_a_worker_that_gets_more_threads_charges_for_more_idle_cores(monkeypatch):
    """A warm worker trains a trial on one group of cores, then one on two: each pays for the cores that it holds."""
    for threads in ("1", "2", "1"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        meter = make_meter(("cpu",))
        assert isinstance(meter, SoloMeter)
        assert meter._sensor.cores == min(int(threads), cores_allowed())


def test_the_meter_of_a_worker(gpus):
    """Its GPU by CUDA's number and the CPU; sensors are opened once per process."""
    stub = gpus(2)
    stub.set_load(200.0, 1)
    first = make_meter(("cuda:1",), cores=1)
    first.epoch_begin()
    time.sleep(0.3)
    energy = first.epoch_end()
    parts = first.last.devices
    assert parts["gpu:1"].joules == pytest.approx(200 * first.last.time_s, rel=0.1)
    assert energy.source is Source.ESTIMATED  # the CPU's part is
    assert len(parts) == 2
    first.close()
    second = make_meter(("cuda:1",), cores=1)
    assert second._meter is first._meter
    with pytest.warns(RuntimeWarning, match="no cuda:7 here"):
        assert make_meter(("cuda:7",)) is None
    for sensor in first._meter.sensors:
        sensor.close()


def test_measurements_read_as_people_write_them():
    def text(value, unit="J", doubt=0.05):
        return str(Measurement(value, unit, Source.ESTIMATED, doubt))

    assert text(12.3 * 3600) == "12.3 Wh +- 5% (estimated)"
    assert text(1.234) == "1.23 J +- 5% (estimated)"
    assert text(1234 * 3600) == "1,230 Wh +- 5% (estimated)"
    assert text(27.75e3 * 3600, doubt=0) == "27.8 kWh (estimated)"
    assert text(15e3, "g") == "15 kg +- 5% (estimated)"
    assert text(16e9, "bytes") == "16 GB +- 5% (estimated)"
    assert text(5.0, doubt=12.0) == "5 J +- 1,200% (estimated)"

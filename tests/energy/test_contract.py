"""Every sensor keeps the contract."""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.core import VirtualClock
from penstock.core.errors import SensorError
from penstock.energy import (
    V100_LOADS,
    EstimateSensor,
    NvmlSensor,
    ReplaySensor,
    SharedSensor,
    SimulatedGpu,
    State,
    examine,
    rapl_sensors,
)
from penstock.recurring import RecurringJob
from penstock.testing.sensors import SensorContract
from penstock.train._energy_loader import EnergyLoader


class TestEstimate(SensorContract):
    @pytest.fixture
    def sensor(self):
        return EstimateSensor()


class TestSimulated(SensorContract):
    @pytest.fixture
    def sensor(self):
        self.clock = VirtualClock()
        gpu = SimulatedGpu(self.clock)
        gpu.run(V100_LOADS["resnet50", 256])
        return gpu

    def pass_time(self):
        self.clock.advance_to(self.clock.now_s() + 1)


class TestReplay(SensorContract):
    @pytest.fixture
    def sensor(self):
        self.clock = VirtualClock(5.0)
        return ReplaySensor([0, 10, 20, 1000], [50, 60, 40, 55], self.clock)

    def pass_time(self):
        self.clock.advance_to(self.clock.now_s() + 7)


class TestRapl(SensorContract):
    @pytest.fixture
    def sensor(self, powercap):
        tree = powercap({"intel-rapl:0": ("package-0", 1_000_000, 50_000_000)})
        self.file, done = tree / "intel-rapl:0" / "energy_uj", threading.Event()

        def burn():  # a package of about 50 W; the file is replaced whole, as the kernel's reads are
            count = 0
            while not done.wait(0.002):
                count += 100_000
                beside = tree / "next"
                beside.write_text(f"{(1_000_000 + count) % 50_000_000}\n")
                beside.replace(self.file)

        thread = threading.Thread(target=burn)
        thread.start()
        (sensor,) = rapl_sensors(tree)
        yield sensor
        done.set()
        thread.join()
        sensor.close()

    def pass_time(self):
        before = self.file.read_text()
        super().pass_time()
        while self.file.read_text() == before:  # a disk may take its time
            time.sleep(0.001)


class TestNvml(SensorContract):
    @pytest.fixture
    def sensor(self, gpus):
        gpus(1).set_load(180.0)
        sensor = NvmlSensor(0)
        yield sensor
        sensor.close()


class TestNvmlSampled(SensorContract):
    @pytest.fixture
    def sensor(self, gpus, nvml_stub):
        stub = gpus(1)
        stub.set_load(180.0)
        stub.add_flags(nvml_stub.NO_COUNTER)
        sensor = NvmlSensor(0, sample_s=0.01)
        yield sensor
        sensor.close()


class TestShared(SensorContract):
    @pytest.fixture
    def sensor(self, gpus, tmp_path: Path):
        gpus(1).set_load(180.0)
        sensor = SharedSensor(NvmlSensor(0), period_s=0.01)
        yield sensor
        sensor.close()


AMDSMI = """
import time
START = time.monotonic()
CAP = {"power_cap": 300_000_000, "min_power_cap": 100_000_000, "max_power_cap": 300_000_000}
def amdsmi_init(): pass
def amdsmi_get_processor_handles(): return ["handle"]
def amdsmi_get_gpu_asic_info(handle): return {"market_name": "Instinct"}
def amdsmi_get_gpu_device_uuid(handle): return "uuid"
def amdsmi_get_energy_count(handle):
    return {"energy_accumulator": int((time.monotonic() - START) * 200e6 / 15.3), "counter_resolution": 15.3}
def amdsmi_get_power_info(handle): return {"current_socket_power": "N/A", "average_socket_power": 200}
def amdsmi_get_power_cap_info(handle): return CAP
def amdsmi_set_power_cap(handle, index, cap): CAP["power_cap"] = cap
"""


class TestAmd(SensorContract):
    """Against a module of the documented shape; the real one needs ROCm."""

    @pytest.fixture
    def sensor(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        from penstock.energy import _amd

        (tmp_path / "amdsmi.py").write_text(AMDSMI)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(_amd, "_module", None)
        (sensor,) = _amd.amd_sensors()
        yield sensor
        sys.modules.pop("amdsmi", None)

    def test_watts(self, sensor):
        before, before_s = sensor.energy_j(), time.monotonic()
        time.sleep(0.05)
        joules, seconds = sensor.energy_j() - before, time.monotonic() - before_s
        assert joules / seconds == pytest.approx(200, rel=0.2)


@pytest.fixture
def amd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from penstock.energy import _amd

    def make(**functions):
        (tmp_path / "amdsmi.py").write_text(AMDSMI)
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.setattr(_amd, "_module", None)
        assert _amd.amd_available()
        for name, function in functions.items():
            monkeypatch.setattr(_amd._module, name, function)
        return _amd

    yield make
    sys.modules.pop("amdsmi", None)


def test_amd_gpus_that_cant_be_listed_are_a_sensor_error(amd, tmp_path):
    def fail():
        raise RuntimeError("AMDSMI_STATUS_INIT_ERROR")

    found = amd(amdsmi_get_processor_handles=fail)
    with pytest.raises(SensorError, match="can't list its GPUs: AMDSMI_STATUS_INIT_ERROR"):
        found.amd_sensors()
    (finding,) = [finding for finding in examine(tmp_path, tmp_path) if "AMD" in finding.subject]
    assert finding.measure is State.BROKEN
    assert "modprobe amdgpu" in finding.fix


def test_an_amd_gpu_that_cant_be_read_is_told_of(amd, tmp_path):
    def uuid(handle):
        if handle == "bad":
            raise RuntimeError("AMDSMI_STATUS_NO_DATA")
        return handle

    found = amd(amdsmi_get_processor_handles=lambda: ["bad", "good"], amdsmi_get_gpu_device_uuid=uuid)
    with pytest.warns(RuntimeWarning, match="AMDSMI_STATUS_NO_DATA"):
        (sensor,) = found.amd_sensors()
    assert sensor.id == "amd:1"
    bad, good = [finding for finding in examine(tmp_path, tmp_path) if finding.subject.startswith("amd:")]
    assert (bad.subject, bad.measure) == ("amd:0", State.BROKEN)
    assert (good.subject, good.measure, good.control) == ("amd:1 Instinct", State.OK, State.OK)


def test_an_amd_gpu_without_a_lowest_limit_is_metered_and_left_alone(amd, tmp_path):
    """A lowest limit of "0 W" is none: a job that looks for limits goes on without."""
    cap = {"power_cap": 750_000_000, "min_power_cap": 0, "max_power_cap": 750_000_000}
    found = amd(amdsmi_get_power_cap_info=lambda handle: cap)
    (sensor,) = found.amd_sensors()
    assert sensor.power_limit_range_w is None

    def train(run):
        for _ in run.epochs():
            time.sleep(0.25)
            run.report(accuracy=1.0)

    done = RecurringJob("nightly", train, batch_sizes=[8], max_epochs=2, sensors=[sensor]).run()
    assert done.reached
    assert done.energy_j / done.time_s == pytest.approx(200, rel=0.2)
    loader = EnergyLoader([1, 2], epochs=1, sensors=[sensor])
    assert [list(loader) for _ in loader.epochs()] == [[1, 2]]
    assert loader.report.limits is None
    (finding,) = [finding for finding in examine(tmp_path, tmp_path) if finding.subject.startswith("amd:")]
    assert (finding.measure, finding.control) == (State.OK, State.ABSENT)


def test_an_amd_gpu_whose_accumulator_stands_still_is_not_told_to_draw_nothing(amd, monkeypatch):
    count = {"energy_accumulator": 0, "counter_resolution": 15.3}
    found = amd(amdsmi_get_energy_count=lambda handle: count)
    (sensor,) = found.amd_sensors()
    clock = VirtualClock(sensor._changed_s)
    monkeypatch.setattr(found, "time", SimpleNamespace(monotonic=clock.now_s))
    clock.advance_to(clock.now_s() + 1.0)
    assert sensor.energy_j() == 0.0  # it may be slow
    clock.advance_to(clock.now_s() + 2.0)
    with pytest.raises(SensorError, match="stood still for 3"):
        sensor.energy_j()
    count["energy_accumulator"] = 1_000_000
    assert sensor.energy_j() == pytest.approx(15.3)
    count["energy_accumulator"] = 0  # started again
    clock.advance_to(clock.now_s() + 1.0)
    assert sensor.energy_j() == pytest.approx(215.3)


def test_the_limit_of_an_amd_gpu_is_tried(amd, tmp_path):
    def refuse(handle, index, cap):
        raise RuntimeError("AMDSMI_STATUS_NO_PERM")

    amd(amdsmi_set_power_cap=refuse)
    (finding,) = [finding for finding in examine(tmp_path, tmp_path) if finding.subject.startswith("amd:")]
    assert (finding.measure, finding.control) == (State.OK, State.LIMITED)
    assert "sudo" in finding.fix


def test_amd_is_left_out_without_rocm(monkeypatch: pytest.MonkeyPatch):
    from penstock.energy import _amd

    monkeypatch.setattr(_amd, "_module", None)
    assert _amd.amd_sensors() == []

"""NVIDIA GPUs: the real nvidia-ml-py against a library that behaves like NVML."""

import subprocess
import sys
import time

import pytest

from penstock.core import Source
from penstock.core.errors import InvalidInput, NotPermitted, SensorError, Unsupported
from penstock.energy import Meter, NvmlSensor, gpu_sensors, sensors_for
from penstock.energy._nvml import visible_gpus


@pytest.fixture
def gpu(gpus):
    """One GPU on a virtual clock, and its sensor."""
    stub = gpus(1, virtual=True)
    sensor = NvmlSensor(0, now=stub.now_s)
    yield stub, sensor
    sensor.close()


def test_counts_what_the_gpu_draws(gpu):
    stub, sensor = gpu
    stub.set_load(200.0)
    stub.advance(10)
    stub.set_load(0.0)  # 40 W idle
    stub.advance(5)
    assert sensor.energy_j() == pytest.approx(10 * 200 + 5 * 40)
    assert sensor.power_w() == pytest.approx(40)
    assert (sensor.source, sensor.name, sensor.id) == (Source.MEASURED, "Stub V100", "gpu:0")


def test_the_limit_caps_the_power(gpu):
    stub, sensor = gpu
    stub.set_load(240.0)
    assert sensor.power_limit_range_w == (100.0, 250.0)
    sensor.set_power_limit_w(125.0)
    stub.advance(4)
    assert sensor.energy_j() == pytest.approx(500)
    assert stub.limit_w() == sensor.power_limit_w() == 125.0


def test_a_counter_that_starts_again_is_bridged(gpu):
    stub, sensor = gpu
    stub.set_load(200.0)
    stub.advance(10)
    assert sensor.energy_j() == pytest.approx(2000)
    stub.advance(3)
    stub.change(energy_j=0.0)  # the driver was reloaded
    stub.advance(1)
    with pytest.warns(RuntimeWarning, match="started again"):
        assert sensor.energy_j() == pytest.approx(2000 + 4 * 200)
    stub.advance(1)
    assert sensor.energy_j() == pytest.approx(2000 + 5 * 200)


def test_a_stalled_counter_gives_way_to_sampling(gpu, nvml_stub):
    stub, sensor = gpu
    stub.set_load(150.0)
    stub.advance(1)
    assert sensor.energy_j() == pytest.approx(150)
    stub.add_flags(nvml_stub.STALLED)
    stub.advance(1)
    assert sensor.energy_j() == pytest.approx(150)  # it may just be slow
    stub.advance(4)
    with pytest.warns(RuntimeWarning, match="stood still for 5.0 s at 150 W"):
        assert sensor.energy_j() == pytest.approx(150 + 5 * 150)
    stub.advance(2)
    assert sensor.energy_j() == pytest.approx(150 + 7 * 150)
    assert "sampled" in sensor.method
    assert sensor.uncertainty >= 0.1


@pytest.mark.parametrize("flag", ["NO_COUNTER", "NO_ENERGY_FUNCTION"])
def test_without_a_counter_power_is_sampled_in_the_background(gpus, nvml_stub, flag):
    stub = gpus(1)
    stub.add_flags(getattr(nvml_stub, flag))
    stub.set_load(100.0)
    before_j = stub.energy_j(0)
    sensor = NvmlSensor(0, sample_s=0.005)
    begun_j = stub.energy_j(0)
    time.sleep(0.1)
    stub.set_load(200.0)
    time.sleep(0.1)  # nobody asks: the thread must see both levels
    ending_j = stub.energy_j(0)
    joules = sensor.energy_j()
    most_j = stub.energy_j(0) - before_j
    sensor.close()
    assert 0.75 * (ending_j - begun_j) <= joules <= 1.25 * most_j
    assert stub.readers()


def test_a_library_without_the_symbol(gpus, nvml_stub, tmp_path):
    """An old driver: the function is not there at all."""
    stub = gpus(1)
    stub.set_load(100.0)
    folder = tmp_path / "old"
    folder.mkdir()
    library = nvml_stub.build(folder, "-DWITHOUT_ENERGY")
    code = (
        "import time; from penstock.energy import NvmlSensor; s = NvmlSensor(0, sample_s=0.01);"
        "time.sleep(0.1); print(s.method, s.energy_j() > 5)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=stub.environment(library),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "NVML power sampled every 0.01 s True"


def test_a_lost_gpu_is_an_error_and_not_zero(gpu, nvml_stub):
    stub, sensor = gpu
    stub.set_load(200.0)
    meter = Meter([sensor])
    window = meter.window()
    stub.advance(1)
    stub.add_flags(nvml_stub.LOST)
    for read in (sensor.energy_j, sensor.power_w, sensor.power_limit_w):
        with pytest.raises(SensorError, match=r"fallen off the bus.*nvidia-smi --gpu-reset -i 0"):
            read()
    window.end()
    with pytest.raises(SensorError, match="fallen off the bus"):
        window.energy
    assert list(window.failures) == ["gpu:0"]
    assert not window.devices


def test_no_permission_names_the_remedy(gpu, nvml_stub):
    stub, sensor = gpu
    stub.add_flags(nvml_stub.LOCKED)
    with pytest.raises(NotPermitted, match=r"200 W.*CAP_SYS_ADMIN.*--cap-add SYS_ADMIN.*nvidia-smi -i 0 -pl"):
        sensor.set_power_limit_w(200.0)
    assert stub.limit_w() == 250.0
    with pytest.raises(InvalidInput, match=r"100\.\.250 W, got 300"):
        sensor.set_power_limit_w(300.0)


def test_a_gpu_without_a_limit(gpu, nvml_stub):
    stub, sensor = gpu
    stub.add_flags(nvml_stub.NO_LIMIT)
    assert sensor.power_limit_range_w is None
    with pytest.raises(Unsupported, match="no power limit"):
        sensor.set_power_limit_w(200.0)


def test_mig_is_refused_unless_the_whole_is_wanted(gpus, nvml_stub):
    stub = gpus(2, virtual=True)
    stub.add_flags(nvml_stub.MIG, 1)
    with pytest.raises(Unsupported, match=r"divided by MIG.*nvidia-smi -i 1 -mig 0"):
        NvmlSensor(1)
    whole = NvmlSensor(1, whole_mig_gpu=True, now=stub.now_s)
    stub.advance(2)
    assert whole.energy_j() == pytest.approx(80)
    whole.close()
    with pytest.raises(Unsupported, match="MIG instance"):
        NvmlSensor("MIG-123")
    found = gpu_sensors(shared=False)
    assert [sensor.id for sensor in found] == ["gpu:0"]
    for sensor in found:
        sensor.close()


def test_visible_devices_are_those_of_cuda(gpus, monkeypatch):
    stub = gpus(4)
    uuid = stub.state.devices[3].uuid.decode()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", f"2,{uuid[:12]}")
    assert visible_gpus() == [2, uuid[:12]]
    (gpu, *_) = sensors_for(("node7/cuda:1",), shared=False)
    assert (gpu.id, gpu.key) == ("gpu:3", uuid)
    gpu.close()
    with pytest.raises(Unsupported, match="no cuda:2 here"):
        sensors_for(("cuda:2",))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,-1,0")
    assert visible_gpus() == [1]
    with pytest.raises(Unsupported, match="no GPU 9: NVML shows 4"):
        NvmlSensor(9)


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_meter_sums_gpus(gpus, count):
    stub = gpus(count, virtual=True)
    sensors = [NvmlSensor(index, now=stub.now_s) for index in range(count)]
    for index in range(count):
        stub.set_load(100.0 + 10 * index, index)

    class Clock:
        now_s = stub.now_s

    with Meter(sensors, clock=Clock()) as meter:
        stub.advance(50)
    assert meter.energy.joules == pytest.approx(50 * sum(100 + 10 * index for index in range(count)))
    assert [part.joules for part in meter.devices.values()] == pytest.approx(
        [50 * (100 + 10 * index) for index in range(count)]
    )
    assert meter.energy.source is Source.MEASURED
    assert meter.time_s == pytest.approx(50)
    for sensor in sensors:
        sensor.close()


def test_without_nvml_there_is_a_reason(monkeypatch, nvml_library, nvml_stub):
    monkeypatch.delenv(nvml_stub.ENVIRONMENT, raising=False)
    with pytest.raises(Unsupported, match="Driver Not Loaded"):
        NvmlSensor(0)
    assert gpu_sensors() == []

"""RAPL: wrap-around, domains that contain each other, unreadable files."""

import os
import random
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import NotPermitted, SensorError
from penstock.energy import EstimateSensor, Meter, cpu_sensors, rapl_sensors
from penstock.energy._poller import POLLER, Poller
from penstock.energy._rapl import RaplDomain, RaplSensor, find_domains, unwrap

RANGE_UJ = 262_143_328_850


def test_what_a_server_adds_up(powercap):
    """Two packages with dram; core and uncore lie inside, psys around, mmio is the package again."""
    root = powercap(
        {
            "intel-rapl:0": ("package-0", 0, RANGE_UJ),
            "intel-rapl:0/intel-rapl:0:0": ("core", 0, RANGE_UJ),
            "intel-rapl:0/intel-rapl:0:1": ("uncore", 0, RANGE_UJ),
            "intel-rapl:0/intel-rapl:0:2": ("dram", 0, RANGE_UJ),
            "intel-rapl:1": ("package-1", 0, RANGE_UJ),
            "intel-rapl:1/intel-rapl:1:0": ("dram", 0, RANGE_UJ),
            "intel-rapl:2": ("psys", 0, RANGE_UJ),
            "intel-rapl-mmio:0": ("package-0", 0, RANGE_UJ),
        }
    )
    # The kernel also shows children beside their parents.
    for child in ("intel-rapl:0:0", "intel-rapl:0:1", "intel-rapl:0:2"):
        (root / child).symlink_to(root / "intel-rapl:0" / child)
    assert [domain.id for domain in find_domains(root)] == ["cpu:0", "memory:0", "cpu:1", "memory:1"]
    assert [domain.id for domain in find_domains(root, psys=True)] == ["psys:0"]
    assert all("mmio" not in str(domain.path) for domain in find_domains(root))


def test_every_die_of_every_package_is_counted(powercap):
    """Since Linux 5.3 a package of several dies has a counter for each, "package-0-die-1"."""
    drawn_uj = {"package-0-die-0": 1 << 24, "package-0-die-1": 1 << 25, "package-1-die-0": 1 << 26}
    drawn_uj["package-1-die-1"] = 1 << 27
    root = powercap({f"intel-rapl:{n}": (label, 0, RANGE_UJ) for n, label in enumerate(drawn_uj)})
    sensors = rapl_sensors(root)
    window = Meter(sensors).window()
    for n, count in enumerate(drawn_uj.values()):
        (root / f"intel-rapl:{n}" / "energy_uj").write_text(f"{count}\n")
    time.sleep(0.01)  # longer than the counters' step
    assert window.end().energy.joules == pytest.approx(sum(drawn_uj.values()) / 1e6)
    assert len(window.devices) == 4
    for sensor in sensors:
        sensor.close()


def test_without_psys_the_packages_are_taken(powercap):
    root = powercap({"intel-rapl:0": ("package-0", 0, RANGE_UJ)})
    assert [domain.id for domain in find_domains(root, psys=True)] == ["cpu:0"]


@given(start=st.integers(0, 1000), steps=st.lists(st.integers(0, 1000), max_size=30))
def test_unwrapping_recovers_every_count(start, steps):
    """A counter modulo 1001, read often enough, loses nothing."""
    range_, value, counted = 1000, start, 0
    for step in steps:
        now = (value + step) % (range_ + 1)
        counted += unwrap(value, now, range_)
        value = now
    assert counted == sum(steps)


def test_a_sensor_counts_over_many_wraps(powercap):
    root = powercap({"intel-rapl:0": ("package-0", 900, 1000)})
    (sensor,) = rapl_sensors(root)
    file, value, drawn = root / "intel-rapl:0" / "energy_uj", 900, 0
    generator = random.Random(7)
    for _ in range(200):
        step = generator.randrange(0, 1001)
        value, drawn = (value + step) % 1001, drawn + step
        file.write_text(f"{value}\n")
        assert sensor.energy_j() == pytest.approx(drawn / 1e6)
    sensor.close()


def test_a_wrap_between_two_questions_is_seen_by_the_background_reading(powercap):
    """A range of 4 J could wrap within 4 ms at 1 kW: it is read every millisecond unasked."""
    root = powercap({"intel-rapl:0": ("package-0", 0, 4_000_000)})
    (sensor,) = rapl_sensors(root)
    file = root / "intel-rapl:0" / "energy_uj"
    total = 0
    for _ in range(6):
        total += 3_000_000
        beside = root / "next"
        beside.write_text(f"{total % 4_000_001}\n")
        beside.replace(file)
        until_s = time.monotonic() + 60
        while sensor._last_uj != total % 4_000_001 and time.monotonic() < until_s:
            time.sleep(0.001)  # nobody asks
    assert sensor.energy_j() == pytest.approx(total / 1e6)
    sensor.close()


def test_a_reading_that_fails_once_is_tried_again():
    """Else a counter that the kernel kept back for a moment would wrap unseen from then on."""
    calls, again = [], threading.Event()

    def read():
        calls.append(1)
        if len(calls) == 1:
            raise SensorError("not now")
        again.set()

    poller = Poller()
    number = poller.add(0.001, read)
    assert again.wait(60)
    poller.remove(number)


def test_unreadable_counters_name_the_command(powercap, monkeypatch):
    root = powercap({"intel-rapl:0": ("package-0", 0, RANGE_UJ)})
    file = root / "intel-rapl:0" / "energy_uj"
    if os.geteuid() == 0:  # root reads everything: refuse as the kernel would
        read = Path.read_bytes

        def refuse(path):
            if path == file:
                raise PermissionError(13, "Permission denied", str(path))
            return read(path)

        monkeypatch.setattr(Path, "read_bytes", refuse)
    else:
        file.chmod(0)
    with pytest.raises(NotPermitted, match=r"sudo chmod -R a\+r /sys/class/powercap/intel-rapl"):
        rapl_sensors(root)
    (sensor,) = cpu_sensors(root=root)  # the default goes on with the estimate
    assert isinstance(sensor, EstimateSensor)


def test_nonsense_is_an_error(powercap):
    root = powercap({"intel-rapl:0": ("package-0", 0, 0)})
    with pytest.raises(SensorError, match="not a range"):
        rapl_sensors(root)
    (root / "intel-rapl:0" / "max_energy_range_uj").write_text("many\n")
    with pytest.raises(SensorError, match="can't be read"):
        RaplSensor(RaplDomain(root / "intel-rapl:0", "package-0", "cpu:0", "cpu"))


def test_no_powercap_no_sensors(tmp_path):
    assert rapl_sensors(tmp_path / "none") == []


def test_a_counter_that_started_again_has_not_wrapped(powercap):
    """After a suspend it begins at 0: a wrap would mean 160 kJ in a moment, more than any CPU draws."""
    root = powercap({"intel-rapl:0": ("package-0", 100_000_000_000, RANGE_UJ)})
    (sensor,) = rapl_sensors(root)
    file = root / "intel-rapl:0" / "energy_uj"
    file.write_text("100005000000\n")
    assert sensor.energy_j() == pytest.approx(5)
    file.write_text("2000000\n")
    with pytest.warns(RuntimeWarning, match="started again"):
        joules = sensor.energy_j()
    assert 7 <= joules < 1000
    file.write_text("3000000\n")
    assert sensor.energy_j() == pytest.approx(joules + 1)
    sensor.close()


def test_a_counter_that_cant_be_read_leaves_no_other_one_open(powercap):
    root = powercap(
        {"intel-rapl:0": ("package-0", 0, RANGE_UJ), "intel-rapl:0/intel-rapl:0:0": ("dram", 0, RANGE_UJ)}
    )
    (root / "intel-rapl:0" / "intel-rapl:0:0" / "energy_uj").write_text("nothing\n")
    before = set(POLLER._jobs)
    with pytest.raises(SensorError, match="can't be read"):
        rapl_sensors(root)
    assert set(POLLER._jobs) <= before

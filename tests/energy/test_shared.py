"""One reader per device and node: several processes, one GPU, and the library's own count of who called it."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from penstock.core import Source
from penstock.core.errors import SensorError
from penstock.energy import (
    DeviceKind,
    EpochMeter,
    Meter,
    NvmlSensor,
    Sensor,
    SharedSensor,
    gpu_sensors,
    sensors_for,
)
from penstock.energy._poller import POLLER

WORKER = """
import json, sys, time
from penstock.energy import EpochMeter, Meter, gpu_sensors
sensors = gpu_sensors()
hook = EpochMeter(Meter(sensors), fraction=float(sys.argv[1]))
print("ready", flush=True)
for line in sys.stdin:
    if line.strip() == "begin":
        hook.epoch_begin()
        print("begun", flush=True)
    elif line.strip() == "end":
        energy = hook.epoch_end()
        print(json.dumps({
            "j": energy.joules, "source": str(energy.source), "s": hook.last.time_s,
            "reader": [s.is_reader for s in sensors],
        }), flush=True)
    elif line.strip() == "pause":
        hook.close()
        print("paused", flush=True)
"""


class Worker:
    def __init__(self, stub, library, weight=1.0):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(weight)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=stub.environment(library),
        )
        assert self.line() == "ready"

    def line(self):
        return self.process.stdout.readline().strip()

    def begin(self):
        self.say("begin")
        assert self.line() == "begun"

    def end(self):
        self.say("end")
        return json.loads(self.line())

    def say(self, text):
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def close(self):
        self.process.stdin.close()
        self.process.wait(120)
        self.process.stdout.close()


@pytest.fixture
def workers(gpus, nvml_library):
    made = []
    stub = gpus(1)
    stub.set_load(200.0)

    def make(*weights):
        found = [Worker(stub, nvml_library, weight) for weight in weights]
        made.extend(found)
        return found

    yield stub, make
    for worker in made:
        if worker.process.poll() is None:
            worker.process.kill()
        worker.process.wait()
        worker.process.stdin.close()
        worker.process.stdout.close()


def together(stub, some):
    """Results of workers that have begun and ended one after the other; joules while all were there, and of the rest.

    On a busy machine the rest is not little, and whose it is depends on who was how quick.
    """
    marks = [stub.energy_j(0)]
    for worker in some:
        worker.begin()
    marks.append(stub.energy_j(0))
    time.sleep(0.8)
    marks.append(stub.energy_j(0))
    results = [worker.end() for worker in some]
    marks.append(stub.energy_j(0))
    return results, marks[2] - marks[1], marks[1] - marks[0] + marks[3] - marks[2]


def test_four_workers_one_reader_and_the_parts_sum_to_the_whole(workers):
    stub, make = workers
    four = make(1.0, 1.0, 1.0, 1.0)
    stub.forget_calls()
    results, all_j, rest_j = together(stub, four)
    readers = stub.readers()
    assert len(readers) == 1, f"one process must read the GPU, {readers} did"
    assert [result["reader"] for result in results].count([True]) == 1
    assert readers.keys() <= {worker.process.pid for worker in four}
    assert 0.85 * all_j <= sum(result["j"] for result in results) <= 1.15 * (all_j + rest_j)
    for result in results:
        assert 0.65 * all_j / 4 <= result["j"] <= 1.35 * all_j / 4 + rest_j
        assert result["source"] == "attributed"


def test_weights_are_respected_and_a_lone_worker_is_measured(workers):
    stub, make = workers
    big, small = make(0.75, 0.25)
    big.begin()
    time.sleep(0.5)
    alone = big.end()
    assert alone["source"] == "measured"
    assert alone["j"] == pytest.approx(200 * alone["s"], rel=0.1)
    results, both_j, rest_j = together(stub, (big, small))
    for result, part in zip(results, (0.75, 0.25), strict=True):
        assert 0.8 * part * both_j <= result["j"] <= 1.2 * part * both_j + rest_j


def test_a_killed_reader_is_replaced_and_nothing_is_counted_for_it(workers):
    stub, make = workers
    first, second = make(1.0, 1.0)
    second.begin()
    first.begin()
    time.sleep(0.4)
    (reader,) = stub.readers()
    killed, left = (first, second) if reader == first.process.pid else (second, first)
    os.kill(killed.process.pid, signal.SIGKILL)
    killed.process.wait()
    stub.forget_calls()
    left.end()
    # Soon it has noticed, and a second later that the dead process no longer has a part.
    after, until_s = {}, time.monotonic() + 120
    while after.get("source") != "measured" and time.monotonic() < until_s:
        left.begin()
        time.sleep(0.5)
        after = left.end()
    assert after["reader"] == [True]
    assert set(stub.readers()) == {left.process.pid}
    assert after["source"] == "measured"
    assert after["j"] == pytest.approx(200 * after["s"], rel=0.1)


def test_an_orderly_end_hands_over(workers):
    stub, make = workers
    first, second = make(1.0, 1.0)
    (reader,) = stub.readers()
    leaver, left = (first, second) if reader == first.process.pid else (second, first)
    left.begin()
    leaver.close()
    result, until_s = {"reader": [False]}, time.monotonic() + 120
    while result["reader"] != [True] and time.monotonic() < until_s:
        time.sleep(1.0)
        result = left.end()
        left.begin()
    assert result["reader"] == [True]
    assert result["j"] == pytest.approx(200 * result["s"], rel=0.15)


def grown(stub, read, seconds):
    """What joules have grown by in so many seconds or more; the least and the most that the GPU has drawn meanwhile."""
    marks = [stub.energy_j(0)]
    begin_j = read()
    marks.append(stub.energy_j(0))
    time.sleep(seconds)
    marks.append(stub.energy_j(0))
    end_j = read()
    marks.append(stub.energy_j(0))
    return end_j - begin_j, marks[2] - marks[1], marks[3] - marks[0]


def test_idle_power_has_its_own_account(gpus):
    """The device was seen at 40 W doing nothing; at work it draws 200."""
    stub = gpus(1)
    sensor = SharedSensor(NvmlSensor(0), period_s=0.01)
    stub.set_load(200.0)
    sensor.join(1.0)
    part_j, least_j, most_j = grown(stub, lambda: sensor.reading()[1], 0.4)
    assert 0.85 * least_j <= part_j <= 1.15 * most_j
    idle_j, least_j, most_j = grown(stub, sensor.idle_part_j, 0.4)
    assert 0.9 * least_j * 40 / 200 <= idle_j <= 1.1 * most_j * 40 / 200
    sensor.close()


def test_two_sensors_of_one_process_share_its_reading(gpus):
    stub = gpus(1)
    stub.set_load(100.0)
    first, second = SharedSensor(NvmlSensor(0)), SharedSensor(NvmlSensor(0))
    assert first.is_reader
    assert second.is_reader
    for sensor in (first, second):
        joules, least_j, most_j = grown(stub, sensor.energy_j, 0.2)
        assert 0.8 * least_j <= joules <= 1.2 * most_j
    before_j = second.energy_j()
    first.close()  # whose inner sensor was read
    joules, least_j, most_j = grown(stub, second.energy_j, 0.2)
    assert 0.7 * least_j <= joules <= 1.3 * most_j
    assert second.energy_j() >= before_j + joules
    second.close()
    with pytest.raises(SensorError, match="is closed"):
        second.energy_j()


class Counter(Sensor):
    """Counts its readings, a joule each; fails while it is told to."""

    id, name, kind, method = "gpu:0", "counter", DeviceKind.GPU, "count"
    source, uncertainty = Source.MEASURED, 0.0

    def __init__(self, key):
        self.key, self.count, self.lost = key, 0, False

    def energy_j(self):
        if self.lost:
            raise SensorError("gone")
        self.count += 1
        return float(self.count)

    def power_w(self):
        return 1.0


def test_a_device_that_is_gone_when_its_reader_changes_is_counted_from_its_return(tmp_path):
    first, second = Counter("changing"), Counter("changing")
    one = SharedSensor(first, folder=tmp_path, period_s=600)
    for _ in range(50):
        one._channel.tick()
    two = SharedSensor(second, folder=tmp_path, period_s=600)
    second.lost = True
    one.close()  # the other's device can't be read: no error of this one
    with pytest.raises(SensorError, match="gone"):
        two.energy_j()
    second.lost = False
    two._channel.tick()
    at_j = two.energy_j()
    for _ in range(20):
        two._channel.tick()
    assert two.energy_j() - at_j > 19
    two.close()


def test_a_new_reader_that_can_not_read_at_first_loses_nothing_later(tmp_path):
    old = SharedSensor(Counter("returning"), folder=tmp_path, period_s=600)
    for _ in range(50):
        old._channel.tick()
    old.close()
    device = Counter("returning")
    new = SharedSensor(device, folder=tmp_path, period_s=600)
    channel = new._channel
    device.lost, channel.is_reader = True, False
    channel.try_to_read()  # as after the other reader's end
    device.lost = False
    channel.tick()
    at_j = new.energy_j()
    for _ in range(20):
        channel.tick()
    assert new.energy_j() - at_j > 19
    new.close()


def test_a_forked_child_follows_its_parent(gpus):
    stub = gpus(1)
    stub.set_load(100.0)
    (sensor,) = gpu_sensors()
    assert sensor.is_reader
    context = multiprocessing.get_context("fork")
    queue = context.Queue()

    def child():
        queue.put((grown(stub, sensor.energy_j, 0.3), sensor.is_reader, os.getpid()))

    stub.forget_calls()
    process = context.Process(target=child)
    process.start()
    (joules, least_j, most_j), is_reader, pid = queue.get(timeout=120)
    process.join()
    assert not is_reader
    assert 0.7 * least_j <= joules <= 1.3 * most_j
    assert set(stub.readers()) == {os.getpid()}
    assert pid != os.getpid()
    sensor.close()


def in_a_fork(work):
    """What ``work()`` gives in a forked child; an error if it hangs there."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    process = context.Process(target=lambda: queue.put(work()))
    process.start()
    try:
        return queue.get(timeout=30)
    finally:
        process.kill()
        process.join()


def test_a_window_from_before_a_fork_goes_on_in_the_child(gpus):
    stub = gpus(1)
    stub.set_load(100.0)
    sensors = gpu_sensors()
    time.sleep(0.5)
    before_j = stub.energy_j(0)
    window = Meter(sensors).window()
    time.sleep(0.3)
    least_j = stub.energy_j(0) - before_j

    def child():
        return window.energy.joules

    joules = in_a_fork(child)
    assert 0.7 * least_j <= joules <= 1.3 * (stub.energy_j(0) - before_j)
    sensors[0].close()


def test_a_fork_while_the_device_is_read_does_not_hang_the_child(tmp_path):
    reading = threading.Event()

    class Slow(Counter):
        def energy_j(self):
            if threading.current_thread() is not threading.main_thread():
                reading.set()
                time.sleep(0.2)
            return super().energy_j()

    sensor = SharedSensor(Slow("slow"), folder=tmp_path, period_s=0.01)
    reading.clear()
    assert reading.wait(30)
    assert in_a_fork(sensor.energy_j) >= 0.0
    sensor.close()


def test_a_forked_child_has_an_account_of_its_own_and_keeps_it(gpus):
    """Whoever closes a file gives up all of the process's locks of it, those taken through another descriptor too."""
    stub = gpus(1)
    stub.set_load(100.0)
    first, second = gpu_sensors() + gpu_sensors()
    first.join(1.0)

    def child():
        first.join(1.0)
        second.energy_j()
        time.sleep(1.2)  # the reader looks once a second who is alive
        before = first.reading()
        time.sleep(0.5)
        after = first.reading()
        first.close()
        return after[1] - before[1], after[0] - before[0]

    part_j, whole_j = in_a_fork(child)
    assert whole_j > 0
    assert 0.3 * whole_j <= part_j <= 0.7 * whole_j
    before_j = first.reading()[1]
    joules, least_j, most_j = grown(stub, lambda: first.reading()[1] - before_j, 0.3)
    assert 0.6 * least_j <= joules <= 1.4 * most_j
    for sensor in (first, second):
        sensor.close()


def test_a_child_that_closes_what_it_inherited_takes_nothing_from_its_parent(gpus):
    stub = gpus(1)
    stub.set_load(100.0)
    (sensor,) = gpu_sensors()
    sensor.join(1.0)
    in_a_fork(sensor.close)
    joules, least_j, most_j = grown(stub, lambda: sensor.reading()[1], 0.5)
    assert 0.7 * least_j <= joules <= 1.3 * most_j
    sensor.close()


def test_a_lost_gpu_is_told_to_those_who_follow(gpus, nvml_library, nvml_stub):
    stub = gpus(1)
    worker = Worker(stub, nvml_library)  # the reader
    (sensor,) = gpu_sensors()

    def until(good):  # the reader has noticed
        until_s = time.monotonic() + 120
        while True:
            try:
                told = "" if sensor.energy_j() >= 0 else "less than nothing"
            except SensorError as error:
                told = str(error)
            if good(told) or time.monotonic() > until_s:
                return told
            time.sleep(0.02)

    assert not sensor.is_reader
    assert sensor.energy_j() >= 0
    stub.add_flags(nvml_stub.LOST)
    assert "fallen off the bus" in until(lambda told: told)
    stub.change(flags=0)  # reset
    assert until(lambda told: not told) == ""
    worker.close()
    sensor.close()


def test_a_foreign_folder_is_refused(tmp_path, monkeypatch):
    from penstock.energy._shared import runtime_folder

    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    folder = runtime_folder()
    folder.chmod(0o777)
    with pytest.raises(SensorError, match="not this user's alone"):
        runtime_folder()


def test_the_meter_marks_what_is_shared(gpus):
    """In one process: joined alone it is measured, beside another participant attributed."""
    stub = gpus(1)
    stub.set_load(120.0)
    mine, other = SharedSensor(NvmlSensor(0), period_s=0.01), SharedSensor(NvmlSensor(0), period_s=0.01)
    hook = EpochMeter(Meter([mine]))
    other.join(1.0)
    hook.epoch_begin()
    time.sleep(0.4)
    energy = hook.epoch_end()
    assert energy.source is Source.ATTRIBUTED
    assert energy.joules == pytest.approx(60 * hook.last.time_s, rel=0.2)
    other.leave()
    hook.epoch_begin()
    time.sleep(0.4)
    energy = hook.epoch_end()
    assert energy.source is Source.MEASURED
    assert energy.joules == pytest.approx(120 * hook.last.time_s, rel=0.1)
    mine.close()
    other.close()


def test_a_window_that_began_before_its_process_used_the_device_is_the_whole_ones(tmp_path):
    """Its part has no beginning to be told from: the difference could be less than nothing."""
    mine = SharedSensor(Counter("joining"), folder=tmp_path, period_s=600)
    other = SharedSensor(Counter("joining"), folder=tmp_path, period_s=600)
    for _ in range(50):
        mine._channel.tick()
    mine.resolution_s = 0.0
    window = Meter([mine]).window()
    whole_j = mine.energy_j()
    mine.join(1.0)
    other.join(1.0)
    for _ in range(10):
        mine._channel.tick()
    assert window.end().energy.joules >= mine.energy_j() - whole_j - 1
    assert window.energy.joules > 9
    for sensor in (mine, other):
        sensor.close()


@pytest.mark.parametrize("opens", [gpu_sensors, lambda: sensors_for(("cuda:0", "cuda:1"))])
def test_a_gpu_that_cant_be_opened_leaves_no_other_one_read(gpus, nvml_stub, opens):
    """A worker tries again for every trial: each would leave a reader behind that nobody closes."""
    stub = gpus(2)
    stub.add_flags(nvml_stub.LOST, 1)
    before = set(POLLER._jobs)
    with pytest.raises(SensorError, match="fallen off the bus"):
        opens()
    assert set(POLLER._jobs) <= before

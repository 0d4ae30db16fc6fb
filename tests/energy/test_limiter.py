"""The power limiter end to end: limits set and restored through the real nvidia-ml-py, whatever happens."""

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from penstock.core import Measurement, Source, VirtualClock
from penstock.core.errors import InvalidInput, NotPermitted, Unsupported
from penstock.energy import (
    V100,
    V100_LOADS,
    EtaCost,
    FileCache,
    LeastEnergy,
    LeastTime,
    LimitGuard,
    LimitOptions,
    LimitProfile,
    NvmlSensor,
    PowerLimiter,
    PowerProfile,
    ReplaySensor,
    SimulatedGpu,
    make_meter,
    savings,
    would_have_taken,
)
from penstock.energy._guard import claim_path
from penstock.energy._watchdog import restore

# iteration seconds by limit: a job whose watts are the limit (its load wants 240 W)
SPEED = {250: 0.100, 225: 0.102, 200: 0.105, 175: 0.112, 150: 0.125, 125: 0.155, 100: 0.200}
WATTS = {limit: min(limit, 240) for limit in SPEED}


class Job:
    """A training on the stub's virtual clock."""

    def __init__(self, stub, count=1):
        self.stub = stub
        self.sensors = [NvmlSensor(index, now=stub.now_s) for index in range(count)]
        stub.set_load(240.0)

    def epochs(self, limiter, epochs=1, iterations=800):
        for _ in range(epochs):
            limiter.epoch_begin()
            for _ in range(iterations):
                self.stub.advance(SPEED[round(self.stub.limit_w())])
                limiter.iteration()
            limiter.epoch_end()

    def close(self):
        for sensor in self.sensors:
            sensor.close()


@pytest.fixture
def job(gpus):
    made = []

    def make(count=1):
        made.append(Job(gpus(count, virtual=True), count))
        return made[-1]

    yield make
    for job in made:
        job.close()


def brute_force(eta):
    return min(SPEED, key=lambda limit: (eta * WATTS[limit] + (1 - eta) * 250) * SPEED[limit])


@pytest.mark.parametrize("count", [1, 2, 4])
@pytest.mark.parametrize("eta", [0, 0.5, 1])
def test_the_best_limit_is_set_on_every_gpu_and_restored(job, count, eta):
    job = job(count)
    stub = job.stub
    stub.change(limit_w=230.0)  # what the administrator chose
    with PowerLimiter(job.sensors, rule=EtaCost(eta), now=stub.now_s) as limiter:
        assert [stub.limit_w(index) for index in range(count)] == [230.0] * count
        job.epochs(limiter)
        assert [stub.limit_w(index) for index in range(count)] == [brute_force(eta)] * count
        report = limiter.report
        assert report.best.limit_w == brute_force(eta)
        assert report.profile.world_size == count
        assert report.profile.at(150.0).power_w == pytest.approx(150 * count, rel=1e-3)
        assert limiter.max_power_w == 250 * count
    assert [stub.limit_w(index) for index in range(count)] == [230.0] * count


def test_profiles_are_cached_by_device_task_and_batch_size(job, tmp_path):
    job = job()
    cache = FileCache(tmp_path / "deep" / "profiles.json")
    arguments = {"rule": LeastEnergy(), "cache": cache, "task": "resnet", "now": job.stub.now_s}
    with PowerLimiter(job.sensors, batch_size=64, **arguments) as limiter:
        job.epochs(limiter)
        assert not limiter.report.cached
    sets = job.stub.state.devices[0].sets
    with PowerLimiter(job.sensors, batch_size=64, **arguments) as limiter:
        job.epochs(limiter, iterations=1)  # known: applied before the first iteration
        assert limiter.report.cached
        assert job.stub.limit_w() == limiter.report.best.limit_w
    assert job.stub.state.devices[0].sets - sets == 3  # held, applied, restored
    with PowerLimiter(job.sensors, batch_size=128, **arguments) as limiter:
        assert not limiter.report.cached
    cache.put(cache_key := "power-profile/Stub V100/resnet/64/1", {"nonsense": 1})
    assert cache.get(cache_key)
    with PowerLimiter(job.sensors, batch_size=64, **arguments) as limiter:
        assert not limiter.report.cached


def test_observer_mode_says_what_would_be_saved(job):
    job = job()
    with PowerLimiter(job.sensors, rule=LeastEnergy(), observe=True, now=job.stub.now_s) as limiter:
        job.epochs(limiter, epochs=2)
        assert job.stub.limit_w() == 250
        report = limiter.report
    best = brute_force(1)
    energy_saved = 1 - WATTS[best] * SPEED[best] / (WATTS[250] * SPEED[250])
    assert report.observing
    assert report.energy_saved == pytest.approx(energy_saved, abs=0.01)
    assert report.time_saved == pytest.approx(1 - SPEED[best] / SPEED[250], abs=0.01)
    assert f"{best} W would take" in str(report)


def test_without_permission_it_says_so_once_and_goes_on(job, nvml_stub):
    job = job()
    job.stub.add_flags(nvml_stub.LOCKED)
    said = []
    with PowerLimiter(job.sensors, now=job.stub.now_s, tell=said.append) as limiter:
        job.epochs(limiter, epochs=3, iterations=300)
        report = limiter.report
    assert len(said) == 1
    assert "CAP_SYS_ADMIN" in said[0]
    assert "sudo" in said[0]
    assert report.observing
    assert report.best is None
    assert job.stub.limit_w() == 250


def test_a_gpu_lost_while_profiling_ends_the_profiling_alone(job, nvml_stub):
    job = job(2)
    said = []
    with PowerLimiter(job.sensors, now=job.stub.now_s, tell=said.append) as limiter:
        job.epochs(limiter, iterations=200)
        assert job.stub.limit_w(0) < 250
        job.stub.add_flags(nvml_stub.LOST, 1)
        job.epochs(limiter, iterations=600)
    assert len(said) == 1
    assert "fallen off the bus" in said[0]
    assert job.stub.limit_w(0) == 250  # the other one is back where it was


def test_an_exception_restores(job):
    job = job()

    def fail():
        with PowerLimiter(job.sensors, now=job.stub.now_s) as limiter:
            job.epochs(limiter, iterations=300)
            assert job.stub.limit_w() != 250
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    assert job.stub.limit_w() == 250


TRAINING = """
import os, signal, sys, time
from penstock.energy import LimitGuard, gpu_sensors
sensors = gpu_sensors()
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have left it ignored
guard = LimitGuard(sensors)
guard.hold()
guard.set(125.0)
if "fork" in sys.argv:
    if os.fork() == 0:
        print("held", flush=True)
        time.sleep(600)
        os._exit(0)
else:
    print("held", flush=True)
if "exit" in sys.argv:
    sys.exit(3)
if "raise" in sys.argv:
    raise RuntimeError
time.sleep(600)
"""


def train(stub, library, *argv):
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINING, *argv],
        env=stub.environment(library),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout.readline().strip() == "held"
    return process


def wait_for_limit(stub, limit_w, seconds=120.0):
    deadline = time.monotonic() + seconds
    every = range(stub.state.count)
    while any(stub.limit_w(index) != limit_w for index in every) and time.monotonic() < deadline:
        time.sleep(0.02)
    return stub.limit_w()


@pytest.mark.faults
@pytest.mark.parametrize(
    ("how", "code"),
    [("exit", 3), ("raise", 1), (signal.SIGTERM, -15), (signal.SIGINT, None), (signal.SIGKILL, -9)],
)
def test_limits_come_back_however_the_process_ends(gpus, nvml_library, how, code):
    count = 2
    stub = gpus(count)
    stub.change(limit_w=240.0)
    if isinstance(how, str):
        process = train(stub, nvml_library, how)
    else:
        process = train(stub, nvml_library)
        assert [stub.limit_w(index) for index in range(count)] == [125.0] * count
        os.kill(process.pid, how)
    process.wait(120)
    process.stdout.close()
    if code is not None:
        assert process.returncode == code
    if how is not signal.SIGKILL:
        assert [stub.limit_w(index) for index in range(count)] == [240.0] * count, "restored before the end"
    assert wait_for_limit(stub, 240.0) == 240.0
    assert [stub.limit_w(index) for index in range(count)] == [240.0] * count


@pytest.mark.faults
def test_a_forked_child_that_lives_on_does_not_hold_the_watchdog_up(gpus, nvml_library):
    """Loader workers are forks: they inherit the pipe whose end the watchdog waits for."""
    stub = gpus(1)
    process = train(stub, nvml_library, "fork")
    children = psutil.Process(process.pid).children(recursive=True)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    try:
        assert wait_for_limit(stub, 250.0) == 250.0
    finally:
        for child in children:
            with contextlib.suppress(psutil.Error):  # it is gone, or about to be
                if "time.sleep(600)" in " ".join(child.cmdline()):
                    child.kill()


@pytest.mark.faults
def test_when_the_watchdog_dies_too_the_next_job_restores_what_was(gpus, nvml_library):
    stub = gpus(1)
    stub.change(limit_w=220.0)
    process = train(stub, nvml_library)
    (watchdog,) = psutil.Process(process.pid).children()
    watchdog.kill()
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert stub.limit_w() == 125.0
    sensor = NvmlSensor(0)
    with LimitGuard([sensor]) as guard:
        assert guard.original_w == (220.0,)
        guard.set(150.0)
    assert stub.limit_w() == 220.0
    sensor.close()


def test_a_limit_is_restored_of_a_gpu_whose_energy_is_not_read(gpus):
    """The watchdog has no use for joules: a counter that fails must not keep it from its work."""
    stub = gpus(1)
    sensor = NvmlSensor(0)
    key = sensor.restore_key
    sensor.close()
    stub.change(limit_w=125.0)
    stub.forget_calls()
    assert restore({key: 220.0}, tries=1)
    assert stub.limit_w() == 220.0
    assert not stub.readers()


def test_a_job_that_may_not_restore_a_killed_ones_limit_leaves_it_to_one_that_may(gpus, nvml_stub):
    stub = gpus(1)
    sensor = NvmlSensor(0)
    stub.change(limit_w=125.0)
    Path(claim_path(sensor.restore_key)).write_text('{"pid": 1, "limit_w": 220.0}')
    stub.add_flags(nvml_stub.LOCKED)
    with pytest.raises(NotPermitted):
        LimitGuard([sensor]).hold()
    stub.change(flags=0)
    with LimitGuard([sensor]) as guard:
        assert guard.original_w == (220.0,)
        guard.set(150.0)
    assert stub.limit_w() == 220.0
    sensor.close()


HOLDER = """
import fcntl, json, os, sys, time
claim = open(sys.argv[1], "r+")
fcntl.lockf(claim, fcntl.LOCK_EX)
print("locked", flush=True)
input()
claim.write(json.dumps({"pid": os.getpid(), "limit_w": 220.0, "watched": sys.argv[2] == "watched"}))
claim.flush()
print("told", flush=True)
time.sleep(600)
"""


@pytest.mark.faults
@pytest.mark.parametrize("watched", [False, True])
def test_a_watchdog_stays_till_the_next_job_has_its_own(gpus, watched):
    """One job is killed, the next one takes its claim over and is killed before it could set anything."""
    stub = gpus(1)
    sensor = NvmlSensor(0)
    key = sensor.restore_key
    sensor.close()
    stub.change(limit_w=125.0)
    # What a job that was killed has left: its own watchdog is the one that is tested.
    Path(claim_path(key)).write_text(json.dumps({"pid": 1, "limit_w": 220.0, "watched": True}).ljust(80))
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, claim_path(key), "watched" if watched else ""],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout.readline() == "locked\n"
        done = []
        watchdog = threading.Thread(target=lambda: done.append(restore({key: 220.0}, dead=1)), daemon=True)
        watchdog.start()
        watchdog.join(0.3)
        assert watchdog.is_alive()  # it holds the claim, and nobody knows whether it will live
        holder.stdin.write("\n")
        holder.stdin.flush()
        assert holder.stdout.readline() == "told\n"
        watchdog.join(120 if watched else 0.3)
        assert watchdog.is_alive() is not watched
        assert stub.limit_w() == 125.0
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    watchdog.join(120)
    assert done == [True]
    assert stub.limit_w() == (125.0 if watched else 220.0)


def test_a_claim_says_that_a_watchdog_knows_of_it(gpus):
    gpus(1)
    sensor = NvmlSensor(0)
    claim = Path(claim_path(sensor.restore_key))
    with LimitGuard([sensor]):
        assert json.loads(claim.read_text()) == {"pid": os.getpid(), "limit_w": 250.0, "watched": True}
    assert claim.read_text() == ""
    sensor.close()


@pytest.mark.faults
def test_two_jobs_cant_hold_one_limit(gpus, nvml_library):
    stub = gpus(2)
    process = train(stub, nvml_library)
    sensor = NvmlSensor(1)
    with pytest.raises(NotPermitted, match=f"Process {process.pid} holds the power limit"):
        LimitGuard([sensor]).hold()
    assert stub.limit_w(1) == 125.0
    os.kill(process.pid, signal.SIGTERM)
    process.wait(120)
    process.stdout.close()
    with LimitGuard([sensor]) as guard:
        assert guard.held
    sensor.close()


def test_a_termination_handler_of_the_program_still_runs(gpus, nvml_library):
    stub = gpus(1)
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *a: sys.exit(7))\n" + TRAINING
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=stub.environment(nvml_library), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().strip() == "held"
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(120) == 7
    process.stdout.close()
    assert stub.limit_w() == 250.0


def test_the_watchdog_is_light(gpus, nvml_library):
    stub = gpus(1)
    code = (
        "import sys, penstock.energy._watchdog, penstock.energy._nvml, pynvml;"
        "print([m for m in ('torch', 'numpy', 'optuna', 'sqlalchemy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=stub.environment(nvml_library),
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[]"


def test_what_cant_be_limited_is_refused(job):
    clock = VirtualClock()
    replay = ReplaySensor([0, 1], [1, 1], clock)
    with pytest.raises(Unsupported, match="no power limit"):
        LimitGuard([replay]).hold()
    with pytest.raises(InvalidInput, match="needs a GPU"):
        PowerLimiter([])
    with pytest.raises(InvalidInput, match="of one model"):
        PowerLimiter([replay, *job().sensors])


def test_a_counter_that_stood_still_saves_nothing():
    """An average of 0 W is what such a device shows; the training goes on."""
    still = LimitProfile(200.0, 0.0, 10.0)
    profile = PowerProfile("GPU", 1, 200.0, (still, LimitProfile(100.0, 0.0, 5.0)))
    assert savings(profile, profile.limits[1]) == (0.0, -1.0)
    energy, time_s = would_have_taken(
        Measurement(0.0, "J", Source.MEASURED), 10.0, profile, still, profile.limits[1]
    )
    assert (energy.joules, time_s) == (0.0, 20.0)


def test_what_another_limit_would_have_taken(job):
    """A run of 1000 s at 250 W, had it run at the best limit: by the profile's ratios."""
    job = job()
    with PowerLimiter(job.sensors, rule=LeastEnergy(), observe=True, now=job.stub.now_s) as limiter:
        job.epochs(limiter, iterations=1200)
        profile, best = limiter.report.profile, limiter.report.best
    ran = Measurement(240_000, "J", Source.MEASURED)
    energy, time_s = would_have_taken(ran, 1000.0, profile, profile.highest, best)
    chosen = round(best.limit_w)
    assert time_s == pytest.approx(1000 * SPEED[chosen] / SPEED[250], rel=0.01)
    assert energy.joules == pytest.approx(time_s * WATTS[chosen], rel=0.01)
    assert energy.source is Source.ESTIMATED


def test_a_run_s_meter_finds_the_limit_and_gives_it_back(gpus, tmp_path):
    """The hook of a worker, in real time: two trials of one batch size, the second knows the profile."""
    stub = gpus(1)
    stub.set_load(240.0)
    options = LimitOptions(LeastEnergy(), "cnn", tmp_path / "profiles.json", slice_s=0.02)
    first = make_meter(("cuda:0",), cores=1, limits=options, batch_size=32)
    for _ in range(200):
        first.epoch_begin()
        for _ in range(20):
            time.sleep(0.001)
            first.iteration(32)
        assert first.epoch_end().joules > 0
        if not first._limiter.profiling:
            break
    best = first._limiter.report.best
    assert stub.limit_w() == best.limit_w
    first.close()
    assert stub.limit_w() == 250
    assert [key for key, _ in FileCache(options.profiles).items()] == ["power-profile/Stub V100/cnn/32/1"]
    second = make_meter(("cuda:0",), cores=1, limits=options, batch_size=32)
    second.epoch_begin()
    assert stub.limit_w() == best.limit_w
    second.close()
    assert stub.limit_w() == 250
    for sensor in first._meter.sensors:
        sensor.close()


def test_many_processes_may_keep_profiles_at_once(tmp_path):
    cache = FileCache(tmp_path / "profiles.json")
    with multiprocessing.get_context("fork").Pool(4) as pool:
        pool.starmap(cache.put, [(f"key {number}", number) for number in range(40)])
        pool.close()  # whoever is ended by a signal that a handler takes may miss it as it begins to wait
        pool.join()
    assert dict(cache.items()) == {f"key {number}": number for number in range(40)}


@pytest.mark.parametrize(("iterations", "evaluation_s"), [(800, 30.0), (100, 5.0), (30, 2.0)])
def test_what_follows_the_last_iteration_is_not_profiled(job, iterations, evaluation_s):
    """A worker learns of an epoch's end after its evaluation: idle seconds must not dilute watts and speed."""
    job = job()
    stub = job.stub
    with PowerLimiter(job.sensors, rule=EtaCost(0.5), now=stub.now_s, exact_epochs=False) as limiter:
        for _ in range(60):
            stub.set_load(240.0)
            limiter.epoch_begin()
            for _ in range(iterations):
                stub.advance(SPEED[round(stub.limit_w())])
                limiter.iteration()
            stub.set_load(0.0)
            stub.advance(evaluation_s)
            limiter.epoch_end()
            if not limiter.profiling:
                break
        report = limiter.report
    assert report.best.limit_w == brute_force(0.5)
    for seen in report.profile.limits:
        assert seen.power_w == pytest.approx(WATTS[round(seen.limit_w)], rel=1e-3)
        assert seen.throughput == pytest.approx(1 / SPEED[round(seen.limit_w)], rel=1e-3)


def test_a_profile_goes_on_where_a_short_training_left_it(job, tmp_path):
    job = job()
    stub = job.stub
    arguments = {"rule": LeastEnergy(), "cache": FileCache(tmp_path / "p.json"), "now": stub.now_s}
    tried = []
    for _ in range(10):
        with PowerLimiter(job.sensors, **arguments) as limiter:
            job.epochs(limiter, iterations=130)  # 13 s and more: a warm-up and a limit or two
            tried.append(stub.limit_w())
            if not limiter.profiling:
                break
        assert stub.limit_w() == 250
    assert 2 < len(tried) < 10
    report = limiter.report
    assert [seen.limit_w for seen in report.profile.limits] == sorted(SPEED, reverse=True)
    assert report.best.limit_w == brute_force(1)
    for seen in report.profile.limits:
        assert seen.power_w == pytest.approx(WATTS[round(seen.limit_w)], rel=1e-3)


def test_iterations_without_samples_dont_end_a_slice(job):
    job = job()
    with PowerLimiter(job.sensors, now=job.stub.now_s) as limiter:
        limiter.epoch_begin()
        for _ in range(3000):
            job.stub.advance(0.1)
            limiter.iteration(0)
        assert limiter.profiling
        job.epochs(limiter, epochs=3)
        assert limiter.report.best is not None


@pytest.mark.faults
def test_one_watchdog_serves_a_process_for_many_trainings(gpus, nvml_library):
    """And restores what the last one left when the process is killed."""
    stub = gpus(1)
    stub.change(limit_w=220.0)
    code = (
        "import time\n"
        "from penstock.energy import LimitGuard, gpu_sensors\n"
        "sensors = gpu_sensors(shared=False)\n"
        "for _ in range(5):\n"
        "    with LimitGuard(sensors) as guard:\n"
        "        guard.set(150.0)\n"
        "guard = LimitGuard(sensors); guard.hold(); guard.set(125.0)\n"
        "print('held', flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=stub.environment(nvml_library), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline().strip() == "held"
    (watchdog,) = psutil.Process(process.pid).children()
    assert stub.limit_w() == 125.0
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert wait_for_limit(stub, 220.0) == 220.0
    watchdog.wait(120)  # and is gone


def test_a_profile_of_a_card_of_the_same_name_that_takes_higher_limits(tmp_path):
    """As cards of one chip from several makers do: what this one does not take is not set."""
    clock, load = VirtualClock(), V100_LOADS["resnet50", 256]
    cache = FileCache(tmp_path / "profiles.json")

    def train(model, rule):
        gpu = SimulatedGpu(clock, model)
        with PowerLimiter([gpu], rule=rule, cache=cache, now=clock.now_s) as limiter:
            limiter.epoch_begin()
            gpu.run(load)
            first_w = gpu.power_limit_w()
            for _ in range(400):
                clock.advance_to(clock.now_s() + 0.2 * gpu.slowdown())
                limiter.iteration()
            limiter.epoch_end()
            return first_w, limiter.report

    _, report = train(V100, LeastTime())
    assert report.best.limit_w == 250
    lower = replace(V100, max_limit_w=210.0)
    first_w, report = train(lower, LeastTime())
    assert (first_w, report.best.limit_w) == (
        200.0,
        200.0,
    )  # from the first iteration: nothing is profiled again
    cost = {
        w: V100.epoch_s(load, w) * (0.5 * V100.power_w(load, w) + 0.5 * 210)
        for w in (100, 125, 150, 175, 200)
    }
    assert train(lower, EtaCost(0.5))[0] == min(cost, key=cost.__getitem__)
    none = replace(V100, min_limit_w=90.0, max_limit_w=95.0)
    assert train(none, LeastTime())[1].best.limit_w == 95  # nothing of it is known: profiled


@pytest.mark.parametrize(("low_w", "high_w"), [(100.0, 300.0), (50.0, 250.0)])
def test_a_profile_that_leaves_limits_of_this_card_untried_is_made_anew(tmp_path, low_w, high_w):
    """Zeus 4.2: all possible limits. A card of the same name that takes fewer of them has left a profile."""
    clock, load = VirtualClock(), V100_LOADS["resnet50", 256]
    cache = FileCache(tmp_path / "profiles.json")
    wider = replace(V100, min_limit_w=low_w, max_limit_w=high_w)
    tried = []
    for model in (V100, wider, wider):
        gpu = SimulatedGpu(clock, model)
        with PowerLimiter([gpu], cache=cache, now=clock.now_s) as limiter:
            limiter.epoch_begin()
            gpu.run(load)
            cached = limiter.report.cached
            for _ in range(600):
                clock.advance_to(clock.now_s() + 0.2 * gpu.slowdown())
                limiter.iteration()
            limiter.epoch_end()
            limits_w = [seen.limit_w for seen in limiter.report.profile.limits]
            tried.append((cached, max(limits_w), min(limits_w)))
    assert tried == [(False, 250.0, 100.0), (False, high_w, low_w), (True, high_w, low_w)]

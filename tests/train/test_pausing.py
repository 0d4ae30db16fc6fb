"""Trials in bubbles: a real host process, real pauses in forward and backward, and the results of trials alone."""

import copy
import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import penstock as pk
from penstock.core.errors import InvalidInput, Unsupported
from penstock.train._bubble_gate import Gate
from penstock.train._bubble_host import Host
from penstock.train._bubble_page import WAITING
from penstock.train._bubble_page import clock_s as bubble_clock_s
from penstock.train._pausing import squeeze_task


def network(width=16):
    return nn.Sequential(
        nn.Linear(8, width),
        nn.ReLU(inplace=True),
        nn.Dropout(0.2),
        nn.Linear(width, width),
        nn.Tanh(),
        nn.Linear(width, 3),
    )


def batches(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(16, 8, generator=draw), torch.randint(3, (16,), generator=draw)) for _ in range(count)
    ]


def train(gate, steps):
    torch.manual_seed(3)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if gate is not None:
        gate.attach(model)
        gate.attach_optimizer(optimizer)
    losses = []
    for inputs, targets in batches(steps):
        loss = nn.functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


HOST = """
import sys, time
from penstock.train._bubble_host import Host
host = Host(sys.argv[1], stage=0, free_bytes=123)
print("ready", flush=True)
lent_s, busy_s = float(sys.argv[2]), float(sys.argv[3])
if not lent_s:
    time.sleep(600)
while True:
    host.lend(lent_s)
    time.sleep(lent_s)
    host.take_back()
    time.sleep(busy_s)
"""


@pytest.fixture
def host_job(tmp_path):
    """A host job in a process of its own: lends its device for so long, keeps it for so long, and again."""
    started = []

    def start(lent_s, busy_s):
        command = [sys.executable, "-c", HOST, str(tmp_path), str(lent_s), str(busy_s)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_losses_in_bubbles_are_those_alone(tmp_path, host_job):
    alone = train(None, 30)
    host_job(0.004, 0.004)
    with Gate.any(tmp_path) as gate:
        assert gate.free_bytes == 123
        squeezed = train(gate, 30)
        used = gate.use
    assert squeezed == alone  # to the last bit
    assert used.pauses > 0
    assert used.worked_s > 0


def test_a_trial_stops_inside_the_backward_pass_and_inside_the_forward_pass(tmp_path):
    """The host takes its device back in the middle of a pass: no further layer begins until it lends again."""
    host = Host(tmp_path)
    gate = Gate(host.path)
    model = gate.attach(nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))))
    ran = []
    for i, layer in enumerate(model):
        layer.register_forward_hook(lambda m, a, o, i=i: ran.append(("F", i)))
        layer.weight.register_hook(lambda g, i=i: ran.append(("B", i)))
    paused_after = []

    def pause(slot, now):  # stands in for the sleep: the test is host and trial in one
        paused_after.append(ran[-1] if ran else None)
        host.lend()
        return time.monotonic()

    gate._pause = pause
    host.lend()
    model[2].register_forward_hook(lambda m, a, o: host.take_back() and None)
    model[3].weight.register_hook(lambda g: host.take_back() and None)
    model(torch.randn(2, 4)).sum().backward()
    assert ran == [("F", i) for i in range(5)] + [("B", i) for i in reversed(range(5))]
    assert paused_after == [("F", 2), ("B", 3)]
    host.close()
    gate.close()


class Clock:
    """The time of hosts and gates, which passes when it is told to."""

    now_s = 1000.0

    def __init__(self, monkeypatch):
        for module in ("_bubble_gate", "_bubble_host"):
            monkeypatch.setattr(f"penstock.train.{module}.clock_s", lambda: self.now_s)


def test_no_layer_begins_that_would_not_end_in_time(tmp_path, monkeypatch):
    clock = Clock(monkeypatch)
    host = Host(tmp_path)
    gate = Gate(host.path, slack_s=0.0)
    host.lend(1.0)
    gate.passage("slow")
    clock.now_s += 0.05
    gate.passage("next")  # slow has taken 50 ms
    pauses = gate.use.pauses
    host.lend(0.02)
    asked = []
    gate._pause = lambda slot, now: asked.append(slot) or now
    gate.passage("next")
    gate.passage("slow")
    assert asked == ["slow"]
    assert pauses == 0
    host.close()
    gate.close()


def test_what_never_ran_begins_only_with_time_to_spare(tmp_path, monkeypatch):
    """Two milliseconds are kept for what is not known."""
    Clock(monkeypatch)
    host = Host(tmp_path)
    gate = Gate(host.path, slack_s=0.0)
    asked = []
    gate._pause = lambda slot, now: asked.append(slot) or now
    host.lend(0.0015)
    gate.passage("new")
    host.lend(1.0)
    gate.passage("another")
    assert asked == ["new"]
    host.close()
    gate.close()


@contextmanager
def lending(host, after_s, length_s):
    """Lends for so long after a while, and again and again: on a busy machine a trial may miss one or another."""
    over = threading.Event()

    def lend():
        wait_s = after_s
        while not over.wait(wait_s):
            host.lend(length_s)
            wait_s = 2 * length_s

    thread = threading.Thread(target=lend)
    thread.start()
    yield
    over.set()
    thread.join()


def test_what_fits_nowhere_begins_with_a_bubble(tmp_path):
    """What is longer than the bubble waits for a beginning; what is not, for one with room for it."""
    host = Host(tmp_path)
    gate = Gate(host.path, slack_s=0.0)
    gate._needs["long"] = 0.2
    began = time.monotonic()
    host.lend(0.1, began - 0.09)  # its last tenth
    with lending(host, 0.05, 0.1):
        gate.passage("long")
    assert time.monotonic() - began >= 0.05  # not in that one
    gate._needs["fits"] = 0.5
    began = time.monotonic()
    host.lend(1.0, began - 0.9)  # a bubble that is long enough, but nearly over
    with lending(host, 0.2, 1.0):
        gate.passage("fits")
    assert time.monotonic() - began >= 0.2
    host.close()
    gate.close()


def test_need_covers_how_much_a_layer_varies(tmp_path):
    """Half of the times are 1 ms, half 3 ms: a mean of 2 ms would be too late every second time."""
    with Host(tmp_path) as host, Gate(host.path) as gate:
        for number in range(200):
            gate._learn("layer", 0.001 if number % 2 else 0.003)
            gate._learn("even", 0.001)
        assert gate._needs["layer"] >= 0.003
        assert gate._needs["even"] == pytest.approx(0.001)


def test_a_trial_that_waits_for_its_core_does_not_overrun(tmp_path):
    """Counted by the CPU, what another process had of the core is neither an overrun nor the layer's time."""
    host = Host(tmp_path)
    gate = Gate(host.path)
    gate._by_cpu = True
    host.lend()
    gate.passage("layer")
    host.take_back()
    time.sleep(0.05)  # the host has the core
    gate.rest()
    assert gate.use.overrun_s < 0.03
    assert gate._needs["layer"] < 0.05
    host.lend()
    gate.passage("layer")
    while time.process_time() - gate._cpu_s < 0.02:
        pass
    host.take_back()  # and the CPU time before it is not one either
    gate.rest()
    assert gate.use.overruns_s[-1] < 0.02
    host.lend()
    gate.passage("layer")
    host.take_back()
    end = time.process_time() + 0.02
    while time.process_time() < end:
        pass
    gate.rest()
    assert gate.use.overrun_s >= 0.02
    host.close()
    gate.close()


def test_data_waits_for_a_bubble_and_counts_by_its_cpu_time(tmp_path):
    with Host(tmp_path) as host, Gate(host.path) as gate:
        optimizer = gate.attach_optimizer(torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1))
        host.lend()
        asked = []
        gate._pause = lambda slot, now: asked.append(slot) or now
        optimizer.register_step_pre_hook(lambda *_: host.take_back() and None)
        optimizer.step()
        assert asked == ["between operations"]
        worked_s = gate.use.worked_s
        time.sleep(0.05)  # waits for data
        gate.rest()
        assert gate.use.worked_s - worked_s < 0.04


def test_python_code_without_a_passage_stops_when_the_bubble_ends(tmp_path):
    """Data made by hand, say: it stands still while the host computes, and ends with what it would have made."""
    host = Host(tmp_path)
    gate = Gate(host.path)
    host.lend()

    def lend_again():
        while not host._words[WAITING]:
            time.sleep(0.005)
        time.sleep(0.2)
        host.lend()

    again = threading.Thread(target=lend_again, daemon=True)
    with gate.anywhere():
        gate.passage("data")
        host.lend(0.05)
        again.start()
        times = [time.monotonic()]
        while gate.use.pauses == 0 and times[-1] < times[0] + 120:
            times.append(time.monotonic())
        times.append(time.monotonic())
    assert max(b - a for a, b in itertools.pairwise(times)) >= 0.2  # it stood still
    assert gate.use.pauses == 1
    assert "data" not in gate._needs  # of what was cut nothing is learned
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_REAL)[0] == 0
    again.join()
    host.close()
    gate.close()


def test_a_timer_that_fires_in_the_midst_of_its_own_work_stops_a_trial_once(tmp_path, monkeypatch):
    """A busy machine runs a process again after more than a millisecond, at any line."""
    with Host(tmp_path) as host, Gate(host.path) as gate:
        host.lend()
        gate.passage("data")
        host.lend(0.0)
        fired = []

        def clock_s():
            if not fired:
                fired.append(True)
                threading.Timer(0.1, host.lend).start()
                gate._tick(signal.SIGALRM, None)
            return bubble_clock_s()

        monkeypatch.setattr("penstock.train._bubble_gate.clock_s", clock_s)
        gate._tick(signal.SIGALRM, None)
        assert (gate.use.pauses, len(gate.use.overruns_s)) == (1, 1)


def test_the_timer_leaves_others_timers_alone(tmp_path):
    with Host(tmp_path) as host, Gate(host.path) as gate:
        theirs = signal.signal(signal.SIGALRM, lambda *_: None)
        mine = signal.getsignal(signal.SIGALRM)
        try:
            with gate.anywhere():
                assert signal.getsignal(signal.SIGALRM) is mine
        finally:
            signal.signal(signal.SIGALRM, theirs)


def test_overruns_by_quantile(tmp_path):
    with Host(tmp_path) as host, Gate(host.path) as gate:
        assert math.isnan(host.guest.quantile_s(0.5))
        for number in range(1100):  # more than are kept
            gate._stopped(number / 1000)
        use = host.guest
        assert len(use.overruns_s) == 1024
        assert use.overruns_s == tuple(number / 1000 for number in range(76, 1100))
        assert use.quantile_s(1) == use.overrun_s == 1.099
        assert use.quantile_s(0.5) == 0.587  # the 512th of them
        with pytest.raises(InvalidInput, match="part"):
            use.quantile_s(2)


GUEST = """
import os, sys
from penstock.train._bubble_gate import Gate
gate = Gate(sys.argv[1])
gate.to_cores()
gate.to_background()
where = "/proc/self/autogroup"
nice = (open(where).read() if os.path.exists(where) else "").split() or ["19"]  # where there are no such groups
print(sorted(os.sched_getaffinity(0)), os.sched_getscheduler(0), nice[-1])
gate.passage("layer")
print(os.sched_getscheduler(0))
"""


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="Linux alone has these")
def test_a_trial_yields_its_core_also_from_a_session_of_its_own(tmp_path):
    """Sessions share cores evenly, idle or not (autogroups): workers have one, so theirs must step back as well."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        host = Host(tmp_path)
    finally:
        os.sched_setaffinity(0, cores)
    host.close()  # so that the trial goes on, and need not yield any more
    command = [sys.executable, "-c", GUEST, str(host.path)]
    told = subprocess.run(command, capture_output=True, text=True, start_new_session=True, check=True).stdout
    assert told.split("\n")[:2] == [f"[{min(cores)}] {os.SCHED_IDLE} 19", str(os.SCHED_OTHER)]


def test_on_a_gpu_a_layer_ends_when_the_gpu_has_done_it(tmp_path, monkeypatch):
    host = Host(tmp_path, gpu=0)
    gate = Gate(host.path)
    waited = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(time.sleep(0.01)))
    host.lend()
    gate.passage("layer")
    gate.passage("next")
    assert len(waited) == 2
    assert gate.use.worked_s >= 0.01
    host.close()
    gate.close()


def test_an_overrun_is_counted(tmp_path):
    host = Host(tmp_path)
    gate = Gate(host.path)
    host.lend()
    gate.passage("layer")
    host.take_back()
    time.sleep(0.02)
    gate.rest()
    assert host.guest.overrun_s >= 0.02
    host.close()
    gate.close()


def test_a_host_that_dies_leaves_its_device_to_the_trial(tmp_path, host_job):
    host = host_job(0, 0)
    with Gate.any(tmp_path) as gate:
        end = threading.Timer(0.2, host.kill)  # it lives when the trial begins to wait
        end.start()
        assert len(train(gate, 3)) == 3
        end.join()


def test_a_host_that_ends_leaves_its_device_to_the_trial(tmp_path):
    host = Host(tmp_path)
    with Gate(host.path) as gate:
        host.close()
        assert train(gate, 3) == train(None, 3)
        assert gate.use.pauses == 0


def test_one_trial_per_stage(tmp_path):
    with Host(tmp_path, stage=0), Host(tmp_path, stage=1):
        first, second = Gate.any(tmp_path), Gate.any(tmp_path)
        assert {first.path.name, second.path.name} == {"stage0.bubble", "stage1.bubble"}
        with pytest.raises(Unsupported, match="All 2 stages"):
            Gate.any(tmp_path)
        first.close()
        Gate.any(tmp_path).close()
        second.close()
    with pytest.raises(InvalidInput, match="start it first"):
        Gate.any(tmp_path / "nowhere")


def test_copies_of_a_model_share_its_gate(tmp_path):
    with Host(tmp_path) as host, Gate(host.path) as gate:
        host.lend()
        model = gate.attach(network())
        twin = copy.deepcopy(model)
        before = gate.use.worked_s
        twin(torch.randn(2, 8)).sum().backward()
        assert gate.use.worked_s > before


def test_host_learns_its_bubbles_and_lends_only_the_long_ones(tmp_path):
    with Host(tmp_path, least_s=0.015, learn_steps=2, early=0.2) as host:
        lent = []
        host.lend, real = lambda length, now: (lent.append((host._at, length)), real(length, now)), host.lend
        for _ in range(4):
            with host.step():
                with host.computing():
                    pass
                time.sleep(0.03)  # gap 1
                with host.computing():
                    pass
    assert len(host.bubbles_s) == 3
    assert [gap for gap, _ in lent if gap == 1] == [1, 1]  # after two steps of learning
    assert all(length >= 0.024 for gap, length in lent if gap == 1)
    assert host.bubbles_s[1] >= 0.03


def test_host_refuses_what_it_cannot_watch(tmp_path):
    with Host(tmp_path) as host, pytest.raises(InvalidInput, match="pipelining"):
        host.watch(nn.Linear(2, 2))
    with pytest.raises(InvalidInput, match="stage"):
        Host(tmp_path, stage=-1)
    with pytest.raises(InvalidInput, match=r"pk\.Task"):
        squeeze_task(print, tmp_path)


def make(width):
    return network(width)


def test_a_study_in_bubbles_reports_what_it_reports_alone(tmp_path, host_job):
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    targets = (inputs.sum(1) > 0).long()
    task = pk.Task(make, pk.Data.split(inputs, targets), nn.functional.cross_entropy, epochs=2, batch_size=16)
    space = pk.Space(lr=pk.Float(1e-3, 0.5, log=True), width=pk.Choice(8, 16), momentum=pk.Float(0.1, 0.9))
    host_job(0.005, 0.003)
    outcomes = []
    for one in (task, pk.bubbles.squeeze(task, tmp_path, background=False)):
        study = pk.Study(
            one,
            space,
            minimize="loss",
            scheduler=pk.Full(trials=4, epochs=2),
            executor=pk.Local(slots=1),
            fuse=False,
            store=False,
            seed=5,
        )
        study.run()
        outcomes.append([(t.config, t.metrics["loss"], t.metrics["train_loss"]) for t in study.trials])
    assert outcomes[0] == outcomes[1]
    assert len(outcomes[0]) == 4

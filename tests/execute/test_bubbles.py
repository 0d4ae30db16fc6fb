"""Bubbles and shared slots as devices of a study: real workers, and the losses of trials alone."""

import os
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock as pk
from penstock.core.errors import InvalidInput, Unsupported
from penstock.execute._bubbles import in_bubble
from penstock.execute._pool import Pool
from penstock.schedule import StopRule
from penstock.train._bubble_host import Margin
from penstock.train._bubble_page import stages_in


def points():
    x = torch.randn(160, 6, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return x, (x[:, 0] * x[:, 1] > 0).long()


def net():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)).double()


class Others(StopRule):
    """Another study that comes when the first trial has trained two epochs."""

    def __init__(self, folder):
        self.pool = Pool(folder)

    def start(self):
        pass

    def observe(self, trial, epoch, metrics):
        if epoch >= 2 and self.pool._path is None:
            self.pool.join()
            self.pool.update(["cpu:0", "cpu:1"], (), 0.0)
        return None


CALLS: list[None] = []


def patient(model, x):
    """Waits in its sixth epoch until there is a file: the driver gets to move them, however late it comes to it."""
    CALLS.append(
        None
    )  # once for all members: seven to compare them with trials alone, then nine in each epoch
    while len(CALLS) > 60 and not os.path.exists(os.environ["PENSTOCK_TEST_FLAG"]):
        time.sleep(0.01)
    return model(x)


def tune(executor, epochs=6, forward=None, **options):
    data = pk.Data.split(*points())
    task = pk.Task(net, data, F.cross_entropy, epochs=epochs, batch_size=16, forward=forward)
    study = pk.Study(
        task,
        {"lr": pk.Float(1e-3, 0.3, log=True)},
        minimize="loss",
        scheduler=pk.Full(trials=4, epochs=epochs),
        sampler=pk.Random(),
        executor=executor,
        store=False,
        **options,
    )
    study.run(view=None)
    return study


def losses(study):
    return [trial.metrics["loss"] for trial in study.trials]


@pytest.fixture(scope="module")
def alone():
    return losses(tune(pk.Local(slots=1, threads=1), fuse=False))


def test_a_study_in_bubbles_fused_has_the_losses_of_trials_alone(tmp_path, alone):
    """Two stages lend for good: all that is asked is that trials pass the gates, fused, on stages as devices."""
    hosts = [pk.bubbles.Host(tmp_path, stage=number, background=False) for number in (0, 1)]
    for host in hosts:
        host.lend()
    executor = pk.Local(slots=0, threads=1, bubbles=tmp_path)
    study = tune(executor, fuse=2)
    assert losses(study) == pytest.approx(alone, rel=1e-9)
    assert {share.device for trial in study.trials for share in trial.shares} == {
        "bubble:stage0",
        "bubble:stage1",
    }
    assert all(host.guest.worked_s > 0 for host in hosts)
    for host in hosts:
        host.close()
    assert {lent.speed for lent in executor.lent().values()} == {1.0}  # the host is over: the device is free


def test_a_group_whose_slot_others_claim_is_merged_with_another_and_ends_as_it_would_have(
    tmp_path, monkeypatch
):
    flag = tmp_path / "told"
    monkeypatch.setenv("PENSTOCK_TEST_FLAG", str(flag))
    executor = pk.Local(slots=2, threads=1, shared=tmp_path)
    stop = executor.stop
    executor.stop = lambda *trials, **why: (stop(*trials, **why), flag.touch())
    study = tune(executor, epochs=40, fuse=4, forward=patient, stop=Others(tmp_path))
    merged = [note.data for note in study.state.notes if note.topic == "merge"]
    assert len(merged) == 1
    assert sorted(merged[0]["trials"]) == [0, 1, 2, 3]
    study.stop_rules[0].pool.leave()
    assert losses(study) == pytest.approx(
        losses(tune(pk.Local(slots=1, threads=1), epochs=40, fuse=False)), rel=1e-9
    )


def test_nothing_is_measured_in_bubbles(tmp_path):
    host = pk.bubbles.Host(tmp_path, gpu=3)
    (stage,) = stages_in(tmp_path)
    assert stage.gpu == "3"
    facts = in_bubble({"fusion": {"count": 4, "key": "k", "measure": True, "ahead": 9}}, stage)
    assert facts["fusion"] == {"count": 4, "key": "k", "check": True}
    assert facts["bubble"].endswith("stage0.bubble")
    host.close()


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: pk.Local(bubbles=path / "none").slots, "start it first"),
        (lambda path: pk.Local(bubbles=3), "bubbles"),
        (lambda path: pk.Local(slots=0), "slots"),
        (lambda path: pk.Local(shared=3), "shared"),
        (lambda path: pk.Local(shared=True, weight=-1), "weight"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, make, says):
    with pytest.raises(InvalidInput, match=says):
        make(tmp_path)


@pytest.mark.parametrize(
    ("given", "says"),
    [({"bubbles": "/dev/shm/llm"}, "memory of its own machine"), ({"shared": True}, "slots=")],
)
def test_ray_says_at_once_what_it_does_not_have(given, says):
    with pytest.raises(Unsupported, match=says):
        pk.Ray(**given)


def test_the_margin_settles_where_the_host_loses_what_it_may():
    """Bubbles of 1 s in steps of 5 s that end up to 0.2 s early; without a margin 2% of the time would be lost."""
    generator = torch.Generator().manual_seed(0)
    margin, late = Margin(0.1, slowdown=0.002), []
    for early_s in (0.2 * torch.rand(4000, generator=generator)).tolist():
        late.append(max(0.0, early_s - margin.early))
        margin.passed(5.0, late[-1])
    lost = sum(late[1000:]) / (5.0 * 3000)
    assert 0.0005 < lost < 0.003

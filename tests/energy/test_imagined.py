"""Imagined GPUs: joules and seconds are those of the GPU's model, and limits are the best by brute force."""

import pickle

import pytest

import penstock as pk
from penstock.core.errors import InvalidInput
from penstock.energy import V100, EtaCost, LimitOptions, Load

LOAD = Load(epoch_s=40.0, duty=0.7, peak_w=290.0, light_w=60.0)
LIMITS_W = range(100, 251, 25)


def load(config):
    return LOAD


def train(run):
    for epoch in run.epochs():
        run.report(loss=1 / (epoch + 1))


def simulate(*, trials=1, epochs=3, fuse=False, fused=0.0, rule=None, executor=None):
    return pk.Study(
        train,
        pk.Space(x=pk.Float(0, 1)),
        minimize="loss",
        scheduler=pk.Full(trials=trials, epochs=epochs),
        sampler=pk.Random(),
        executor=executor or pk.Simulated(1, seconds=40.0, fused=fused, power=pk.SimulatedGpus(load)),
        power_limits=rule,
        fuse=fuse,
        store=False,
    ).run()


def best_w(eta):
    """Zeus Eq. 7 by brute force."""
    cost = {w: (eta * V100.power_w(LOAD, w) + (1 - eta) * 250) * V100.epoch_s(LOAD, w) for w in LIMITS_W}
    return min(cost, key=cost.get)


def test_an_epoch_takes_and_draws_what_the_model_says():
    study = simulate(epochs=2)
    seconds = V100.epoch_s(LOAD, 250.0)
    assert study.state.spent_s == pytest.approx(2 * seconds)
    assert study.energy.joules == pytest.approx(2 * seconds * V100.power_w(LOAD, 250.0))
    assert study.energy.source is pk.Source.SIMULATED


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_limits_are_profiled_in_the_first_epochs_and_then_the_best_is_kept(eta):
    study = simulate(epochs=4, rule=EtaCost(eta))
    (note,) = [note.data for note in study.state.notes if note.topic == "power_profile"]
    assert note["limit_w"] == best_w(eta)
    last = study.trials[0].reports[-1]
    assert last.train_s == pytest.approx(V100.epoch_s(LOAD, best_w(eta)))
    assert last.energy.joules == pytest.approx(last.train_s * V100.power_w(LOAD, best_w(eta)))


def test_fused_members_share_light_phases_and_not_their_heavy_work():
    """Two members in 1.5 epochs: twice the heavy work, one light phase of what is left."""
    study = simulate(trials=2, epochs=1, fuse=2, fused=0.5)
    duty = 2 * LOAD.duty / 1.5
    both = Load(1.5 * 40.0, duty, LOAD.peak_w, LOAD.light_w)
    assert study.state.spent_s == pytest.approx(V100.epoch_s(both, 250.0))
    assert study.energy.joules == pytest.approx(V100.epoch_s(both, 250.0) * V100.power_w(both, 250.0))


def test_on_workers_samples_draw_the_same_whoever_trains_with_whom(tmp_path):
    gpus = pk.SimulatedGpus(load, samples=100, target=3.0)

    def drawn(samples, members=1, options=None):
        meter = gpus.for_spec(("cpu",), {}, options or {}, members)
        meter.epoch_begin()
        for size in samples:
            meter.iteration(size)
        return meter.epoch_end().joules

    whole = V100.epoch_s(LOAD, 250.0) * V100.power_w(LOAD, 250.0)
    assert drawn([10] * 10) == pytest.approx(whole)
    assert drawn([40, 40, 20]) == pytest.approx(whole)
    assert drawn([20] * 10, members=2) == pytest.approx(2 * whole)
    assert drawn([]) == pytest.approx(whole)  # a training that tells of no iterations
    assert drawn([100], options={"model": "target"}) == pytest.approx(3 * whole)
    limited = pickle.loads(
        pickle.dumps(gpus.limited(LimitOptions(EtaCost(0.5), "t", tmp_path / "p.json", slice_s=1.0)))
    )
    meter = limited.for_trial(("cpu",), {"batch_size": 8})
    for _ in range(3):
        meter.epoch_begin()
        for _ in range(100):
            meter.iteration(1)
        energy = meter.epoch_end().joules
    meter.close()
    assert energy == pytest.approx(V100.epoch_s(LOAD, best_w(0.5)) * V100.power_w(LOAD, best_w(0.5)))


def test_what_cannot_be_is_refused():
    with pytest.raises(InvalidInput, match="load takes a Load"):
        pk.SimulatedGpus(5)
    with pytest.raises(InvalidInput, match="must give a Load"):
        simulate(executor=pk.Simulated(1, power=pk.SimulatedGpus(lambda config: 3.0)))
    with pytest.raises(InvalidInput, match="power takes SimulatedGpus"):
        pk.Simulated(1, power=LOAD)
    with pytest.raises(InvalidInput, match="bring their own GPUs"):
        pk.Study(
            train,
            {"x": pk.Float(0, 1)},
            minimize="loss",
            executor=pk.Simulated(1),
            meter=pk.SimulatedGpus(load),
        )


@pytest.mark.parametrize("dies", [False, True], ids=["raises", "worker dies"])
def test_an_epoch_that_fails_is_drawn_too(dies):
    """Every simulated second of a device is in the joules, whether or not its epoch came to a report."""

    def fails(run):
        for epoch in run.epochs():
            if epoch == 2 and not dies:
                raise ValueError("in the third epoch")
            run.report(loss=1.0)

    study = pk.Study(
        fails,
        pk.Space(x=pk.Float(0, 1)),
        minimize="loss",
        scheduler=pk.Full(trials=1, epochs=4),
        executor=pk.Simulated(
            1,
            seconds=40.0,
            power=pk.SimulatedGpus(load),
            failure=lambda trial, epoch, attempt: dies and epoch == 2 and attempt == 0,
        ),
        store=False,
    ).run()
    assert study.trials[0].busy_s == pytest.approx((7 if dies else 3) * V100.epoch_s(LOAD, 250.0))
    assert study.energy.joules == pytest.approx(study.trials[0].busy_s * V100.power_w(LOAD, 250.0))

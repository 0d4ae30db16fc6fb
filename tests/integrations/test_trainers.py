"""Lightning's and Transformers' Trainers as trials of a study, and metered without one."""

import importlib
import math
import warnings

import pytest

import penstock as pk
from penstock import integrations
from penstock.core import VirtualClock
from penstock.energy import V100_LOADS, SimulatedGpu
from penstock.integrations._inline import Inline

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def told(monkeypatch):
    """Samples of each iteration that runs were told of."""
    samples = []
    monkeypatch.setattr(pk.Run, "iteration", lambda run, count=1: samples.append(count))
    return samples


@pytest.fixture(scope="module")
def trainers():
    return importlib.import_module(".trainers", __package__)


def study(train, **options):
    space = {"lr": pk.Choice(1e-4, 1e-2, 1e-1)}
    options = {"scheduler": pk.Full(trials=3, sampler=pk.Grid()), "store": False, **options}
    return pk.Study(train, space, minimize="loss", executor=Inline(), **options)


# --- Lightning -----------------------------------------------------------------------------------------------


def test_lightning_reports_every_epoch_of_every_trial(trainers, told):
    ends = {}

    def train(run):
        trainer, _ = trainers.fit(
            integrations.LightningCallback(run, metrics={"val_loss": "loss"}), run.config["lr"], epochs=3
        )
        ends[run.trial] = float(trainer.callback_metrics["val_loss"])

    found = study(train).run()
    assert [record.epoch for record in found.trials] == [3, 3, 3]
    assert {record.id: record.metrics["loss"] for record in found.trials} == pytest.approx(ends)
    assert all(report.energy.joules > 0 for record in found.trials for report in record.reports)
    losses = [report.metrics["loss"] for report in found.trials[2].reports]
    assert losses == sorted(losses, reverse=True)
    assert told == [16] * (3 * 3 * 4)  # trials x epochs x batches


def test_lightning_stops_with_its_budget_and_a_promoted_trial_goes_on(trainers):
    trained = {}

    def train(run):
        callback = integrations.LightningCallback(run, metrics={"val_loss": "loss"})
        _, module = trainers.fit(callback, run.config["lr"], ckpt_path=callback.ckpt_path)
        trained.setdefault(run.trial, []).append(module.trained)

    halving = pk.Halving(max_epochs=4, min_epochs=1, eta=4, trials=4, sampler=pk.Random())
    found = study(train, scheduler=halving, seed=2).run()
    assert sorted(len(parts) for parts in trained.values()) == [1, 1, 1, 2]
    promoted = next(trial for trial, parts in trained.items() if len(parts) == 2)
    assert trained[promoted] == [[0], [1, 2, 3]]  # no epoch twice
    # The same as trained in one go: weights, optimizer and epoch all came back.
    record = found.trials[promoted]
    trainer, _ = trainers.fit(integrations.LightningCallback(), record.config["lr"])
    assert record.metrics["loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-5)


def test_lightning_reports_what_the_module_logs_at_the_end_of_the_epoch(trainers):
    trained = []

    def train(run):
        module = trainers.fit(
            integrations.LightningCallback(run, metrics={"late": "loss"}), net=trainers.Late
        )[1]
        trained.extend(module.trained)
        assert "on_train_epoch_end" not in vars(module)  # it has its own back

    (record,) = study(train, scheduler=pk.Full(trials=1, epochs=2, sampler=pk.Random())).run().trials
    assert [(report.epoch, report.metrics["loss"]) for report in record.reports] == [(1, 1.0), (2, 2.0)]
    assert trained == [0, 1]  # not one more, to see what the second has logged


def test_lightning_nan_fails_the_trial_with_its_reason(trainers):
    def train(run):
        trainers.fit(
            integrations.LightningCallback(run, metrics={"val_loss": "loss"}, checkpoint=False), math.inf
        )

    found = study(train, scheduler=pk.Full(trials=1)).run()
    assert found.trials[0].status is pk.TrialStatus.FAILED
    assert "'loss' is nan" in found.trials[0].reason


def test_lightning_without_a_study_meters_every_epoch(trainers):
    callback = integrations.LightningCallback()
    trainers.fit(callback, epochs=2)
    assert len(callback.energies) == 2
    assert callback.energy.joules == pytest.approx(sum(drawn.joules for drawn in callback.energies))


def simulated():
    clock = VirtualClock()
    gpu = SimulatedGpu(clock)
    gpu.run(V100_LOADS["resnet50", 256])
    return clock, gpu


def limit_by_hand(batch_size):
    """What a PowerLimiter finds that is driven by hand."""
    clock, gpu = simulated()
    with pk.PowerLimiter([gpu], rule=pk.EtaCost(0.5), now=clock.now_s) as limiter:
        limiter.epoch_begin()
        while limiter.profiling:
            clock.advance_to(clock.now_s() + 2.0 * gpu.slowdown())
            limiter.iteration(batch_size)
        return limiter.report.best.limit_w


def test_lightning_finds_the_power_limit_and_undoes_it(trainers):
    clock, gpu = simulated()
    before_w = gpu.power_limit_w()
    options = {"now": clock.now_s}
    callback = integrations.LightningCallback(
        power_limit=pk.EtaCost(0.5), sensors=[gpu], limiter_options=options
    )
    trainer = trainers.pl.Trainer(
        max_epochs=12,
        callbacks=[trainers.Slow(clock, gpu), callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(
        trainers.Net(0.01),
        trainers.DataLoader(trainers.TensorDataset(trainers.INPUTS, trainers.TARGETS), batch_size=8),
    )
    assert callback.limits.best.limit_w == limit_by_hand(8) < before_w
    assert gpu.power_limit_w() == before_w


# --- Transformers --------------------------------------------------------------------------------------------


def test_transformers_reports_every_evaluation_of_every_trial(trainers, capsys, told):
    ends = {}

    def train(run):
        callback = integrations.TransformersCallback(run, metrics={"eval_loss": "loss", "loss": "train_loss"})
        trainer = trainers.tune(callback, run.folder, run.config["lr"], epochs=3)
        ends[run.trial] = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]

    found = study(train).run()
    for record in found.trials:
        assert [report.metrics["loss"] for report in record.reports] == pytest.approx(ends[record.id])
        assert len(record.reports) == 3
        assert "train_loss" in record.metrics
        assert record.energy.joules > 0
    assert told == [16] * (3 * 3 * 4)


def test_transformers_stops_with_its_budget_and_a_promoted_trial_goes_on(trainers, tmp_path, capsys):
    steps = {}

    def train(run):
        callback = integrations.TransformersCallback(run, metrics={"eval_loss": "loss"})
        trainer = trainers.tune(
            callback, run.folder, run.config["lr"], resume=callback.resume_from, save_strategy="epoch"
        )
        steps.setdefault(run.trial, []).append(trainer.state.global_step)

    halving = pk.Halving(max_epochs=4, min_epochs=1, eta=4, trials=4, sampler=pk.Random())
    found = study(train, scheduler=halving, seed=2).run()
    assert sorted(map(tuple, steps.values())) == [(4,), (4,), (4,), (4, 16)]  # four steps an epoch
    promoted = next(trial for trial, parts in steps.items() if len(parts) == 2)
    record = found.trials[promoted]
    alone = trainers.tune(integrations.TransformersCallback(), tmp_path / "alone", record.config["lr"])
    assert record.metrics["loss"] == pytest.approx(alone.evaluate()["eval_loss"], rel=1e-4)


def test_transformers_reports_several_datasets_as_one(trainers, capsys):
    def train(run):
        names = {"eval_a_loss": "loss", "eval_b_loss": "other"}
        callback = integrations.TransformersCallback(run, metrics=names)
        trainers.tune(callback, run.folder, epochs=2, datasets=("a", "b"), save_strategy="epoch")

    (record,) = study(train, scheduler=pk.Full(trials=1, sampler=pk.Random())).run().trials
    assert [sorted(report.metrics) for report in record.reports] == [["loss", "other"]] * 2


def test_transformers_without_evaluations_reports_its_logs(trainers, tmp_path, capsys):
    def train(run):
        trainers.tune(
            integrations.TransformersCallback(run, metrics=["loss"]), run.folder, epochs=2, eval_strategy="no"
        )

    found = study(train, scheduler=pk.Full(trials=1)).run()
    assert found.trials[0].epoch == 2


def test_transformers_without_a_study_meters_every_epoch(trainers, tmp_path, capsys):
    callback = integrations.TransformersCallback()
    trainers.tune(callback, tmp_path, epochs=2)
    assert len(callback.energies) == 2
    assert callback.energy.joules > 0


def test_transformers_finds_the_power_limit_and_undoes_it(trainers, tmp_path, capsys):
    clock, gpu = simulated()
    before_w = gpu.power_limit_w()
    options = {"now": clock.now_s}
    callback = integrations.TransformersCallback(
        power_limit=pk.EtaCost(0.5), sensors=[gpu], limiter_options=options
    )
    slow = trainers.SlowSteps(clock, gpu)
    trainers.tune([slow, callback], tmp_path, epochs=24, eval_strategy="no")
    assert callback.limits.best.limit_w == limit_by_hand(16) < before_w
    assert gpu.power_limit_w() == before_w


@pytest.mark.parametrize("callback", ["LightningCallback", "TransformersCallback"])
def test_what_cannot_work_is_said(callback):
    callback = getattr(integrations, callback)
    with pytest.raises(pk.errors.InvalidInput, match="takes the Run"):
        callback(run=3)
    with pytest.raises(pk.errors.InvalidInput, match="rule"):
        callback(power_limit=0.5)
    with pytest.raises(pk.errors.InvalidInput, match="list of names"):
        callback(metrics="loss")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback()


@pytest.mark.parametrize("callback", ["LightningCallback", "TransformersCallback"])
@pytest.mark.parametrize("wrong", [{"metrics": 5}, {"metrics": [5]}, {"sensors": 5}, {"sensors": [5]}])
def test_bad_arguments_are_said(callback, wrong):
    callback = getattr(integrations, callback)
    with pytest.raises(pk.errors.InvalidInput, match=f"{next(iter(wrong))} takes"):
        callback(**wrong)


def test_lightning_says_if_none_of_the_wanted_metrics_is_logged(trainers):
    def train(run):
        trainers.fit(integrations.LightningCallback(run, metrics={"val_los": "loss"}), epochs=1)

    (record,) = study(train, scheduler=pk.Full(trials=1, sampler=pk.Random()), retries=0).run().trials
    assert record.status.value == "failed"
    for word in ("'val_los'", "'train_loss'", "'val_loss'"):
        assert word in record.reason + record.error


def test_transformers_says_if_none_of_the_wanted_metrics_is_logged(trainers, capsys):
    def train(run):
        trainers.tune(integrations.TransformersCallback(run, metrics=["eval_accuracy"]), run.folder, epochs=1)

    (record,) = study(train, scheduler=pk.Full(trials=1, sampler=pk.Random()), retries=0).run().trials
    assert record.status.value == "failed"
    for word in ("'eval_accuracy'", "'eval_loss'"):
        assert word in record.reason + record.error

"""Lightning's and Transformers' Trainers as trials of a study, and metered without one."""

import logging
import math
import warnings

import pytest
import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

import penstock as pk
from penstock.core import VirtualClock
from penstock.energy import V100_LOADS, SimulatedGpu
from penstock.integrations import LightningCallback, TransformersCallback
from penstock.integrations._inline import Inline

pytestmark = pytest.mark.filterwarnings("ignore")
for name in ("pytorch_lightning", "lightning.pytorch", "transformers"):
    logging.getLogger(name).setLevel(logging.ERROR)

generator = torch.Generator().manual_seed(0)
INPUTS = torch.randn(64, 4, generator=generator)
TARGETS = INPUTS @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])


@pytest.fixture
def told(monkeypatch):
    """Samples of each iteration that runs were told of."""
    samples = []
    monkeypatch.setattr(pk.Run, "iteration", lambda run, count=1: samples.append(count))
    return samples


def study(train, **options):
    space = {"lr": pk.Choice(1e-4, 1e-2, 1e-1)}
    options = {"scheduler": pk.Full(trials=3, sampler=pk.Grid()), "store": False, **options}
    return pk.Study(train, space, minimize="loss", executor=Inline(), **options)


# --- Lightning -----------------------------------------------------------------------------------------------


class Net(pl.LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.lr, self.net, self.trained = lr, nn.Linear(4, 1), []

    def training_step(self, batch, index):
        loss = nn.functional.mse_loss(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def on_train_epoch_start(self):
        self.trained.append(self.current_epoch)

    def validation_step(self, batch, index):
        self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.lr)


def fit(callback, lr=0.01, epochs=4, **options):
    torch.manual_seed(0)
    module = Net(lr)
    trainer = pl.Trainer(
        max_epochs=epochs,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
        devices=1,
    )
    loader = DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=16)
    trainer.fit(module, loader, loader, **options)
    return trainer, module


def test_lightning_reports_every_epoch_of_every_trial(told):
    ends = {}

    def train(run):
        trainer, _ = fit(LightningCallback(run, metrics={"val_loss": "loss"}), run.config["lr"], epochs=3)
        ends[run.trial] = float(trainer.callback_metrics["val_loss"])

    found = study(train).run()
    assert [record.epoch for record in found.trials] == [3, 3, 3]
    assert {record.id: record.metrics["loss"] for record in found.trials} == pytest.approx(ends)
    assert all(report.energy.joules > 0 for record in found.trials for report in record.reports)
    losses = [report.metrics["loss"] for report in found.trials[2].reports]
    assert losses == sorted(losses, reverse=True)
    assert told == [16] * (3 * 3 * 4)  # trials x epochs x batches


def test_lightning_stops_with_its_budget_and_a_promoted_trial_goes_on():
    trained = {}

    def train(run):
        callback = LightningCallback(run, metrics={"val_loss": "loss"})
        _, module = fit(callback, run.config["lr"], ckpt_path=callback.ckpt_path)
        trained.setdefault(run.trial, []).append(module.trained)

    halving = pk.Halving(max_epochs=4, min_epochs=1, eta=4, trials=4, sampler=pk.Random())
    found = study(train, scheduler=halving, seed=2).run()
    assert sorted(len(parts) for parts in trained.values()) == [1, 1, 1, 2]
    promoted = next(trial for trial, parts in trained.items() if len(parts) == 2)
    assert trained[promoted] == [[0], [1, 2, 3]]  # no epoch twice
    # The same as trained in one go: weights, optimizer and epoch all came back.
    record = found.trials[promoted]
    trainer, _ = fit(LightningCallback(), record.config["lr"])
    assert record.metrics["loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]), rel=1e-5)


def test_lightning_nan_fails_the_trial_with_its_reason():
    def train(run):
        fit(LightningCallback(run, metrics={"val_loss": "loss"}, checkpoint=False), math.inf)

    found = study(train, scheduler=pk.Full(trials=1)).run()
    assert found.trials[0].status is pk.TrialStatus.FAILED
    assert "'loss' is nan" in found.trials[0].reason


def test_lightning_without_a_study_meters_every_epoch():
    callback = LightningCallback()
    fit(callback, epochs=2)
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


class Slow(pl.Callback):
    """Moves the simulated GPU's clock by an iteration's time, as its power limit makes it."""

    def __init__(self, clock, gpu):
        self.clock, self.gpu = clock, gpu

    def on_train_batch_start(self, *args):
        self.clock.advance_to(self.clock.now_s() + 2.0 * self.gpu.slowdown())


def test_lightning_finds_the_power_limit_and_undoes_it():
    clock, gpu = simulated()
    before_w = gpu.power_limit_w()
    options = {"now": clock.now_s}
    callback = LightningCallback(power_limit=pk.EtaCost(0.5), sensors=[gpu], limiter_options=options)
    trainer = pl.Trainer(
        max_epochs=12,
        callbacks=[Slow(clock, gpu), callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(Net(0.01), DataLoader(TensorDataset(INPUTS, TARGETS), batch_size=8))
    assert callback.limits.best.limit_w == limit_by_hand(8) < before_w
    assert gpu.power_limit_w() == before_w


# --- Transformers --------------------------------------------------------------------------------------------


class TinyConfig(PretrainedConfig):
    model_type = "tiny"


class Tiny(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.net = nn.Linear(4, 1)
        self.post_init()

    def forward(self, x, labels=None):
        predicted = self.net(x)
        return {"loss": nn.functional.mse_loss(predicted, labels), "logits": predicted}


ROWS = [{"x": x, "labels": t} for x, t in zip(INPUTS, TARGETS, strict=True)]


def tune(callback, folder, lr=0.01, epochs=4, resume=None, **options):
    torch.manual_seed(0)
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=16,
        learning_rate=lr,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_strategy="epoch",
        lr_scheduler_type="constant",
        **{"eval_strategy": "epoch", "save_strategy": "no", **options},
    )
    trainer = Trainer(
        Tiny(TinyConfig()),
        arguments,
        train_dataset=ROWS,
        eval_dataset=ROWS,
        callbacks=callback if isinstance(callback, list) else [callback],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def test_transformers_reports_every_evaluation_of_every_trial(capsys, told):
    ends = {}

    def train(run):
        callback = TransformersCallback(run, metrics={"eval_loss": "loss", "loss": "train_loss"})
        trainer = tune(callback, run.folder, run.config["lr"], epochs=3)
        ends[run.trial] = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]

    found = study(train).run()
    for record in found.trials:
        assert [report.metrics["loss"] for report in record.reports] == pytest.approx(ends[record.id])
        assert len(record.reports) == 3
        assert "train_loss" in record.metrics
        assert record.energy.joules > 0
    assert told == [16] * (3 * 3 * 4)


def test_transformers_stops_with_its_budget_and_a_promoted_trial_goes_on(tmp_path, capsys):
    steps = {}

    def train(run):
        callback = TransformersCallback(run, metrics={"eval_loss": "loss"})
        trainer = tune(
            callback, run.folder, run.config["lr"], resume=callback.resume_from, save_strategy="epoch"
        )
        steps.setdefault(run.trial, []).append(trainer.state.global_step)

    halving = pk.Halving(max_epochs=4, min_epochs=1, eta=4, trials=4, sampler=pk.Random())
    found = study(train, scheduler=halving, seed=2).run()
    assert sorted(map(tuple, steps.values())) == [(4,), (4,), (4,), (4, 16)]  # four steps an epoch
    promoted = next(trial for trial, parts in steps.items() if len(parts) == 2)
    record = found.trials[promoted]
    alone = tune(TransformersCallback(), tmp_path / "alone", record.config["lr"])
    assert record.metrics["loss"] == pytest.approx(alone.evaluate()["eval_loss"], rel=1e-4)


def test_transformers_without_evaluations_reports_its_logs(tmp_path, capsys):
    def train(run):
        tune(TransformersCallback(run, metrics=["loss"]), run.folder, epochs=2, eval_strategy="no")

    found = study(train, scheduler=pk.Full(trials=1)).run()
    assert found.trials[0].epoch == 2


def test_transformers_without_a_study_meters_every_epoch(tmp_path, capsys):
    callback = TransformersCallback()
    tune(callback, tmp_path, epochs=2)
    assert len(callback.energies) == 2
    assert callback.energy.joules > 0


class SlowSteps(TrainerCallback):
    """As ``Slow``."""

    def __init__(self, clock, gpu):
        self.clock, self.gpu = clock, gpu

    def on_step_begin(self, args, state, control, **more):
        self.clock.advance_to(self.clock.now_s() + 2.0 * self.gpu.slowdown())


def test_transformers_finds_the_power_limit_and_undoes_it(tmp_path, capsys):
    clock, gpu = simulated()
    before_w = gpu.power_limit_w()
    options = {"now": clock.now_s}
    callback = TransformersCallback(power_limit=pk.EtaCost(0.5), sensors=[gpu], limiter_options=options)
    slow = SlowSteps(clock, gpu)
    tune([slow, callback], tmp_path, epochs=24, eval_strategy="no")
    assert callback.limits.best.limit_w == limit_by_hand(16) < before_w
    assert gpu.power_limit_w() == before_w


@pytest.mark.parametrize("callback", [LightningCallback, TransformersCallback])
def test_what_cannot_work_is_said(callback):
    with pytest.raises(pk.errors.InvalidInput, match="takes the Run"):
        callback(run=3)
    with pytest.raises(pk.errors.InvalidInput, match="rule"):
        callback(power_limit=0.5)
    with pytest.raises(pk.errors.InvalidInput, match="list of names"):
        callback(metrics="loss")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        callback()


@pytest.mark.parametrize("callback", [LightningCallback, TransformersCallback])
@pytest.mark.parametrize("wrong", [{"metrics": 5}, {"metrics": [5]}, {"sensors": 5}, {"sensors": [5]}])
def test_bad_arguments_are_said(callback, wrong):
    with pytest.raises(pk.errors.InvalidInput, match=f"{next(iter(wrong))} takes"):
        callback(**wrong)


def test_lightning_says_if_none_of_the_wanted_metrics_is_logged():
    def train(run):
        fit(LightningCallback(run, metrics={"val_los": "loss"}), epochs=1)

    (record,) = study(train, scheduler=pk.Full(trials=1, sampler=pk.Random()), retries=0).run().trials
    assert record.status.value == "failed"
    for word in ("'val_los'", "'train_loss'", "'val_loss'"):
        assert word in record.reason + record.error


def test_transformers_says_if_none_of_the_wanted_metrics_is_logged(capsys):
    def train(run):
        tune(TransformersCallback(run, metrics=["eval_accuracy"]), run.folder, epochs=1)

    (record,) = study(train, scheduler=pk.Full(trials=1, sampler=pk.Random()), retries=0).run().trials
    assert record.status.value == "failed"
    for word in ("'eval_accuracy'", "'eval_loss'"):
        assert word in record.reason + record.error

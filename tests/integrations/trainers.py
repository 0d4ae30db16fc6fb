"""Small trainings with Lightning and Transformers: imported by whom they are used, for both take seconds to import."""

import logging

import pytorch_lightning as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments

for name in ("pytorch_lightning", "lightning.pytorch", "transformers"):
    logging.getLogger(name).setLevel(logging.ERROR)

generator = torch.Generator().manual_seed(0)
INPUTS = torch.randn(64, 4, generator=generator)
TARGETS = INPUTS @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])


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


class Late(Net):
    """Logs when an epoch is over."""

    def on_train_epoch_end(self):
        self.log("late", self.current_epoch + 1.0)


def fit(callback, lr=0.01, epochs=4, net=Net, **options):
    torch.manual_seed(0)
    module = net(lr)
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


class Slow(pl.Callback):
    """Moves the simulated GPU's clock by an iteration's time, as its power limit makes it."""

    def __init__(self, clock, gpu):
        self.clock, self.gpu = clock, gpu

    def on_train_batch_start(self, *args):
        self.clock.advance_to(self.clock.now_s() + 2.0 * self.gpu.slowdown())


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


def tune(callback, folder, lr=0.01, epochs=4, resume=None, datasets=(), **options):
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
        eval_dataset=dict.fromkeys(datasets, ROWS) if datasets else ROWS,
        callbacks=callback if isinstance(callback, list) else [callback],
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


class SlowSteps(TrainerCallback):
    """As ``Slow``."""

    def __init__(self, clock, gpu):
        self.clock, self.gpu = clock, gpu

    def on_step_begin(self, args, state, control, **more):
        self.clock.advance_to(self.clock.now_s() + 2.0 * self.gpu.slowdown())

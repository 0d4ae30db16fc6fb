# Run with: python examples/lightning_tune.py        (needs: pip install "penstock[lightning]")
"""Tune a Lightning module: ASHA stops bad trials after an epoch and lets good ones go on from their checkpoints."""

import penstock as pk


def train(run):
    """One trial: an ordinary Lightning training with one callback more."""
    import logging

    import pytorch_lightning as pl
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    from penstock.integrations import LightningCallback

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)

    class Net(pl.LightningModule):
        def __init__(self, lr, width):
            super().__init__()
            self.lr = lr
            self.net = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))

        def training_step(self, batch, index):
            return nn.functional.mse_loss(self.net(batch[0]), batch[1])

        def validation_step(self, batch, index):
            self.log("val_loss", nn.functional.mse_loss(self.net(batch[0]), batch[1]))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=self.lr)

    x = torch.randn(512, 8, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, x.sin().sum(1, keepdim=True))
    callback = LightningCallback(run, metrics={"val_loss": "loss"})
    trainer = pl.Trainer(
        max_epochs=9,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    loader = DataLoader(data, batch_size=64)
    trainer.fit(Net(run.config["lr"], run.config["width"]), loader, loader, ckpt_path=callback.ckpt_path)


study = pk.Study(
    train,
    pk.Space(lr=pk.Float(1e-4, 1e-1, log=True), width=pk.Choice(8, 32)),
    minimize="loss",
    scheduler=pk.ASHA(max_epochs=9, trials=6),
    executor=pk.Local(1),
    store="lightning.db",
)

if __name__ == "__main__":
    study.run(view="auto")
    print(study)

"""PyTorch Lightning: a callback that makes a Trainer's fit a trial, or meters it."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any, final

from penstock.integrations._training import TrainingCallback

if TYPE_CHECKING:
    from pytorch_lightning import Callback
else:
    # The package has two names with a Callback each. A Trainer of the one that is loaded gets one of its own kind.
    _loaded = [name for name in ("lightning.pytorch", "pytorch_lightning") if name in sys.modules]
    try:
        Callback = import_module(_loaded[0] if _loaded else "lightning.pytorch").Callback
    except ImportError:
        Callback = import_module("pytorch_lightning").Callback


@final
class LightningCallback(TrainingCallback, Callback):
    """Joins a Lightning ``Trainer`` to Penstock: ``Trainer(callbacks=[LightningCallback(run)])``.

    With the ``run`` of a training function, every epoch is reported with the Trainer's ``callback_metrics``, the study
    meters it and tries power limits, and ``fit`` ends when the trial's budget does or the study stops it::

        def train(run):
            callback = LightningCallback(run, metrics={"val_loss": "loss"})
            trainer = Trainer(max_epochs=27, callbacks=[callback])
            trainer.fit(Model(run.config["lr"]), data, ckpt_path=callback.ckpt_path)

    Without one it meters each epoch and, with ``power_limit``, finds and sets the best power limit of the GPUs.

    Args:
        run: The trial; None: only energy and power limit.
        metrics: Which metrics to report: names, or the study's names by Lightning's; None: all there are.
        checkpoint: Keep a checkpoint of every epoch, so that a promoted or retried trial goes on (``ckpt_path``).
        power_limit: A rule such as ``EtaCost(0.5)``, without a run; within a study give it to the Study.
        cache: A file that keeps power profiles for the next training.
        sensors: What to meter, without a run; None: what there is.
    """

    _followed = False

    @property
    def ckpt_path(self) -> str | None:
        """What ``Trainer.fit(ckpt_path=...)`` goes on from: the trial's checkpoint as a file, or None."""
        kept = self._kept("lightning")
        if kept is None:
            return None
        path = kept[0] / "resume.ckpt"
        path.write_bytes(kept[1])
        return str(path)

    # --- called by Lightning ---------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to meter."""
        loader = trainer.train_dataloader
        size = (getattr(loader, "batch_size", None) or 0) * trainer.world_size
        self._training.begin(task=type(pl_module).__name__, batch_size=size)
        self._leave(pl_module)
        # A callback's own turn at the end of an epoch is before the module's, which may log metrics then.
        own = pl_module.on_train_epoch_end

        def then_report() -> Any:
            told = own()
            self._close_epoch(trainer)
            return told

        pl_module.on_train_epoch_end = then_report
        self._followed = True

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Tell of an iteration."""
        self._training.iteration(_samples(batch) * trainer.world_size)

    def _close_epoch(self, trainer: Any) -> None:
        """Report the epoch; end the training if the study wants it to."""
        self._training.report(
            trainer.callback_metrics, (lambda: self._dumped(trainer)) if self._checkpoint else None
        )
        # All ranks stop in the same epoch, though one alone has heard of it.
        if trainer.strategy.reduce_boolean_decision(self._training.stop_asked, all=False):
            trainer.should_stop = True

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Restore the power limits; say if nothing could be reported."""
        self._leave(pl_module)
        self._training.finish()

    def _leave(self, pl_module: Any) -> None:
        """Let the module have its own end of an epoch back."""
        if self._followed:
            vars(pl_module).pop("on_train_epoch_end", None)
            self._followed = False

    def _dumped(self, trainer: Any) -> dict[str, bytes]:
        """The Trainer's checkpoint as bytes."""
        run = self._training.run
        assert run is not None
        path = run.folder / "epoch.ckpt"
        trainer.save_checkpoint(path)
        try:
            return {"lightning": path.read_bytes()}
        finally:
            path.unlink(missing_ok=True)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the power limits."""
        self._leave(pl_module)
        self._training.end()


def _samples(batch: Any) -> int:
    """How many samples a batch has: its first tensor's length; 1 where there is none."""
    while isinstance(batch, dict | list | tuple) and batch:
        batch = next(iter(batch.values())) if isinstance(batch, dict) else batch[0]
    shape = getattr(batch, "shape", None)
    return int(shape[0]) if shape is not None and len(shape) > 0 else 1

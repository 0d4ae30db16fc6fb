"""Hugging Face Transformers: a callback that makes a Trainer's train a trial, or meters it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, final

from transformers import TrainerCallback

from penstock.integrations._training import TrainingCallback, packed, unpacked


@final
class TransformersCallback(TrainingCallback, TrainerCallback):
    """Joins a Transformers ``Trainer`` to Penstock: ``Trainer(..., callbacks=[TransformersCallback(run)])``.

    With the ``run`` of a training function, every evaluation is a report (``eval_strategy="epoch"`` makes it one per
    epoch; without evaluations every log of the training loss is one), the study meters the time between, and the
    training ends when the trial's budget does or the study stops it::

        def train(run):
            callback = TransformersCallback(run, metrics={"eval_loss": "loss"})
            arguments = TrainingArguments(output_dir=str(run.folder), eval_strategy="epoch", save_strategy="epoch", ...)
            trainer = Trainer(model, arguments, ..., callbacks=[callback])
            trainer.train(resume_from_checkpoint=callback.resume_from)

    Where the Trainer saves when it evaluates, what it saved is the trial's checkpoint, and a promoted or retried trial
    goes on from ``resume_from``.

    Without a run it meters each such stretch and, with ``power_limit``, finds and sets the GPUs' best power limit.

    Args:
        run: The trial; None: only energy and power limit.
        metrics: Which metrics to report: names, or the study's names by the Trainer's; None: all numbers there are.
        checkpoint: Keep what the Trainer saves as the trial's checkpoint.
        power_limit: A rule such as ``EtaCost(0.5)``, without a run; within a study give it to the Study.
        cache: A file that keeps power profiles for the next training.
        sensors: What to meter, without a run; None: what there is.
    """

    _waiting: dict[str, Any] | None = None  # metrics whose report waits for the Trainer to save

    @property
    def resume_from(self) -> str | None:
        """What ``Trainer.train(resume_from_checkpoint=...)`` goes on from: the trial's checkpoint, or None."""
        kept = self._kept("transformers")
        return None if kept is None else str(unpacked(kept[1], kept[0] / "resume"))

    # --- called by Transformers ------------------------------------------------------------------------------

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Begin to meter."""
        model = more.get("model")
        self._waiting = None
        self._training.begin(task=type(model).__name__, batch_size=_batch_size(args))

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Tell of an iteration."""
        self._training.iteration(_batch_size(args))

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **more: Any
    ) -> None:
        """Report, where nothing is evaluated."""
        if args.eval_strategy == "no" and logs and "loss" in logs and state.global_step:
            self._close(logs, args, state, control)

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: dict[str, Any] | None = None, **more: Any
    ) -> None:
        """Report."""
        if args.eval_strategy != "no" and metrics and state.global_step:
            logged: dict[str, Any] = next(
                (entry for entry in reversed(state.log_history) if "loss" in entry), {}
            )
            self._close({**logged, **metrics}, args, state, control)

    def on_save(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Make the report that waited for the checkpoint."""
        metrics, self._waiting = self._waiting, None
        if metrics is not None:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            self._report(metrics, control, folder if folder.is_dir() else None)

    def on_train_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        """Restore the power limits; say if nothing could be reported."""
        if self._waiting is not None:
            self._report(self._waiting, control, None)
        self._training.finish()

    def _close(self, metrics: dict[str, Any], args: Any, state: Any, control: Any) -> None:
        if self._checkpoint and control.should_save:
            # The Trainer saves after it has evaluated, and evaluates each of several datasets by itself.
            self._waiting = {**(self._waiting or {}), **metrics}
            return
        self._report(metrics, control, None)

    def _report(self, metrics: dict[str, Any], control: Any, folder: Path | None) -> None:
        self._training.report(metrics, None if folder is None else (lambda: {"transformers": packed(folder)}))
        if self._training.stop_asked:
            control.should_training_stop = True


def _batch_size(args: Any) -> int:
    return int(args.train_batch_size * args.gradient_accumulation_steps * args.world_size)

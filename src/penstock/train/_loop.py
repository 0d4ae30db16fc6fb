"""The one training loop: epochs, evaluation, checkpoints and exploration of a Task's trial."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import pickle
import random
import sys
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, final
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from penstock.core.errors import InvalidInput
from penstock.core.trial import Config
from penstock.model._watch import Watch
from penstock.train._explored import carried, fits
from penstock.train._layout import lay_out
from penstock.train._loader import Loaded, Source, copied, derive, flatten, order_of
from penstock.train._seeding import seed_torch
from penstock.train._threads import Pace, paced

if TYPE_CHECKING:
    from penstock.train._elastic import Crew
    from penstock.train._task import Task

_TRIES = 3  # learning rates an exploration tries, each a tenth of the one before
_SWEEP = (
    8,
    24,
)  # steps that a sweep takes where the batches explored are fewer: as many as an epoch has, within these
_FORWARD = 1 / 3  # of a training step: a backward pass takes twice a forward one
_FLUSH = 2048  # losses kept as separate tensors before they are joined


class RunLike(Protocol):
    """What the loop needs of a Run. ``options`` (Segment.options) and ``until`` may be missing."""

    @property
    def config(self) -> Config:
        """The trial's configuration."""

    @property
    def seed(self) -> int:
        """The trial's seed."""

    @property
    def device(self) -> Any:
        """Where to train: ``"cpu"``, ``"cuda:1"`` or a ``torch.device``."""

    def epochs(self) -> Iterable[int]:
        """The epochs to run."""

    def report(self, **metrics: float) -> None:
        """Report an epoch's metrics."""

    def save(self, state: Any) -> None:
        """Keep a checkpoint."""

    def load(self) -> Any | None:
        """The checkpoint to go on from."""


def train(task: Task, run: RunLike) -> None:
    """Train a Task as a Run says: from its checkpoint, for its epochs, in its mode.

    ``run.options``, set by ``pk.SM2``: the epochs in ``"explorations"`` (counted from 0) are exploratory, they leave
    the model as it was and set the learning rate; all others train. Without that list ``"mode": "explore"`` makes
    every epoch of the segment exploratory.
    """
    if getattr(run, "should_stop", False):  # told so while something else kept the worker busy
        return
    options: Mapping[str, Any] = getattr(run, "options", None) or {}
    listed = options.get("explorations")
    at: frozenset[int] | None = None if listed is None else frozenset(listed)
    if options.get("model") == "target":  # of a study that otherwise trains a narrow twin
        task = task.full()
    with private_randomness():
        trainer = Trainer(task, run.config, seed=run.seed, device=run.device, lr_is_found=bool(options))
        trainer.on_iteration = getattr(run, "_on_iteration", None)
        trainer.crew = getattr(run, "_crew", None)
        trainer.pace = getattr(run, "_pace", None)
        state = run.load()
        if state is not None:
            trainer.load_state(state)
        # A scheduler's budget is in the run's epochs; the task's own counts only where there is none.
        bounded = getattr(run, "until", None) is not None
        if not bounded and trainer.epoch >= task.epochs:
            return
        file = _step_file(task, run) if trainer.crew is None else None
        for _ in run.epochs():
            explores = options.get("mode") == "explore" if at is None else trainer.epoch in at
            if explores:
                metrics = trainer.explore(options)
            elif file is None:
                metrics = trainer.train_epoch()
            else:
                metrics = _train_epoch_saving(trainer, file)
            over = not explores and task.target is not None and task.target.reached(metrics)
            if over:
                metrics["target_reached"] = 1.0  # told, for a segment may end with this very epoch
            over = over or (not bounded and trainer.epoch >= task.epochs)
            if (
                over
                or explores
                or trainer.epoch % task.checkpoint_epochs == 0
                or _is_last(run, trainer.epoch)
                or getattr(run, "should_stop", False)  # what is not saved would have to be trained again
            ):
                run.save(trainer.state())
            run.report(**metrics)
            if over:
                return


def _step_file(task: Task, run: RunLike) -> Path | None:
    """Where checkpoints within an epoch go: beside the trial's own files, for the Run's count whole epochs."""
    if task.checkpoint_steps is None:
        return None
    folder = getattr(run, "folder", None)
    return None if folder is None else Path(folder) / "step.ckpt"


def _train_epoch_saving(trainer: Trainer, file: Path) -> dict[str, float]:
    """An epoch with checkpoints within it, from the one an interrupted worker left, if it fits."""
    base = trainer.fingerprint()
    try:
        kept = torch.load(file, map_location=trainer.device, weights_only=False)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, zipfile.BadZipFile):
        kept = None  # none, or one that a power cut damaged: the epoch starts from its beginning
    if kept is not None and kept["base"] == base:
        kept["state"]["random"] = {
            key: value.cpu() if isinstance(value, Tensor) else value
            for key, value in kept["state"]["random"].items()
        }
        trainer.load_state(kept["state"])

    def save(state: Any) -> None:
        part = file.with_suffix(".tmp")
        torch.save({"base": base, "state": state}, part)
        os.replace(part, file)

    return trainer.train_epoch(save=save)


def _is_last(run: RunLike, epoch: int) -> bool:
    ends = (getattr(run, "until", None), getattr(run, "_leave", None))  # of its segment, and by a budget
    return any(end is not None and epoch >= end for end in ends)


@final
class Trainer:
    """One trial's model, optimizer, schedule and position, and the steps that move them.

    Nothing of it is global but the random generators, which ``train_epoch`` seeds from (seed, epoch): the same
    trial gives the same numbers alone, after a resume, or between other trials. Wrap its use in
    ``private_randomness`` to leave the process's generators as they were.

    Attributes:
        epoch: Epochs behind it, exploratory ones included.
        step: Batches of the present epoch behind it.
        crew: The workers that train this trial together, on a device each; None: it is alone.
        pace: Chooses its threads where it has several groups of CPU cores; None: they stay as they are.
        on_iteration: Called after each step with its number of samples, also for steps of exploring copies; None:
            nobody wants to know.
    """

    def __init__(
        self,
        task: Task,
        config: Config,
        *,
        seed: int,
        device: Any = "cpu",
        lr: float | None = None,
        lr_is_found: bool = False,
        model: Any = None,
    ) -> None:
        self.task = task
        self.config = task.hyperparameters(config)
        self.seed = seed
        self.device = _device(device)
        self.data: Loaded = task.load(self.device)
        self.batch_size = min(task.size_of_batches(self.config), self.data.train.n)
        used: set[str] = set()
        built = model is None
        if model is None:
            seed_everything(derive(seed, "init"))
            model, used = task.build_model(self.config)
            _check_own(model)
        self.model: torch.nn.Module = model.to(self.device)
        if isinstance(
            task.loss, torch.nn.Module
        ):  # with weights of classes, made where nobody knew of the device
            task.loss.to(self.device)
        if any(torch.nn.parameter.is_lazy(p) for p in self.model.parameters()):
            self._materialise()
        self._needs_lr = lr is None and lr_is_found and "lr" not in self.config
        if self._needs_lr:
            lr = 1.0  # set before the first step, in proportion: groups and schedules start from what they make of this
        trainable = task.groups(self.model, self.config)
        self.optimizer, taken = task.build_optimizer(trainable, self.config, lr=lr)
        used |= taken
        self.steps_per_epoch = _steps(self.data.train.n, self.batch_size, task.drop_last)
        self.schedule, self._per_step, taken = task.build_schedule(
            self.optimizer, self.config, steps_per_epoch=self.steps_per_epoch
        )
        used |= taken
        if used and built:  # nobody saw which names the factory of a given model looked at
            _warn_once(task.check_names(config, used, certain=not task.factory_gets_all(self.config)))
        clip = self.config.get("clip_norm", task.clip_norm)
        self.clip_norm: float | None = None if clip is None else float(clip)
        self.dtype, self.scaler = _precision(self.device, task.amp)
        inner = getattr(self.schedule, "inner", self.schedule)  # a twin's is wrapped
        self._plateau = isinstance(inner, torch.optim.lr_scheduler.ReduceLROnPlateau)
        self.epoch = 0
        self.step = 0
        self.on_iteration: Callable[[float], None] | None = None
        self.crew: Crew | None = None
        self.pace: Pace | None = None
        self._losses: list[Tensor] = []
        self._resume_random: dict[str, Any] | None = None
        self._checked = False
        self._laid_out = False
        self._held: dict[str, float] | None = None  # of the last exploration; None: nothing is explored

    def _materialise(self) -> None:
        """Let lazy layers see a batch: an optimizer needs their parameters."""
        inputs, _ = next(self.data.train.batches(min(2, self.data.train.n)))
        self.model.eval()
        with torch.no_grad():
            (self.task.forward or _forward)(self.model, inputs)
        self.model.train()

    # ------------------------------------------------------------ learning rate

    @property
    def lr(self) -> float:
        """The first parameter group's learning rate, as the schedule has it now."""
        return float(self.optimizer.param_groups[0]["lr"])

    def set_lr(self, lr: float) -> None:
        """Train on at ``lr``; a schedule goes on from it in proportion, groups keep their ratios."""
        old = float(self.optimizer.param_groups[0].get("initial_lr", self.optimizer.param_groups[0]["lr"]))
        for group in self.optimizer.param_groups:
            for key in ("lr", "initial_lr"):
                if key not in group:
                    continue
                now = group[key]
                value = float(now) * lr / old if old > 0 else lr
                if isinstance(now, Tensor):
                    now.fill_(value)
                else:
                    group[key] = value
        for schedule in _schedules(self.schedule):
            bases = getattr(schedule, "base_lrs", None)
            if bases is not None:
                schedule.base_lrs = [base * lr / old if old > 0 else lr for base in bases]
        self._needs_lr = False

    # ------------------------------------------------------------ training

    def train_epoch(self, *, save: Callable[[Any], None] | None = None) -> dict[str, float]:
        """Train one epoch, or the rest of an interrupted one, and evaluate.

        Args:
            save: Called with a state every ``checkpoint_steps`` steps.

        Returns:
            ``loss`` (on the validation data where there is any), ``train_loss`` and the task's metrics.
        """
        if self._needs_lr:
            raise InvalidInput(
                f"No learning rate: {', '.join(self.config) or 'an empty configuration'} holds none and none was "
                "explored before this epoch. Add lr to the space, or begin with an exploratory epoch."
            )
        source = self.data.train
        self.seed_epoch()
        if self._resume_random is not None:
            set_random_state(self._resume_random, self.device)
            self._resume_random = None
        order = order_of(source.n, self.seed, self.epoch)
        batches = source.batches(self.batch_size, order=order, start=self.step, drop_last=self.task.drop_last)
        every = self.task.checkpoint_steps if save is not None else None
        self.model.train()
        try:
            if every is None:
                self.run_steps(batches)
            else:
                self._run_steps_saving(batches, every, save)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error) or source.n % self.batch_size != 1:
                raise
            raise InvalidInput(
                f"{source.n} samples in batches of {self.batch_size} leave a last batch of one, of which a batch norm "
                "knows no variance: give the task drop_last=True."
            ) from error
        train_loss = self._mean_loss()
        self.epoch += 1
        self.step = 0
        self._losses = []
        metrics = self.evaluate()
        if self.schedule is not None and not self._per_step:
            self.schedule.step(*([metrics.get("loss", train_loss)] if self._plateau else []))
        metrics.setdefault("loss", train_loss)
        if self._held is not None:
            self._held["last"] = metrics["loss"]
        return {**metrics, "train_loss": train_loss}

    def _run_steps_saving(
        self, batches: Iterator[Any], every: int, save: Callable[[Any], None] | None
    ) -> None:
        while self.step < self.steps_per_epoch:
            before = self.step
            self.run_steps(itertools.islice(batches, every - before % every))
            if self.step == before:
                return
            if save is not None and self.step < self.steps_per_epoch:
                save(self.state())

    def run_steps(self, batches: Iterable[Any]) -> None:
        """One optimizer step per batch. The inner loop of every training there is: keep it lean."""
        if self.crew is not None:
            self.crew.run_steps(self, batches)
            return
        # Locals, and no .item(): a step must neither look names up nor wait for the device.
        model, loss_of, optimizer = self.model, self.task.loss, self.optimizer
        forward = self.task.forward or _forward
        zero, step, losses = optimizer.zero_grad, optimizer.step, self._losses
        clip, scaler, dtype = self.clip_norm, self.scaler, self.dtype
        schedule = self.schedule if self._per_step else None
        keep, tell = losses.append, self.on_iteration
        plain = dtype is None and scaler is None
        trained = trained_by(optimizer)
        if not (self._checked and self._laid_out):
            batches = self._check_first(batches, forward)
        if self.pace is not None:
            batches = paced(batches, self.pace, torch.set_num_threads)
        for inputs, targets in batches:
            if plain:
                loss = loss_of(forward(model, inputs), targets)
            else:
                with torch.autocast(self.device.type, dtype=dtype):
                    loss = loss_of(forward(model, inputs), targets)
            zero()
            if scaler is None:
                loss.backward()
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(trained, clip)
                step()
            else:
                scaler.scale(loss).backward()
                if clip is not None:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(trained, clip)
                scaler.step(optimizer)
                scaler.update()
            if schedule is not None:
                schedule.step()
            keep(loss.detach())
            self.step += 1
            if tell is not None:
                tell(_rows(inputs))
            if len(losses) >= _FLUSH:
                losses[:] = [torch.cat([loss.reshape(-1) for loss in losses])]

    def peek(self, batch: Any) -> float:
        """The loss of one batch as training sees it (dropout on), without a step."""
        inputs, targets = copied(batch)
        forward = self.task.forward or _forward
        with torch.no_grad(), self._autocast():
            return float(self.task.loss(forward(self.model, inputs), targets))

    def _check_first(self, batches: Iterable[Any], forward: Callable[..., Any]) -> Iterator[Any]:
        """The batches, after a look at what loss and model make of the first."""
        for number, batch in enumerate(batches):
            if number == 0:
                if not self._checked:
                    self._check_loss(batch, forward)
                if not self._laid_out:  # who comes out of a fused group is not, either
                    lay_out(self, batch, forward)
                    self._laid_out = True
            yield batch

    def _check_loss(self, batch: Any, forward: Callable[..., Any]) -> None:
        inputs, targets = copied(batch)
        name = getattr(self.task.loss, "__name__", type(self.task.loss).__name__)
        with no_trace(self.model, self.device), torch.enable_grad(), self._autocast():
            try:
                output = forward(self.model, inputs)
            except RuntimeError as error:
                doubles = any(leaf.dtype == torch.float64 for leaf in flatten(inputs)[0])
                if not doubles or any(p.dtype == torch.float64 for p in self.model.parameters()):
                    raise
                raise InvalidInput(
                    f"The inputs are float64 and the model is not ({error}): give them as float32, by "
                    'x.astype("float32") or x.float().'
                ) from error
            with warnings.catch_warnings():
                # torch's own losses tell where they compare each output with every target. Nobody sees a worker's
                # warnings, and the figures would be wrong.
                warnings.filterwarnings("error", "Using a target size", UserWarning)
                try:
                    loss = self.task.loss(output, targets)
                except UserWarning as error:
                    raise InvalidInput(
                        f"loss={name} would compare each output with every target: {str(error).split('. ')[0]}. "
                        "nn.Flatten(0) as the last layer makes (rows,) of (rows, 1); y[:, None] the other way round."
                    ) from error
        if not isinstance(loss, Tensor):
            raise InvalidInput(
                f"loss={name} returned a {type(loss).__name__}; it must return a scalar tensor."
            )
        if loss.numel() != 1:
            raise InvalidInput(
                f"loss={name} returned a tensor of shape {tuple(loss.shape)}; it must return a scalar: "
                'take the mean (reduction="mean").'
            )
        if not loss.requires_grad:
            raise InvalidInput(
                f"loss={name} gave a loss without a gradient: is it detached, or every weight frozen?"
            )
        self._checked = True

    def _autocast(self) -> Any:
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, dtype=self.dtype)

    def _mean_loss(self) -> float:
        if not self._losses:
            return math.nan
        losses = torch.cat([loss.reshape(-1) for loss in self._losses]).double()
        sizes = torch.full_like(losses, float(self.batch_size))
        rest = self.data.train.n % self.batch_size
        if rest and not self.task.drop_last and len(losses) == self.steps_per_epoch:
            sizes[-1] = float(rest)
        return float((losses * sizes).sum() / sizes.sum())

    # ------------------------------------------------------------ evaluation

    def evaluate(self, source: Source | None = None) -> dict[str, float]:
        """The loss and the task's metrics on the validation data (or ``source``); empty where there is none."""
        source = source or self.data.val
        if source is None:
            return {}
        if self.crew is not None:
            return self.crew.evaluate(self, source)
        task, model, loss_of = self.task, self.model, self.task.loss
        forward = task.forward or _forward
        on_set = task.metrics_on == "set" and bool(task.metrics)
        sums: dict[str, Tensor] = {}
        outputs: list[Any] = []
        truths: list[Any] = []
        sizes: list[int] = []
        rows = 0
        was_training = model.training
        model.eval()
        try:
            # No inference mode: a model may keep what it makes here (positions, a mask) and train with it.
            with torch.no_grad(), self._autocast():
                for inputs, targets in source.batches(task.eval_batch_size):
                    count = min(task.eval_batch_size, source.n - rows)
                    output = forward(model, inputs)
                    _add(sums, "loss", loss_of(output, targets), count)
                    if on_set:
                        if not outputs:
                            _check_room(output, count, source.n, self.device)
                        outputs.append(output)
                        truths.append(targets)
                        sizes.append(count)
                    else:
                        for name, metric in task.metrics.items():
                            _add(sums, name, metric(output, targets), count)
                    rows += count
                result = {name: float(value) / rows for name, value in sums.items()}
                if on_set:
                    output, truth = _join(outputs, sizes), _join(truths)
                    for name, metric in task.metrics.items():
                        result[name] = _scalar(name, metric(output, truth))
        finally:
            model.train(was_training)
        return result

    # ------------------------------------------------------------ exploration (SM2)

    def clone(self) -> Trainer:
        """An isolated copy: training it changes nothing here."""
        other = Trainer(
            self.task,
            self.config,
            seed=self.seed,
            device=self.device,
            lr=self.lr,
            model=copy.deepcopy(self.model),
        )
        other.load_state(copy.deepcopy(self.state()))
        other._checked = self._checked
        other._laid_out = self._laid_out
        other.on_iteration = self.on_iteration  # its steps are steps of the same devices
        return other

    def explore(self, options: Mapping[str, Any]) -> dict[str, float]:
        """An exploratory epoch (SM2 4.2, 4.4): sets the learning rate, leaves everything else as it was.

        On a random part of the batches, the first half sweeps the learning rate on a copy of the model; a second
        copy trains on the other half at the rate found and is evaluated, which gives the configuration's
        performance. Both copies are thrown away.

        A rate that training still gets better with is kept if the sweep names a smaller one: see ``_pace``.

        Args:
            options: ``lrs``, ``lr_range`` and ``fraction`` as in ``pk.SM2``.

        Returns:
            The metrics of the second copy, with ``sm2_lr`` (the rate chosen), ``sm2_held`` (1 if it is the one
            before, kept), ``sm2_stability`` and ``sm2_loss`` (the sweep's, of its own choice) and ``sm2_fraction``:
            its part of the work of an epoch, validation included, so that energy / fraction is the energy of an
            epoch.

        Raises:
            InvalidInput: The schedule has rates of its own, whatever is found here.
        """
        from penstock.train._lr_range import sweep

        _check_relative(self.schedule)
        lrs = int(options.get("lrs", 20))
        low, high = options.get("lr_range", (1e-3, 1.0))
        fraction = float(options.get("fraction", 0.25))
        self.seed_epoch()
        subset = self.subset(fraction)
        half = max(1, len(subset) // (2 * self.batch_size)) * self.batch_size
        # Of large batches on little data some are used again, but an exploration must stay cheap beside an epoch.
        least = min(max(_SWEEP[0], self.steps_per_epoch), _SWEEP[1])
        choice = sweep(self.clone(), lrs=lrs, lr_range=(low, high), order=subset[:half], least_steps=least)
        rest = subset[half:] if len(subset) > half else subset
        checked = 0 if self.data.val is None else self.data.val.n
        work = choice.steps * self.batch_size + choice.probed * _FORWARD
        held = self._pace(choice.lr)
        lr, metrics = choice.lr, {"loss": math.nan}
        # A rate that breaks the copy would break the model: a tenth of it, and once more.
        for lr in ([] if held is None else [held]) + [choice.lr / 10**attempt for attempt in range(_TRIES)]:
            metrics = self._try(lr, rest)
            work += len(rest) + checked * _FORWARD
            if all(map(math.isfinite, metrics.values())):
                break
        self.set_lr(lr)
        best = metrics["loss"] if self._held is None else min(self._held["best"], self._held["last"])
        self._held = {"lr": lr, "best": best, "last": math.inf}
        self.epoch += 1
        self.step = 0
        if math.isfinite(choice.loss):
            metrics["sm2_loss"] = choice.loss
        return {
            **metrics,
            "sm2_lr": lr,
            "sm2_held": float(lr == held),
            "sm2_stability": choice.stability if lr >= choice.lr else 0.0,
            "sm2_fraction": work / (self.data.train.n + checked * _FORWARD),
        }

    def _pace(self, swept: float) -> float | None:
        """The rate trained at since the last exploration, if it is above the sweep's and still pays; else None.

        A sweep over a trained model sees a few steps per rate, and for these a smaller rate is always better: the
        noise that a larger one keeps up dies away, which would soon be over. Followed each time, the rate falls
        long before it has done its work. That the loss is lower after the epochs since than it ever was before is
        the better evidence that their rate is stable; once it is not, the sweep says how far to go down.
        """
        held = self._held
        if held is None or held["lr"] <= swept or not held["last"] < held["best"]:
            return None
        return held["lr"]

    def _try(self, lr: float, order: Tensor) -> dict[str, float]:
        """Metrics of a copy after training on ``order`` at ``lr``."""
        copied = self.clone()
        copied.set_lr(lr)
        copied.model.train()
        copied.run_steps(copied.data.train.batches(self.batch_size, order=order))
        train_loss = float(torch.cat([loss.reshape(-1) for loss in copied._losses]).double().mean())
        metrics = copied.evaluate()
        metrics.setdefault("loss", train_loss)
        return {**metrics, "train_loss": train_loss}

    def subset(self, fraction: float) -> Tensor:
        """A random part of this epoch's batches, as whole batches where there are any."""
        source = self.data.train
        order = order_of(source.n, derive(self.seed, "explore"), self.epoch)
        batches = max(1, round(fraction * self.steps_per_epoch))
        return order[: min(source.n, batches * self.batch_size)]

    def others(self, order: Tensor, rows: int) -> Tensor:
        """``rows`` samples that are not in ``order``, as far as there are any; the rest from its end."""
        n = self.data.train.n
        whole = order_of(n, derive(self.seed, "explore"), self.epoch)
        free = torch.ones(n, dtype=torch.bool)
        free[order] = False
        outside = whole[free[whole]][:rows]
        return (
            torch.cat([outside, order[len(order) - (rows - len(outside)) :]])
            if len(outside) < rows
            else outside
        )

    # ------------------------------------------------------------ state

    def seed_epoch(self) -> None:
        """Seed all generators for the present epoch."""
        seed_everything(derive(self.seed, "epoch", self.epoch))

    def state(self) -> dict[str, Any]:
        """Everything that a resume needs: model, optimizer, schedule, generators, position."""
        return {
            "version": 1,
            "epoch": self.epoch,
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "random": random_state(self.device),
            "losses": torch.cat([loss.reshape(-1) for loss in self._losses]).cpu() if self._losses else None,
            "lr_found": not self._needs_lr,
            "held": None if self._held is None else dict(self._held),
            "config": dict(self.config),
        }

    def fingerprint(self) -> int:
        """Tells this state from any other at the start of an epoch: seed, epoch, configuration, weights."""
        text = json.dumps([self.seed, self.epoch, dict(self.config)], sort_keys=True, default=repr)
        crc = zlib.crc32(text.encode())
        for tensor in self.model.state_dict().values():
            if isinstance(tensor, Tensor):
                crc = zlib.crc32(
                    tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes(), crc
                )
        return crc

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from a ``state()``; one of another configuration (PBT) goes on under this one.

        Raises:
            InvalidInput: It is another model's.
        """
        before = state.get("config", self.config)  # not in checkpoints of before
        changed = [name for name in {**before, **self.config} if before.get(name) != self.config.get(name)]
        optimizer, schedule = state["optimizer"], state["schedule"]
        if changed:
            optimizer, schedule = self._carried(before, optimizer, schedule)
        try:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(optimizer)
        except (RuntimeError, ValueError, KeyError) as error:
            remedy = "Did the model factory change since it was saved?"
            if changed:
                remedy = (
                    f"It was saved with another {', '.join(changed)}: what changes the network must be "
                    "structural=True in the space, so that trials which take over weights keep it."
                )
            raise InvalidInput(
                f"The checkpoint does not fit the model of this configuration: {error}. {remedy}"
            ) from error
        if self.schedule is not None and schedule is not None:
            self.schedule.load_state_dict(schedule)
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.epoch = int(state["epoch"])
        self.step = int(state["step"])
        losses = state["losses"]
        self._losses = [] if losses is None else [losses.to(self.device)]
        self._resume_random = dict(state["random"]) if self.step else None
        self._needs_lr = not state["lr_found"]
        held = state.get("held")  # not in checkpoints of before
        self._held = None if held is None else dict(held)
        # A loss that has trained it needs no look, which takes a forward at every promotion, pause and resize.
        self._checked = self.epoch > 0 or self.step > 0

    def _carried(self, before: Config, optimizer: Any, schedule: Any) -> tuple[Any, Any]:
        """The states of an optimizer and a schedule that were trained with ``before``, for this configuration."""
        lr = None if "lr" in before and "lr" in self.config else 1.0  # one that was found stays
        old_kind, old, old_schedule, old_steps = self._fresh(before, lr)
        kind, new, new_schedule, steps = self._fresh(self.config, lr)
        groups = carried(optimizer["param_groups"], old["param_groups"], new["param_groups"])
        kept = kind is old_kind and fits(old["param_groups"], new["param_groups"])
        if schedule is not None and old_schedule is not None and new_schedule is not None:
            pace = steps / old_steps if self._per_step else 1.0
            schedule = carried(schedule, old_schedule, new_schedule, pace=pace)
        return {"state": optimizer["state"] if kept else {}, "param_groups": groups}, schedule

    def _fresh(self, config: Config, lr: float | None) -> tuple[type, Any, Any, int]:
        """Optimizer and schedule as a configuration makes them: their states, and the steps of an epoch."""
        size = min(self.task.size_of_batches(config), self.data.train.n)
        steps = _steps(self.data.train.n, size, self.task.drop_last)
        made, _ = self.task.build_optimizer(self.task.groups(self.model, config), config, lr=lr)
        schedule, _, _ = self.task.build_schedule(made, config, steps_per_epoch=steps)
        return type(made), made.state_dict(), None if schedule is None else schedule.state_dict(), steps


def trained_by(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters that an optimizer trains, whose gradients it drops after each step.

    Those of others add up, and have no part in the norm that is clipped.
    """
    return [p for group in optimizer.param_groups for p in group["params"]]


_built: WeakValueDictionary[int, torch.nn.Parameter] = WeakValueDictionary()
"""The weights to train of the models that factories made in this process, by id."""


def _check_own(model: torch.nn.Module) -> None:
    """Refuse a model with weights of one that was made before: a trial would go on from what others have trained."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    for name, p in trained:
        if _built.get(id(p)) is p:
            raise InvalidInput(
                f"The model factory returned the weights {name!r} a second time, which trials would share: each would "
                "go on from what the others have trained. Make the network, and all that is trained in it, within the "
                "factory, or give out a copy (copy.deepcopy(network))."
            )
    _built.update((id(p), p) for _, p in trained)


def _schedules(schedule: Any) -> Iterator[Any]:
    """A scheduler and those that it is made of (``SequentialLR``, ``ChainedScheduler``, a twin's)."""
    if schedule is not None:
        yield schedule
        for each in (getattr(schedule, "inner", None), *getattr(schedule, "_schedulers", ())):
            yield from _schedules(each)


def _check_relative(schedule: Any) -> None:
    """Refuse schedulers that set rates they were made with, so that a rate that was found would count for nothing."""
    torch_schedules = torch.optim.lr_scheduler
    own = (torch_schedules.OneCycleLR, torch_schedules.CyclicLR, torch.optim.swa_utils.SWALR)
    for each in _schedules(schedule):
        if isinstance(each, own):
            raise InvalidInput(
                f"The schedule's {type(each).__name__} sets learning rates of its own, so there is none to find. Use "
                "one that multiplies (LinearLR and then CosineAnnealingLR, by SequentialLR; LambdaLR), or another "
                "scheduler than pk.SM2, with lr in the space."
            )


def _forward(model: torch.nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, Tensor):
        return model(inputs)
    if isinstance(inputs, dict):
        return model(**inputs)
    if isinstance(inputs, tuple | list):
        return model(*inputs)
    return model(inputs)


def _rows(batch: Any) -> int:
    """How many samples a batch has."""
    while not isinstance(batch, Tensor):
        batch = next(iter(batch.values() if isinstance(batch, Mapping) else batch))
    return len(batch)


def _steps(n: int, size: int, drop_last: bool) -> int:
    return max(1, n // size) if drop_last else -(-n // size)


def _device(device: Any) -> torch.device:
    found = device if isinstance(device, torch.device) else torch.device(str(device).split("/")[-1])
    return torch.device("cpu") if found.type == "cpu" else found


def _precision(device: torch.device, amp: bool) -> tuple[torch.dtype | None, Any]:
    if not amp:
        return None, None
    if device.type == "cuda" and not torch.cuda.is_bf16_supported():
        return torch.float16, torch.amp.GradScaler("cuda")
    return torch.bfloat16, None


def _add(sums: dict[str, Tensor], name: str, value: Any, count: int) -> None:
    tensor = value if isinstance(value, Tensor) else torch.tensor(float(value))
    if tensor.numel() != 1:
        raise InvalidInput(
            f"The metric {name!r} returned shape {tuple(tensor.shape)}; it must return one number."
        )
    part = tensor.detach().reshape(()).double() * count
    sums[name] = sums[name] + part if name in sums else part


def _scalar(name: str, value: Any) -> float:
    if isinstance(value, Tensor) and value.numel() != 1:
        raise InvalidInput(
            f"The metric {name!r} returned shape {tuple(value.shape)}; it must return one number."
        )
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"The metric {name!r} returned {value!r}; it must return one number.") from error


def _join(parts: Sequence[Any], sizes: Sequence[int] | None = None) -> Any:
    """Outputs or targets of batches as those of all their rows, ``sizes`` rows each.

    Raises:
        InvalidInput: They are objects that can't be put together.
    """
    first = parts[0]
    if isinstance(first, Tensor):
        if len(parts) == 1:
            return first
        return torch.cat(list(parts)) if first.dim() else _mean(parts, sizes)
    if isinstance(first, Mapping):
        named = {key: _join([part[key] for part in parts], sizes) for key in first}
        # Outputs of Hugging Face's models are looked up by attribute, too.
        return type(first)(**named) if is_dataclass(first) else named
    if isinstance(first, tuple | list):
        items = [_join([part[i] for part in parts], sizes) for i in range(len(first))]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    if is_dataclass(first) and not isinstance(first, type):
        names = [each.name for each in fields(first) if each.init]
        return replace(first, **{n: _join([getattr(part, n) for part in parts], sizes) for n in names})
    if len(parts) > 1 and any(isinstance(value, Tensor) for value in getattr(first, "__dict__", {}).values()):
        raise InvalidInput(
            f"The model returns a {type(first).__name__}, and Penstock can't put those of several batches together for "
            'the metrics. Return tensors, tuples, dicts or a dataclass, or use metrics_on="batch".'
        )
    return first


def _mean(parts: Sequence[Tensor], sizes: Sequence[int] | None) -> Tensor:
    """What is one number for a batch (a penalty, a loss), for all rows: the mean."""
    values = torch.stack(list(parts))
    weights = torch.tensor([1] * len(parts) if sizes is None else sizes, device=values.device)
    mean = (values.double() * weights).sum() / weights.sum()
    return mean.to(values.dtype) if values.is_floating_point() else mean


def _check_room(output: Any, rows: int, n: int, device: torch.device) -> None:
    """Refuse to collect outputs that can't fit: better now than as an out-of-memory in the last batch."""
    if not isinstance(output, Tensor):
        return
    need = output.nbytes / max(1, rows) * n
    if need < (1 << 30):
        return
    from penstock.train._loader import _free_bytes

    free = _free_bytes(device)
    if need > free / 2:
        raise InvalidInput(
            f"The outputs for all {n} validation samples take {need / 2**30:.1f} GiB, more than half of the "
            f'{free / 2**30:.1f} GiB free. Use metrics_on="batch", or fewer validation samples.'
        )


_warned: set[str] = set()


def _warn_once(text: str | None) -> None:
    if text is not None and text not in _warned:
        _warned.add(text)
        warnings.warn(text, UserWarning, stacklevel=4)


# ---------------------------------------------------------------- randomness


def seed_everything(seed: int) -> None:
    """Seed torch, Python and (if it is in use) numpy."""
    seed_torch(torch, seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of all generators a training may draw from."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Put the generators back where ``random_state`` found them."""
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))  # out of a file they may come as a list
    if "numpy" in state and "numpy" in sys.modules:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)


@contextmanager
def private_randomness() -> Iterator[None]:
    """Whatever is drawn or seeded inside, the process's generators are as before afterwards."""
    device = (
        torch.device("cuda", torch.cuda.current_device())
        if torch.cuda.is_available()
        else torch.device("cpu")
    )
    before = random_state(device)
    try:
        yield
    finally:
        set_random_state(before, device)


@contextmanager
def no_trace(model: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """A look at what a model does: whatever it changes of itself comes back, and so do the generators that it moves.

    That is batch norm's statistics and dropout's draws, but also weights: a teacher that follows its student, or a code
    book, is often kept in frozen parameters. The tensors themselves come back, not their values alone: in a fused group
    they are views of the group's. And what layers keep as plain attributes: that they have set their weights by the
    first batch, how often they were called.
    """
    before = random_state(device)
    watch = Watch(model.modules())
    places: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
        (table, key, tensor, tensor.detach().clone())
        for sub in model.modules()
        for table in (sub._parameters, sub._buffers)
        for key, tensor in table.items()
        if tensor is not None
    ]
    try:
        yield
    finally:
        with torch.no_grad():
            for place, key, tensor, value in places:
                place[key] = tensor.copy_(value)
        watch.restore()
        set_random_state(before, device)

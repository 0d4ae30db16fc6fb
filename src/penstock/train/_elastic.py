"""Elastic training: one trial on several devices, the same result whatever their number and whenever it changes.

A trial of Penstock's own loop that spreads over groups of CPU cores is trained by one worker with more threads. On
GPUs, and where a function says how, it is trained by a crew: one worker per device, each with the whole model, that go
through the same batches in the same order. Each takes its rows of every batch; gradients are summed over the crew
before the step, so that the step is that of the whole batch. What depends on other rows of the batch is made whole
again: batch norm's statistics are those of all rows, and dropout draws the mask of all rows and keeps its own. The
first worker (the lead) reports and saves, the others follow. To change the number of workers, the crew stops at the end
of an epoch and another one goes on from the checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, final, overload

from penstock.core.errors import ExecutorError, InvalidInput
from penstock.core.measurement import Measurement, measurement
from penstock.train._checkpoint import Checkpoints, Found, Plain, Report
from penstock.train._task import Task
from penstock.train._world import World

if TYPE_CHECKING:
    from torch import Tensor

    from penstock.train._loader import Source
    from penstock.train._loop import Trainer
    from penstock.train._run import EpochMeter, Sink

_MEET_S = 120.0  # how long workers wait for each other to begin
_LOOKS = 1000  # batches whose targets are looked at before a loss is computed in parts
_PATIENCE_S = 3600.0  # how long one may let the others wait later on
_MARK = "penstock_devices"
_FAILURES, _FAILURE = "penstock_failures", "penstock_failure"
UNDIVIDED = "undivided"
"""The topic under which a crew tells the study that its loss can't be computed in parts."""
_F = TypeVar("_F", bound=Callable[..., Any])


@overload
def elastic(function: _F) -> _F: ...
@overload
def elastic(*, max_devices: int) -> Callable[[_F], _F]: ...
def elastic(function: Any = None, *, max_devices: int = 1 << 30) -> Any:
    """Mark a training function that can train one trial on several devices, and be moved between them.

    Such a function is called once per device, in processes of their own, that ``torch.distributed`` joins already.
    ``run.world`` tells which one it is. All of them loop over ``run.epochs()`` alike; what rank 0 reports and saves
    counts. It must save in every epoch: when the planner changes the number of devices, the present workers stop at
    the end of the epoch and others call the function again, which goes on from ``run.load()``.

    Args:
        function: The training function.
        max_devices: The most devices it can use.
    """
    if isinstance(max_devices, bool) or not isinstance(max_devices, int) or max_devices < 1:
        raise InvalidInput(f"max_devices must be a whole number of at least 1, got {max_devices!r}.")

    def mark(marked: Any) -> Any:
        if not callable(marked):
            raise InvalidInput(
                f"pk.elastic marks a training function, got {marked!r}. Write @pk.elastic above it, or "
                "@pk.elastic(max_devices=4)."
            )
        setattr(marked, _MARK, max_devices)
        return marked

    return mark if function is None else mark(function)


def most_devices(work: Any) -> int:
    """Over how many devices a trial of ``work`` can spread."""
    return 1 << 30 if isinstance(work, Task) else int(getattr(work, _MARK, 1))


def by_threads(work: Any, kinds: Iterable[str], spread: str = "threads") -> bool:
    """Whether one worker trains a trial that spreads, with the threads of all its devices; else a crew does.

    On groups of CPU cores that is quicker for Penstock's own loop: threads share the model and the batch, so nothing
    has to be exchanged, and whatever a loss or a layer makes of a whole batch stays as it is.

    Args:
        work: The study's work.
        kinds: Of the devices.
        spread: What the planner was told: ``"threads"``, or ``"workers"`` for a crew everywhere.
    """
    return spread == "threads" and isinstance(work, Task) and all(kind == "cpu" for kind in kinds)


@contextlib.contextmanager
def joined(world: tuple[int, int, str], device: str) -> Iterator[Crew]:
    """This worker as a member of a crew.

    Args:
        world: Its rank, how many there are, and a file that does not exist yet, by which they find each other.
        device: Where it trains: gloo joins CPUs, nccl GPUs.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    rank, size, path = world
    if not dist.is_available():
        raise ExecutorError("This build of torch has no torch.distributed, so a trial can't spread here.")
    if dist.is_initialized():
        dist.destroy_process_group()  # of a trial that failed
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they are all on this machine
    store = FileStore(path, size)
    store.set_timeout(timedelta(seconds=_MEET_S))
    cuda = device.startswith("cuda") and dist.is_nccl_available()
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=_PATIENCE_S),
    )
    try:
        yield Crew(World(rank, size), store)
    finally:
        # Whoever waits for this worker's word fails at once: its connections are closed.
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


@final
class Crew:
    """One worker's view of the crew it is in. All members call its methods in the same order.

    Args:
        world: Which one it is, of how many.
        store: Where they met; None: they did not.
    """

    def __init__(self, world: World, store: Any = None) -> None:
        self.world = world
        self._store = store
        self.note: Callable[[str, dict[str, Any]], None] | None = (
            None  # tells the study, where someone listens
        )
        self._rows: tuple[int, int, int] | None = None  # begin, end, all: of the batch that is being trained
        self._divides: bool | None = None  # whether batches can be trained in parts; None: not looked at yet
        self._silent = False  # layers that look at the whole batch make do with this worker's part

    @property
    def leads(self) -> bool:
        """Whether this worker reports and saves."""
        return self.world.rank == 0

    # ------------------------------------------------------------ words

    def meet(self) -> None:
        """Wait until all are here."""
        self.agree(0)

    def agree(self, number: int) -> int:
        """The lead's number, for everybody."""
        import torch
        import torch.distributed as dist

        word = torch.tensor([number])
        dist.broadcast(word, src=0)
        return int(word.item())

    def share(self, value: Any) -> Any:
        """The lead's value, for everybody."""
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def collect(self, value: Any) -> list[Any]:
        """Everybody's values, at the lead; nothing elsewhere."""
        import torch.distributed as dist

        found: list[Any] | None = [None] * self.world.size if self.leads else None
        dist.gather_object(value, found, dst=0)
        return found or []

    def blame(self, error: BaseException) -> BaseException:
        """Why the crew fails, of what this worker fails with: the first one's error, which made the others fail.

        Not in the order of the other methods: told where they met, for the others may wait in any of them.
        """
        from penstock.train._run import Refused
        from penstock.train._worker import one_line, user_traceback

        if self._store is None:
            return error
        try:
            if self._store.add(_FAILURES, 1) == 1:
                told = [self.world.rank, one_line(error), user_traceback(error)]
                self._store.set(_FAILURE, json.dumps(told))
                return error
            rank, reason, detail = json.loads(self._store.get(_FAILURE))
        except Exception:
            return error  # the folder is gone, or the first one died
        return Refused(reason, f"On the worker of rank {rank}:\n{detail}")

    # ------------------------------------------------------------ training

    def run_steps(self, trainer: Trainer, batches: Iterable[Any]) -> None:
        """``Trainer.run_steps`` over the crew: the same steps within rounding."""
        import torch

        from penstock.train._loop import _forward, _rows, trained_by

        task, model, optimizer = trainer.task, trainer.model, trainer.optimizer
        forward = task.forward or _forward
        schedule = trainer.schedule if trainer._per_step else None
        scaler, clip, tell = trainer.scaler, trainer.clip_norm, trainer.on_iteration
        parameters = [p for p in model.parameters() if p.requires_grad]
        size = self.world.size
        if not (trainer._checked and trainer._laid_out):
            batches = trainer._check_first(batches, forward)
        with self._whole_batches(model):
            for inputs, targets in batches:
                rows = _rows(inputs)
                part = 1.0
                if rows >= size and self._divides is None:
                    self._look_at_parts(trainer, inputs, targets, rows)
                if rows >= size and self._divides:
                    begin, end = self._part_of(rows)
                    inputs, targets = _cut(inputs, begin, end, rows), _cut(targets, begin, end, rows)
                    self._rows, part = (begin, end, rows), (end - begin) / rows
                # Too few rows for everybody, or a loss that is no mean: each trains the whole batch, as if alone.
                with trainer._autocast():
                    loss = task.loss(forward(model, inputs), targets)
                optimizer.zero_grad()
                mine = loss * part
                (mine if scaler is None else scaler.scale(mine)).backward()
                told = mine.detach()
                if self._rows is not None:
                    told = _sum_gradients(parameters, told)
                self._rows = None
                if scaler is not None and clip is not None:
                    scaler.unscale_(optimizer)
                if clip is not None:
                    torch.nn.utils.clip_grad_norm_(trained_by(optimizer), clip)
                if scaler is None:
                    optimizer.step()
                else:
                    scaler.step(optimizer)
                    scaler.update()
                if schedule is not None:
                    schedule.step()
                trainer._losses.append(told)
                trainer.step += 1
                if tell is not None:
                    tell(rows)

    def _look_at_parts(self, trainer: Trainer, inputs: Any, targets: Any, rows: int) -> None:
        """See, once, whether a batch may be trained in parts: only then the steps are the same.

        The loss must be the mean of those of the parts (no sum, no mean weighted by classes, no comparison of rows with
        each other), and a part must go through the model as it does within the whole. Says so where it is not.
        """
        text = None
        found = _loss_by_parts(trainer, inputs, targets, rows, self.world.size)
        if found is not None:
            loss = trainer.task.loss
            name = getattr(loss, "__name__", type(loss).__name__)
            text = (
                f"loss={name} of a batch of {rows} is {found[0]:.6g}, but its parts have {found[1]:.6g} on average, so "
                "several workers would train another model than one. Give a loss that is a mean over the batch, where "
                "every row counts alike: no sum, no weights of classes, no targets that are passed over."
            )
        # The lead's word on the loss: the others may round in another way. On the model all are asked.
        if not self.agree(text is None):
            self._divides = False
        else:
            text = self._fails_on_part(trainer, inputs, rows)
            self._divides = self._all(text is None)
            if self._divides:
                text = self._odd_forward(trainer, inputs, rows)
                self._divides = self._all(text is None)
        if not self._divides and self.leads and self.note is not None:
            reason = text or "a part of a batch does not go through the model as it does within the whole."
            self.note(UNDIVIDED, {"text": f"Trials do not spread over devices: {reason}"})

    def _all(self, fine: bool) -> bool:
        """Whether everybody says so."""
        import torch
        import torch.distributed as dist

        word = torch.tensor([int(fine)])
        dist.all_reduce(word, op=dist.ReduceOp.MIN)
        return bool(word.item())

    def _part_of(self, rows: int) -> tuple[int, int]:
        """Which rows of a batch are this worker's: first, and after the last."""
        rank, size = self.world.rank, self.world.size
        return rank * rows // size, (rank + 1) * rows // size

    def _fails_on_part(self, trainer: Trainer, inputs: Any, rows: int) -> str | None:
        """Why the model can't take this worker's part of a batch; None: it can. Leaves no trace.

        Each looks for itself: where it fails for one alone, the others would wait for it in their batch norms.
        """
        begin, end = self._part_of(rows)
        self._rows, self._silent = (begin, end, rows), True
        try:
            _passed(trainer, _cut(inputs, begin, end, rows))
        except Exception as error:
            return f"the model fails on a part of a batch of {rows}: {error}"
        finally:
            self._rows, self._silent = None, False
        return None

    def _odd_forward(self, trainer: Trainer, inputs: Any, rows: int) -> str | None:
        """What this worker's part of a batch does in the model that it does not do within the whole; None: nothing.

        All look together, for their batch norms speak to each other. Leaves no trace.
        """
        begin, end = self._part_of(rows)
        whole, moved, drawn = _passed(trainer, inputs)
        self._rows = begin, end, rows
        try:
            mine, own_moved, own_drawn = _passed(trainer, _cut(inputs, begin, end, rows))
        finally:
            self._rows = None
        if drawn != own_drawn:
            return (
                "the model draws other random numbers for a part of a batch than for the whole (dropout within "
                "scaled_dot_product_attention or a recurrent layer, noise of the batch's shape)."
            )
        if not _all_close(_cut(whole, begin, end, rows), mine):
            return "the model mixes the rows of a batch other than by batch norm: a part of it has other outputs."
        odd = [name for name, value in moved.items() if not _all_close(value, own_moved[name])]
        return f"the model updates {odd[0]} by the part of the batch that a worker has." if odd else None

    @contextlib.contextmanager
    def _whole_batches(self, model: Any) -> Iterator[None]:
        """Layers that look at, or draw for, a batch see the crew's whole one."""
        import torch
        from torch.nn import functional
        from torch.nn.modules.batchnorm import _BatchNorm

        norms = [module for module in model.modules() if isinstance(module, _BatchNorm)]
        names = ("dropout", "dropout1d", "dropout2d", "dropout3d")
        before = {name: getattr(functional, name) for name in names}

        def dropout(name: str, feature: bool) -> Callable[..., Tensor]:
            plain = before[name]

            def drop(
                input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
            ) -> Tensor:  # as torch's, which callers name by keyword
                place = None if self._rows is None else _batch_of(input, self._rows)
                if place is None or not training or not 0 < p < 1:
                    return plain(input, p, training, inplace)  # type: ignore[no-any-return]
                dim, begin, count, whole = place
                shape = list(input.shape)
                shape[dim] = whole
                if feature:
                    shape[2:] = [1] * len(shape[2:])
                noise = torch.empty(shape, dtype=input.dtype, device=input.device).bernoulli_(1 - p)
                return input * noise.div_(1 - p).narrow(dim, begin, count)

            return drop

        for norm in norms:
            setattr(norm, "forward", _norm_forward(self, norm))  # noqa: B010 (its own, not its class's)
        for name in names:
            setattr(functional, name, dropout(name, name != "dropout"))
        try:
            yield
        finally:
            self._rows = None
            for norm in norms:
                del norm.forward
            for name, function in before.items():
                setattr(functional, name, function)

    # ------------------------------------------------------------ evaluation

    def evaluate(self, trainer: Trainer, source: Source) -> dict[str, float]:
        """``Trainer.evaluate`` over the crew: batches are dealt out, the lead adds up in their order."""
        import torch

        from penstock.train._loop import _add, _check_room, _forward, _join, _scalar

        task, model = trainer.task, trainer.model
        forward, size = task.forward or _forward, task.eval_batch_size
        on_set = task.metrics_on == "set" and bool(task.metrics)
        parts: list[tuple[int, int, dict[str, Any], Any]] = []
        truths: list[Any] = []
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad(), trainer._autocast():
                for number, (inputs, targets) in enumerate(source.batches(size)):
                    if on_set and self.leads:
                        truths.append(targets)
                    if number % self.world.size != self.world.rank:
                        continue
                    count = min(size, source.n - number * size)
                    output = forward(model, inputs)
                    values = {"loss": task.loss(output, targets)}
                    if not on_set:
                        values |= {name: metric(output, targets) for name, metric in task.metrics.items()}
                    elif not parts:
                        _check_room(output, count, source.n, trainer.device)
                    parts.append((number, count, values, output if on_set else None))
                found = sorted(
                    (part for each in self.collect(parts) for part in each), key=lambda part: part[0]
                )
                result: dict[str, float] = {}
                if self.leads:
                    sums: dict[str, Any] = {}
                    for _, count, values, _ in found:
                        for name, value in values.items():
                            _add(sums, name, value, count)
                    result = {name: float(value) / source.n for name, value in sums.items()}
                    if on_set:
                        sizes = [part[1] for part in found]
                        output, truth = _join([part[3] for part in found], sizes), _join(truths)
                        for name, metric in task.metrics.items():
                            result[name] = _scalar(name, metric(output, truth))
        finally:
            model.train(was_training)
        shared: dict[str, float] = self.share(result)
        return shared


def _cut(tree: Any, begin: int, end: int, rows: int) -> Any:
    """Rows of a batch, however its tensors are nested."""
    from torch import Tensor

    if isinstance(tree, Tensor):
        return tree[begin:end] if tree.dim() and len(tree) == rows else tree
    if isinstance(tree, dict):
        return {key: _cut(value, begin, end, rows) for key, value in tree.items()}
    if isinstance(tree, tuple | list):
        items = [_cut(value, begin, end, rows) for value in tree]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def _passed(trainer: Trainer, inputs: Any) -> tuple[Any, dict[str, Tensor], list[Any]]:
    """A batch's outputs, weights and buffers after it, and the states of the generators; leaves no trace."""
    import torch

    from penstock.train._loader import copied
    from penstock.train._loop import _forward, no_trace, random_state

    model = trainer.model
    with no_trace(model, trainer.device):
        with torch.no_grad(), trainer._autocast():
            output = (trainer.task.forward or _forward)(model, copied(inputs))
        drawn = [
            after.tolist()
            for name, after in random_state(trainer.device).items()
            if name in ("torch", "cuda")
        ]
        held = (*model.named_parameters(), *model.named_buffers())
        return output, {name: tensor.detach().clone() for name, tensor in held}, drawn


def _all_close(whole: Any, part: Any) -> bool:
    """Whether tensors that have the same shape in both are the same up to rounding."""
    import torch
    from torch import Tensor
    from torch.utils import _pytree as pytree

    ours, theirs = pytree.tree_leaves(whole), pytree.tree_leaves(part)
    if len(ours) != len(theirs):
        return False
    for a, b in zip(ours, theirs, strict=True):
        if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape or not a.dim():
            continue  # no rows of a batch
        eps = torch.finfo(a.dtype).eps if a.is_floating_point() else 0.0
        x, y = a.double(), b.double()
        size = float(torch.nan_to_num(x).abs().max()) if x.numel() else 0.0
        if not torch.allclose(x, y, rtol=0.0, atol=min(0.1, 1e4 * eps) * max(1e-3, size), equal_nan=True):
            return False
    return True


def _loss_by_parts(
    trainer: Trainer, inputs: Any, targets: Any, rows: int, size: int
) -> tuple[float, float] | None:
    """The loss of a batch, and the mean of those of its parts, if they differ by more than rounding.

    Of one and the same output, so that it is about the loss alone. Leaves no trace: neither in the generators nor in
    the model.
    """
    import torch

    from penstock.train._loader import copied
    from penstock.train._loop import _forward, no_trace

    task, model = trainer.task, trainer.model
    bounds = [(rank * rows // size, (rank + 1) * rows // size) for rank in range(size)]
    with no_trace(model, trainer.device), torch.no_grad(), trainer._autocast():
        output = (task.forward or _forward)(model, copied(inputs))
        for truth in _truths(trainer, targets, rows):
            loss = task.loss(output, truth)
            parts = []
            for begin, end in bounds:
                mine = _cut(output, begin, end, rows), _cut(truth, begin, end, rows)
                try:
                    parts.append(float(task.loss(*mine)) * (end - begin) / rows)
                except Exception:
                    return None  # its output can't be cut like a batch, so there is nothing to compare
            whole, mean = float(loss), sum(parts)
            # Sums in another order differ by some units of what the type resolves.
            noise = min(0.1, 100 * torch.finfo(loss.dtype).eps) * max(abs(whole), sum(map(abs, parts)))
            if math.isfinite(whole) and not abs(whole - mean) <= noise:
                return whole, mean
    return None


def _truths(trainer: Trainer, targets: Any, rows: int) -> Iterator[Any]:
    """The targets of a batch, then those of the epoch's others, where they are at hand.

    Targets that a loss passes over (``ignore_index``) may be rare, and a batch without any says nothing of them.
    """
    from penstock.train._loader import Preloaded, flatten, order_of

    yield targets
    source = trainer.data.train
    if not isinstance(source, Preloaded):
        return
    first = len(source.leaves) - len(flatten(targets)[0])
    order = order_of(source.n, trainer.seed, trainer.epoch).to(source.device)
    for number in range(min(_LOOKS, source.n // rows)):
        index = order[number * rows : (number + 1) * rows]
        leaves = [leaf[:0] if at < first else leaf[index] for at, leaf in enumerate(source.leaves)]
        yield source.rebuild(leaves)[1]


def _batch_of(input: Tensor, rows: tuple[int, int, int]) -> tuple[int, int, int, int] | None:
    """Which dimension holds the batch, where its rows begin, how many there are, and how many the whole batch has."""
    begin, end, whole = rows
    mine = end - begin
    for dim in range(min(2, input.dim())):
        if input.size(dim) == mine:
            return dim, begin, mine, whole
    if input.dim() and mine and input.size(0) % mine == 0:  # several rows per sample: sequences laid out flat
        each = input.size(0) // mine
        return 0, begin * each, mine * each, whole * each
    return None


def _sum_gradients(parameters: Sequence[Tensor], loss: Tensor) -> Tensor:
    """Sum gradients over the crew in one message; returns the summed loss.

    A parameter nobody has a gradient for keeps none: an optimizer passes it by.
    """
    import torch
    import torch.distributed as dist

    kind = torch.float64 if any(p.dtype == torch.float64 for p in parameters) else torch.float32
    has = torch.tensor([float(p.grad is not None) for p in parameters], dtype=kind, device=loss.device)
    pieces = [(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1).to(kind) for p in parameters]
    flat = torch.cat([*pieces, loss.reshape(1).to(kind), has])
    dist.all_reduce(flat)
    split: Any = flat.split
    summed: list[Tensor] = list(split([p.numel() for p in parameters] + [1, len(parameters)]))
    counts, total = summed.pop(), summed.pop()
    used = counts.tolist()
    for parameter, gradient, count in zip(parameters, summed, used, strict=True):
        if count:
            gradient = gradient.view_as(parameter).to(parameter.dtype)
            if parameter.grad is None:
                parameter.grad = gradient.clone()
            else:
                parameter.grad.copy_(gradient)
    return total.reshape(()).to(loss.dtype)


def _norm_forward(crew: Crew, norm: Any) -> Callable[[Tensor], Tensor]:
    """Batch norm over the whole batch: each worker's means and squared deviations, joined (Chan et al. 1979)."""
    import torch

    plain = type(norm).forward

    def forward(input: Tensor) -> Tensor:
        if crew._rows is None or not (norm.training or norm.running_mean is None):
            return plain(norm, input)  # type: ignore[no-any-return]
        norm._check_input_dim(input)
        wide = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        with torch.no_grad():
            mean, var, total = _whole_moments(wide, World(0, 1) if crew._silent else crew.world)
            if norm.track_running_stats and norm.running_mean is not None and norm.training:
                norm.num_batches_tracked.add_(1)
                rate = norm.momentum
                if rate is None:
                    rate = 1.0 / float(norm.num_batches_tracked)
                unbiased = var * (total / (total - 1))
                norm.running_mean.lerp_(mean.to(norm.running_mean.dtype), rate)
                norm.running_var.lerp_(unbiased.to(norm.running_var.dtype), rate)
        out: Tensor = _whole_norm().apply(
            wide, norm.weight, norm.bias, mean, var, norm.eps, total, crew.world
        )
        return out.to(input.dtype)

    return forward


def _whole_moments(wide: Tensor, world: World) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance per channel of the crew's whole batch, and how many values each is of; differentiable."""
    import torch

    var, mean = torch.var_mean(wide, [0, *range(2, wide.dim())], correction=0)
    count = wide.numel() / wide.size(1)
    row = torch.stack([torch.full_like(mean, count), mean, var * count])
    counts, means, spreads = _gathered(row, world).unbind(1)
    total = counts[:, :1].sum()
    mean = (counts * means).sum(0) / total
    return mean, (spreads + counts * (means - mean).square()).sum(0) / total, total


@functools.cache
def _whole_norm() -> Any:
    """The normalisation itself, by torch's own kernels, with its derivative over the crew's whole batch."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional

    class WholeNorm(torch.autograd.Function):
        """The same as differentiating through ``_whole_moments``, in a third of the passes over the data."""

        @staticmethod
        def forward(
            context: Any,
            wide: Tensor,
            weight: Tensor | None,
            bias: Tensor | None,
            mean: Tensor,
            var: Tensor,
            eps: float,
            total: Tensor,
            world: World,
        ) -> Tensor:
            context.save_for_backward(wide, weight, bias, mean, var, total)
            context.eps, context.world = eps, world
            return functional.batch_norm(wide, mean, var, weight, bias, False, 0.0, eps)

        @staticmethod
        def backward(context: Any, *gradients: Tensor) -> Any:
            wide, weight, bias, mean, var, total = context.saved_tensors
            needs = context.needs_input_grad[:3]
            rest = (None,) * 5
            if torch.is_grad_enabled():  # a derivative of a derivative: step by step
                return (*_differentiated(wide, weight, bias, gradients[0], needs, context), *rest)
            outer = gradients[0].contiguous()
            shape = [1, -1] + [1] * (wide.dim() - 2)
            inverse = torch.rsqrt(var + context.eps)
            scale = torch.ones_like(mean) if weight is None else weight
            _, by_weight, by_bias = torch.ops.aten.native_batch_norm_backward(
                outer, wide, scale, mean, var, mean, inverse, False, context.eps, [False, True, True]
            )
            by_input = None
            if needs[0]:
                sums = torch.stack([by_weight, by_bias])
                dist.all_reduce(sums)
                along, level = sums.div_(total).unbind(0)
                times = scale * inverse
                slope = -times * inverse * along
                offset = -times * level - slope * mean
                by_input = torch.addcmul(offset.view(shape), wide, slope.view(shape))
                by_input.addcmul_(outer, times.view(shape))
            return by_input, by_weight if needs[1] else None, by_bias if needs[2] else None, *rest

    def _differentiated(
        wide: Tensor, weight: Tensor | None, bias: Tensor | None, outer: Tensor, needs: Any, context: Any
    ) -> list[Tensor | None]:
        mean, var, _ = _whole_moments(wide, context.world)
        shape = [1, -1] + [1] * (wide.dim() - 2)
        out = (wide - mean.view(shape)) * torch.rsqrt(var + context.eps).view(shape)
        if weight is not None:
            out = out * weight.view(shape)
        if bias is not None:
            out = out + bias.view(shape)
        tensors = (wide, weight, bias)
        wanted = [t for t, need in zip(tensors, needs, strict=True) if need and t is not None]
        found = iter(torch.autograd.grad(out, wanted, outer, create_graph=True))
        return [next(found) if need else None for need in needs]

    return WholeNorm


def _gathered(row: Tensor, world: World) -> Tensor:
    """Everybody's rows, one after the other; gradients flow back to whom they belong."""
    import torch

    if world.size == 1:
        return row.unsqueeze(0)
    nobody = torch.zeros_like(row)
    mine = torch.stack([row if rank == world.rank else nobody for rank in range(world.size)])
    summed: Tensor = _crew_sum().apply(mine)
    return summed


@functools.cache
def _crew_sum() -> Any:
    import torch
    import torch.distributed as dist

    class Sum(torch.autograd.Function):
        """A sum over the crew, forwards and backwards."""

        @staticmethod
        def forward(context: Any, tensor: Tensor) -> Tensor:
            tensor = tensor.clone()
            dist.all_reduce(tensor)
            return tensor

        @staticmethod
        def backward(context: Any, *gradients: Tensor) -> Tensor:
            summed: Tensor = Sum.apply(gradients[0].contiguous())  # type: ignore[no-untyped-call]
            return summed

    return Sum


# ---------------------------------------------------------------- around a Run


@final
class CrewSink:
    """Passes on the lead's news, and everybody the lead's orders. A follower has no news."""

    def __init__(self, crew: Crew, sink: Sink) -> None:
        self._crew = crew
        self._sink = sink
        crew.note = getattr(sink, "noted", None)

    def reported(self, report: Report) -> None:
        """An epoch is over."""
        if self._crew.leads:
            self._sink.reported(report)

    def saved(self, epoch: int, path: str) -> None:
        """A checkpoint is complete."""
        if self._crew.leads:
            self._sink.saved(epoch, path)

    def told(self) -> tuple[str, bool] | None:
        """Whether to stop: what the lead was told, at the same place for all."""
        told = self._sink.told() if self._crew.leads else None
        word = self._crew.agree(0 if told is None else 2 if told[1] else 1)
        if self._crew.leads or word == 0:
            return told
        return "as the lead was told", word == 2


@final
class ReadOnly:
    """A follower's checkpoints: it goes on from the lead's and writes none."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints

    def find(self) -> Found | None:
        """What the lead finds, too."""
        return self._checkpoints.find()

    def stage(self, state: Any) -> None:
        """The lead does."""

    def commit(self, epoch: int, reports: Sequence[Report]) -> str | None:
        """The lead does."""
        return None

    def discard(self) -> None:
        """There is nothing."""

    def settle(self) -> None:
        """There is nothing."""


@final
class CrewMeter:
    """The energy of all workers of the crew, at the lead."""

    def __init__(self, crew: Crew, meter: EpochMeter) -> None:
        self._crew = crew
        self._meter = meter
        on_iteration = getattr(meter, "on_iteration", None)
        if on_iteration is not None:
            self.on_iteration = on_iteration
        # One without a device to read goes by the samples it is told of, which are the whole crew's.
        spread: Callable[[int], None] | None = getattr(meter, "spread", None)
        if spread is not None:
            spread(crew.world.size)

    def epoch_begin(self) -> None:
        """An epoch begins."""
        self._meter.epoch_begin()

    def epoch_end(self) -> Measurement | None:
        """What everybody drew; followers add what they drew before it, since nobody hears of that otherwise."""
        own = self._meter.epoch_end()
        if not self._crew.leads and own is not None:
            other = self.other()
            own = own if other is None else own + measurement(*other)
        drawn = [part for part in self._crew.collect(own) if part is not None]
        total: Measurement | None = None
        for part in drawn:
            total = part if total is None else total + part
        return total

    def other(self) -> Plain | None:
        """What this worker drew in no epoch."""
        tell: Callable[[], Plain | None] | None = getattr(self._meter, "other", None)
        return None if tell is None else tell()

    def close(self) -> None:
        """The segment is over."""
        self._meter.close()


__all__ = [
    "UNDIVIDED",
    "Crew",
    "CrewMeter",
    "CrewSink",
    "ReadOnly",
    "by_threads",
    "elastic",
    "joined",
    "most_devices",
]

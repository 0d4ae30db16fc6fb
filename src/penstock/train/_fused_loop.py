"""The fused loop: many trials of one Task trained as one, each as if it were alone."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.core.errors import InvalidInput, PenstockError, Unsupported
from penstock.core.trial import Config
from penstock.model import Form, FusedOptimizer, FusedStep, Fusion, Pace, group_names
from penstock.model._watch import DRAWS, generators
from penstock.train._layout import lay_out
from penstock.train._loader import Preloaded, Source, derive, order_of
from penstock.train._loop import (
    RunLike,
    Trainer,
    _forward,
    _is_last,
    _join,
    _scalar,
    private_randomness,
    random_state,
    seed_everything,
    set_random_state,
    train,
    trained_by,
)

if TYPE_CHECKING:
    from penstock.train._task import Task

_CHUNK_BYTES = 4 << 20
_MEASURED = 5  # steps whose median is a form's pace
_MEASURED_S = 0.03  # short steps are measured for so long
_LONG_S = 0.25  # long ones not much longer

_costs = {"record_cost_s": 1.0, "compile_cost_s": 60.0}
"""What recording and compiling took here last; the first figures are for a busy laptop."""
_steady: WeakKeyDictionary[Task, set[tuple[Any, ...]]] = WeakKeyDictionary()
"""A task's networks whose step was seen to be the same operations every time: a group that got smaller, or was split,
records it once and not twice."""
_repaying: WeakKeyDictionary[Task, set[tuple[Any, ...]]] = WeakKeyDictionary()
"""A task's networks whose recorded step was measured to be faster: the next such group need not wait to find out."""


@final
class FusedTrainer:
    """Trainers of one Task that advance together.

    They are split into groups whose batches have one shape; what can't be fused runs one after another, and
    ``reasons`` says why. A group that does not fit the memory is halved.

    Args:
        trainers: One per trial. They stay usable between epochs: their tensors are views of the group's.
        most: The most members of a group (the planner's fusion count); None: all in one.
        compile: Whether steps may be compiled where it pays.

    Attributes:
        trainers: Those in training.
        reasons: Why trainers run one after another, by trainer.
    """

    def __init__(self, trainers: Sequence[Trainer], *, most: int | None = None, compile: bool = True) -> None:
        if most is not None and most < 1:
            raise InvalidInput(f"most must be at least 1, got {most}.")
        self.most = most
        self.compile = compile
        self.trainers: list[Trainer] = []
        self.reasons: dict[Trainer, str] = {}
        self._groups: list[_Group] = []
        self._alone: list[Trainer] = []
        self.join(trainers)

    def join(self, trainers: Sequence[Trainer]) -> None:
        """Take more trainers in, between epochs."""
        self.trainers += trainers
        alike: dict[Any, list[Trainer]] = {}
        for trainer in trainers:
            reason = _alone(trainer)
            if reason is None:
                alike.setdefault(_likeness(trainer), []).append(trainer)
            else:
                self._set_alone([trainer], reason)
        for members in alike.values():
            size = self.most or len(members)
            count = math.ceil(len(members) / size)
            for part in range(count):  # evenly: 9 members at most 8 are 5 and 4, not 8 and 1
                self._fuse(members[part::count])

    def leave(self, trainers: Sequence[Trainer]) -> None:
        """Let these go, standing on their own; the others' state is re-indexed and otherwise untouched."""
        going = set(map(id, trainers))
        for group in self._groups:
            group.leave([t for t in group.trainers if id(t) in going])
        self._groups = [group for group in self._groups if group.trainers]
        self._alone = [t for t in self._alone if id(t) not in going]
        self.trainers = [t for t in self.trainers if id(t) not in going]

    def train_epoch(self, *, ahead: int = 0) -> dict[Trainer, dict[str, float] | Exception]:
        """Train every trainer one epoch and evaluate it.

        Args:
            ahead: Epochs that are sure to follow with these members: recording a step must repay itself.

        Returns:
            Metrics as of ``Trainer.train_epoch``, or the error that ended a trainer.
        """
        results: dict[Trainer, dict[str, float] | Exception] = {}
        queue = list(self._groups)
        while queue:
            group = queue.pop(0)
            try:
                results.update(group.train_epoch(ahead))
            except _Refused as refused:  # before anything was changed
                self._groups.remove(group)
                members = group.release()
                if refused.memory and len(members) > 1:
                    half = (len(members) + 1) // 2
                    before = len(self._groups)
                    self._fuse(members[:half])
                    self._fuse(members[half:])
                    queue += self._groups[before:]
                else:
                    self._set_alone(members, str(refused))
        for trainer in self._alone:
            try:
                results[trainer] = trainer.train_epoch()
            except Exception as error:  # one trial's failure is its own
                results[trainer] = error
        return results

    @property
    def counts(self) -> list[int]:
        """Members of each fused group; 1 for each trainer that runs alone."""
        return [len(group.trainers) for group in self._groups] + [1] * len(self._alone)

    @property
    def forms(self) -> list[Form]:
        """How each fused group's steps run at present."""
        return [group.form for group in self._groups]

    def _fuse(self, members: list[Trainer]) -> None:
        if len(members) == 1:
            self._set_alone(members, "there is no other trial like it")
            return
        try:
            self._groups.append(_Group(members, compile=self.compile))
        except Unsupported as error:
            self._set_alone(members, str(error))

    def _set_alone(self, members: Sequence[Trainer], reason: str) -> None:
        self._alone += members
        for trainer in members:
            self.reasons[trainer] = reason


class _Refused(Exception):
    """The group can't train as one; nothing of it has been changed."""

    def __init__(self, reason: str, *, memory: bool = False) -> None:
        super().__init__(reason)
        self.memory = memory


@final
class _Group:
    """Trainers whose steps are one."""

    def __init__(self, trainers: Sequence[Trainer], *, compile: bool) -> None:
        self.trainers = list(trainers)
        first = trainers[0]
        task = first.task
        self.task = task
        models = [t.model for t in trainers]
        self.fusion = Fusion(
            models, groups=group_names(first.model, first.optimizer), channels_last=task.channels_last is True
        )
        self.optimizer = FusedOptimizer(
            self.fusion.stack, [t.optimizer for t in trainers], [t.clip_norm for t in trainers]
        )
        self.optimizer.adopt(range(len(trainers)))
        forward, loss = task.forward or _forward, task.loss

        def function(model: Any, inputs: Any, targets: Any) -> Tensor:
            value: Tensor = loss(forward(model, inputs), targets)
            return value.reshape(())

        self.step = FusedStep(
            self.fusion, self.optimizer, function, autocast=first.dtype, beside=(loss, forward)
        )
        self.step.steady = self._kind() in _steady.get(task, ())
        self.form = Form.PLAIN
        self._compile = compile
        self._records = True
        self._compiles = compile
        self._probed = False
        self._fused_evaluation = True
        self._times: dict[Form, list[float]] = {form: [] for form in Form}
        self._spent_s = self._tried_s()

    # ------------------------------------------------------------ members

    def leave(self, trainers: Sequence[Trainer]) -> None:
        if not trainers:
            return
        going = set(map(id, trainers))
        stay = [i for i, t in enumerate(self.trainers) if id(t) not in going]
        if not stay:
            self.release()
            return
        gone = [i for i in range(len(self.trainers)) if i not in set(stay)]
        # The optimizers first: they look their parameters up in the stack.
        self.fusion.keep(stay)
        self.optimizer.keep(stay)
        for i in gone:
            _stand(self.trainers[i])
        self.trainers = [self.trainers[i] for i in stay]
        self._forget()

    def release(self) -> list[Trainer]:
        """Let all members go."""
        from penstock.model import detach, release

        members, self.trainers = self.trainers, []
        for trainer in members:
            detach(trainer.model)
            release(trainer.optimizer)
            _stand(trainer)
        return members

    def _kind(self) -> tuple[Any, ...]:
        """Which of the task's networks the members have."""
        stack = self.fusion.stack
        return tuple((slot.names, slot.shape) for slot in stack.slots)

    def _forget(self) -> None:
        self.step.forget()
        self.form = Form.PLAIN
        self._times = {form: [] for form in Form}
        self._spent_s = self._tried_s()

    def _tried_s(self) -> float:
        """What the group is taken to have spent before its first step."""
        return 2 * _costs["record_cost_s"] if self._kind() in _repaying.get(self.task, ()) else 0.0

    # ------------------------------------------------------------ an epoch

    def train_epoch(self, ahead: int) -> dict[Trainer, dict[str, float] | Exception]:
        first = self.trainers[0]
        batches = _batches(self.trainers)
        self.fusion.train(True)
        for trainer, generator in zip(self.trainers, self.fusion.draws.generators, strict=True):
            generator.manual_seed(derive(trainer.seed, "epoch", trainer.epoch))
        losses = self._run_steps(batches, ahead * first.steps_per_epoch)
        table = torch.stack(losses) if losses else torch.empty((0, len(self.trainers)))
        results: dict[Trainer, dict[str, float] | Exception] = {}
        means = []
        for trainer, column in zip(self.trainers, table.unbind(1), strict=True):
            trainer._losses = [column] if len(column) else []
            means.append(trainer._mean_loss())
            trainer.epoch += 1
            trainer.step = 0
            trainer._losses = []
        measured = self.evaluate()
        for trainer, mean, metrics in zip(self.trainers, means, measured, strict=True):
            if isinstance(metrics, Exception):
                results[trainer] = metrics
                continue
            if trainer.schedule is not None and not trainer._per_step:
                trainer.schedule.step(*([metrics.get("loss", mean)] if trainer._plateau else []))
            metrics.setdefault("loss", mean)
            results[trainer] = {**metrics, "train_loss": mean}
        return results

    def _run_steps(self, batches: Iterator[Any], later: int) -> list[Tensor]:
        """One step per batch; ``later``: steps that are sure to follow after this epoch."""
        trainers, step = self.trainers, self.step
        schedules = [t.schedule for t in trainers if t.schedule is not None and t._per_step]
        losses: list[Tensor] = []
        left = trainers[0].steps_per_epoch
        tell, seen = trainers[0].on_iteration, 0
        clock = _clock(trainers[0].device)
        if self.optimizer.refresh():
            self._forget()
        for inputs, targets in batches:
            if not self._probed:
                self._probe(inputs, targets)
            self._choose(inputs, targets, later + left)
            begin_s = clock()
            losses.append(step(inputs, targets))
            self._note(clock() - begin_s)
            left -= 1
            if tell is not None:
                rest = trainers[0].data.train.n - seen
                size = min(trainers[0].batch_size, rest) if rest > 0 else trainers[0].batch_size
                seen += size
                tell(float(len(trainers) * size))
            if schedules:
                for schedule in schedules:
                    schedule.step()
                if self.optimizer.refresh():
                    self._forget()
        return losses

    def _probe(self, inputs: Any, targets: Any) -> None:
        """Whether forward and backward can be fused here, and fit: a look that leaves no trace."""
        trainer = self.trainers[0]
        if not trainer._checked:
            own = _of((inputs, targets), 0)
            trainer._check_loss(own, self.task.forward or _forward)
        before = random_state(trainer.device)
        try:
            # A thread that fetches samples may draw for them meanwhile.
            self.step.probe(inputs, targets, draws=isinstance(trainer.data.train, Preloaded))
        except Unsupported as error:
            cause = error.__cause__
            raise _Refused(str(error), memory=cause is not None and _is_memory(cause)) from error
        except Exception as error:
            if _is_memory(error):
                raise _Refused("the group does not fit the memory", memory=True) from error
            raise _Refused(f"{type(error).__name__}: {error}") from error
        finally:
            set_random_state(before, trainer.device)
        for trainer in self.trainers:
            trainer._checked = True
            trainer.optimizer._opt_called = True  # lr schedulers ask for it
        self._probed = True

    def _choose(self, inputs: Any, targets: Any, remaining: int) -> None:
        """Record or compile the step once that repays itself."""
        medians = {form: _median(times) for form, times in self._times.items()}
        if self.form is not Form.PLAIN and medians[self.form] is None:
            return  # It has been paid for, and is to show its pace before it is left.
        pace = Pace(
            medians[Form.PLAIN],
            medians[Form.RECORDED],
            medians[Form.COMPILED],
            self._spent_s,
            **_costs,
        )
        plain_s, recorded_s = medians[Form.PLAIN], medians[Form.RECORDED]
        if plain_s is not None and recorded_s is not None and recorded_s < plain_s:
            _repaying.setdefault(self.task, set()).add(self._kind())
        wanted = pace.best(remaining, can_record=self._records, can_compile=self._compiles)
        if wanted is self.form:
            return
        if wanted is Form.PLAIN:
            self.step.forget()
            self.form = wanted
            return
        clock = _clock(self.trainers[0].device)
        begin_s = clock()
        try:
            made = self.step.record(inputs, targets, compile=wanted is Form.COMPILED)
        except Unsupported:
            if wanted is Form.COMPILED:
                self._compiles = False
            else:
                self._records = False
            return
        _steady.setdefault(self.task, set()).add(self._kind())
        _costs["compile_cost_s" if made.compiled else "record_cost_s"] = clock() - begin_s
        self.form = wanted

    def _note(self, seconds: float) -> None:
        self._spent_s += seconds
        times = self._times[self.form]
        if len(times) < _MEASURED + 1:
            times.append(seconds)

    # ------------------------------------------------------------ evaluation

    def evaluate(self) -> list[dict[str, float] | Exception]:
        """The members' metrics on the validation data, which all of them read at once."""
        source = self.trainers[0].data.val
        if source is None:
            return [{} for _ in self.trainers]
        draws = self.fusion.draws
        if self._fused_evaluation:
            states = [generator.get_state() for generator in draws.generators]
            drawn, common = generators(), torch.get_rng_state()
            try:
                found = self._evaluate(source)
                if drawn != generators() or not torch.equal(common, torch.get_rng_state()):
                    raise Unsupported(DRAWS)  # a metric may, too
                return found
            except Exception:  # it can't be fused, does not fit the memory, or is one member's failure
                self._fused_evaluation = False
            for generator, state in zip(draws.generators, states, strict=True):
                generator.set_state(state)
        results: list[dict[str, float] | Exception] = []
        for member, trainer in enumerate(self.trainers):
            # As at the start of the epoch that has just ended: its steps drew nothing from these.
            seed_everything(derive(trainer.seed, "epoch", trainer.epoch - 1))
            try:
                with draws.lend(member):
                    results.append(trainer.evaluate())
            except Exception as error:
                results.append(error)
        return results

    def _evaluate(self, source: Source) -> list[dict[str, float] | Exception]:
        task, first = self.task, self.trainers[0]
        forward, loss_of = task.forward or _forward, task.loss
        on_set = task.metrics_on == "set" and bool(task.metrics)
        count = len(self.trainers)
        sums = [dict.fromkeys(() if on_set else task.metrics, 0.0) for _ in self.trainers]
        totals = torch.zeros(count, dtype=torch.float64, device=first.device)
        outputs: list[list[Any]] = [[] for _ in self.trainers]
        truths: list[Any] = []
        sizes: list[int] = []
        rows = 0

        def function(model: Any, inputs: Any, targets: Any) -> tuple[Any, Tensor]:
            output = forward(model, inputs)
            value: Tensor = loss_of(output, targets)
            return output, value.reshape(())

        self.fusion.train(False)
        try:
            with torch.no_grad(), first._autocast():
                for inputs, targets in source.batches(task.eval_batch_size):
                    size = min(task.eval_batch_size, source.n - rows)
                    output, losses = self.fusion(function, inputs, targets, stacked=(False, False))
                    _check_parts(output)
                    totals += losses.double() * size
                    for member in range(count):
                        own = _of(output, member)
                        if on_set:
                            outputs[member].append(own)
                        else:
                            for name, metric in task.metrics.items():
                                sums[member][name] += _scalar(name, metric(own, targets)) * size
                    truths.append(targets)
                    sizes.append(size)
                    rows += size
                results: list[dict[str, float] | Exception] = []
                truth = _join(truths) if on_set else None
                for member, total in enumerate(totals.tolist()):
                    found = {"loss": total / rows, **{n: v / rows for n, v in sums[member].items()}}
                    try:
                        if on_set:
                            whole = _join(outputs[member], sizes)
                            for name, metric in task.metrics.items():
                                found[name] = _scalar(name, metric(whole, truth))
                        results.append(found)
                    except Exception as error:  # a metric that this member's outputs break
                        results.append(error)
        finally:
            self.fusion.train(True)
        return results


def _of(tree: Any, member: int) -> Any:
    """One member's part of stacked tensors."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[member], tree)


def _check_parts(output: Any) -> None:
    """Refuse outputs whose members' parts can't be told apart: objects with tensors inside that torch does not know."""
    for leaf in pytree.tree_leaves(output):
        if dataclasses.is_dataclass(leaf) or (leaf is output and not isinstance(leaf, Tensor)):
            raise Unsupported(f"the model returns a {type(leaf).__name__}, which can't be split into members")


def _stand(trainer: Trainer) -> None:
    """After leaving: the schedule's wrapper around the optimizer's step is as it was, nothing else is shared."""
    trainer.model.train(True)


def _median(times: Sequence[float]) -> float | None:
    """The median without the first, which pays for warming up; None before there are enough."""
    return statistics.median(times[1:]) if len(times) > _MEASURED else None


def _is_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        "can't allocate memory" in str(error) or "out of memory" in str(error).lower()
    )


def _alone(trainer: Trainer) -> str | None:
    """Why a trainer can't be fused with any other, or None."""
    if trainer.scaler is not None:
        return "float16 with loss scaling: the scale is common to all that share a backward"
    if trainer._needs_lr:
        return "its learning rate is not known yet"
    if trainer.step:
        return "it goes on in the middle of an epoch"
    return None


def _likeness(trainer: Trainer) -> tuple[Any, ...]:
    """What fused trainers must agree on: shapes, batch size, data, optimizer and its groups."""
    parameters = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in trainer.model.named_parameters()
    )
    flags = tuple(
        tuple(sorted((k, v) for k, v in group.items() if isinstance(v, bool)))
        for group in trainer.optimizer.param_groups
    )
    return (
        id(trainer.task),
        trainer.batch_size,
        str(trainer.device),
        type(trainer.model).__qualname__,  # not the class: one that the factory defines is another every time
        parameters,
        type(trainer.optimizer),
        flags,
        _group_members(trainer),
    )


def _group_members(trainer: Trainer) -> tuple[frozenset[str | None], ...]:
    """Which parameters each group of the optimizer has: a configuration may choose a layer that gets its own rate."""
    names = {id(p): name for name, p in trainer.model.named_parameters()}
    return tuple(frozenset(names.get(id(p)) for p in g["params"]) for g in trainer.optimizer.param_groups)


def _batches(trainers: Sequence[Trainer]) -> Iterator[Any]:
    """The members' next batches, stacked; each in its own order."""
    first = trainers[0]
    source, size, drop = first.data.train, first.batch_size, first.task.drop_last
    orders = [order_of(source.n, t.seed, t.epoch) for t in trainers]
    if not isinstance(source, Preloaded):
        streams = [source.batches(size, order=order, drop_last=drop) for order in orders]
        for parts in zip(*streams, strict=True):
            yield _stack_tree(parts)
        return
    table = torch.stack(orders)  # members, samples
    count = len(trainers)
    total = source.n - source.n % size if drop else source.n
    whole = total // size
    row_bytes = max(1, source.nbytes // source.n)
    per = max(1, min(whole, _CHUNK_BYTES // max(1, row_bytes * size * count))) if whole else 1
    for low in range(0, whole, per):
        steps = min(per, whole - low)
        index = table[:, low * size : (low + steps) * size].view(count, steps, size).transpose(0, 1)
        flat = index.reshape(-1).to(source.device)
        chunk = [
            leaf.index_select(0, flat).view(steps, count, size, *leaf.shape[1:]) for leaf in source.leaves
        ]
        for step in range(steps):
            yield source.rebuild([leaf[step] for leaf in chunk])
    if whole * size < total:
        flat = table[:, whole * size : total].reshape(-1).to(source.device)
        rest = total - whole * size
        yield source.rebuild(
            [leaf.index_select(0, flat).view(count, rest, *leaf.shape[1:]) for leaf in source.leaves]
        )


def _stack_tree(parts: Sequence[Any]) -> Any:
    flat = [pytree.tree_flatten(part) for part in parts]
    leaves = [torch.stack(column) for column in zip(*(leaves for leaves, _ in flat), strict=True)]
    return pytree.tree_unflatten(leaves, flat[0][1])


# ---------------------------------------------------------------- runs


class Window(Protocol):
    """Meters the epochs of a fused training. Members are named by their place among the runs."""

    def begin(self) -> None:
        """An epoch of all members begins."""

    def end(self, samples: Mapping[int, float]) -> None:
        """It is over; how many samples each member has processed."""

    def settle(self, at: int) -> None:
        """A member's epoch is about to be closed."""


def train_fused(
    task: Task,
    runs: Sequence[RunLike],
    *,
    most: int | None = None,
    ended: Callable[[int, BaseException | None], None] | None = None,
    window: Window | None = None,
    on_iteration: Callable[[float], None] | None = None,
) -> list[BaseException | None]:
    """Train several runs of one Task as one; each reports, saves, stops and fails by itself.

    Args:
        task: The task.
        runs: One per trial. Their budgets may differ: who is done leaves, the others go on.
        most: The planner's fusion count.
        ended: Called with a run's place and what ended it, as soon as it has left.
        window: Meters each epoch.
        on_iteration: Called after each step with the number of samples of all members.

    Returns:
        For each run what ended it: None, or what ``train`` would have raised.
    """
    ends: list[BaseException | None] = [None] * len(runs)
    lanes: list[_Lane] = []

    def left(number: int, error: BaseException | None) -> None:
        ends[number] = error
        if ended is not None:
            ended(number, error)

    with private_randomness():
        for number, run in enumerate(runs):
            options: Mapping[str, Any] = getattr(run, "options", None) or {}
            if getattr(run, "should_stop", False):  # told so while fusion was measured
                left(number, None)
                continue
            if options.get("mode") == "explore" or options.get("explorations") or task.checkpoint_steps:
                left(number, _ended(lambda run=run: train(task, run)))  # type: ignore[misc]
                continue
            try:
                lane = _Lane(task, run, number, window, lr_is_found=bool(options))
                lane.trainer.on_iteration = on_iteration
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                left(number, error)
                continue
            lanes.append(lane)
        fused = FusedTrainer([lane.trainer for lane in lanes], most=most)
        by_trainer = {lane.trainer: lane for lane in lanes}
        while lanes:
            lanes = _keep(fused, lanes, left, lambda lane: lane.begin())
            if not lanes:
                break
            if window is not None:
                window.begin()
            for trainer, result in fused.train_epoch(ahead=min(lane.ahead for lane in lanes)).items():
                by_trainer[trainer].result = result
            if window is not None:
                window.end({lane.number: float(lane.samples) for lane in lanes})
            lanes = _keep(fused, lanes, left, lambda lane: lane.end())
    return ends


def _ended(call: Callable[[], None]) -> BaseException | None:
    try:
        call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error
    return None


def _keep(
    fused: FusedTrainer,
    lanes: Sequence[_Lane],
    left: Callable[[int, BaseException | None], None],
    advance: Callable[[_Lane], bool],
) -> list[_Lane]:
    """The lanes that go on after ``advance``; the others leave the group."""
    stay: list[_Lane] = []
    going: list[tuple[_Lane, BaseException | None]] = []
    for lane in lanes:
        try:
            if advance(lane):
                stay.append(lane)
            else:
                going.append((lane, None))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a lane's end (Unwind) or failure is its own
            going.append((lane, error))
    fused.leave([lane.trainer for lane, _ in going])
    for lane, why in going:
        left(lane.number, why)
    return stay


@final
class _Lane:
    """One run of a fused training."""

    def __init__(
        self, task: Task, run: RunLike, number: int, window: Window | None, *, lr_is_found: bool
    ) -> None:
        self.task = task
        self.run = run
        self.number = number
        self._window = window
        self.trainer = Trainer(task, run.config, seed=run.seed, device=run.device, lr_is_found=lr_is_found)
        state = run.load()
        if state is not None:
            self.trainer.load_state(state)
        self._bounded = getattr(run, "until", None) is not None
        self._epochs = iter(run.epochs())
        self.result: dict[str, float] | Exception = {}

    @property
    def ahead(self) -> int:
        """Epochs that are sure to follow the present one."""
        until = getattr(self.run, "until", None)
        return max(0, (self.task.epochs if until is None else until) - self.trainer.epoch - 1)

    @property
    def samples(self) -> int:
        """Samples of an epoch."""
        trainer = self.trainer
        whole = trainer.steps_per_epoch * trainer.batch_size
        return whole if self.task.drop_last else min(whole, trainer.data.train.n)

    def begin(self) -> bool:
        """Whether there is another epoch to train."""
        if self._window is not None:
            self._window.settle(self.number)
        if not self._bounded and self.trainer.epoch >= self.task.epochs:
            return False
        return next(self._epochs, None) is not None

    def end(self) -> bool:
        """Save and report an epoch; whether to go on."""
        result = self.result
        if isinstance(result, Exception):
            raise result
        task, trainer, run = self.task, self.trainer, self.run
        over = task.target is not None and task.target.reached(result)
        if over:
            result["target_reached"] = 1.0  # told, for a segment may end with this very epoch
        over = over or (not self._bounded and trainer.epoch >= task.epochs)
        leaves = getattr(run, "should_stop", False)  # perhaps to go on elsewhere, from here
        if over or leaves or trainer.epoch % task.checkpoint_epochs == 0 or _is_last(run, trainer.epoch):
            run.save(own_state(trainer))
        run.report(**result)
        return not over  # the worker closes the last epoch, as for any function that leaves its loop


def own_state(trainer: Trainer) -> dict[str, Any]:
    """A trainer's state with tensors of its own: a saved view would carry the memory of all members along."""
    state = trainer.state()
    if not trainer.step:
        state["random"] = {}  # the generators are seeded anew at the start of every epoch
    state["model"] = _own(state["model"])
    state["optimizer"] = _own(state["optimizer"])
    return state


def _own(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        copied = {key: _own(value) for key, value in tree.items()}
        return type(tree)(copied) if type(tree) is not dict else copied
    if isinstance(tree, list):
        return [_own(value) for value in tree]
    return tree


# ---------------------------------------------------------------- before fusion is trusted


@final
@dataclass(frozen=True, slots=True)
class FusionCheck:
    """One step fused against one step unfused.

    Attributes:
        ok: Whether they agree.
        error: The largest difference, relative to the size of the tensor it is in (absolute below 1).
        where: The tensor with the largest difference.
        reason: Why the members can't be fused or don't agree; empty if they do.
        dtype: In which precision they were compared.
        members: How many were compared.
        sequential: Functions that are computed member by member.
    """

    ok: bool
    error: float
    where: str
    reason: str
    dtype: str
    members: int
    sequential: tuple[str, ...] = ()

    def record(self) -> dict[str, Any]:
        """JSON-able values for the journal."""
        data = dataclasses.asdict(self)
        data["error"] = self.error if math.isfinite(self.error) else None  # JSON knows no infinity
        data["sequential"] = list(self.sequential)
        return data


def check(
    task: Task, configs: Sequence[Config], *, device: Any = "cpu", tolerance: float = 1e-10
) -> FusionCheck:
    """Compare one training step of ``configs`` fused and unfused, in float64.

    Where the task can't compute in float64 (a loss with float32 class weights), float32 is used with a tolerance
    to match.
    """
    if len(configs) < 2:
        raise InvalidInput(f"A fusion has at least 2 members, got {len(configs)} configurations.")
    with private_randomness():
        try:
            return _check(task, configs, torch.float64, device, tolerance)
        except (Unsupported, _Refused) as error:
            return FusionCheck(False, math.inf, "", str(error), "float64", len(configs))
        except PenstockError:
            raise
        except RuntimeError:
            try:
                return _check(task, configs, torch.float32, device, max(tolerance, 1e-4))
            except (Unsupported, _Refused) as error:
                return FusionCheck(False, math.inf, "", str(error), "float32", len(configs))


def _check(
    task: Task, configs: Sequence[Config], dtype: torch.dtype, device: Any, tolerance: float
) -> FusionCheck:
    def make() -> list[Trainer]:
        made = [
            Trainer(task, config, seed=i, device=device, lr_is_found=True) for i, config in enumerate(configs)
        ]
        for trainer in made:
            trainer.model.to(dtype)
            _wake(trainer)
            if trainer._needs_lr:
                trainer.set_lr(1e-2)
        return made

    alone, together = make(), make()
    kinds = {_likeness(t) for t in together}
    if len(kinds) > 1:
        raise Unsupported(
            f"the {len(configs)} configurations make {len(kinds)} kinds of trials; check each kind"
        )

    def cast(tree: Any) -> Any:
        return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)

    group = _Group(together, compile=False)
    for trainer, generator in zip(together, group.fusion.draws.generators, strict=True):
        generator.manual_seed(derive(trainer.seed, "epoch", 0))
    group.fusion.train(True)
    inputs, targets = cast(next(_batches(together)))
    group._probe(inputs, targets)
    fused_losses, gradients = group.step._differentiate(inputs, targets)
    pairs: list[tuple[str, int, Any, Any]] = []
    forward = task.forward or _forward
    slots = group.fusion.stack.slots
    for number, trainer in enumerate(alone):
        trainer.seed_epoch()
        trainer.model.train()
        source = trainer.data.train
        order = order_of(source.n, trainer.seed, 0)
        x, y = cast(next(source.batches(trainer.batch_size, order=order)))
        if task.channels_last:
            lay_out(trainer, (x, y), forward)  # masks over images are drawn in the order of memory
        with trainer._autocast():
            loss = task.loss(forward(trainer.model, x), y)
        loss.backward()
        pairs.append(("loss", number, loss.reshape(()), fused_losses[number]))
        for slot, gradient in zip(slots, gradients, strict=True):
            p = trainer.model.get_parameter(slot.names[0])
            theirs = None if gradient is None else gradient[number]
            pairs.append((f"the gradient of {slot.names[0]}", number, p.grad, theirs))
            # The updates are compared for one gradient: Adam makes steps out of a gradient's rounding errors.
            p.grad = None if theirs is None else theirs.clone()
    group.optimizer.step(gradients)
    for number, (trainer, other) in enumerate(zip(alone, together, strict=True)):
        if trainer.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(trained_by(trainer.optimizer), trainer.clip_norm)
        trainer.optimizer.step()
        state = other.model.state_dict()
        pairs += [(name, number, value, state[name]) for name, value in trainer.model.state_dict().items()]
        fused = other.optimizer.state_dict()["state"]
        for key, own in trainer.optimizer.state_dict()["state"].items():
            pairs += [(f"optimizer.{key}.{n}", number, v, fused.get(key, {}).get(n)) for n, v in own.items()]
    # A bias before a batch norm has no gradient but rounding errors, as large as the gradients around it make them.
    sizes = [1.0] * len(alone)
    for name, number, a, _ in pairs:
        if name.startswith("the gradient") and isinstance(a, Tensor):
            sizes[number] = max(sizes[number], _size(a.detach().double()))
    worst, where = 0.0, ""
    for name, number, a, b in pairs:
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            error = _difference(a, b, sizes[number] if name.startswith("the gradient") else 1.0)
            if error > worst:
                worst, where = error, f"{name} of member {number}"
    ok = worst <= tolerance
    reason = "" if ok else f"{where} differs by {worst:.3g} after one step"
    return FusionCheck(
        ok,
        worst,
        where,
        reason,
        str(dtype).split(".")[-1],
        len(configs),
        tuple(sorted(group.fusion.sequential)),
    )


def _wake(trainer: Trainer) -> None:
    """Fill parameters that start at zero: the gradients of all that lies before a twin's readout would be zero, too.

    So the check would see nothing of what the forward does to them, a hook on an activation for one.
    """
    generator = torch.Generator().manual_seed(derive(trainer.seed, "wake"))
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            if parameter.is_floating_point() and not parameter.any():
                drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(0.1 * drawn)


def _size(x: Tensor) -> float:
    return float(torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0).abs().max()) if x.numel() else 0.0


def _difference(a: Any, b: Any, least: float) -> float:
    """The largest difference, relative to the size of ``a`` (to ``least`` where that is larger)."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.shape != b.shape:
        return math.inf
    if not a.numel():
        return 0.0
    x, y = a.detach().double(), b.detach().double()
    if not torch.equal(torch.isfinite(x), torch.isfinite(y)):
        return math.inf
    return _size(x - y) / max(least, _size(x))


# ---------------------------------------------------------------- measuring, for the planner


def measure(
    task: Task,
    configs: Sequence[Config],
    count: int,
    *,
    device: Any = "cpu",
    steps: int = 5,
) -> tuple[float, int]:
    """Seconds of a step of ``count`` members (1: unfused) and the bytes it needs, on throw-away members.

    Configurations are used in turn. What ``plan.choose_count`` asks for.

    Raises:
        Unsupported: ``count`` members of these configurations can't be fused.
    """
    if count < 1 or not configs:
        raise InvalidInput(f"There is nothing to measure: {count} members of {len(configs)} configurations.")
    with private_randomness():
        trainers = []
        for i in range(count):
            trainer = Trainer(task, configs[i % len(configs)], seed=i, device=device, lr_is_found=True)
            if trainer._needs_lr:
                trainer.set_lr(1e-3)
            trainers.append(trainer)
        saved = _Saved()
        if count == 1:
            return _measure_alone(trainers[0], steps, saved)
        group = _Group(trainers, compile=False)
        group.fusion.train(True)
        batches = [batch for _, batch in zip(range(2), _batches(trainers), strict=False)]
        try:
            group._probe(*batches[0])
        except _Refused as error:
            if error.memory:
                raise MemoryError(str(error)) from error
            raise Unsupported(str(error)) from error
        with saved:
            group.step(*batches[0])
        least_s = _fastest(lambda i: group.step(*batches[i % len(batches)]), steps, trainers[0].device)
        rows = len(group.optimizer.state) + 3  # weights, gradients, and the update's work space
        held = rows * group.fusion.stack.flat.nbytes + sum(
            t.nbytes for t in group.fusion.stack.others.values()
        )
        return least_s, held + saved.nbytes


def _clock(device: torch.device) -> Callable[[], float]:
    """By what steps are compared: with one thread on a CPU its own time, so that neighbours decide nothing."""
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


def _fastest(step: Callable[[int], object], steps: int, device: torch.device) -> float:
    """Seconds of the fastest of ``steps`` steps: of more that are short, of fewer long ones."""
    times: list[float] = []
    clock = _clock(device)
    while (
        len(times) < 2
        or (len(times) < steps and sum(times) < _LONG_S)
        or (sum(times) < _MEASURED_S and len(times) < 8 * steps)
    ):
        begin_s = clock()
        step(len(times))
        times.append(clock() - begin_s)
    return min(times)


def _measure_alone(trainer: Trainer, steps: int, saved: _Saved) -> tuple[float, int]:
    source = trainer.data.train
    order = order_of(source.n, trainer.seed, 0)
    batches = [b for _, b in zip(range(2), source.batches(trainer.batch_size, order=order), strict=False)]
    batches = [pytree.tree_map_only(Tensor, Tensor.clone, b) for b in batches]
    trainer.model.train()
    with saved:
        trainer.run_steps(batches[:1])
    least_s = _fastest(lambda i: trainer.run_steps([batches[i % len(batches)]]), steps, trainer.device)
    weights = sum(p.nbytes for p in trainer.model.parameters())
    states = sum(
        v.nbytes for own in trainer.optimizer.state.values() for v in own.values() if isinstance(v, Tensor)
    )
    buffers = sum(b.nbytes for b in trainer.model.buffers())
    return least_s, 3 * weights + states + buffers + saved.nbytes


@final
class _Saved:
    """Counts the bytes that autograd keeps from forward to backward: what grows with the members."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._seen: set[int] = set()
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._seen:
            self._seen.add(storage.data_ptr())
            self.nbytes += storage.nbytes()
        return tensor

    def __enter__(self) -> None:
        self._hooks.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


__all__ = ["FusedTrainer", "FusionCheck", "check", "measure", "own_state", "train_fused"]

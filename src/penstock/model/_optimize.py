"""Fused optimizers: one update for all members, each with the hyperparameters its own torch optimizer holds now."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from penstock.core.errors import Unsupported
from penstock.model._growth import only_growth, shortening, squared
from penstock.model._stack import Stack

Rows: TypeAlias = Tensor
"""A tensor laid out like the stack: one row per member."""


@dataclass(frozen=True, slots=True)
class Update:
    """What a kernel updates: some columns of the stack.

    Attributes:
        p: Parameters, updated in place.
        g: Gradients; may be overwritten.
        state: The optimizer's state by torch's names, updated in place.
        c: Coefficients by name, one column in the parameters' type, made of the hyperparameters by ``Kind.derive``.
        flags: Switches in which all members agree.
        t: Steps done, this one included, one column of float64; of SGD, those with momentum.
    """

    p: Rows
    g: Rows
    state: Mapping[str, Rows]
    c: Mapping[str, Tensor]
    flags: Mapping[str, bool]
    t: Tensor


Numbers: TypeAlias = Mapping[str, float]


def _decayed(u: Update) -> Rows:
    """The gradient with the weights' decay added to it."""
    g = u.g.neg_() if u.flags["maximize"] else u.g
    return g.addcmul_(u.p, u.c["decay"]) if u.flags["decays"] else g


def _sgd_coefficients(h: Numbers) -> dict[str, float]:
    # torch dampens nothing without momentum
    rest = 1.0 - h["dampening"] if h["momentum"] else 1.0
    return {"down": -h["lr"], "decay": h["weight_decay"], "momentum": h["momentum"], "rest": rest}


def _sgd(u: Update) -> None:
    g = _decayed(u)
    if u.flags["moves"]:
        momentum = u.c["momentum"]
        buffer = _unrested(u)
        if u.flags["dampens"]:
            weight = torch.where(
                u.t <= 1, torch.ones_like(u.c["rest"]), u.c["rest"]
            )  # the first is the gradient
            buffer.mul_(momentum).addcmul_(g, weight)
        else:
            buffer.mul_(momentum).add_(g)
        _rested(u, buffer)
        g = g.addcmul_(buffer, momentum) if u.flags["nesterov"] else buffer
    u.p.addcmul_(g, u.c["down"])


def _unrested(u: Update) -> Rows:
    """The buffer to move: a copy where members rest, whose buffers stay as they are while their momentum is 0."""
    buffer = u.state["momentum_buffer"]
    return buffer.clone() if u.flags["rests"] else buffer


def _rested(u: Update, moved: Rows) -> None:
    """Put the buffers of those that move back."""
    if u.flags["rests"]:
        buffer = u.state["momentum_buffer"]
        buffer.copy_(torch.where(u.c["momentum"] == 0, buffer, moved))


def _adam_coefficients(h: Numbers) -> dict[str, float]:
    return {
        "down": -h["lr"],
        "decay": h["weight_decay"],
        "shrink": 1.0 - h["lr"] * h["weight_decay"],
        "rest1": 1.0 - h["beta1"],
        "beta2": h["beta2"],
        "rest2": 1.0 - h["beta2"],
        "eps": h["eps"],
        "log1 (double)": math.log(h["beta1"]) if h["beta1"] else -math.inf,
        "log2 (double)": math.log(h["beta2"]) if h["beta2"] else -math.inf,
    }


def _adam(u: Update) -> None:
    if u.flags["decoupled"]:
        g = u.g.neg_() if u.flags["maximize"] else u.g
        if u.flags["decays"]:
            u.p.mul_(u.c["shrink"])
    else:
        g = _decayed(u)
    mean, square = u.state["exp_avg"], u.state["exp_avg_sq"]
    mean.lerp_(g, u.c["rest1"])
    square.mul_(u.c["beta2"]).addcmul_(g, g * u.c["rest2"])
    if u.flags["amsgrad"]:
        square = u.state["max_exp_avg_sq"].copy_(torch.maximum(u.state["max_exp_avg_sq"], square))
    # 1 - beta ** t, without the cancellation of nearly equal numbers
    correction1 = -torch.expm1(u.c["log1 (double)"] * u.t)
    correction2 = -torch.expm1(u.c["log2 (double)"] * u.t)
    step = (u.c["down"] / correction1).to(u.p.dtype)
    denominator = torch.sqrt(square).div_(correction2.sqrt().to(u.p.dtype)).add_(u.c["eps"])
    u.p.addcmul_(mean / denominator, step)


def _adadelta_coefficients(h: Numbers) -> dict[str, float]:
    return {
        "down": -h["lr"],
        "decay": h["weight_decay"],
        "rho": h["rho"],
        "rest": 1.0 - h["rho"],
        "eps": h["eps"],
    }


def _adadelta(u: Update) -> None:
    g = _decayed(u)
    rho, rest, eps = u.c["rho"], u.c["rest"], u.c["eps"]
    square, delta_square = u.state["square_avg"], u.state["acc_delta"]
    square.mul_(rho).addcmul_(g, g * rest)
    delta = (delta_square + eps).sqrt_().div_((square + eps).sqrt_()).mul_(g)
    delta_square.mul_(rho).addcmul_(delta, delta * rest)
    u.p.addcmul_(delta, u.c["down"])


def _rmsprop_coefficients(h: Numbers) -> dict[str, float]:
    return {
        "down": -h["lr"],
        "decay": h["weight_decay"],
        "alpha": h["alpha"],
        "rest": 1.0 - h["alpha"],
        "eps": h["eps"],
        "momentum": h["momentum"],
    }


def _rmsprop(u: Update) -> None:
    g = _decayed(u)
    square = u.state["square_avg"]
    square.mul_(u.c["alpha"]).addcmul_(g, g * u.c["rest"])
    if u.flags["centered"]:
        mean = u.state["grad_avg"].lerp_(g, u.c["rest"])
        root = (square - mean * mean).sqrt_()
    else:
        root = torch.sqrt(square)
    step = g / root.add_(u.c["eps"])
    if u.flags["moves"]:
        step = _unrested(u).mul_(u.c["momentum"]).add_(step)
        _rested(u, step)
    u.p.addcmul_(step, u.c["down"])


@dataclass(frozen=True, slots=True)
class Kind:
    """How to read one torch optimizer and which kernel does what it does."""

    kernel: Callable[[Update], None]
    derive: Callable[[Numbers], dict[str, float]]
    numbers: tuple[str, ...]
    flags: tuple[str, ...]
    state: tuple[str, ...]
    counts: bool = True
    momentum: str | None = None
    optional: Mapping[str, str] = field(default_factory=dict)


_KINDS: dict[type, Kind] = {
    torch.optim.SGD: Kind(
        _sgd,
        _sgd_coefficients,
        ("lr", "momentum", "dampening", "weight_decay"),
        ("nesterov", "maximize"),
        (),
        counts=False,
        momentum="momentum_buffer",
    ),
    torch.optim.Adam: Kind(
        _adam,
        _adam_coefficients,
        ("lr", "beta1", "beta2", "eps", "weight_decay"),
        ("amsgrad", "maximize", "decoupled"),
        ("exp_avg", "exp_avg_sq"),
        optional={"amsgrad": "max_exp_avg_sq"},
    ),
    torch.optim.Adadelta: Kind(
        _adadelta,
        _adadelta_coefficients,
        ("lr", "rho", "eps", "weight_decay"),
        ("maximize",),
        ("square_avg", "acc_delta"),
    ),
    torch.optim.RMSprop: Kind(
        _rmsprop,
        _rmsprop_coefficients,
        ("lr", "alpha", "eps", "momentum", "weight_decay"),
        ("centered", "maximize"),
        ("square_avg",),
        momentum="momentum_buffer",
        optional={"centered": "grad_avg"},
    ),
}
_KINDS[torch.optim.AdamW] = _KINDS[torch.optim.Adam]


def group_names(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """The names of the parameters in each group of a member's optimizer."""
    names = {id(p): name for name, p in module.named_parameters()}
    groups = [[names[id(p)] for p in group["params"] if id(p) in names] for group in optimizer.param_groups]
    if sum(map(len, groups)) != sum(len(group["params"]) for group in optimizer.param_groups):
        raise Unsupported("the optimizer trains parameters that are not the model's")
    return groups


@dataclass(frozen=True, slots=True)
class _Run:
    """Neighbouring columns of one group that are updated together."""

    start: int
    stop: int
    group: int
    slot: int  # its first


@final
class FusedOptimizer:
    """Steps the members' torch optimizers as one.

    Every member keeps its torch optimizer: param groups are read from it (so any lr scheduler works), and its state
    are views of this one's, so its ``state_dict`` needs no special code. An optimizer without a kernel steps member by
    member on the views.

    Attributes:
        optimizers: The members' optimizers.
        reason: Why the members are stepped one by one; None when they are fused.

    Args:
        stack: The members' weights, grouped by ``group_names``.
        optimizers: One per member.
        clips: The members' limits of the gradient's norm; None clips nothing.
    """

    def __init__(
        self,
        stack: Stack,
        optimizers: Sequence[torch.optim.Optimizer],
        clips: Sequence[float | None] | None = None,
    ) -> None:
        self.stack = stack
        self.optimizers = list(optimizers)
        self.clips = list(clips) if clips is not None else [None] * len(self.optimizers)
        self.reason: str | None = None
        self.state: dict[str, Rows] = {}
        try:
            self._kind: Kind | None = _kind(self.optimizers)
        except Unsupported as error:
            self._kind, self.reason = None, str(error)
        self._runs: dict[tuple[bool, ...], list[_Run]] = {}
        self._used: tuple[bool, ...] | None = None
        self._moves: Tensor | None = None
        self._bound: list[list[tuple[nn.Parameter, dict[str, Any]]]] = []
        self._setup()

    def _setup(self) -> None:
        count = len(self.optimizers)
        device = self.stack.flat.device
        self._moves = None
        kind = self._kind
        self._values: list[dict[str, list[float]]] = []
        self.numbers: list[dict[str, Tensor]] = []
        self.flags: list[dict[str, bool]] = []
        self.clip = None
        if any(clip is not None for clip in self.clips):
            limits = [math.inf if clip is None else float(clip) for clip in self.clips]
            self.clip = torch.tensor(limits, dtype=torch.float64, device=device).unsqueeze(1)
        if kind is None:
            return
        scalar = torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32
        if not hasattr(self, "steps"):
            self.steps = torch.zeros((count, len(self.stack.slots)), dtype=scalar)
        for _ in self.optimizers[0].param_groups:  # one may be empty, or all frozen
            self._values.append({})
            self.numbers.append({})
            self.flags.append({})
        self.refresh()
        wanted = list(kind.state)
        for flag, name in kind.optional.items():
            if any(flags[flag] for flags in self.flags):
                wanted.append(name)
        if kind.momentum is not None and any(flags["moves"] for flags in self.flags):
            wanted.append(kind.momentum)
        for name in wanted:
            self.state.setdefault(name, torch.zeros_like(self.stack.flat))

    # ------------------------------------------------------------ hyperparameters

    def refresh(self) -> bool:
        """Read the members' hyperparameters again; returns whether a switch changed.

        Raises:
            Unsupported: Members no longer agree on a switch.
        """
        kind = self._kind
        if kind is None:
            return False
        changed = False
        for number, (values, tensors) in enumerate(zip(self._values, self.numbers, strict=True)):
            groups = [optimizer.param_groups[number] for optimizer in self.optimizers]
            now = {name: [_number(group, name) for group in groups] for name in kind.numbers}
            if now != values:
                if [m != 0 for m in now.get("momentum", ())] != [m != 0 for m in values.get("momentum", ())]:
                    self._moves, self._used = None, None  # who begins to move gets a buffer
                values.update(now)
                self._derive(kind, now, tensors)
            flags = {name: _agreed(self.optimizers, groups, name) for name in kind.flags}
            flags["decays"] = any(values["weight_decay"])
            if "momentum" in values:
                flags["moves"] = any(values["momentum"])
                flags["rests"] = flags["moves"] and not all(values["momentum"])
                flags["dampens"] = any(values.get("dampening", ()))
            if flags != self.flags[number]:
                changed = True
                self.flags[number] = flags
                if flags.get("moves") and kind.momentum is not None:
                    self.state.setdefault(kind.momentum, torch.zeros_like(self.stack.flat))
        return changed

    def _derive(self, kind: Kind, values: Mapping[str, list[float]], tensors: dict[str, Tensor]) -> None:
        """The kernel's coefficients, in place: a recorded step reads the same tensors."""
        rows = [
            kind.derive({name: column[member] for name, column in values.items()})
            for member in range(len(self.optimizers))
        ]
        flat = self.stack.flat
        for name in rows[0]:
            dtype = torch.float64 if name.endswith("(double)") else flat.dtype
            column = torch.tensor([[row[name]] for row in rows], dtype=dtype)
            if name in tensors:
                tensors[name].copy_(column)
            else:
                tensors[name] = column.to(flat.device)

    # ------------------------------------------------------------ stepping

    @torch.no_grad()
    def step(self, gradients: Sequence[Tensor | None]) -> None:
        """Update all members with the gradients of the stack's leaves (None: not used, left as it is)."""
        self.apply(self.join(gradients), tuple(g is not None for g in gradients))
        self.count(gradients)

    def join(self, gradients: Sequence[Tensor | None]) -> Rows:
        """The gradients laid out like the stack."""
        count, flat = len(self.stack), self.stack.flat
        pairs = list(zip(gradients, self.stack.slots, strict=True))
        if all(g is None or g.is_contiguous() for g in gradients):
            parts = [
                flat.new_zeros(count, slot.stop - slot.start) if g is None else g.reshape(count, -1)
                for g, slot in pairs
            ]
            return torch.cat(parts, 1)
        rows = torch.empty_like(flat)  # gradients of another layout (kernels) are copied once, not twice
        for g, slot in pairs:
            place = self.stack.view(rows, slot)
            if g is None:
                place.zero_()
            else:
                place.copy_(g)
        return rows

    def apply(self, rows: Rows, used: tuple[bool, ...]) -> None:
        """Clip and update. The steps' counts are ``count``'s."""
        if self.clip is not None:
            norms = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
            factor = (self.clip.to(rows.dtype) / (norms + 1e-6)).clamp_(max=1.0)
            rows.mul_(torch.where(torch.isinf(self.clip), torch.ones_like(factor), factor))
        kind = self._kind
        if kind is None:
            self._step_each(rows, used)
            return
        for run in self.runs(used):
            cut = slice(run.start, run.stop)
            state = {name: rows_[:, cut] for name, rows_ in self.state.items()}
            t = self.steps[:, run.slot : run.slot + 1].to(rows.device, torch.float64) + 1.0
            self._update(
                kind,
                run,
                Update(
                    self.stack.flat[:, cut],
                    rows[:, cut],
                    state,
                    self.numbers[run.group],
                    self.flags[run.group],
                    t,
                ),
            )

    def _update(self, kind: Kind, run: _Run, u: Update) -> None:
        """Run the kernel; weights of a group with a ``growth`` get longer by that share only (``Growth``)."""
        share = float(self.optimizers[0].param_groups[run.group].get("growth", 1.0))
        if share == 1:
            kind.kernel(u)
            return
        slots = [slot for slot in self.stack.slots if run.start <= slot.start < run.stop]
        parts = [u.p[:, slot.start - run.start : slot.stop - run.start] for slot in slots]
        before = [squared(part) for part in parts]
        if u.flags.get("decoupled") and u.flags["decays"]:
            before = [length * u.c["shrink"].square() for length in before]
        kind.kernel(u)
        for part, length in zip(parts, before, strict=True):
            part.mul_(shortening(length, squared(part), share))

    @torch.no_grad()
    def step_members(self, gradients: Sequence[Tensor | None], members: Sequence[int]) -> None:
        """Update these members alone, with gradients that have a row for each of them.

        The weights change behind autograd's back: what the other members have computed and not differentiated yet
        lies in the same tensors, and stays as it is.

        Raises:
            Unsupported: The optimizers can't be stepped as one (any more).
        """
        self.refresh()
        kind = self._kind
        if kind is None:
            raise Unsupported(self.reason or "the optimizers have no kernel")
        used = tuple(g is not None for g in gradients)
        rows = torch.cat(
            [
                self.stack.flat.new_zeros((len(members), slot.stop - slot.start))
                if g is None
                else g.reshape(len(members), -1)
                for g, slot in zip(gradients, self.stack.slots, strict=True)
            ],
            1,
        )
        flat = self.stack.flat.data
        index = None
        if list(members) != list(range(len(self.stack))):
            index = torch.tensor(list(members))
        there = None if index is None else index.to(flat.device)
        for run in self.runs(used):
            cut = slice(run.start, run.stop)
            whole = {"": flat[:, cut], **{name: rows_[:, cut] for name, rows_ in self.state.items()}}
            t = self.steps[:, run.slot : run.slot + 1]
            numbers = self.numbers[run.group]
            if index is not None and there is not None:
                t = t.index_select(0, index)
                numbers = {name: column.index_select(0, there) for name, column in numbers.items()}
            own = whole if there is None else {name: w.index_select(0, there) for name, w in whole.items()}
            state = {name: value for name, value in own.items() if name}
            t = t.to(flat.device, torch.float64) + 1.0
            self._update(kind, run, Update(own[""], rows[:, cut], state, numbers, self.flags[run.group], t))
            if there is not None:
                for name, value in own.items():
                    whole[name].index_copy_(0, there, value)
        done = self._done(used)
        if index is None:
            fresh = bool(((self.steps == 0) & (done > 0)).any())
            self.steps += done
        else:
            done = done.index_select(0, index)
            fresh = bool(((self.steps.index_select(0, index) == 0) & (done > 0)).any())
            self.steps[index] += done
        if fresh or used != self._used:
            self._used = used
            self.bind()

    def count(self, gradients: Sequence[Tensor | None]) -> None:
        """One more step is behind the members."""
        self.counted(tuple(g is not None for g in gradients))

    def counted(self, used: tuple[bool, ...]) -> None:
        """One more step is behind the members, of those parameters that were used."""
        if self._kind is None:
            return
        self.steps += self._done(used)
        if used != self._used:
            self._used = used
            self.bind()

    def _done(self, used: tuple[bool, ...]) -> Tensor:
        """What a step adds to the counts; of SGD, which has a state of its momentum alone, only where it moves."""
        if self._moves is None:
            shape = len(self.optimizers), len(self.stack.slots)
            self._moves = torch.ones(shape, dtype=self.steps.dtype)
            if self._kind is not None and not self._kind.counts:
                for number, slot in enumerate(self.stack.slots):
                    momentum = self._values[slot.group]["momentum"]
                    self._moves[:, number] = torch.tensor([float(m != 0) for m in momentum])
        return self._moves if all(used) else self._moves * torch.tensor(used, dtype=self.steps.dtype)

    def runs(self, used: tuple[bool, ...]) -> list[_Run]:
        """Which columns are updated together: those of a group, but for parameters that got no gradient."""
        found = self._runs.get(used)
        if found is None:
            # Parameters that joined late have a count of their own, and go by themselves.
            counts = self.steps.t().tolist()
            found = []
            for number, slot in enumerate(self.stack.slots):
                if not used[number]:
                    continue
                last = found[-1] if found else None
                if (
                    last is not None
                    and last.group == slot.group
                    and last.stop == slot.start
                    and counts[last.slot] == counts[number]
                ):
                    found[-1] = _Run(last.start, slot.stop, slot.group, last.slot)
                else:
                    found.append(_Run(slot.start, slot.stop, slot.group, number))
            self._runs = {used: found}
        return found

    def _step_each(self, rows: Rows, used: tuple[bool, ...]) -> None:
        for member, optimizer in enumerate(self.optimizers):
            for slot, has in zip(self.stack.slots, used, strict=True):
                p = self.stack.parameter(member, slot)
                p.grad = self.stack.view(rows[member], slot) if has else None
            with torch.enable_grad():
                optimizer.step()

    # ------------------------------------------------------------ members' own state

    def adopt(self, members: Sequence[int]) -> None:
        """Take over the state that these members' optimizers hold (after they loaded a checkpoint)."""
        kind = self._kind
        if kind is None:
            return
        if kind.momentum is not None and any(
            own.get(kind.momentum) is not None for m in members for own in self.optimizers[m].state.values()
        ):
            self.state.setdefault(kind.momentum, torch.zeros_like(self.stack.flat))
        with torch.no_grad():
            for member in members:
                for number, slot in enumerate(self.stack.slots):
                    own = self.optimizers[member].state.get(self.stack.parameter(member, slot), {})
                    for name, rows in self.state.items():
                        value = own.get(name)
                        target = self.stack.view(rows[member], slot)
                        if value is None:
                            target.zero_()
                        elif value.data_ptr() != target.data_ptr():
                            target.copy_(value)
                    started = any(value is not None for value in own.values())
                    self.steps[member, number] = float(own.get("step", started))
        self._runs = {}
        self.bind()

    def bind(self) -> None:
        """Let the members' optimizers hold views of this one's state, once there is a step behind them."""
        kind = self._kind
        if kind is None:
            return
        self._bound = [[] for _ in self.optimizers]
        for member, optimizer in enumerate(self.optimizers):
            for number, slot in enumerate(self.stack.slots):
                if not self.steps[member, number]:
                    continue
                p = self.stack.parameter(member, slot)
                own: dict[str, Any] = {"step": self.steps[member, number]} if kind.counts else {}
                momentum = self._values[slot.group].get("momentum")
                for name, rows in self.state.items():
                    still = name == kind.momentum and momentum is not None and not momentum[member]
                    if still and name not in optimizer.state.get(p, {}):
                        continue
                    own[name] = self.stack.view(rows[member], slot)
                if own:
                    optimizer.state[p] = own
                    self._bound[member].append((p, dict(own)))

    def is_bound(self, member: int) -> bool:
        """Whether a member's optimizer still holds the views: whoever owns it may have reset its state."""
        state = self.optimizers[member].state
        for p, views in self._bound[member] if self._bound else ():
            own = state.get(p, {})
            if own.keys() != views.keys() or any(own[name] is not view for name, view in views.items()):
                return False
        return True

    def keep(self, members: Sequence[int]) -> list[torch.optim.Optimizer]:
        """Go on with these members, after the stack did; returns the others' optimizers, standing on their own."""
        kept = set(members)
        gone = [o for i, o in enumerate(self.optimizers) if i not in kept]
        for optimizer in gone:
            release(optimizer)
        rows = torch.as_tensor(list(members), dtype=torch.long)
        self.optimizers = [self.optimizers[i] for i in members]
        self.clips = [self.clips[i] for i in members]
        if self._kind is not None:
            self.state = {n: s.index_select(0, rows.to(s.device)) for n, s in self.state.items()}
            self.steps = self.steps.index_select(0, rows)
        self._setup()
        self.bind()
        return gone

    def add(
        self, optimizers: Sequence[torch.optim.Optimizer], clips: Sequence[float | None] | None = None
    ) -> None:
        """Take more members in, after the stack did."""
        before = len(self.optimizers)
        self.optimizers += optimizers
        self.clips += list(clips) if clips is not None else [None] * len(optimizers)
        if self._kind is not None:
            _kind(self.optimizers)
            more = len(optimizers)
            self.state = {n: torch.cat([s, s.new_zeros((more, s.shape[1]))]) for n, s in self.state.items()}
            self.steps = torch.cat([self.steps, self.steps.new_zeros((more, self.steps.shape[1]))])
        self._setup()
        self.adopt(range(before, len(self.optimizers)))


def release(optimizer: torch.optim.Optimizer) -> None:
    """Give an optimizer state tensors of its own."""
    for own in optimizer.state.values():
        for name, value in own.items():
            if isinstance(value, Tensor):
                own[name] = value.clone()


def _kind(optimizers: Sequence[torch.optim.Optimizer]) -> Kind:
    kinds = {type(optimizer) for optimizer in optimizers}
    if len(kinds) > 1:
        raise Unsupported(
            f"members have different optimizers: {', '.join(sorted(k.__name__ for k in kinds))}"
        )
    found = _KINDS.get(next(iter(kinds)))
    if found is None:
        name = next(iter(kinds)).__name__
        raise Unsupported(f"{name} has no fused kernel: it steps member by member")
    shapes = {tuple(len(group["params"]) for group in optimizer.param_groups) for optimizer in optimizers}
    if len(shapes) > 1:
        raise Unsupported("members' optimizers have different parameter groups")
    for optimizer in optimizers:
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        if not all(only_growth(list(each.values())) for each in hooks):
            raise Unsupported("an optimizer has step hooks")
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise Unsupported("an optimizer is differentiable")
    for number in range(len(optimizers[0].param_groups)):
        groups = [optimizer.param_groups[number] for optimizer in optimizers]
        if len({group.get("growth", 1.0) for group in groups}) > 1:
            raise Unsupported("members' weights may grow by different shares")
        for flag in found.flags:
            _agreed(optimizers, groups, flag)
    return found


def _number(group: Mapping[str, Any], name: str) -> float:
    if name == "beta1":
        return float(group["betas"][0])
    if name == "beta2":
        return float(group["betas"][1])
    return float(group[name])


def _agreed(optimizers: Sequence[Any], groups: Sequence[Mapping[str, Any]], name: str) -> bool:
    if name == "decoupled":
        decoupled = isinstance(optimizers[0], torch.optim.AdamW)
        values = {bool(group.get("decoupled_weight_decay", decoupled)) for group in groups}
    else:
        values = {bool(group[name]) for group in groups}
    if len(values) > 1:
        raise Unsupported(f"members' optimizers differ in {name}")
    return values.pop()

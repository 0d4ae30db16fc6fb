"""Lanes: models whose training loops are apart, and whose forward, backward and update are computed as one.

A loop that calls its model gets a copy of its row of the fused output, which is where its own autograd graph begins:
``loss.backward()`` leaves the gradient of that row, and the rows of all lanes are differentiated together. Whatever a
loop does with its model beside that (reads parameters, adds a penalty of them to the loss, loads a state, calls a
submodule) is ordinary torch on parameters that are views of the stack.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.core.errors import Unsupported
from penstock.model._fuse import Fusion, _attributes, _differences, unfusable
from penstock.model._optimize import FusedOptimizer, group_names, release
from penstock.model._stack import _same_tensors, detach
from penstock.model._watch import DRAWS, Watch, generators, shared

_PLAIN = (bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size, slice)
Signature: TypeAlias = tuple[Any, ...]


class Call(NamedTuple):
    """A lane's call of its model.

    Attributes:
        leaves: Its tensors and other arguments.
        spec: How they are put together; None: they are the positional arguments.
        signature: What calls must agree on to be one.
    """

    leaves: tuple[Any, ...]
    spec: Any
    signature: Signature


@final
class Box:
    """What a lane waits for from one fused forward: gradients of its rows of the outputs."""

    __slots__ = ("__weakref__", "done", "flight", "leaves", "member", "stamp")

    def __init__(self, flight: Flight, member: Member) -> None:
        self.flight = flight
        self.member = member
        self.stamp = member.stamp()
        self.leaves: list[weakref.ref[Tensor] | None] = []
        self.done = False

    def arrived(self) -> tuple[Tensor | None, ...] | None:
        """The gradients that the lane's own backward has left; None if it did not come by."""
        found: list[Tensor | None] = []
        for ref in self.leaves:
            leaf = None if ref is None else ref()
            if leaf is None:
                found.append(None)
                continue
            leaf._fix_weakref()  # type: ignore[attr-defined]
            found.append(leaf.grad)
            leaf.grad = None
        return tuple(found) if any(g is not None for g in found) else None


@final
class Flight:
    """One fused forward that is yet to be differentiated."""

    __slots__ = ("freed", "home", "leaves", "open", "outputs", "rows", "stacked")

    def __init__(self, home: FusedLanes, outputs: list[Tensor], members: Sequence[Member]) -> None:
        self.home = home
        self.outputs = outputs
        self.leaves = home.fusion.stack.leaves  # as it was: members may leave before it lands
        self.rows = {member: row for row, member in enumerate(members)}  # of the outputs
        self.stacked = {member: member.number for member in members}  # of the leaves
        self.open: list[weakref.ref[Box]] = []
        self.freed = False


def untouched(tensor: Tensor) -> tuple[Box, int] | None:
    """Whose output this very tensor is, and which one, if nobody has done anything to it: no need of an engine then."""
    found: tuple[Box, int] | None = tensor.__dict__.get("_penstock_out")
    if found is None or tensor._version or tensor._backward_hooks or tensor.retains_grad or tensor.dim():
        return None
    return found


class Landing(NamedTuple):
    """A lane's backward: the gradients of its part of a flight, and whether it will come again."""

    box: Box
    gradients: tuple[Tensor | None, ...]
    retain: bool


@final
class Member:
    """One lane's model and optimizer within the group.

    Attributes:
        module: The model, its tensors views of the stack.
        optimizer: Its optimizer.
        number: Its row of the stack.
        parameters: Those that are trained, in the order of the stack.
        boxes: What it has not differentiated yet.
        loaded: Its optimizer's state is not the group's: it has loaded or stepped by itself.
    """

    def __init__(self, group: FusedLanes, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.group: FusedLanes | None = group
        self.module = module
        self.optimizer = optimizer
        self.number = 0
        self.parameters: list[nn.Parameter] = []
        self.boxes: list[weakref.ref[Box]] = []
        self.loaded = False
        self.steps = 0
        self._modules = list(module.modules())
        self._hooks = [
            hooks
            for sub in self._modules[1:]  # the model's own are called by its lane
            for hooks in (
                sub._forward_hooks,
                sub._forward_pre_hooks,
                sub._backward_hooks,
                sub._backward_pre_hooks,
            )
        ]
        self._hooked = [dict(hooks) for hooks in self._hooks]  # a twin's multipliers
        self._holders: list[Any] = [
            held for sub in self._modules for held in (sub._parameters, sub._buffers, sub._modules)
        ]
        self._held: list[dict[str, Any]] = [dict(held) for held in self._holders]
        self._tensors = [t for held in self._held for t in held.values() if isinstance(t, Tensor)]
        self._trained = [t.requires_grad for t in self._tensors]
        self._wheres: list[int] = []
        self._flags: tuple[bool, ...] = ()
        self._watch = Watch(())

    def bind(self, number: int) -> None:
        """The stack has been laid out anew."""
        group = self.group
        if group is None:
            return
        self.number = number
        self.parameters = [group.fusion.stack.parameter(number, slot) for slot in group.fusion.stack.slots]
        self._wheres = [t.data_ptr() for t in self._tensors]

    def watch(self) -> None:
        """Remember how the model is: what changes it later is seen."""
        self._watch = Watch(self._modules)
        self._flags = tuple(held["training"] for held in self._watch.held)

    def stamp(self) -> tuple[int, int]:
        """Differs once the weights have changed."""
        return self.steps, sum([p._version for p in self.parameters])

    def in_place(self) -> bool:
        """Whether its parameters still lie in the stack."""
        return self.holds() and [t.data_ptr() for t in self._tensors] == self._wheres

    def holds(self) -> bool:
        """Whether its tensors are the same objects."""
        try:
            return self._holders == self._held  # compares what is in the dicts by identity first
        except (RuntimeError, ValueError, TypeError):
            return False

    def changed(self) -> str | None:
        """Why the model is not the one that was fused, or None."""
        tensors = self._tensors
        if not self.in_place():
            return "a layer, parameter or buffer has been replaced"
        if [t.requires_grad for t in tensors] != self._trained:
            return "a parameter has been frozen or set free"
        for p in self.parameters:
            if p._backward_hooks or p._post_accumulate_grad_hooks:
                return "a parameter has a gradient hook"
        if self._hooks != self._hooked:
            return "a layer has hooks"
        flags = tuple([sub.training for sub in self._modules])
        if flags != self._flags:
            self._flags = flags
            for held, flag in zip(self._watch.held, flags, strict=True):
                held["training"] = flag
        found = self._watch.odd()
        return None if found is None else f"a {type(found[0]).__name__} has been changed: {found[1]}"

    @property
    def flags(self) -> tuple[bool, ...]:
        """Which layers are in training mode."""
        return self._flags

    def landings(self, retain: bool) -> list[Landing]:
        """What the lane's own backward has left at the fused outputs."""
        found = []
        for ref in self.boxes:
            box = ref()
            gradients = None if box is None else box.arrived()
            if box is not None and gradients is not None:
                found.append(Landing(box, gradients, retain))
        return found

    def used(self) -> tuple[bool, ...]:
        """Which parameters have a gradient."""
        return tuple([p.grad is not None for p in self.parameters])


@final
@dataclass(frozen=True, slots=True)
class LaneCheck:
    """A fused forward and backward against one by one, on throw-away copies in float64 where they compute in it.

    Attributes:
        ok: Whether they agree.
        error: The largest difference, relative to the size of the tensor it is in (absolute below 1).
        dtype: The precision.
        reason: Why not; empty if they do.
    """

    ok: bool
    error: float
    dtype: str
    reason: str = ""

    def record(self) -> dict[str, Any]:
        """JSON-able values for the journal."""
        error = self.error if math.isfinite(self.error) else None
        return {"ok": self.ok, "error": error, "dtype": self.dtype, "reason": self.reason}


@final
class FusedLanes:
    """Models of one structure, called, differentiated and updated together or in part.

    Attributes:
        fusion: The models.
        optimizer: Their optimizers.
        members: In the order of the stack.
        refused: Signatures of calls that are not fused, and why.
        checks: The comparisons made, by signature.
        flown: Signatures of calls that have been fused.

    Args:
        pairs: Model and optimizer of each lane.

    Raises:
        Unsupported: They can't be fused; the text is the reason.
    """

    def __init__(self, pairs: Sequence[tuple[nn.Module, torch.optim.Optimizer]]) -> None:
        modules = [module for module, _ in pairs]
        reason = unfusable(modules[0])
        if reason is not None:
            raise Unsupported(reason)
        self.fusion = Fusion(modules, groups=group_names(*pairs[0]))
        self.optimizer = FusedOptimizer(self.fusion.stack, [optimizer for _, optimizer in pairs])
        self.optimizer.adopt(range(len(pairs)))
        self.members = [Member(self, module, optimizer) for module, optimizer in pairs]
        for number, member in enumerate(self.members):
            member.bind(number)
        self.refused: dict[Signature, str] = {}
        self.checks: dict[Signature, LaneCheck] = {}
        self.flown: set[Signature] = set()
        self._template = list(self.fusion._template.modules())
        self._watch: Watch | None = None  # of the template
        self._flags: tuple[bool, ...] = ()
        self._last: tuple[list[Member], list[Tensor | None], list[Sequence[Tensor] | None]] | None = None

    # ------------------------------------------------------------ members

    def leave(self, members: Sequence[Member]) -> None:
        """Let these go, standing on their own; the others are re-indexed and otherwise untouched."""
        going = {id(member) for member in members}
        kept = [member for member in self.members if id(member) not in going]
        grads = [(p, p.grad) for member in self.members for p in member.parameters]
        if kept:
            self._adopt()
            numbers = [member.number for member in kept]
            self.fusion.keep(numbers)
            self.optimizer.keep(numbers)
            self._watch = None
        else:
            for member in members:
                detach(member.module)
                release(member.optimizer)
        for p, grad in grads:  # leaving is no step: gradients stay
            p.grad = grad
        self._last = None
        for member in members:
            member.group = None
        self.members = kept
        for number, member in enumerate(kept):
            member.bind(number)

    # ------------------------------------------------------------ forward

    def call(self, member: Member, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | str:
        """A lane's call of its model; text: why it must be made by the lane itself."""
        changed = member.changed()
        if changed is not None:
            return changed
        if not kwargs and all(isinstance(arg, Tensor) for arg in args):
            leaves, spec = args, None
        else:
            found, spec = pytree.tree_flatten((args, kwargs))
            leaves = tuple(found)
        facts: list[Any] = []
        tensors = 0
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                if leaf.requires_grad and torch.is_grad_enabled():
                    return "an input needs a gradient"
                if leaf.layout is not torch.strided:
                    return "an input is sparse"
                tensors += 1
                facts.append((leaf.shape, leaf.dtype, leaf.device))
            elif isinstance(leaf, _PLAIN):
                facts.append((type(leaf), leaf))
            else:
                return f"an argument is a {type(leaf).__name__}"
        if not tensors:
            return "it is called without tensors"
        device = self.fusion.stack.flat.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        signature = (
            None if spec is None else repr(spec),
            tuple(facts),
            member.flags,
            torch.is_grad_enabled(),
            cast,
            torch.get_default_dtype(),
        )
        reason = self.refused.get(signature)
        return Call(tuple(leaves), spec, signature) if reason is None else reason

    def forward(self, members: Sequence[Member], calls: Sequence[Call], states: list[Tensor]) -> list[Any]:
        """What each member's model returns.

        Args:
            members: Who calls.
            calls: Their calls, of one signature.
            states: Those of their random generators; replaced by what they are afterwards.

        Raises:
            Unsupported: It can't be fused. Nothing has been changed.
        """
        first = calls[0]
        _, _, flags, grad, cast, _ = first.signature
        rows = None if len(members) == len(self.members) else [member.number for member in members]
        if rows is None:
            order = sorted(range(len(members)), key=lambda i: members[i].number)
        else:
            order = list(range(len(members)))
        chosen = [members[i] for i in order]
        columns = list(zip(*(calls[i].leaves for i in order), strict=True))
        real = [at for at, leaf in enumerate(first.leaves) if isinstance(leaf, Tensor)]
        with torch.no_grad():
            given = [torch.stack(columns[at]) for at in real]
        draws = self.fusion.draws
        generators = [draws.generators[member.number] for member in chosen]
        watch = self._mode(flags)
        before = [(stacked, stacked.clone()) for stacked in self.fusion.stack.others.values()]
        try:
            with (
                torch.set_grad_enabled(grad),
                _casting(self.fusion.stack.flat.device.type, cast),
                draws.late(list(zip(generators, [states[i] for i in order], strict=True))) as late,
            ):
                result = self.fusion(_caller(first, real), *given, rows=rows)
            leaves, spec = pytree.tree_flatten(result)
            _verify(leaves, watch, given)
        except Unsupported:
            with torch.no_grad():
                for stacked, old in before:
                    stacked.data.copy_(old)
            raise
        if late.loaded:
            for i, generator in zip(order, generators, strict=True):
                states[i] = generator.get_state()
        outs: list[Any] = [None] * len(members)
        for i, out in zip(order, self._hand_out(chosen, leaves, grad), strict=True):
            single = spec.is_leaf() if hasattr(spec, "is_leaf") else False
            outs[i] = out[0] if single else pytree.tree_unflatten(out, spec)
        return outs

    def _hand_out(self, members: Sequence[Member], leaves: list[Any], grad: bool) -> Iterator[list[Any]]:
        """Each member's row of the outputs, with the box that waits for its gradients."""
        flown = [leaf for leaf in leaves if grad and isinstance(leaf, Tensor) and leaf.requires_grad]
        flight = Flight(self, flown, members) if flown else None
        pieces = [leaf.detach().unbind(0) if isinstance(leaf, Tensor) else None for leaf in leaves]
        for row, member in enumerate(members):
            box = None if flight is None else Box(flight, member)
            own: list[Any] = []
            for leaf, parts in zip(leaves, pieces, strict=True):
                if parts is None:
                    own.append(leaf)
                elif box is not None and leaf.requires_grad:
                    start = parts[row].requires_grad_()
                    start.__dict__["_penstock"] = box  # it lives as long as the lane's graph does
                    out = start.clone()
                    out.__dict__["_penstock_out"] = box, len(box.leaves)
                    box.leaves.append(weakref.ref(start))
                    own.append(out)
                else:
                    own.append(parts[row].clone())  # no view: a lane may write into it
            if box is not None and flight is not None:
                member.boxes = [ref for ref in member.boxes if ref() is not None]
                member.boxes.append(weakref.ref(box))
                flight.open.append(member.boxes[-1])
            yield own

    def _mode(self, flags: tuple[bool, ...]) -> Watch:
        if flags != self._flags or self._watch is None:
            self._flags = flags
            for sub, flag in zip(self._template, flags, strict=True):
                sub.training = flag
            self._watch = Watch(self._template)
        return self._watch

    # ------------------------------------------------------------ backward

    def backward(self, landings: Sequence[Landing]) -> None:
        """Differentiate, and add to the members' gradients.

        Raises:
            RuntimeError: A part of it has been differentiated before.
        """
        jobs: dict[tuple[int, tuple[bool, ...]], list[Landing]] = {}
        for landing in landings:
            pattern = tuple(g is not None for g in landing.gradients)
            jobs.setdefault((id(landing.box.flight), pattern), []).append(landing)
        for job in jobs.values():
            for landing in job:
                landing.box.done = not landing.retain
            self._land(job)

    def _land(self, job: Sequence[Landing]) -> None:
        flight = job[0].box.flight
        given, outputs = [], []
        ordered = sorted(job, key=lambda landing: flight.rows[landing.box.member])
        whole = len(ordered) == len(flight.rows)
        for at, g in enumerate(ordered[0].gradients):
            if g is None:
                continue
            output = flight.outputs[at]
            if whole:
                gradient = torch.stack([landing.gradients[at] for landing in ordered])  # type: ignore[misc]
            else:  # what the others hold of the flight gets nothing, and gives nothing
                gradient = torch.zeros_like(output)
                for landing in ordered:
                    own = landing.gradients[at]
                    if own is not None:
                        gradient[flight.rows[landing.box.member]].copy_(own)
            outputs.append(output)
            given.append(gradient)
        retain = any((box := ref()) is not None and not box.done for ref in flight.open)
        found: Sequence[Tensor | None] = torch.autograd.grad(
            outputs, flight.leaves, given, retain_graph=retain, allow_unused=True
        )
        flight.freed = not retain
        members = [landing.box.member for landing in ordered]
        everyone = len(members) == len(self.members) and flight.leaves is self.fusion.stack.leaves
        pieces: list[Sequence[Tensor] | None] = [None if g is None else g.unbind(0) for g in found]
        empty = True
        for slot, parts in enumerate(pieces):
            if parts is None:
                continue
            for member in members:
                p = member.parameters[slot]
                grad = p.grad
                if grad is None:
                    p.grad = parts[flight.stacked[member]]
                else:
                    empty = False
                    grad.add_(parts[flight.stacked[member]])
        if empty and everyone:
            self._last = (self.members, list(found), pieces)

    # ------------------------------------------------------------ the update

    def step(self, members: Sequence[Member]) -> None:
        """Update these members, whose gradients are those of the same parameters.

        Raises:
            Unsupported: Their optimizers can't be stepped as one.
        """
        if self.optimizer.reason is not None:
            raise Unsupported(self.optimizer.reason)
        self.optimizer.refresh()
        self._adopt()
        ordered = sorted(members, key=lambda member: member.number)
        self.optimizer.step_members(self._gradients(ordered), [member.number for member in ordered])
        for member in ordered:
            member.steps += 1

    def _adopt(self) -> None:
        """Take over what members' optimizers have loaded or done by themselves, before views are put in its place."""
        if self.optimizer.reason is None:
            for member in self.members:
                member.loaded = member.loaded or not self.optimizer.is_bound(member.number)
        loaded = [member for member in self.members if member.loaded and member.holds()]
        if loaded and self.optimizer.reason is None:
            self.optimizer.adopt([member.number for member in loaded])
        for member in loaded:
            member.loaded = False

    def _gradients(self, members: Sequence[Member]) -> list[Tensor | None]:
        """The members' gradients, stacked: as they came where nobody has put others in their places."""
        if self._last is not None and len(members) == len(self.members):
            _, stacked, pieces = self._last
            if all(
                _is_row(p.grad, whole, parts, member.number)
                for member in members
                for p, whole, parts in zip(member.parameters, stacked, pieces, strict=True)
            ):
                return stacked
        found: list[Tensor | None] = []
        for slot in range(len(self.fusion.stack.slots)):
            grads = [member.parameters[slot].grad for member in members]
            found.append(None if grads[0] is None else torch.stack(grads))  # type: ignore[arg-type]
        return found

    # ------------------------------------------------------------ before it is trusted

    def check(
        self, members: Sequence[Member], calls: Sequence[Call], *, tolerance: float = 1e-10
    ) -> LaneCheck:
        """Compare the fused call, and its gradients, with one by one; leaves no trace."""
        found = LaneCheck(False, math.inf, "float64", "it computes in no precision")
        chosen = self._two(members)
        for dtype, most in ((torch.float64, tolerance), (None, 1e-4)):
            name = str(dtype or self.fusion.stack.flat.dtype).split(".")[-1]
            try:
                error = self._compare([members[i] for i in chosen], [calls[i] for i in chosen], dtype)
            except Unsupported as refused:
                return LaneCheck(False, math.inf, name, str(refused))
            except (RuntimeError, TypeError, ValueError) as failed:
                text = f"{type(failed).__name__}: {failed}".split("\n")[0]
                found = LaneCheck(False, math.inf, name, text)
                continue
            ok = error <= most
            return LaneCheck(ok, error, name, "" if ok else f"fused and unfused differ by {error:.3g}")
        return found

    def _two(self, members: Sequence[Member]) -> tuple[int, int]:
        """Which to compare: the first, and one with other rates where there is one, for these take other ways."""
        settings = [own for _, _, own in self.fusion._rates] + [own for *_, own in self.fusion._numbers]
        numbers = [[own.values[member.number] for own in settings] for member in members]
        return 0, next((i for i in range(1, len(members)) if numbers[i] != numbers[0]), 1)

    def _compare(self, members: Sequence[Member], calls: Sequence[Call], dtype: torch.dtype | None) -> float:
        def cast(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            own = leaf.detach().clone()  # a model may write into its inputs
            return own.to(dtype) if own.is_floating_point() and dtype is not None else own

        _, _, flags, grad, autocast, _ = calls[0].signature
        if dtype is not None:
            autocast = None
        device = self.fusion.stack.flat.device.type

        def copies() -> list[nn.Module]:
            made = [copy.deepcopy(member.module) for member in members]
            for module in made:
                module.to(dtype)
                for hooks in (
                    module._forward_hooks,
                    module._forward_pre_hooks,
                    module._backward_hooks,
                    module._backward_pre_hooks,
                ):
                    hooks.clear()  # the lane's affair
                for p in module.parameters():
                    p.grad = None
                for sub, flag in zip(module.modules(), flags, strict=True):
                    sub.training = flag
            return made

        alone, together = copies(), copies()
        cut = [call._replace(leaves=tuple(cast(leaf) for leaf in call.leaves)) for call in calls]
        real = [at for at, leaf in enumerate(cut[0].leaves) if isinstance(leaf, Tensor)]
        stacked = [torch.stack([call.leaves[at] for call in cut]) for at in real]
        fusion = Fusion(together, seeds=range(len(members)))
        template = list(fusion._template.modules())
        for sub, flag in zip(template, flags, strict=True):
            sub.training = flag
        watch = Watch(template)
        worst = 0.0
        drawn = generators()
        with torch.set_grad_enabled(grad), _casting(device, autocast):
            fused = pytree.tree_leaves(fusion(_caller(cut[0], real), *stacked))
            _verify(fused, watch, stacked)
            if drawn != generators():
                raise Unsupported(DRAWS)
            backs = [
                (at, torch.randn_like(leaf))
                for at, leaf in enumerate(fused)
                if isinstance(leaf, Tensor) and leaf.requires_grad
            ]
            gradients: Sequence[Tensor | None] = ()
            if backs:
                gradients = torch.autograd.grad(
                    [fused[at] for at, _ in backs],
                    fusion.stack.leaves,
                    [g for _, g in backs],
                    allow_unused=True,
                )
            for number, module in enumerate(alone):
                torch.manual_seed(number)
                args, kwargs = _arguments(cut[number], cut[number].leaves)
                out = pytree.tree_leaves(module(*args, **kwargs))
                if len(out) != len(fused):
                    return math.inf
                for mine, theirs in zip(out, fused, strict=True):
                    if isinstance(mine, Tensor):
                        worst = max(worst, _difference(mine, theirs[number], 1.0))
                    elif mine != theirs:
                        return math.inf
                if backs:
                    wanted = [module.get_parameter(slot.names[0]) for slot in fusion.stack.slots]
                    own = torch.autograd.grad(
                        [out[at] for at, _ in backs], wanted, [g[number] for _, g in backs], allow_unused=True
                    )
                    size = max([1.0, *(_size(g) for g in own if g is not None)])
                    for a, b in zip(own, gradients, strict=True):
                        if (a is None) != (b is None):
                            return math.inf
                        if a is not None and b is not None:
                            worst = max(worst, _difference(a, b[number], size))
                for mine, theirs in zip(_tensors(module), _tensors(together[number]), strict=True):
                    worst = max(worst, _difference(mine, theirs, 1.0))
        return worst


def _tensors(module: nn.Module) -> tuple[Tensor, ...]:
    """What a forward may change: batch norm's statistics, a frozen teacher that follows its student."""
    return *module.parameters(), *module.buffers()


def _is_row(grad: Tensor | None, whole: Tensor | None, parts: Sequence[Tensor] | None, row: int) -> bool:
    """Whether a gradient is the one that came, and lies where it lay: ``p.grad.data = ...`` keeps the object."""
    if grad is None or whole is None or parts is None:
        return grad is None and whole is None
    here = whole.data_ptr() + row * whole.stride(0) * whole.element_size()
    return grad is parts[row] and grad.data_ptr() == here


def alike(
    pairs: Sequence[tuple[nn.Module, torch.optim.Optimizer]],
) -> tuple[list[list[int]], dict[int, str]]:
    """Which of these can be fused: groups of at least 2 by number, and why the rest can't."""
    groups: list[list[int]] = []
    reasons: dict[int, str] = {}
    facts: list[Any] = [None] * len(pairs)
    for number, (module, optimizer) in enumerate(pairs):
        reason = unfusable(module)
        try:
            names = group_names(module, optimizer) if reason is None else []
        except Unsupported as error:
            reason = str(error)
        if reason is not None:
            reasons[number] = reason
            continue
        facts[number] = _attributes(module)
        for group in groups:
            other, stepper = pairs[group[0]]
            try:
                _same_tensors([other, module])
                _differences([facts[group[0]], facts[number]])
                if type(stepper) is not type(optimizer) or group_names(other, stepper) != names:
                    raise Unsupported("members have different optimizers")
            except Unsupported as error:
                reasons[number] = str(error)
                continue
            group.append(number)
            reasons.pop(number, None)
            break
        else:
            groups.append([number])
    for group in groups:
        if len(group) == 1:
            reasons.setdefault(group[0], "there is no other lane like it")
    return [group for group in groups if len(group) > 1], reasons


def _verify(leaves: Sequence[Any], watch: Watch, given: Sequence[Tensor]) -> None:
    """The forward must have given all it has to say in what it returns; ``given`` are copies of its lanes' inputs.

    Raises:
        Unsupported: It has not.
    """
    for leaf in leaves:
        if not isinstance(leaf, (Tensor, *_PLAIN)):
            raise Unsupported(f"the model returns a {type(leaf).__name__}, which can't be split into members")
    found = watch.odd()
    if found is not None:
        watch.restore()
        raise shared(*found)
    if any(tensor._version for tensor in given):
        raise Unsupported("the model writes into its inputs, which its lane may go on with")


def _caller(call: Call, real: Sequence[int]) -> Callable[..., Any]:
    if call.spec is None:
        return _plainly
    leaves = list(call.leaves)

    def run(model: Any, *given: Tensor) -> Any:
        for at, tensor in zip(real, given, strict=True):
            leaves[at] = tensor
        args, kwargs = pytree.tree_unflatten(leaves, call.spec)
        return model(*args, **kwargs)

    return run


def _plainly(model: Any, *given: Tensor) -> Any:
    return model(*given)


def _arguments(call: Call, leaves: Sequence[Any]) -> tuple[Any, Any]:
    return (tuple(leaves), {}) if call.spec is None else pytree.tree_unflatten(list(leaves), call.spec)


@contextmanager
def _casting(device: str, dtype: torch.dtype | None) -> Iterator[None]:
    if dtype is None:
        yield
        return
    with torch.autocast(device, dtype=dtype):
        yield


def _size(x: Tensor) -> float:
    return (
        float(torch.nan_to_num(x.detach(), nan=0.0, posinf=0.0, neginf=0.0).abs().max()) if x.numel() else 0.0
    )


def _difference(a: Tensor, b: Any, least: float) -> float:
    if not isinstance(b, Tensor) or a.shape != b.shape:
        return math.inf
    x, y = a.detach().double(), b.detach().double()
    if not torch.equal(torch.isfinite(x), torch.isfinite(y)):
        return math.inf
    return _size(x - y) / max(least, _size(x))


__all__ = [
    "Box",
    "Call",
    "Flight",
    "FusedLanes",
    "Landing",
    "LaneCheck",
    "Member",
    "alike",
    "untouched",
]

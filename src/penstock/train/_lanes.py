"""Lanes: training functions that take turns in one process and meet in fused calls of their models.

Each function runs in a greenlet of its own. Where it calls its prepared model, differentiates its loss or steps its
optimizer it is parked; once every lane is parked or has ended, requests of one kind are computed as one (Hydro 4.2,
inter-trial fusion) and their lanes go on. Nobody ever waits for somebody who is not there: in each round at least one
request is answered, alone if need be, so that no order of calls, phases and exits can block.
"""

from __future__ import annotations

import contextvars
import copy
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, final

import greenlet
import torch
from torch import Tensor, nn

from penstock.core.errors import InvalidInput, Unsupported
from penstock.model._lanes import Call, FusedLanes, Landing, Member, Signature, alike, untouched
from penstock.train._generators import Generators

_PATIENCE = 32  # rounds after which a request that few share is answered
_TRIES = 3  # of a call that was fused before
_ORDER = {"backward": 0, "step": 1, "forward": 2}  # of what is answered first, where as many wait for each
_ALONE = object()
_functorch: Any = torch._C._functorch
_pop_mode: Any = torch.overrides._pop_mode
_push_mode: Any = torch.overrides._push_mode
_saved_hooks: Any = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda ignored: None)


class Again(BaseException):
    """The lane does what can't be done in one: its function is run again, by itself."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class _Request(NamedTuple):
    kind: str
    member: Member | None
    what: Any
    key: tuple[Any, ...]


@final
class Lane:
    """One training function among others.

    Attributes:
        number: Its number.
        result: What the function returned.
        error: What it raised.
        again: Why it must be run by itself.
        prepared: Models that it has prepared.
        fused: Fused calls of its models so far.
    """

    def __init__(self, hub: Hub, number: int, function: Callable[[Lane], Any]) -> None:
        self.number = number
        self.result: Any = None
        self.error: BaseException | None = None
        self.again: str | None = None
        self.prepared = 0
        self.fused = 0
        self.members: list[Member] = []
        self.request: _Request | None = None
        self.waited = 0
        self.states: tuple[Any, ...] | None = None
        self.share_s = 0.0  # its part of the fused calls since it was parked
        self.parked_s = 0.0
        self.resumed_s: float | None = None
        self.busy_s = 0.0
        self._hub = hub
        self._function = function
        self._said: set[str] = set()
        self.greenlet = greenlet.greenlet(self._main, parent=hub.greenlet)
        self.greenlet.gr_context = contextvars.copy_context()

    def _main(self, _: Any) -> None:
        try:
            self.result = self._function(self)
        except Again as again:
            self.again = again.reason
        except greenlet.GreenletExit:
            self.again = "the lanes were closed"
        except BaseException as error:  # a lane's failure is its own
            self.error = error

    def prepare(
        self, model: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[nn.Module, torch.optim.Optimizer]:
        """Let calls of the model and steps of the optimizer meet those of the other lanes."""
        if not isinstance(model, nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidInput(
                "run.prepare(model, optimizer) takes a torch module and a torch optimizer, got "
                f"{type(model).__name__} and {type(optimizer).__name__}."
            )
        if isinstance(model.__dict__.get("forward"), _Forward):
            raise InvalidInput(
                "This model has been prepared already; call run.prepare() once for each model."
            )
        self.prepared += 1
        if self.here():
            self.park(_Request("prepare", None, (model, optimizer), ("prepare", self.prepared)))
        return model, optimizer

    def own(self, state: Any) -> Any:
        """A state to save with tensors of its own: a saved view would carry the memory of all lanes along."""
        return _owned(state)

    def say(self, reason: str) -> None:
        """Tell once why something of the lane is not fused."""
        if reason not in self._said:
            self._said.add(reason)
            self._hub.note({"lane": self.number, "reason": reason})

    def busy(self) -> float:
        """Seconds that it has run or was computed for."""
        running_s = 0.0 if self.resumed_s is None else time.perf_counter() - self.resumed_s
        return self.busy_s + running_s

    # ------------------------------------------------------------ the lane's side

    def here(self) -> bool:
        """Whether the lane may be parked: it runs in its own greenlet, outside of anything that is torch's."""
        return (
            greenlet.getcurrent() is self.greenlet
            and torch._C._current_graph_task_id() == -1
            and _functorch.maybe_current_level() is None
            and not torch._C._len_torch_dispatch_stack()
            and _saved_hooks(True) is None
        )

    def park(self, request: _Request) -> Any:
        """Wait for the answer; the others don't see what is set here for this thread."""
        grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
        device = self._hub.device
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        if cast is not None:
            torch.set_autocast_enabled(device, False)
        if dtype is not self._hub.dtype:
            torch.set_default_dtype(self._hub.dtype)
        modes = [_pop_mode() for _ in range(torch._C._len_torch_function_stack())]
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                answer = self._hub.greenlet.switch(request)
        else:
            answer = self._hub.greenlet.switch(request)
        for mode in reversed(modes):
            _push_mode(mode)
        if cast is not None:
            torch.set_autocast_dtype(device, cast)
            torch.set_autocast_enabled(device, True)
            torch.clear_autocast_cache()  # others may have left theirs
        if torch.is_grad_enabled() is not grad:
            torch.set_grad_enabled(grad)
        if torch.get_default_dtype() is not dtype:
            torch.set_default_dtype(dtype)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def land(self, retain: bool) -> None:
        """Differentiate what the lane's own backward has reached."""
        landings: list[Landing] = []
        for member in self.members:
            landings += member.landings(retain)
        if landings:
            self.differentiate(landings)

    def differentiate(self, landings: Sequence[Landing]) -> None:
        """Wait until these are differentiated."""
        for landing in landings:
            box = landing.box
            if box.flight.freed or box.done:
                raise RuntimeError(
                    "Trying to backward through the graph a second time. Specify retain_graph=True if you need to."
                )
            if box.stamp != box.member.stamp():
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an inplace operation: "
                    "the model's parameters have changed between forward and backward."
                )
        home = landings[0].box.flight.home
        self.park(_Request("backward", landings[0].box.member, landings, (id(home), "backward")))

    def open(self) -> bool:
        """Whether something has been computed and not differentiated."""
        return any(ref() is not None for member in self.members for ref in member.boxes)


@final
class _Forward:
    """A model's forward in a lane. Copies of the model have the plain one."""

    def __init__(self, lane: Lane, member: Member, plain: Callable[..., Any]) -> None:
        self._lane = lane
        self._member = member
        self._plain = plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        lane, member = self._lane, self._member
        group = member.group
        if group is None or not lane.here():
            return self._alone(args, kwargs)
        call = group.call(member, args, kwargs)
        if isinstance(call, str):
            lane.say(call)
            return self._alone(args, kwargs)
        if torch._C._len_torch_function_stack():
            lane.say("a torch function mode is active")
            return self._alone(args, kwargs)
        answer = lane.park(_Request("forward", member, call, (id(group), "forward", call.signature)))
        return self._alone(args, kwargs) if answer is _ALONE else answer[0]

    def _alone(self, args: Any, kwargs: Any) -> Any:
        if torch.is_autocast_enabled(self._lane._hub.device):
            torch.clear_autocast_cache()
        return self._plain(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = memo.get(id(self._member.module))
        return types.MethodType(type(made).forward, made) if made is not None else self

    def __reduce__(self) -> Any:
        return getattr, (self._member.module, "forward")  # where it is read there is only the class's


def _steps(lane: Lane, member: Member) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The optimizer's ``step`` and ``zero_grad`` in a lane."""
    plain = type(member.optimizer).step
    zero = type(member.optimizer).zero_grad

    def step(optimizer: Any, closure: Callable[[], Any] | None = None) -> Any:
        optimizer._opt_called = True  # lr schedulers ask for it
        here = lane.here()
        if here:
            lane.land(False)  # what was differentiated by ways that are not seen
        group = member.group
        if group is None or not here:
            return plain(optimizer, closure)
        reason = group.optimizer.reason
        if reason is None and not member.in_place():
            reason = "a parameter has been replaced"
            lane._hub.leave([member])
            lane.say(reason)
            return plain(optimizer, closure)
        loss = None
        if reason is None:
            if closure is not None:
                with torch.enable_grad():
                    loss = closure()
            reason = _unfit(member)
        if reason is not None:
            lane.say(f"its optimizer steps by itself: {reason}")
            member.loaded = True
            return plain(optimizer, closure) if loss is None else (plain(optimizer), loss)[1]
        used = member.used()
        if not any(used):
            return loss
        answer = lane.park(_Request("step", member, None, (id(group), "step", used)))
        if answer is _ALONE:
            member.loaded = True
            plain(optimizer)
        return loss

    def zero_grad(optimizer: Any, set_to_none: bool = True) -> None:
        if not set_to_none:
            zero(optimizer, set_to_none=False)
            return
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = None

    return step, zero_grad


def _unfit(member: Member) -> str | None:
    optimizer = member.optimizer
    if len(optimizer.param_groups) != len(member.group.optimizer.numbers if member.group else ()):
        return "it has got another parameter group"
    if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
        return "it has step hooks"
    held = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if len(held) != sum(member.used()):
        return "it trains other parameters than before"
    if any(p.grad is not None and p.grad.layout is not torch.strided for p in member.parameters):
        return "gradients are sparse"
    return None


@final
class Hub:
    """Runs lanes until all have ended.

    Args:
        functions: The lanes' functions; each is called with its ``Lane``.
        device: The kind of device they compute on.
        ended: Called with a lane as soon as it has ended.
        note: Called with what was decided, and why something is not fused.
        resumed: Called with a lane and seconds, when it goes on: so long it neither ran nor was computed for.
        fuse: False: all is computed one by one (for comparisons).

    Attributes:
        lanes: All lanes.
        groups: The groups of models that meet.
        greenlet: Where fused calls are computed.
    """

    def __init__(
        self,
        functions: Sequence[Callable[[Lane], Any]],
        *,
        device: str = "cpu",
        ended: Callable[[Lane], None] = lambda lane: None,
        note: Callable[[Mapping[str, Any]], None] = lambda data: None,
        resumed: Callable[[Lane, float], None] = lambda lane, seconds: None,
        fuse: bool = True,
    ) -> None:
        self.device = torch.device(device).type
        self.dtype = torch.get_default_dtype()
        self.note = note
        self.groups: list[FusedLanes] = []
        self.greenlet = greenlet.getcurrent()
        self._ended = ended
        self._resumed = resumed
        self._fuse = fuse
        self._failures: dict[Signature, int] = {}
        self._lane_of: dict[int, Lane] = {}
        self.lanes = [Lane(self, number, function) for number, function in enumerate(functions)]
        self._generators = Generators(torch.device(device) if self.device == "cuda" else None)

    # ------------------------------------------------------------ rounds

    def run(self) -> None:
        """Run all lanes to their ends.

        Raises:
            Exception: Of a fused call, not of a lane: lanes that have not ended are unwound, with ``again`` set.
        """
        before = self._generators.keep(None)
        live = list(self.lanes)
        try:
            with _intercepted(self):
                for lane in self.lanes:
                    self._resume(lane, None)
                while live := self._bury(live):
                    self._round(live)
        finally:
            for lane in live:
                if not lane.greenlet.dead:
                    lane.greenlet.throw(greenlet.GreenletExit)
            self._generators.put(before)

    def _bury(self, live: Sequence[Lane]) -> list[Lane]:
        """Let the models of lanes that have ended go."""
        dead = [lane for lane in live if lane.greenlet.dead]
        if dead:
            self.leave([member for lane in dead for member in lane.members])
            for lane in dead:
                self._ended(lane)
        return [lane for lane in live if not lane.greenlet.dead]

    def _round(self, live: Sequence[Lane]) -> None:
        keys: dict[tuple[Any, ...], list[Lane]] = {}
        for lane in live:
            if lane.request is not None:
                keys.setdefault(lane.request.key, []).append(lane)
        domains: dict[Any, list[tuple[Any, ...]]] = {}
        for key in keys:
            domains.setdefault(key[0], []).append(key)
        for found in domains.values():
            chosen = max(found, key=lambda key: _urgency(key, keys[key]))
            for key in found:
                for lane in keys[key]:
                    lane.waited += 1
            self._serve(keys[chosen])

    def _serve(self, lanes: Sequence[Lane]) -> None:
        begin_s = time.perf_counter()
        requests = [lane.request for lane in lanes if lane.request is not None]
        kind = requests[0].kind
        if kind == "prepare":
            answers = self._prepare(lanes, requests)
        elif kind == "forward":
            torch.set_default_dtype(requests[0].what.signature[5])
            answers = self._forward(lanes, requests)
            torch.set_default_dtype(self.dtype)
        elif kind == "backward":
            answers = self._backward(requests)
        else:
            answers = self._step(requests)
        share_s = (time.perf_counter() - begin_s) / len(lanes)
        for lane in lanes:
            lane.share_s = share_s
            lane.busy_s += share_s
        for lane, answer in zip(lanes, answers, strict=True):
            self._resume(lane, answer)

    def _resume(self, lane: Lane, answer: Any) -> None:
        if lane.states is not None:
            self._generators.put(lane.states)
        lane.request, lane.waited = None, 0
        now_s = time.perf_counter()
        self._resumed(lane, now_s - lane.parked_s - lane.share_s if lane.parked_s else -1.0)
        lane.share_s = 0.0
        lane.resumed_s = now_s
        request = lane.greenlet.switch(answer)
        lane.parked_s = time.perf_counter()
        lane.resumed_s = None
        lane.busy_s += lane.parked_s - now_s
        if lane.greenlet.dead:
            torch.set_grad_enabled(True)
            torch.set_default_dtype(self.dtype)
            self._generators.forget()
            return
        lane.states = self._generators.keep(lane.states)
        lane.request = request
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)

    # ------------------------------------------------------------ answers

    def _prepare(self, lanes: Sequence[Lane], requests: Sequence[_Request]) -> list[Any]:
        pairs = [request.what for request in requests]
        groups, reasons = alike(pairs) if self._fuse else ([], {})
        for group in groups:
            try:
                made = FusedLanes([pairs[i] for i in group])
            except Unsupported as error:
                reasons.update(dict.fromkeys(group, str(error)))
                continue
            self.groups.append(made)
            for i, member in zip(group, made.members, strict=True):
                self._dress(lanes[i], member)
        if groups and not self.groups:
            groups = []
        if reasons and not groups and len(lanes) > 1:
            self.note({"count": 1, "reason": next(iter(reasons.values()))})
        for i, reason in reasons.items():
            lanes[i].say(reason)
        return [None] * len(lanes)

    def _dress(self, lane: Lane, member: Member) -> None:
        module, optimizer = member.module, member.optimizer
        lane.members.append(member)
        self._lane_of[id(member)] = lane
        module.__dict__["forward"] = _Forward(lane, member, module.forward)
        step, zero_grad = _steps(lane, member)
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
        optimizer.zero_grad = types.MethodType(zero_grad, optimizer)  # type: ignore[method-assign]

        def loaded(_: Any) -> None:
            member.loaded = True

        optimizer.register_load_state_dict_post_hook(loaded)
        member.watch()

    def _forward(self, lanes: Sequence[Lane], requests: Sequence[_Request]) -> list[Any]:
        members = [request.member for request in requests if request.member is not None]
        calls: list[Call] = [request.what for request in requests]
        group = members[0].group
        signature = calls[0].signature
        alone: list[Any] = [_ALONE] * len(requests)
        if group is None or len(members) < 2:
            return alone
        if signature not in group.checks:
            check = group.checks[signature] = group.check(members, calls)
            training = signature[3]
            if not check.ok:
                self._refuse(group, signature, check.reason, check.record())
                return alone
            if training and sum(1 for key in group.checks if key[3]) == 1:
                self.note(
                    {"count": len(group.members), "reason": "as the study asks for", "check": check.record()}
                )
        drawn = 3 if self.device == "cuda" else 0  # which of a lane's generators its model draws from
        states: list[Any] = [lane.states[drawn] for lane in lanes if lane.states is not None]
        try:
            found = group.forward(members, calls, states)
        except Unsupported as error:
            if error.__cause__ is not None and _is_memory(error.__cause__):
                raise MemoryError(str(error)) from error
            self._failures[signature] = self._failures.get(signature, 0) + 1
            if signature not in group.flown or self._failures[signature] >= _TRIES:
                self._refuse(group, signature, str(error), None)
            return alone
        group.flown.add(signature)
        for lane, state in zip(lanes, states, strict=True):
            if lane.states is not None:
                lane.states = (*lane.states[:drawn], state, *lane.states[drawn + 1 :])
            lane.fused += 1
        return [(out,) for out in found]

    def _refuse(self, group: FusedLanes, signature: Signature, reason: str, check: Any) -> None:
        group.refused[signature] = reason
        if signature[3]:  # with gradients: there is nothing left to fuse
            self.note({"count": 1, "reason": reason, "check": check})
            for member in group.members:
                self._lane_of[id(member)].say(reason)
            self.leave(list(group.members))

    def _backward(self, requests: Sequence[_Request]) -> list[Any]:
        homes: dict[int, list[Landing]] = {}
        groups: dict[int, FusedLanes] = {}
        for request in requests:
            for landing in request.what:
                home = landing.box.flight.home
                groups[id(home)] = home
                homes.setdefault(id(home), []).append(landing)
        try:
            for at, landings in homes.items():
                groups[at].backward(landings)
        except RuntimeError as error:
            if _is_memory(error):
                raise
            return [error] * len(requests)
        return [None] * len(requests)

    def _step(self, requests: Sequence[_Request]) -> list[Any]:
        members = [request.member for request in requests if request.member is not None]
        group = members[0].group
        if group is None:
            return [_ALONE] * len(requests)
        try:
            group.step(members)
        except Unsupported as error:
            for member in members:
                self._lane_of[id(member)].say(f"its optimizer steps by itself: {error}")
            return [_ALONE] * len(requests)
        return [None] * len(requests)

    def leave(self, members: Sequence[Member]) -> None:
        """Let models go on by themselves."""
        for group in self.groups:
            going = [member for member in members if member.group is group]
            if not going:
                continue
            # Who stays is laid out anew, by name: not those that have been rebuilt meanwhile.
            going += [m for m in group.members if m not in going and not m.in_place()]
            if len(group.members) - len(going) < 2:  # one lane has nobody to meet
                going = list(group.members)
            with torch.no_grad():
                group.leave(going)
        self.groups = [group for group in self.groups if group.members]


def _urgency(key: tuple[Any, ...], lanes: Sequence[Lane]) -> tuple[bool, int, int]:
    late = max(lane.waited for lane in lanes) >= _PATIENCE
    return late, len(lanes), -_ORDER.get(key[1], 0) if isinstance(key[1], str) else 0


@contextmanager
def _intercepted(hub: Hub) -> Iterator[None]:
    """While lanes run, ``backward`` of a lane goes on in the fused graph.

    ``Tensor.backward`` calls ``torch.autograd.backward``. It is not done from inside, by a node of the graph: the lane
    would be switched away in the middle of torch's engine.
    """
    backward, grad = torch.autograd.backward, torch.autograd.grad
    lanes = {lane.greenlet: lane for lane in hub.lanes}

    def fused_backward(
        tensors: Any,
        grad_tensors: Any = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        grad_variables: Any = None,
        inputs: Any = None,
    ) -> None:
        lane = lanes.get(greenlet.getcurrent())
        mine = lane is not None and lane.here()
        if lane is not None and (create_graph or inputs is not None) and lane.open():
            raise Again("backward(create_graph=True) or backward(inputs=...) of a fused model")
        if lane is not None and mine and grad_tensors is None and grad_variables is None:
            out = untouched(tensors) if type(tensors) is Tensor else None
            if out is not None:  # the loss is what the model returned
                box, at = out
                gradients: list[Tensor | None] = [None] * len(box.leaves)
                gradients[at] = torch.ones_like(tensors)
                lane.differentiate([Landing(box, tuple(gradients), bool(retain_graph))])
                return
        backward(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        if lane is not None and mine:
            lane.land(bool(retain_graph))

    def fused_grad(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        lane = lanes.get(greenlet.getcurrent())
        if lane is not None and lane.open():
            asked = {id(inputs)} if isinstance(inputs, Tensor) else {id(x) for x in inputs}
            if any(id(p) in asked for member in lane.members for p in member.module.parameters()):
                raise Again("torch.autograd.grad asks for gradients of a fused model's parameters")
        return grad(outputs, inputs, *args, **kwargs)

    torch.autograd.backward, torch.autograd.grad = fused_backward, fused_grad
    try:
        yield
    finally:
        torch.autograd.backward, torch.autograd.grad = backward, grad


def _owned(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        whole = tree.layout is not torch.strided or tree.untyped_storage().nbytes() <= tree.nbytes
        if whole:
            return tree
        made = tree.detach().clone()
        return nn.Parameter(made, tree.requires_grad) if isinstance(tree, nn.Parameter) else made
    if isinstance(tree, dict):
        owned = {key: _owned(value) for key, value in tree.items()}
        if all(owned[key] is value for key, value in tree.items()):
            return tree
        copied = copy.copy(tree)
        copied.update(owned)
        return copied
    if isinstance(tree, list | tuple):
        items = [_owned(value) for value in tree]
        if all(a is b for a, b in zip(items, tree, strict=True)):
            return tree
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    return tree


def _is_memory(error: BaseException) -> bool:
    from penstock.train._fused_loop import _is_memory as is_memory

    return is_memory(error)


__all__ = ["Again", "Hub", "Lane"]

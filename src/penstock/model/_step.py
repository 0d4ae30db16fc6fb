"""One training step of all members: forward, backward and update; as it comes, recorded, or compiled."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.core.errors import Unsupported
from penstock.model._fuse import Fusion
from penstock.model._optimize import FusedOptimizer
from penstock.model._watch import DRAWS, Watch, behind, generators, shared

_TRIVIAL = frozenset({"detach", "alias"})
_SHAPES = frozenset({"view", "_unsafe_view", "expand"})
_VIEWS = frozenset(
    {
        "view",
        "slice",
        "transpose",
        "t",
        "unsqueeze",
        "squeeze",
        "expand",
        "select",
        "permute",
        "as_strided",
        "split",
    }
)


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step as a flat list of tensor operations.

    Attributes:
        run: Takes the batch's tensors and the masks (compiled: the members' state before them) and returns the
            members' losses.
        shapes: Of the batch it was recorded for.
        used: Which leaves got a gradient.
        wanted: The dropout masks it takes.
        seconds: What recording (and compiling) took.
        compiled: Whether it was compiled.
    """

    run: Callable[..., Any]
    shapes: tuple[Any, ...]
    used: tuple[bool, ...]
    wanted: tuple[Any, ...]
    seconds: float
    compiled: bool


@final
class FusedStep:
    """Forward, backward and update of all members for one batch each.

    Run as it comes, every operation passes Python, the vmap machinery and autograd. Recording the whole step once
    (with the gradient's operations in it) leaves the bare operations; compiling the recording fuses them (Hydro
    4.2, intra-trial fusion). Both are for a fixed number of members and batch shape, and are worth it only if enough
    steps follow: ``record`` says what it cost.

    Args:
        fusion: The members' models.
        optimizer: Their optimizers.
        function: ``function(model, inputs, targets)`` gives a member's loss.
        autocast: The type of mixed precision, or None.
        beside: What the function is made of beside the model (a loss), which members share.
    """

    def __init__(
        self,
        fusion: Fusion,
        optimizer: FusedOptimizer,
        function: Callable[..., Tensor],
        *,
        autocast: torch.dtype | None = None,
        beside: Sequence[Any] = (),
    ) -> None:
        self.fusion = fusion
        self.beside = list(beside)
        self.optimizer = optimizer
        self.function = function
        self.autocast = autocast
        self.recorded: list[Recorded] = []
        # Whether two recordings were seen to be the same: what the forward does hangs on neither members nor batch.
        self.steady = False

    def __call__(self, inputs: Any, targets: Any) -> Tensor:
        """Train one step; returns the members' losses before it."""
        if self.recorded:
            shapes = _shapes(inputs, targets)
            for recorded in self.recorded:
                if recorded.shapes == shapes:
                    return self._replay(recorded, inputs, targets)
        losses, gradients = self._differentiate(inputs, targets)
        self.optimizer.step(gradients)
        return losses

    def _differentiate(self, inputs: Any, targets: Any) -> tuple[Tensor, list[Tensor | None]]:
        fusion = self.fusion
        if self.autocast is None:
            losses = fusion(self.function, inputs, targets)
        else:
            with torch.autocast(fusion.stack.flat.device.type, dtype=self.autocast):
                losses = fusion(self.function, inputs, targets)
        if losses.shape != (len(fusion),):
            raise Unsupported(f"the loss must be one number per member, got shape {tuple(losses.shape[1:])}")
        return losses.detach(), fusion.gradients(losses)

    def probe(self, inputs: Any, targets: Any, *, draws: bool = True) -> None:
        """See whether forward and backward can be fused. Leaves no trace but what a forward keeps at its first call.

        Members share one copy of the model's code and its attributes. A forward that counts its calls, or keeps a
        state beside the buffers, would do so for all of them, and be recorded with the count of one moment. What it
        keeps once and for all (a mask of a length, positions) is seen by a second look.

        Args:
            inputs: A batch.
            targets: Its targets.
            draws: Whether to look for draws from Python's and numpy's generators; no, where other threads draw.

        Raises:
            Unsupported: They can't.
        """
        modules = list(self.fusion._template.modules())
        others = list({id(each): each for part in self.beside for each in behind(part)}.values())
        with self._aside(), _put_back(others):
            for _ in range(2):
                watch, drawn = Watch(modules, others), generators()
                self._differentiate(*_copied(inputs, targets))
                if draws and drawn != generators():
                    raise Unsupported(DRAWS)
                if watch.settled():
                    return
            found = watch.odd()
            if found is not None:
                raise shared(*found)

    # ------------------------------------------------------------ recording

    def forget(self) -> None:
        """Drop the recordings: the number of members or a switch changed."""
        self.recorded = []

    def record(self, inputs: Any, targets: Any, *, compile: bool = False) -> Recorded:
        """Record the step for batches of this shape. Leaves the members as they are.

        Raises:
            Unsupported: The step is not the same list of operations every time (it draws from Python's random
                numbers, counts its calls, ...), or can't be recorded.
        """
        if self.optimizer.reason is not None:
            raise Unsupported(self.optimizer.reason)
        begin_s = time.perf_counter()
        with self._aside():
            before = [tensor.detach().clone() for tensor in self._state()]  # a forward may change it
            with self.fusion.draws.record():
                losses, gradients = self._differentiate(*_copied(inputs, targets))
            draws = self.fusion.draws
            if draws.opaque:
                raise Unsupported("the model draws random numbers other than dropout masks")
            wanted = tuple(draws.wanted)
            batch = self._batch(inputs, targets)
            masks = [draws.draw(each) for each in wanted]
            used = tuple(g is not None for g in gradients)
            self.optimizer.runs(used)  # asks for the counts of steps, which a recording does not know
            del gradients
            graphs = []
            for _ in range(1 if self.steady else 2):  # what differs between two recordings can't be replayed
                graphs.append(self._trace(inputs, targets, masks, used))
            if _text(graphs[0]) != _text(graphs[-1]):
                raise Unsupported("the forward does something else at every call")
            if not self._same(graphs[-1], before, batch, masks, losses):
                graphs.append(self._trace(inputs, targets, masks, used, fake=False))
                if not self._same(graphs[-1], before, batch, masks, losses):
                    raise Unsupported("the recorded step gives other losses than the step itself")
            self.steady = True
        if compile:
            from penstock.model._compile import compiled

            run = compiled(graphs[-1])
            with self._aside():  # inductor compiles on the first call
                given = *self._state(), *self._batch(inputs, targets)
                run(*(tensor.clone() for tensor in given), *masks)
        else:
            run = _bound(graphs[-1], self._state())
        seconds = time.perf_counter() - begin_s
        made = Recorded(run, _shapes(inputs, targets), used, wanted, seconds, compile)
        self.recorded = [r for r in self.recorded if r.shapes != made.shapes] + [made]
        return made

    def _state(self) -> list[Tensor]:
        """Everything of the members that a step reads or updates."""
        optimizer, stack = self.optimizer, self.fusion.stack
        found = [stack.flat, optimizer.steps]
        found += stack.others.values()
        found += optimizer.state.values()
        for numbers in optimizer.numbers:
            found += numbers.values()
        if optimizer.clip is not None:
            found.append(optimizer.clip)
        return found

    def _batch(self, inputs: Any, targets: Any) -> list[Tensor]:
        return [leaf for leaf in _leaves(inputs, targets) if isinstance(leaf, Tensor)]

    def _replay(self, recorded: Recorded, inputs: Any, targets: Any) -> Tensor:
        draws = self.fusion.draws
        masks = [draws.draw(wanted) for wanted in recorded.wanted]
        with torch.no_grad():
            state = self._state() if recorded.compiled else ()
            losses: Tensor = recorded.run(*state, *self._batch(inputs, targets), *masks)
            self.optimizer.counted(recorded.used)
        return losses

    def _same(
        self,
        graph: Any,
        state: Sequence[Tensor],
        batch: Sequence[Tensor],
        masks: Sequence[Tensor],
        losses: Tensor,
    ) -> bool:
        """Whether a recording runs and, where no masks are drawn, gives these losses for this state."""
        try:
            with torch.no_grad():
                found = graph(*(tensor.clone() for tensor in (*state, *batch)), *masks)
        except Exception:
            return False
        return bool(masks) or torch.allclose(found, losses, rtol=1e-2, atol=1e-5, equal_nan=True)

    def _trace(
        self,
        inputs: Any,
        targets: Any,
        masks: Sequence[Tensor],
        used: tuple[bool, ...],
        *,
        fake: bool = True,
    ) -> Any:
        """The step as a graph. ``fake``: of shapes alone, which is quicker and refuses what hangs on values."""
        from torch.fx.experimental.proxy_tensor import make_fx

        fusion, optimizer, stack = self.fusion, self.optimizer, self.fusion.stack
        leaves, spec = pytree.tree_flatten((inputs, targets))
        real = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def step(*given: Tensor) -> Tensor:
            left = iter(given)
            kept = (stack.flat, stack.leaves, optimizer.steps, stack.others, optimizer.state)
            kept_numbers, kept_clip = optimizer.numbers, optimizer.clip
            try:
                stack.flat, optimizer.steps = next(left), next(left)
                stack.leaves = [
                    stack.view(stack.flat, slot).detach().requires_grad_() for slot in stack.slots
                ]
                stack.others = {name: next(left) for name in kept[3]}
                optimizer.state = {name: next(left) for name in kept[4]}
                optimizer.numbers = [{name: next(left) for name in numbers} for numbers in kept_numbers]
                optimizer.clip = None if kept_clip is None else next(left)
                batch = list(leaves)
                for i in real:
                    batch[i] = next(left)
                x, y = pytree.tree_unflatten(batch, spec)
                with fusion.draws.serve(list(left)), torch.enable_grad():
                    losses, gradients = self._differentiate(x, y)
                with torch.no_grad():
                    optimizer.apply(optimizer.join(gradients), used)
                return losses
            finally:
                stack.flat, stack.leaves, optimizer.steps, stack.others, optimizer.state = kept
                optimizer.numbers, optimizer.clip = kept_numbers, kept_clip

        given = [tensor.detach().clone() for tensor in (*self._state(), *self._batch(inputs, targets))]
        given += masks
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                made = make_fx(step, tracing_mode="fake" if fake else "real", _allow_non_fake_inputs=True)
                graph = made(*given)
        except Unsupported:
            raise
        except Exception as error:
            if fake:  # an operation that knows no shapes, for one
                return self._trace(inputs, targets, masks, used, fake=False)
            text = str(error).strip().split("\n")[0]
            raise Unsupported(f"the step can't be recorded: {type(error).__name__}: {text}") from error
        _tidy(graph)
        return graph

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Whatever the forward does to weights, buffers and generators inside, they are as before afterwards."""
        stack, draws = self.fusion.stack, self.fusion.draws
        before = [(stacked, stacked.clone()) for stacked in (stack.flat, *stack.others.values())]
        states = [generator.get_state() for generator in draws.generators]
        opaque = draws.opaque
        try:
            yield
        finally:
            with torch.no_grad():
                for stacked, values in before:
                    stacked.copy_(values)
            for generator, state in zip(draws.generators, states, strict=True):
                generator.set_state(state)
            draws.opaque = opaque


@contextmanager
def _put_back(others: Sequence[Any]) -> Iterator[None]:
    """Let no member's values stay in objects that trials use one after another, if a look at them fails."""
    watch = Watch((), others)
    try:
        yield
    except BaseException:
        watch.restore()
        raise


def _leaves(inputs: Any, targets: Any) -> Sequence[Any]:
    """What a batch consists of; at every step of the smallest networks, so the usual two tensors come first."""
    if type(inputs) is Tensor and type(targets) is Tensor:
        return inputs, targets
    leaves: list[Any] = pytree.tree_leaves((inputs, targets))
    return leaves


def _copied(inputs: Any, targets: Any) -> Any:
    """A batch for a look: a forward may write into its inputs, which the step itself is to see as they were."""
    return pytree.tree_map_only(Tensor, Tensor.clone, (inputs, targets))


def _shapes(inputs: Any, targets: Any) -> tuple[Any, ...]:
    return tuple(
        [(leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in _leaves(inputs, targets)]
    )


def _tidy(graph: Any) -> None:
    """Take out what only mattered to autograd, and views of a shape that is there already."""
    for node in list(graph.graph.nodes):
        if node.op != "call_function":
            continue
        name = getattr(node.target, "_opname", "")
        same = name in _SHAPES and _shape(node) is not None and _shape(node) == _shape(node.args[0])
        if name in _TRIVIAL or (same and not node.kwargs):
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _shape(node: Any) -> Any:
    value = node.meta.get("val")
    if value is None:
        value = node.meta.get("tensor_meta")
    return None if value is None else tuple(value.shape)


def _only_read(node: Any) -> bool:
    """Whether nothing is written into what a node makes, or into a view of it."""
    for user in node.users:
        schema = getattr(user.target, "_schema", None)
        if schema is None or schema.is_mutable:
            return False
        views = getattr(user.target, "_opname", "") in _SHAPES or any(r.alias_info for r in schema.returns)
        if views and not _only_read(user):
            return False
    return True


def _bound(graph: Any, state: Sequence[Tensor]) -> Callable[..., Any]:
    """The graph with the members' state put in for good: their tensors stay the same, and are updated in place.

    What is only a view of that state (a layer's weights out of the rows), or always the same, is made once, here, and
    not at every step.
    """
    import torch.fx

    values: dict[Any, Tensor] = {}
    inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    for node, tensor in zip(inputs, state, strict=False):
        values[node] = tensor
    for node in graph.graph.nodes:
        name = getattr(node.target, "_opname", "")
        if node.op != "call_function" or (name not in _VIEWS and name != "ones_like"):
            continue
        sources = node.all_input_nodes
        if name == "ones_like":  # where the gradient begins
            like = node.meta.get("val")
            if like is not None and _only_read(node):
                values[node] = torch.ones(like.shape, dtype=like.dtype, device=like.device)
            continue
        if sources and all(source in values for source in sources):
            args = torch.fx.node.map_arg(node.args, values.__getitem__)
            kwargs = torch.fx.node.map_arg(node.kwargs, values.__getitem__)
            with torch.no_grad():
                values[node] = node.target(*args, **kwargs)
    needed = [n for n in values if any(user not in values for user in n.users)]
    constants = [values[node] for node in needed]
    front = inputs[0]
    for number, node in enumerate(needed):
        with graph.graph.inserting_before(front):
            place = graph.graph.placeholder(f"state_{number}")
        node.replace_all_uses_with(place, delete_user_cb=lambda user: user not in values)
    for node in reversed(list(values)):
        graph.graph.erase_node(node)
    graph.recompile()
    forward = graph.forward

    def run(*rest: Tensor) -> Any:
        return forward(*constants, *rest)

    return run


def _text(graph: Any) -> str:
    text: str = graph.code
    constants = [
        (name, value.tolist() if value.numel() < 4096 else tuple(value.shape))
        for name, value in sorted(vars(graph).items())
        if isinstance(value, Tensor)
    ]
    return text + repr(constants)

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

_TRIVIAL = frozenset({"detach", "alias"})


@dataclass(frozen=True, slots=True)
class Recorded:
    """A step as a flat list of tensor operations.

    Attributes:
        run: Takes what ``FusedStep._inputs`` lists and returns the members' losses.
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
    """

    def __init__(
        self,
        fusion: Fusion,
        optimizer: FusedOptimizer,
        function: Callable[..., Tensor],
        *,
        autocast: torch.dtype | None = None,
    ) -> None:
        self.fusion = fusion
        self.optimizer = optimizer
        self.function = function
        self.autocast = autocast
        self.recorded: list[Recorded] = []

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
            with self.fusion.draws.record():
                _, gradients = self._differentiate(inputs, targets)
            draws = self.fusion.draws
            if draws.opaque:
                raise Unsupported("the model draws random numbers other than dropout masks")
            wanted = tuple(draws.wanted)
            used = tuple(g is not None for g in gradients)
            del gradients
            graphs = []
            for _ in range(2):  # twice: what differs between two recordings can't be replayed
                graphs.append(self._trace(inputs, targets, wanted, used))
            if _text(graphs[0]) != _text(graphs[1]):
                raise Unsupported("the forward does something else at every call")
        run: Callable[..., Any] = graphs[1]
        if compile:
            from penstock.model._compile import compiled

            run = compiled(graphs[1])
        seconds = time.perf_counter() - begin_s
        made = Recorded(run, _shapes(inputs, targets), used, wanted, seconds, compile)
        self.recorded = [r for r in self.recorded if r.shapes != made.shapes] + [made]
        return made

    def _inputs(self, inputs: Any, targets: Any, masks: Sequence[Tensor]) -> list[Tensor]:
        optimizer, stack = self.optimizer, self.fusion.stack
        found = [stack.flat, optimizer.steps]
        found += stack.others.values()
        found += optimizer.state.values()
        for numbers in optimizer.numbers:
            found += numbers.values()
        if optimizer.clip is not None:
            found.append(optimizer.clip)
        found += [leaf for leaf in pytree.tree_leaves((inputs, targets)) if isinstance(leaf, Tensor)]
        return [*found, *masks]

    def _replay(self, recorded: Recorded, inputs: Any, targets: Any) -> Tensor:
        draws = self.fusion.draws
        masks = [draws.draw(wanted) for wanted in recorded.wanted]
        with torch.no_grad():
            losses: Tensor = recorded.run(*self._inputs(inputs, targets, masks))
            self.optimizer.counted(recorded.used)
        return losses

    def _trace(self, inputs: Any, targets: Any, wanted: Sequence[Any], used: tuple[bool, ...]) -> Any:
        from torch.fx.experimental.proxy_tensor import make_fx

        fusion, optimizer, stack = self.fusion, self.optimizer, self.fusion.stack
        masks = [
            torch.ones(w.shape, dtype=w.dtype, device=w.device).new_empty((len(fusion), *w.shape)).fill_(1.0)
            for w in wanted
        ]
        masks = [
            torch.empty_strided(
                (len(fusion), *w.shape), (mask[0].numel(), *w.strides), dtype=w.dtype, device=w.device
            ).fill_(1.0)
            for w, mask in zip(wanted, masks, strict=True)
        ]
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

        given = [tensor.detach().clone() for tensor in self._inputs(inputs, targets, ())] + masks
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                graph = make_fx(step)(*given)
        except Unsupported:
            raise
        except Exception as error:
            text = str(error).strip().split("\n")[0]
            raise Unsupported(f"the step can't be recorded: {type(error).__name__}: {text}") from error
        _tidy(graph)
        return graph

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Whatever the forward does to buffers and generators inside, they are as before afterwards."""
        stack, draws = self.fusion.stack, self.fusion.draws
        before = {name: stacked.clone() for name, stacked in stack.others.items()}
        states = [generator.get_state() for generator in draws.generators]
        opaque = draws.opaque
        try:
            yield
        finally:
            with torch.no_grad():
                for name, stacked in stack.others.items():
                    stacked.copy_(before[name])
            for generator, state in zip(draws.generators, states, strict=True):
                generator.set_state(state)
            draws.opaque = opaque


def _shapes(inputs: Any, targets: Any) -> tuple[Any, ...]:
    return tuple(
        (leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf
        for leaf in pytree.tree_leaves((inputs, targets))
    )


def _tidy(graph: Any) -> None:
    """Take out what only mattered to autograd."""
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and getattr(node.target, "_opname", "") in _TRIVIAL:
            node.replace_all_uses_with(node.args[0])
            graph.graph.erase_node(node)
    graph.graph.eliminate_dead_code()
    graph.recompile()


def _text(graph: Any) -> str:
    text: str = graph.code
    constants = [
        (name, value.tolist() if value.numel() < 4096 else tuple(value.shape))
        for name, value in sorted(vars(graph).items())
        if isinstance(value, Tensor)
    ]
    return text + repr(constants)

"""The stack: parameters and buffers of all members in common tensors, of which each member's own are views."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from penstock.core.errors import Unsupported


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one trained parameter lies in the rows of the stack.

    Attributes:
        names: All its names; tied weights have several.
        shape: A member's shape.
        start: First column.
        stop: Column after the last.
        group: Number of its parameter group.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    start: int
    stop: int
    group: int


@final
class Stack:
    """Members' weights, one row per member.

    The trained parameters of a member are one contiguous row of ``flat``: an optimizer updates all members with a
    handful of operations whatever the number of layers, per-member hyperparameters are columns that broadcast,
    a member is copied, added or left out as a row, and no operation mixes rows. Buffers and frozen parameters are
    stacked one by one.

    Args:
        modules: The members' models, of one structure. They are kept, and their tensors become views.
        groups: Parameter names by group of the optimizer; default: one group of all that are trained.

    Raises:
        Unsupported: The models differ in a way that can't be stacked; says in what.
    """

    def __init__(self, modules: Sequence[nn.Module], groups: Sequence[Sequence[str]] | None = None) -> None:
        if not modules:
            raise Unsupported("There is nothing to fuse: no members.")
        self.modules = list(modules)
        first = modules[0]
        _same_tensors(modules)
        names = _names(first)
        trained = [ns for p, ns in names if p.requires_grad]
        frozen = [ns for p, ns in names if not p.requires_grad]
        order = _ordered(trained, groups)
        self.slots: list[Slot] = []
        column = 0
        parameters = dict(first.named_parameters(remove_duplicate=False))
        for number, members in enumerate(order):
            for tied in members:
                p = parameters[tied[0]]
                self.slots.append(Slot(tied, tuple(p.shape), column, column + p.numel(), number))
                column += p.numel()
        kinds = {(parameters[s.names[0]].dtype, parameters[s.names[0]].device) for s in self.slots}
        if len(kinds) > 1:
            kinds_text = ", ".join(sorted(str(dtype) for dtype, _ in kinds))
            raise Unsupported(f"parameters of several types or devices ({kinds_text})")
        if not self.slots:
            raise Unsupported("the model has no parameters to train")
        dtype, device = next(iter(kinds))
        self._frozen = frozen
        self._buffers = _buffers(first)
        self.flat = torch.empty((len(modules), column), dtype=dtype, device=device)
        self.others: dict[str, Tensor] = {}
        with torch.no_grad():
            for row, module in zip(self.flat, modules, strict=True):
                own = dict(module.named_parameters(remove_duplicate=False))
                torch.cat([own[slot.names[0]].detach().reshape(-1) for slot in self.slots], out=row)
            for tied in frozen:
                self.others[tied[0]] = torch.stack(
                    [dict(m.named_parameters(remove_duplicate=False))[tied[0]].detach() for m in modules]
                )
            for name, *_ in self._buffers:
                self.others[name] = torch.stack([_buffer(m, name).detach() for m in modules])
        self.leaves: list[Tensor] = []
        self._bind()

    def __len__(self) -> int:
        return len(self.modules)

    @property
    def tensors(self) -> list[tuple[str, Tensor]]:
        """Every name of a parameter or buffer with its stacked tensor, members first."""
        found = [
            (name, leaf) for slot, leaf in zip(self.slots, self.leaves, strict=True) for name in slot.names
        ]
        for tied in self._frozen:
            found += [(name, self.others[tied[0]]) for name in tied]
        for tied in self._buffers:
            found += [(name, self.others[tied[0]]) for name in tied]
        return found

    @property
    def groups(self) -> list[tuple[int, int]]:
        """The columns of each parameter group."""
        bounds: dict[int, tuple[int, int]] = {}
        for slot in self.slots:
            low, _ = bounds.get(slot.group, (slot.start, slot.stop))
            bounds[slot.group] = (low, slot.stop)
        return [bounds[number] for number in sorted(bounds)]

    def view(self, rows: Tensor, slot: Slot) -> Tensor:
        """The columns of ``slot`` in a tensor laid out like ``flat``, in the parameter's shape."""
        return rows[..., slot.start : slot.stop].view((*rows.shape[:-1], *slot.shape))

    def parameter(self, member: int, slot: Slot) -> nn.Parameter:
        """A member's own parameter."""
        found: nn.Parameter = self.modules[member].get_parameter(slot.names[0])
        return found

    def keep(self, members: Sequence[int]) -> list[nn.Module]:
        """Go on with these members in this order; returns the others, standing on their own.

        Live state is re-indexed: those that stay keep their values bit by bit.
        """
        kept = set(members)
        gone = [self.modules[i] for i in range(len(self)) if i not in kept]
        for module in gone:
            detach(module)
        rows = torch.as_tensor(list(members), dtype=torch.long, device=self.flat.device)
        with torch.no_grad():
            self.flat = self.flat.index_select(0, rows)
            self.others = {name: stacked.index_select(0, rows) for name, stacked in self.others.items()}
        self.modules = [self.modules[i] for i in members]
        self._bind()
        return gone

    def add(self, modules: Sequence[nn.Module]) -> None:
        """Take more members in, behind the present ones."""
        if not modules:
            return
        joined = [*self.modules, *modules]
        _same_tensors(joined)
        more = Stack(modules, self._group_names())
        with torch.no_grad():
            self.flat = torch.cat([self.flat, more.flat])
            self.others = {name: torch.cat([s, more.others[name]]) for name, s in self.others.items()}
        self.modules = joined
        self._bind()

    def _group_names(self) -> list[list[str]]:
        count = 1 + max(slot.group for slot in self.slots)
        return [[s.names[0] for s in self.slots if s.group == number] for number in range(count)]

    def _bind(self) -> None:
        """Let the members' tensors be views of the stack, and make the leaves autograd starts from."""
        self.leaves = [self.view(self.flat, slot).detach().requires_grad_() for slot in self.slots]
        with torch.no_grad():
            for member, module in enumerate(self.modules):
                own = dict(module.named_parameters(remove_duplicate=False))
                row = self.flat[member]
                for slot in self.slots:
                    own[slot.names[0]].data = self.view(row, slot)
                for tied in self._frozen:
                    own[tied[0]].data = self.others[tied[0]][member]
                for name, *_ in self._buffers:
                    _buffer(module, name).data = self.others[name][member]


def detach(module: nn.Module) -> None:
    """Give a module tensors of its own again: a view would keep (and save) the memory of all members."""
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data = tensor.data.clone()
            tensor.grad = None


def _buffer(module: nn.Module, name: str) -> Tensor:
    found: Tensor = module.get_buffer(name)
    return found


def _buffers(module: nn.Module) -> list[tuple[str, ...]]:
    """The names of each buffer, one for each place: a layer that is used under two names has one place."""
    found: dict[int, list[str]] = {}
    for path, sub in module.named_modules():
        for key, buffer in sub._buffers.items():
            if buffer is not None:
                found.setdefault(id(buffer), []).append(f"{path}.{key}" if path else key)
    return [tuple(names) for names in found.values()]


def overlapping(module: nn.Module) -> str | None:
    """A parameter in whose memory something else of the model lies that is not the same parameter, and what; or None.

    ``nn.Parameter(other.weight)`` and ``layer.weight.data`` are such views. The stack would part them.
    """
    parameters = dict(module.named_parameters())
    named: list[tuple[str, Tensor]] = [*parameters.items(), *module.named_buffers()]
    for path, sub in module.named_modules():
        named += [
            (f"{path}.{key}" if path else key, x) for key, x in vars(sub).items() if isinstance(x, Tensor)
        ]
    found = [(name, span) for name, x in named if (span := _span(x)) is not None]
    before, end = "", 0
    for name, (start, stop) in sorted(found, key=lambda each: each[1]):
        if start < end and (name in parameters or before in parameters):
            return f"{before} and {name}"
        if stop > end:
            before, end = name, stop
    return None


def _span(x: Tensor) -> tuple[int, int] | None:
    """The addresses between which a tensor lies; None where it lies nowhere."""
    if not x.numel() or x.layout is not torch.strided or x.is_meta:
        return None
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _names(module: nn.Module) -> list[tuple[nn.Parameter, tuple[str, ...]]]:
    """Each parameter with all its names."""
    found: dict[int, tuple[nn.Parameter, list[str]]] = {}
    for name, p in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(p), (p, []))[1].append(name)
    return [(p, tuple(names)) for p, names in found.values()]


def _ordered(
    trained: Iterable[tuple[str, ...]], groups: Sequence[Sequence[str]] | None
) -> list[list[tuple[str, ...]]]:
    by_name = {name: tied for tied in trained for name in tied}
    if groups is None:
        return [list(dict.fromkeys(by_name.values()))]
    ordered = [list(dict.fromkeys(by_name[name] for name in group if name in by_name)) for group in groups]
    chosen = {tied for group in ordered for tied in group}
    if chosen != set(by_name.values()):
        left = sorted(tied[0] for tied in set(by_name.values()) - chosen)
        raise Unsupported(f"the optimizer does not train {', '.join(left)}")
    return ordered


def _same_tensors(modules: Sequence[nn.Module]) -> None:
    """Every member must have the first one's tensors: names, shapes, types, ties, what is trained."""

    def facts(module: nn.Module) -> list[tuple[object, ...]]:
        parameters: list[tuple[object, ...]] = [
            (names, tuple(p.shape), p.dtype, p.device, p.requires_grad) for p, names in _names(module)
        ]
        buffers: list[tuple[object, ...]] = [
            ((n,), tuple(b.shape), b.dtype, b.device, False)
            for n, b in module.named_buffers(remove_duplicate=False)
        ]
        ties: list[tuple[object, ...]] = [
            (names, "one", "buffer") for names in _buffers(module) if len(names) > 1
        ]
        return parameters + buffers + ties

    wanted = facts(modules[0])
    for number, module in enumerate(modules[1:], 1):
        found = facts(module)
        if found == wanted:
            continue
        for ours, theirs in zip(wanted, found, strict=False):
            if ours != theirs:
                raise Unsupported(
                    f"members differ: {ours[0][0]} is {ours[1]} {ours[2]} in member 0 and "  # type: ignore[index]
                    f"{theirs[0][0]} is {theirs[1]} {theirs[2]} in member {number}"  # type: ignore[index]
                )
        raise Unsupported(f"members differ: member 0 has {len(wanted)} tensors, member {number} {len(found)}")

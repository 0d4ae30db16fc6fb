"""LSTM, GRU and RNN of many members: a batched product for all time steps, then one per step for the state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from penstock.model._ops._base import Members, PerMember, rule
from penstock.model._ops._linear import batched_linear
from penstock.model._ops._random import dropped

State = tuple[Tensor, ...]
Cell = Callable[[Tensor, State, Tensor, Tensor | None], State]


def _lstm_cell(gates_x: Tensor, state: State, w_h: Tensor, b_h: Tensor | None) -> State:
    h, c = state[0], state[1]
    i, f, g, o = (gates_x + batched_linear(h, w_h, b_h)).chunk(4, -1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru_cell(gates_x: Tensor, state: State, w_h: Tensor, b_h: Tensor | None) -> State:
    h = state[0]
    xr, xz, xn = gates_x.chunk(3, -1)
    hr, hz, hn = batched_linear(h, w_h, b_h).chunk(3, -1)
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    n = torch.tanh(xn + r * hn)
    return (n + z * (h - n),)


def _plain_cell(activation: Callable[[Tensor], Tensor]) -> Cell:
    def cell(gates_x: Tensor, state: State, w_h: Tensor, b_h: Tensor | None) -> State:
        return (activation(gates_x + batched_linear(state[0], w_h, b_h)),)

    return cell


def _run(
    members: Members,
    cell: Cell,
    input: Tensor,
    state: Sequence[Tensor],
    weights: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """All layers and directions. Returns the outputs and the last states as a member sees them."""
    x = members.spread(input)
    if x.dim() != 4:
        return NotImplemented
    if batch_first:
        x = x.transpose(1, 2)  # members, time, rows, features
    starts = [members.spread(s) for s in state]
    directions = 2 if bidirectional else 1
    per = 4 if has_biases else 2
    projected = len(weights) == layers * directions * (per + 1)
    per += projected
    tables = [members.spread(w) for w in weights]
    ends: list[State] = []
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            own = tables[at * per : (at + 1) * per]
            w_x, w_h = own[0], own[1]
            b_x, b_h = (own[2], own[3]) if has_biases else (None, None)
            gates = batched_linear(x, w_x, b_x)
            now: State = tuple(s[:, at] for s in starts)
            steps = range(x.shape[1]) if direction == 0 else range(x.shape[1] - 1, -1, -1)
            seen: list[Tensor] = []
            for t in steps:
                now = cell(gates[:, t], now, w_h, b_h)
                if projected:
                    now = (batched_linear(now[0], own[-1], None), *now[1:])
                seen.append(now[0])
            if direction:
                seen.reverse()
            outputs.append(torch.stack(seen, 1))
            ends.append(now)
        x = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if train and layer < layers - 1:
            x = dropped(members, x, dropout)
    last = [members.wrap(torch.stack(column, 1)) for column in zip(*ends, strict=True)]
    if batch_first:
        x = x.transpose(1, 2)
    return (members.wrap(x), *last)


def _layer(cell: Cell, *, states: int) -> Callable[..., Any]:
    def layer(members: Members, input: Tensor, hx: Any, params: Any, *rest: Any) -> Any:
        if not isinstance(params, list | tuple) or len(rest) != 6:  # a packed sequence
            return NotImplemented
        if isinstance(rest[2], PerMember) and not rest[3]:
            rest = (*rest[:2], 0.0, *rest[3:])
        return _run(members, cell, input, hx if states == 2 else (hx,), params, *rest)

    return layer


def _step(
    members: Members,
    input: Tensor,
    hx: Sequence[Tensor],
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
) -> Any:
    """``nn.LSTMCell``; vmap has rules for the other two."""
    b_x, b_h = (None if b is None else members.spread(b) for b in (b_ih, b_hh))
    gates = batched_linear(members.spread(input), members.spread(w_ih), b_x)
    state = tuple(members.spread(s) for s in hx)
    return tuple(members.wrap(s) for s in _lstm_cell(gates, state, members.spread(w_hh), b_h))


_FUNCTIONS: Any = torch._C._VariableFunctions
rule(_FUNCTIONS.lstm_cell)(_step)
rule(_FUNCTIONS.lstm)(_layer(_lstm_cell, states=2))
rule(_FUNCTIONS.gru)(_layer(_gru_cell, states=1))
rule(_FUNCTIONS.rnn_tanh)(_layer(_plain_cell(torch.tanh), states=1))
rule(_FUNCTIONS.rnn_relu)(_layer(_plain_cell(torch.relu), states=1))

"""Data on the device: preloaded once per worker, shared by its trials, cut into batches without copies (SM2 5.1).

How shuffling stays right. Every epoch draws one uniform permutation of the *samples* from (seed, epoch), and
row ``i`` of the epoch is sample ``order[i]``. Permuting ready-made blocks instead would be cheaper, but samples
of one block would meet in one batch in every epoch, which is not what shuffling promises.

How batches come without copies. The rows of the epoch's order are gathered a chunk at a time into a buffer, and
batches are views of adjacent rows of it. So batch ``j`` of size 128 is exactly batches ``2j`` and ``2j + 1`` of
size 64 of the same (seed, epoch) side by side, in memory too: SM2's concatenation of the smallest batches. On a
GPU with room for it the chunk is the whole epoch (one kernel); on a CPU it is small enough for the caches.

What does not fit is streamed: a background thread fetches the same chunks in the same order into a bounded
first-in-first-out queue. The sequence of batches does not depend on which way they came.
"""

from __future__ import annotations

import hashlib
import queue
import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate

from penstock.core.errors import InvalidInput

Batch: TypeAlias = tuple[Any, Any]
"""Inputs and targets, each a tensor or tuples, lists and dicts of tensors."""

_CHUNK_BYTES_CPU = 1 << 20
_CHUNK_BYTES_GPU = 64 << 20
_QUEUE_CHUNKS = 4
_LOOKED_AT = 8  # samples: one that is flipped every other time is the same twice as often as not


def derive(seed: int, *parts: object) -> int:
    """A seed of its own for each purpose: the same parts give the same seed on every machine."""
    text = "/".join([str(seed), *(str(part) for part in parts)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def order_of(n: int, seed: int, epoch: int) -> Tensor:
    """The order of ``n`` samples in an epoch: a uniform permutation drawn from (seed, epoch)."""
    generator = torch.Generator().manual_seed(derive(seed, "order", epoch))
    return torch.randperm(n, generator=generator)


def flatten(tree: Any) -> tuple[list[Tensor], Callable[[Sequence[Tensor]], Any]]:
    """The tensors of nested tuples, lists and dicts, and the function that nests such tensors again."""
    leaves: list[Tensor] = []

    def walk(node: Any) -> Callable[[Sequence[Tensor]], Any]:
        if isinstance(node, Tensor):
            at = len(leaves)
            leaves.append(node)
            return lambda rows: rows[at]
        if isinstance(node, dict):
            parts = {key: walk(value) for key, value in node.items()}
            return lambda rows: {key: part(rows) for key, part in parts.items()}
        if isinstance(node, tuple | list):
            items = [walk(value) for value in node]
            if hasattr(node, "_fields"):  # a namedtuple
                kind = type(node)
                return lambda rows: kind(*(item(rows) for item in items))
            as_type = tuple if isinstance(node, tuple) else list
            return lambda rows: as_type(item(rows) for item in items)
        if hasattr(node, "__array__") or isinstance(node, int | float | bool):
            at = len(leaves)
            leaves.append(_tensor(node))
            return lambda rows: rows[at]
        if node is None:
            return lambda rows: None
        if isinstance(node, DataLoader):
            raise InvalidInput(
                "The data is a DataLoader, and a task makes its batches itself: give what it loads (loader.dataset)."
            )
        raise InvalidInput(
            f"Data must be tensors, arrays, or tuples, lists and dicts of them; got a {type(node).__name__}."
        )

    return leaves, walk(tree)


def copied(batch: Any) -> Any:
    """A batch for a look at it: a model may write into its inputs, and the step that follows wants them unchanged."""
    leaves, rebuild = flatten(batch)
    return rebuild([leaf.clone() for leaf in leaves])


def _tensor(node: Any) -> Tensor:
    if isinstance(node, int | float):
        return torch.as_tensor(node)
    import numpy

    # torch would read a table by its columns.
    array = node if isinstance(node, numpy.ndarray) else numpy.array(node)
    if array.dtype.kind not in "biufc":
        raise InvalidInput(
            f"Data must be numbers, got a {type(node).__name__} of {array.dtype}: encode words and dates first."
        )
    return torch.as_tensor(array)


class Source(ABC):
    """The samples of one split on one device. Read-only, shared by all trials of the worker.

    Attributes:
        n: Number of samples.
        nbytes: Bytes of all samples together.
        device: Where batches come out.
    """

    n: int
    nbytes: int
    device: torch.device
    rebuild: Callable[[Sequence[Tensor]], Batch]
    pair: bool  # a batch is just (tensor, tensor): no nesting to restore

    @abstractmethod
    def chunks(self, order: Tensor | None, rows: int, first: int) -> Iterator[Sequence[Tensor]]:
        """Rows of ``order`` (None: as they lie), ``rows`` at a time, from chunk number ``first``.

        A chunk is valid until the second next one is asked for.
        """

    @abstractmethod
    def chunk_rows(self, size: int) -> int:
        """How many rows a chunk should have: a multiple of ``size``."""

    def batches(
        self,
        size: int,
        *,
        order: Tensor | None = None,
        start: int = 0,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Batches of ``size`` along ``order``, from batch number ``start``; the last may be smaller."""
        rows = self.chunk_rows(size)
        total = self.n if order is None else len(order)
        if drop_last:
            total -= total % size
            order = order[:total] if order is not None else None
        if total == 0:
            return
        skip, per_chunk = start, rows // size
        first = skip // per_chunk
        skip -= first * per_chunk
        rebuild = self.rebuild
        done = first * rows
        for chunk in self.chunks(order, rows, first):
            if done + rows > total:
                chunk = [leaf[: total - done] for leaf in chunk]
            done += rows
            pieces: Iterator[Any] = zip(*(_split(leaf, size) for leaf in chunk), strict=True)
            for _ in range(skip):
                next(pieces, None)
            skip = 0
            if self.pair:
                yield from pieces
            else:
                for piece in pieces:
                    yield rebuild(piece)
            if done >= total:
                return


@final
class Preloaded(Source):
    """Samples that lie on the device."""

    def __init__(self, tree: Batch, device: torch.device) -> None:
        leaves, self.rebuild = flatten(tree)
        self.n = length(leaves)
        self.pair = isinstance(tree[0], Tensor) and isinstance(tree[1], Tensor)
        self.leaves = [leaf.detach().to(device).contiguous() for leaf in leaves]
        self.device = device
        self.nbytes = sum(leaf.nbytes for leaf in self.leaves)
        self._row_bytes = max(1, self.nbytes // max(1, self.n))
        self._free: list[tuple[int, list[Tensor]]] = []

    def chunk_rows(self, size: int) -> int:
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            target = self.nbytes if self.nbytes < free // 4 else _CHUNK_BYTES_GPU
        else:
            target = _CHUNK_BYTES_CPU
        blocks = max(1, min(target // self._row_bytes, self.n) // size)
        return blocks * size

    def chunks(self, order: Tensor | None, rows: int, first: int) -> Iterator[Sequence[Tensor]]:
        if order is None:
            # A model may write into its inputs, and these are every trial's. Who does is seen at the first rows, of
            # which it gets a copy; it then gets copies of all.
            copies = True
            for parts in zip(*(_split(leaf[first * rows :], rows) for leaf in self.leaves), strict=True):
                given = [part.clone() for part in parts] if copies else list(parts)
                yield given
                copies = copies and any(part._version for part in given)
            return
        indices = _split(order.to(self.device), rows)
        # Two buffers in turn: writing over a batch that is still in use would be seen by nobody.
        rings = [self._take(rows) for _ in range(min(2, len(indices)))]
        try:
            for number in range(first, len(indices)):
                index, ring = indices[number], rings[number % len(rings)]
                chunk = [buffer[: len(index)] for buffer in ring]
                for leaf, out in zip(self.leaves, chunk, strict=True):
                    torch.index_select(leaf, 0, index, out=out)
                yield chunk
        finally:
            # Kept for the next epoch: a fresh allocation of this size costs page faults every time.
            self._free = [(rows, ring) for ring in rings]

    def _take(self, rows: int) -> list[Tensor]:
        while self._free:
            size, ring = self._free.pop()
            if size == rows:
                return ring
        return [
            torch.empty((rows, *leaf.shape[1:]), dtype=leaf.dtype, device=self.device) for leaf in self.leaves
        ]


@final
class Streamed(Source):
    """Samples that stay where they are and are fetched ahead by a thread into a bounded queue.

    A dataset that draws random numbers (augmentation) should own its generator: torch's global one belongs to
    the training.
    """

    def __init__(self, data: Any, device: torch.device, *, depth: int = _QUEUE_CHUNKS) -> None:
        self._data = data
        self._is_dataset = _is_dataset(data)
        self.device = device
        self.depth = depth
        if self._is_dataset:
            self.n = len(data)
            sample, self.rebuild = flatten(_pair(_collate([data[0]])))
            self._row_bytes = max(1, sum(leaf.nbytes for leaf in sample))
            self.pair = len(sample) == 2 and all(isinstance(part, Tensor) for part in self.rebuild(sample))
        else:
            leaves, self.rebuild = flatten(data)
            self._leaves = leaves
            self.n = length(leaves)
            self._row_bytes = max(1, sum(leaf.nbytes for leaf in leaves) // max(1, self.n))
            self.pair = isinstance(data[0], Tensor) and isinstance(data[1], Tensor)
        self.nbytes = self._row_bytes * self.n

    def chunk_rows(self, size: int) -> int:
        blocks = max(1, min(_CHUNK_BYTES_CPU // self._row_bytes, self.n) // size)
        return blocks * size

    def _fetch(self, index: Tensor) -> list[Tensor]:
        if self._is_dataset:
            numbers = index.tolist()
            many = getattr(self._data, "__getitems__", None)
            items = many(numbers) if many is not None else [self._data[i] for i in numbers]
            leaves, _ = flatten(_pair(_collate(items)))
        else:
            leaves = [torch.index_select(leaf, 0, index) for leaf in self._leaves]
        if self.device.type == "cuda":
            leaves = [leaf.pin_memory() for leaf in leaves]
        return leaves

    def chunks(self, order: Tensor | None, rows: int, first: int) -> Iterator[Sequence[Tensor]]:
        indices = _split(torch.arange(self.n) if order is None else order.cpu(), rows)[first:]
        # At most `depth` chunks wait: memory stays bounded however slow the training is.
        line: queue.Queue[list[Tensor] | BaseException] = queue.Queue(maxsize=self.depth)
        closed = threading.Event()

        def put(item: list[Tensor] | BaseException) -> bool:
            while not closed.is_set():
                try:
                    line.put(item, timeout=0.1)
                    return True
                except queue.Full:
                    continue
            return False

        def fill() -> None:
            try:
                for index in indices:
                    if not put(self._fetch(index)):
                        return
            except BaseException as error:
                put(error)

        thread = threading.Thread(target=fill, name="penstock-loader", daemon=True)
        thread.start()
        try:
            for _ in indices:
                item = line.get()
                if isinstance(item, BaseException):
                    raise item
                yield [leaf.to(self.device, non_blocking=True) for leaf in item]
        finally:
            closed.set()
            thread.join()


def _split(rows: Tensor, size: int) -> tuple[Tensor, ...]:
    """Views of ``size`` rows each."""
    views: Any = torch.split
    return tuple(views(rows, size))


def length(leaves: Sequence[Tensor]) -> int:
    """How many samples there are: every tensor's rows.

    Raises:
        InvalidInput: They differ, or there are none.
    """
    if not leaves:
        raise InvalidInput("The data holds no tensor. Give (inputs, targets) with one row per sample.")
    lengths = [leaf.shape[0] if leaf.dim() else -1 for leaf in leaves]
    if min(lengths) < 0:
        raise InvalidInput(
            "The data holds a scalar where a tensor with one row per sample is needed. Make a tensor of a list of "
            "numbers: torch.tensor(numbers)."
        )
    if len(set(lengths)) > 1:
        raise InvalidInput(
            f"Inputs and targets must have one row per sample, got {' and '.join(map(str, lengths))} rows."
        )
    if lengths[0] == 0:
        raise InvalidInput("The data has no samples.")
    return lengths[0]


def _is_dataset(data: Any) -> bool:
    return isinstance(data, Dataset) or (
        not isinstance(data, Tensor | tuple | list | dict)
        and hasattr(data, "__getitem__")
        and hasattr(data, "__len__")
        and not hasattr(data, "__array__")
    )


def _is_as_made(data: Any, kind: type) -> bool:
    """Whether a dataset of torch's gives its samples as torch made it: a subclass may transform them."""
    own = ("__getitem__", "__getitems__", "__len__")
    return isinstance(data, kind) and all(
        getattr(type(data), name, None) is getattr(kind, name, None) for name in own
    )


def _pair(sample: Any) -> Batch:
    """A sample as (inputs, targets); anything but a pair is its own target (self-supervised)."""
    if isinstance(sample, tuple | list) and len(sample) == 2:
        return sample[0], sample[1]
    return sample, sample


def _collate(samples: list[Any]) -> Any:
    try:
        return default_collate(samples)
    except RuntimeError as error:
        if "equal size" not in str(error):
            raise
        raise InvalidInput(
            f"Samples of the dataset differ in shape ({error}), and a batch has one. Pad or cut them in the dataset, "
            "all to one length; or make batches yourself, in a function train(run)."
        ) from error


def _varies(data: Any) -> bool:
    """Whether a sample is another one each time it is asked for: cropped, flipped or noisy at random."""
    for at in range(min(len(data), _LOOKED_AT)):
        once, again = (flatten(_collate([data[at]]))[0] for _ in range(2))
        for a, b in zip(once, again, strict=True):
            if a.shape != b.shape or not bool(((a == b) | ((a != a) & (b != b))).all()):
                return True
    return False


def _as_tensors(node: Any) -> Any:
    leaves, rebuild = flatten(node)
    return rebuild(leaves)


def load_split(data: Any, device: torch.device, *, limit_bytes: int | None, preload: bool | None) -> Source:
    """One split as a Source: preloaded if it may and fits ``limit_bytes``, streamed otherwise.

    Args:
        data: ``(inputs, targets)``, a map-style dataset, or inputs that are their own targets.
        device: Where batches are wanted.
        limit_bytes: The most the split may take there; None: what half of the free memory is.
        preload: True or False decides; None: whether it fits, and samples are the same each time.
    """
    limit = _free_bytes(device) // 2 if limit_bytes is None else limit_bytes
    if _is_as_made(data, TensorDataset):
        data = _pair(tuple(data.tensors))
    elif _is_as_made(data, Subset) and _is_as_made(data.dataset, TensorDataset):
        rows = torch.as_tensor(list(data.indices), dtype=torch.long)
        data = _pair(tuple(leaf[rows] for leaf in data.dataset.tensors))
    if not _is_dataset(data):
        tree = _as_tensors(_pair(data))
        leaves, _ = flatten(tree)
        there = all(leaf.device == device for leaf in leaves)
        size = sum(leaf.nbytes for leaf in leaves)
        if preload is False or (preload is None and not there and size > limit):
            return Streamed(tree, device)
        return Preloaded(tree, device)
    if isinstance(data, torch.utils.data.IterableDataset) or not hasattr(data, "__len__"):
        raise InvalidInput(
            f"{type(data).__name__} can't be shuffled: it has no length and no random access. "
            "Give a map-style Dataset or tensors."
        )
    if len(data) == 0:
        raise InvalidInput(f"The dataset {type(data).__name__} has no samples.")
    streamed = Streamed(data, device)
    if preload is False or (preload is None and (streamed.nbytes > limit or _varies(data))):
        return streamed
    # Preprocessed once: every sample goes through the dataset's transforms a single time per worker.
    block = min(1024, streamed.n)
    pieces = [
        flatten(_pair(_collate([data[i] for i in range(low, min(low + block, streamed.n))])))[0]
        for low in range(0, streamed.n, block)
    ]
    whole = [torch.cat(column) for column in zip(*pieces, strict=True)]
    return Preloaded(streamed.rebuild(whole), device)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    import psutil

    return int(psutil.virtual_memory().available)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A Data's splits on one device."""

    train: Source
    val: Source | None


_CACHED = 4  # data sets a worker keeps; the least recently used one goes first
_cache: OrderedDict[Hashable, Loaded] = OrderedDict()
_lock = threading.Lock()


def shared(key: Hashable, load: Callable[[], Loaded]) -> Loaded:
    """What ``load`` gave the first time this process asked for ``key``: trials share it."""
    with _lock:
        found = _cache.get(key)
        if found is None:
            found = load()
            _cache[key] = found
            while len(_cache) > _CACHED:
                _cache.popitem(last=False)
        else:
            _cache.move_to_end(key)
        return found


def forget() -> None:
    """Free everything that was preloaded."""
    with _lock:
        _cache.clear()

"""The loader: the same batches every way, views instead of copies, shuffling that is really uniform."""

import math
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from penstock.core.errors import InvalidInput
from penstock.train import _loader
from penstock.train._loader import Loaded, Preloaded, Streamed, derive, flatten, load_split, order_of, shared

CPU = torch.device("cpu")


def rows(n, width=3):
    x = torch.arange(n * width, dtype=torch.float32).view(n, width)
    return x, torch.arange(n)


class Squares(Dataset):
    """A map-style dataset that counts how often it is asked."""

    def __init__(self, n):
        self.n, self.asked = n, 0

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.asked += 1
        return torch.tensor([float(i), float(i * i)]), i % 7


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(1, 70), st.integers(0, 5), st.booleans())
def test_batches_are_the_permutation_cut_in_order(n, size, epoch, drop_last):
    x, y = rows(n)
    order = order_of(n, 3, epoch)
    expected = [order[i : i + size] for i in range(0, n, size)]
    if drop_last and len(expected[-1]) < size:
        expected.pop()
    # Buffers are reused, so compare batch by batch.
    for (bx, by), e in zip(
        Preloaded((x, y), CPU).batches(size, order=order, drop_last=drop_last), expected, strict=True
    ):
        assert torch.equal(by, e)
        assert torch.equal(bx, x[e])


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 120), st.integers(1, 40), st.data())
def test_streamed_and_preloaded_and_torch_give_the_same_batches(n, size, data):
    x, y = rows(n)
    order = order_of(n, 1, 0)
    start = data.draw(st.integers(0, max(0, -(-n // size) - 1)))
    loader = DataLoader(TensorDataset(x, y), batch_size=size, sampler=order.tolist())
    truth = list(loader)[start:]
    for source in (Preloaded((x, y), CPU), Streamed((x, y), CPU), Streamed(TensorDataset(x, y), CPU)):
        count = 0
        for (bx, by), (tx, ty) in zip(source.batches(size, order=order, start=start), truth, strict=True):
            assert torch.equal(bx, tx)
            assert torch.equal(by, ty)
            count += 1
        assert count == len(truth)


def test_small_chunks_change_nothing(monkeypatch):
    x, y = rows(1000)
    order = order_of(1000, 0, 0)
    whole = [(bx.clone(), by.clone()) for bx, by in Preloaded((x, y), CPU).batches(30, order=order, start=4)]
    monkeypatch.setattr(_loader, "_CHUNK_BYTES_CPU", 20 * 100)
    for source in (Preloaded((x, y), CPU), Streamed((x, y), CPU)):
        assert source.chunk_rows(30) < 1000
        for (bx, by), (wx, wy) in zip(source.batches(30, order=order, start=4), whole, strict=True):
            assert torch.equal(bx, wx)
            assert torch.equal(by, wy)


def test_larger_batches_are_adjacent_smallest_ones_without_a_copy():
    """SM2 5.1: a configuration of a larger batch size trains on concatenated batches of the smallest."""
    source = Preloaded(rows(512), CPU)
    order = order_of(512, 7, 2)
    small = [(x.clone(), x.data_ptr()) for x, _ in source.batches(32, order=order)]
    large = list(source.batches(128, order=order))
    for k, (x, _) in enumerate(large):
        assert torch.equal(x, torch.cat([s for s, _ in small[4 * k : 4 * k + 4]]))
    pointers = {x.untyped_storage().data_ptr() for x, _ in large}
    assert len(pointers) == 1  # four batches, one memory
    step = large[1][0].data_ptr() - large[0][0].data_ptr()
    assert step == 128 * 3 * 4  # adjacent rows


@pytest.mark.parametrize("writes", [False, True])
def test_unshuffled_batches_are_views_of_the_data_unless_they_are_written_to(monkeypatch, writes):
    monkeypatch.setattr("penstock.train._loader._CHUNK_BYTES_CPU", 32 * 20)
    x, y = rows(100)
    kept = x.clone()
    source = Preloaded((x, y), CPU)
    assert source.leaves[0].data_ptr() == x.data_ptr()  # on the same device nothing was copied at all
    where = []
    for bx, _ in source.batches(32):
        where.append(bx.untyped_storage().data_ptr() == x.untyped_storage().data_ptr())
        if writes:
            bx.mul_(2)
    assert where == [False] + [not writes] * 3
    assert torch.equal(x, kept)


def test_every_position_is_equally_likely():
    n, epochs = 20, 4000
    counts = np.zeros((n, n))
    for epoch in range(epochs):
        counts[np.arange(n), order_of(n, 5, epoch).numpy()] += 1
    statistic = ((counts - epochs / n) ** 2 / (epochs / n)).sum()
    # (n-1)^2 degrees of freedom for a doubly constrained table.
    assert 1e-4 < stats.chi2.sf(statistic, (n - 1) ** 2) < 1 - 1e-4


def test_every_pair_meets_equally_often():
    """What permuting ready-made blocks would break: there, samples of a block meet in every epoch."""
    n, size, epochs = 24, 4, 4000
    source = Preloaded((torch.arange(n), torch.arange(n)), CPU)
    together = np.zeros((n, n))
    for epoch in range(epochs):
        for x, _ in source.batches(size, order=order_of(n, 9, epoch)):
            ids = x.numpy()
            together[np.ix_(ids, ids)] += 1
    pairs = together[np.triu_indices(n, 1)]
    expected = epochs * (size - 1) / (n - 1)
    assert pairs.sum() == pytest.approx(expected * len(pairs))
    # A pair's count is close to binomial; six standard deviations over 276 pairs.
    deviation = np.sqrt(expected * (1 - (size - 1) / (n - 1)))
    assert abs(pairs - expected).max() < 6 * deviation
    assert 0.7 < pairs.std() / deviation < 1.3


def test_orders_differ_between_epochs_and_seeds_but_not_between_calls():
    a, b, c = order_of(100, 1, 0), order_of(100, 1, 1), order_of(100, 2, 0)
    assert torch.equal(a, order_of(100, 1, 0))
    assert not torch.equal(a, b)
    assert not torch.equal(a, c)
    state = torch.get_rng_state()
    order_of(100, 1, 0)
    assert torch.equal(state, torch.get_rng_state())  # the global generator is not touched
    assert (
        len({derive(1, "order", e) for e in range(1000)} | {derive(2, "order", e) for e in range(1000)})
        == 2000
    )


def test_a_dataset_is_preprocessed_once_and_then_shared():
    data = Squares(50)
    source = load_split(data, CPU, limit_bytes=None, preload=None)
    assert isinstance(source, Preloaded)
    asked = data.asked
    assert asked <= 51 + 2 * 8  # a few of them twice, to see that they are the same
    for epoch in range(3):
        for x, y in source.batches(8, order=order_of(50, 0, epoch)):
            assert torch.equal(x[:, 0] ** 2, x[:, 1])
            assert torch.equal(x[:, 0].long() % 7, y)
    assert data.asked == asked


def test_what_does_not_fit_is_streamed_and_the_queue_is_bounded(monkeypatch):
    monkeypatch.setattr(_loader, "_CHUNK_BYTES_CPU", 64)
    data = Squares(400)
    source = load_split(data, CPU, limit_bytes=100, preload=None)
    assert isinstance(source, Streamed)
    batches = source.batches(4, order=torch.arange(400))
    data.asked = 0
    next(batches)
    time.sleep(0.2)
    # The consumer holds one chunk, the queue `depth`, the thread one more: never the whole data.
    assert data.asked <= (source.depth + 2) * source.chunk_rows(4)
    batches.close()
    assert not [t for t in threading.enumerate() if t.name == "penstock-loader"]


def test_an_error_in_the_thread_reaches_the_training():
    class Broken(Squares):
        def __getitem__(self, i):
            if i == 30:
                raise OSError("disk gone")
            return super().__getitem__(i)

    source = Streamed(Broken(50), CPU)
    with pytest.raises(OSError, match="disk gone"):
        list(source.batches(5))
    assert not [t for t in threading.enumerate() if t.name == "penstock-loader"]


def test_nested_inputs_and_targets():
    n = 10
    tree = (
        {"a": torch.arange(n), "b": (torch.arange(n) * 2, [torch.arange(n) * 3])},
        (torch.arange(n), None),
    )
    for source in (Preloaded(tree, CPU), Streamed(tree, CPU)):
        for inputs, targets in source.batches(4, order=order_of(n, 0, 0)):
            assert torch.equal(inputs["b"][0], inputs["a"] * 2)
            assert torch.equal(inputs["b"][1][0], inputs["a"] * 3)
            assert torch.equal(targets[0], inputs["a"])
            assert targets[1] is None
    leaves, rebuild = flatten(tree)
    assert len(leaves) == 4
    assert isinstance(rebuild(leaves)[0]["b"][1], list)


def test_numpy_arrays_and_bare_inputs():
    source = load_split(np.ones((5, 2), dtype=np.float32), CPU, limit_bytes=None, preload=None)
    ((x, y),) = source.batches(5)
    assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ((torch.zeros(3, 2), torch.zeros(4)), "3 and 4 rows"),
        ((torch.zeros(0, 2), torch.zeros(0)), "no samples"),
        (("text", torch.zeros(4)), "str"),
        ((torch.tensor(1.0), torch.zeros(4)), "scalar"),
    ],
)
def test_bad_data_is_refused_with_its_value(data, words):
    with pytest.raises(InvalidInput, match=words):
        load_split(data, CPU, limit_bytes=None, preload=None)


def test_an_iterable_dataset_is_refused():
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            yield 1

    with pytest.raises(InvalidInput, match="map-style"):
        load_split(Endless(), CPU, limit_bytes=None, preload=None)


def test_shared_loads_once_per_key_and_drops_the_oldest():
    _loader.forget()
    calls = []

    def load():
        calls.append(1)
        return Loaded(Preloaded(rows(4), CPU), None)

    assert shared("a", load) is shared("a", load)
    assert len(calls) == 1
    for key in "bcde":
        shared(key, load)
    shared("e", load)
    assert len(calls) == 5
    shared("a", load)  # pushed out by four others
    assert len(calls) == 6
    _loader.forget()


@pytest.mark.parametrize("preload", [True, False])
@pytest.mark.parametrize(
    "sample", [lambda i: torch.zeros(i + 1), lambda i: [0.0] * (i + 1)], ids=["tensors", "lists"]
)
def test_samples_of_several_lengths_are_refused_with_the_remedy(preload, sample):
    class Sentences(Squares):
        def __getitem__(self, i):
            return sample(i), i

    with pytest.raises(InvalidInput, match=r"differ in shape .*Pad"):
        list(load_split(Sentences(5), CPU, limit_bytes=None, preload=preload).batches(2))


class Augmented(Dataset):
    """Ten samples, noisy or not, one of them not a number."""

    def __init__(self, noise):
        self.noise = noise

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return torch.full((2,), math.nan if i == 3 else i) + self.noise * torch.rand(2), i


@pytest.mark.parametrize(
    ("noise", "preload", "streams"), [(1, None, True), (0, None, False), (1, True, False)]
)
def test_samples_that_are_others_each_time_are_not_kept(noise, preload, streams):
    source = load_split(Augmented(noise), CPU, limit_bytes=None, preload=preload)
    ((first,), (again,)) = ([x.clone() for x, _ in source.batches(10)] for _ in range(2))
    assert torch.equal(first.nan_to_num(), again.nan_to_num()) == (not streams)


class Scaled(TensorDataset):
    """A dataset of torch's that transforms its samples."""

    def __getitem__(self, i):
        x, y = super().__getitem__(i)
        return 10 * x, y


class ScaledPart(Subset):
    """The same for a part of one, which is how training data alone get a transform."""

    def __getitem__(self, i):
        x, y = self.dataset[self.indices[i]]
        return 10 * x, y

    def __getitems__(self, indices):
        return [self[i] for i in indices]


@pytest.mark.parametrize(
    "make",
    [
        lambda x, y: Scaled(x, y),
        lambda x, y: Subset(Scaled(x, y), range(6)),
        lambda x, y: ScaledPart(TensorDataset(x, y), range(6)),
    ],
    ids=["dataset", "part of it", "part"],
)
def test_a_subclass_of_torchs_datasets_transforms_its_samples(make):
    x, y = rows(6)
    ((inputs, targets),) = load_split(make(x, y), CPU, limit_bytes=None, preload=None).batches(6)
    assert torch.equal(inputs, 10 * x)
    assert torch.equal(targets, y)


def test_an_empty_part_of_tensors_is_refused():
    with pytest.raises(InvalidInput, match="no samples"):
        load_split(Subset(TensorDataset(*rows(6)), []), CPU, limit_bytes=None, preload=None)

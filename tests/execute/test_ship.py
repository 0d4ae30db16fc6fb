"""What is sent to workers: functions of scripts, with the modules they use."""

from __future__ import annotations

import pickle
from types import FunctionType, SimpleNamespace

import torch
import torch.distributed

from penstock.execute._ship import dumps, pack

SCRIPT = """
def train(run):
    return run.config, torch.distributed.is_available(), torch.distributed.config.__name__
"""


def test_a_function_that_spreads_and_reads_its_configuration_travels() -> None:
    """Both words together name a module of a class of its own, which cloudpickle alone can't pickle."""
    script = {"__name__": "__main__", "torch": torch}
    exec(SCRIPT, script)
    train = script["train"]
    assert isinstance(train, FunctionType)
    for found in (pickle.loads(pack(train)), pickle.loads(dumps({"work": train}))["work"]):
        assert found is not train
        assert found(SimpleNamespace(config=7)) == (7, True, "torch.distributed.config")


def test_modules_travel_by_name() -> None:
    assert pickle.loads(dumps(torch.distributed.config)) is torch.distributed.config
    assert pickle.loads(dumps(pickle)) is pickle


def test_views_of_a_large_tensor_go_without_the_rest():
    import torch

    from penstock.train import Data

    whole, labels = torch.arange(100_000.0).reshape(1000, 100), torch.arange(1000)
    rows = [whole[i] for i in range(3)]
    held = {"data": Data((whole[:20], labels[:20]), whole[20:30, :7]), "work": lambda: rows}
    packed = dumps(held)
    assert len(packed) < 40_000  # of 400,000 bytes
    again = pickle.loads(packed)
    assert torch.equal(again["data"].train[0], whole[:20])
    assert torch.equal(again["data"].train[1], labels[:20])
    assert torch.equal(again["data"].val, whole[20:30, :7])
    assert all(torch.equal(a, b) for a, b in zip(again["work"](), rows, strict=True))


def test_other_tensors_go_as_they_are():
    import torch

    leaf = torch.arange(6.0).reshape(2, 3).requires_grad_()
    weight = torch.nn.Parameter(torch.ones(4)[:2])
    wide = torch.ones(1, 3).expand(5, 3)
    sparse = torch.eye(3).to_sparse()
    again = pickle.loads(dumps((leaf, weight, wide, sparse)))
    assert again[0].requires_grad
    assert isinstance(again[1], torch.nn.Parameter)
    assert again[2].stride() == wide.stride()
    assert again[3].is_sparse
    for one, other in zip(again, (leaf, weight, wide, sparse), strict=True):
        assert torch.equal(
            one.to_dense() if one.is_sparse else one, other.to_dense() if other.is_sparse else other
        )

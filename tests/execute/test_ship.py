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

"""Random numbers of a trial are the same whatever its process has imported before."""

import functools
import json
import subprocess
import sys
import textwrap

import pytest

SCRIPT = textwrap.dedent(
    """
    import json, sys
    early, sown = sys.argv[1] == "early", int(sys.argv[2])
    if early:
        import numpy, torch
    from penstock.train._seeding import seed_all, seed_no_more
    seed_all(sown)
    import random
    import numpy, torch
    drawn = [random.random(), float(numpy.random.rand()), float(torch.rand(1))]
    seed_no_more()
    print(json.dumps([drawn, numpy.__spec__.origin, type(torch.__loader__).__name__]))
    """
)


@functools.cache
def drawn(when, seed):
    done = subprocess.run([sys.executable, "-c", SCRIPT, when, str(seed)], capture_output=True, check=True)
    return json.loads(done.stdout)


def test_a_library_that_is_imported_later_is_seeded_then():
    early, late = drawn("early", 7), drawn("late", 7)
    assert early == late
    assert early[0] != drawn("late", 8)[0]


def test_it_is_numpys_and_torchs_own_seeding():
    import random

    import numpy
    import torch

    from penstock.train._seeding import seed_all, seed_no_more

    seed_all(2**40 + 3)
    found = [random.random(), numpy.random.rand(), torch.rand(3)]
    seed_no_more()
    torch.manual_seed(2**40 + 3)
    assert torch.equal(found[2], torch.rand(3))
    assert found[1] == numpy.random.RandomState((2**40 + 3) % 2**32).rand()
    assert found[0] == random.Random(2**40 + 3).random()


@pytest.mark.parametrize("name", ["numpy", "torch"])
def test_after_the_training_nothing_is_seeded(name):
    code = f"""
from penstock.train._seeding import seed_all, seed_no_more
seed_all(7); seed_no_more()
import {name}, json
print(float({name}.rand(1)) if {name!r} == "torch" else float({name}.random.rand()))
"""
    alone = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True).stdout
    assert float(alone) != drawn("late", 7)[0][1 if name == "numpy" else 2]

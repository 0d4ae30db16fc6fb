"""Every sampler keeps the contract of samplers."""

import importlib.util
import warnings

import optuna
import pytest

from penstock.sample import TPE, Grid, Observation, OptunaSampler, Random, Walk, WarmStart
from penstock.testing.samplers import CONDITIONAL, FLAT, STEPPED, SamplerConformance

pytestmark = pytest.mark.filterwarnings("ignore::optuna.exceptions.ExperimentalWarning")


class TestRandom(SamplerConformance):
    def make(self):
        return Random()


class TestGrid(SamplerConformance):
    seeded = False

    def make(self):
        return Grid(resolution=3)


class TestWalk(SamplerConformance):
    def make(self):
        return Walk(sigma=0.2)


class TestShrinkingWalk(SamplerConformance):
    def make(self):
        return Walk(sigma=0.5, sigma_end=0.01, steps=10)


class TestTPE(SamplerConformance):
    rounds = 15

    def make(self):
        return TPE(n_startup_trials=5)


class TestWarmStartOfTPE(SamplerConformance):
    spaces = (FLAT,)
    objectives = (1,)
    rounds = 10

    def make(self):
        configs = [
            {"lr": 0.01, "momentum": 0.9, "batch_size": 64},
            {"lr": 0.1, "momentum": 0.5, "batch_size": 32},
        ]
        return WarmStart(configs, then=TPE(n_startup_trials=4))


class TestWarmStartFromObservations(SamplerConformance):
    spaces = (CONDITIONAL,)
    objectives = (1,)
    rounds = 8

    def make(self):
        configs = [CONDITIONAL.sample(i) for i in range(8)]
        earlier = [Observation(i, c, (c["lr"],), 2, final=i % 2 == 0) for i, c in enumerate(configs)]
        return WarmStart.from_observations(earlier, then=TPE(n_startup_trials=4))


class TestOptunaRandom(SamplerConformance):
    def make(self):
        return OptunaSampler(optuna.samplers.RandomSampler)


class TestOptunaTPEInstance(SamplerConformance):
    spaces = (FLAT, CONDITIONAL)
    objectives = (1,)
    rounds = 9

    def make(self):
        return OptunaSampler(optuna.samplers.TPESampler(n_startup_trials=4, seed=3))


class TestOptunaNSGA2(SamplerConformance):
    def make(self):
        return OptunaSampler(lambda seed: optuna.samplers.NSGAIISampler(seed=seed, population_size=4))


class TestOptunaNSGA3Instance(SamplerConformance):
    spaces = (CONDITIONAL,)
    objectives = (2,)

    def make(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return OptunaSampler(optuna.samplers.NSGAIIISampler(population_size=4))


class TestOptunaQMCInstance(SamplerConformance):
    """Unseeded: Optuna draws the seed of its sequence at random, which must not show."""

    def make(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return OptunaSampler(optuna.samplers.QMCSampler(scramble=True, warn_asynchronous_seeding=False))


@pytest.mark.skipif(importlib.util.find_spec("cmaes") is None, reason="cmaes is not installed")
class TestOptunaCmaEs(SamplerConformance):
    objectives = (1,)

    def make(self):
        return OptunaSampler(
            lambda seed: optuna.samplers.CmaEsSampler(seed=seed, n_startup_trials=3, popsize=4)
        )


class TestOptunaBruteForce(SamplerConformance):
    """Calls Study.stop when it has tried everything: the sampler is exhausted then."""

    spaces = (STEPPED,)

    def make(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return OptunaSampler(lambda seed: optuna.samplers.BruteForceSampler(seed=seed))

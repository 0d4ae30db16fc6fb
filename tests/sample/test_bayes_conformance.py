"""Bayes and Limited keep the contract of samplers."""

from penstock.goal import Quantity
from penstock.predict import Features, Predictors
from penstock.sample import TPE, Bayes, Gate, Limited, Observation, Random, Walk, WarmStart
from penstock.testing.samplers import CONDITIONAL, FLAT, STEPPED, SamplerConformance

# A bound on a part of each of the suite's spaces that about half of the draws keep.
HALF = Quantity("lr_or_width", of=lambda c: c["width"] / 64 if "width" in c else 30 * c["lr"]) <= 1.0


class TestBayes(SamplerConformance):
    rounds = 12

    def make(self):
        return Bayes(startup=4)


class TestBayesUnderLimits(SamplerConformance):
    spaces = (FLAT, CONDITIONAL)
    objectives = (1,)
    rounds = 10

    def make(self):
        return Bayes(startup=4, gate=Gate([HALF]))


class TestBayesTransferring(SamplerConformance):
    spaces = (CONDITIONAL,)
    objectives = (1,)
    rounds = 8

    def make(self):
        configs = [CONDITIONAL.sample(i) for i in range(8)]
        return Bayes(startup=4, transfer=[Observation(i, c, (c["lr"],)) for i, c in enumerate(configs)])


class TestWarmStartOfBayes(SamplerConformance):
    spaces = (FLAT,)
    objectives = (1,)
    rounds = 8

    def make(self):
        return WarmStart([{"lr": 0.01, "momentum": 0.9, "batch_size": 64}], then=Bayes(startup=3))


class TestLimitedRandom(SamplerConformance):
    def make(self):
        return Limited(Random(), [HALF])


class TestLimitedWalk(SamplerConformance):
    def make(self):
        return Limited(Walk(sigma=0.3), [HALF])


class TestLimitedTPE(SamplerConformance):
    spaces = (FLAT, STEPPED)
    objectives = (1,)
    rounds = 10

    def make(self):
        return Limited(TPE(n_startup_trials=4), [HALF])


class TestLimitedBayes(SamplerConformance):
    spaces = (STEPPED,)
    objectives = (1,)
    rounds = 8

    def make(self):
        return Limited(Bayes(startup=3), [HALF], Predictors(features=Features(())))

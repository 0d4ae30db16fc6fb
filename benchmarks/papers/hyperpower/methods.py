"""The methods that are compared: Penstock's, and their peers, each a function that runs one search.

Every method gets the same problem, the same noise and the same number of evaluations. ``Evaluation`` says what one
evaluation was; whether it violates the limits is judged by the device's true values, not by what anybody predicts.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from cnn import Problem

from penstock.goal import Limit, memory_bytes, power_w
from penstock.predict import Features, Predictor, Predictors
from penstock.sample import Bayes, Gate, Limited, Observation, Random, Sampler, Walk

CONFIDENCE = 0.999  # a study's own default
READING_S = 1.0  # of inference for one reading of a network that is not trained yet


@dataclass(frozen=True)
class Evaluation:
    config: dict[str, Any]
    error: float
    violates: bool
    power_w: float
    memory_bytes: float


@dataclass(frozen=True)
class Search:
    evaluations: list[Evaluation]
    cpu_s: float  # of the suggestions alone
    probes: int = (
        0  # networks that were measured before training, since it was in doubt whether they keep the limits
    )
    readings: int = 0  # that this took

    def best(self, count: int | None = None) -> float:
        found = [e.error for e in self.evaluations[:count] if not e.violates]
        return min(found, default=float("inf"))

    @property
    def violations(self) -> int:
        return sum(e.violates for e in self.evaluations)


def limits_of(problem: Problem, share: float, memory_share: float | None = None) -> list[Limit]:
    limits = [power_w <= problem.quantile("power_w", share)]
    if memory_share is not None:
        limits.append(memory_bytes <= problem.quantile("memory_bytes", memory_share))
    return limits


def profile(
    problem: Problem,
    samples: int = 100,
    *,
    extra: bool = True,
    seed: int = 0,
    quantities: Sequence[str] = ("power_w", "memory_bytes"),
) -> Predictors:
    """What ``Profile.collect`` does (section 3.3) on the simulated sensors: random structures, every tenth measured
    again for the sensor's scatter, and with ``extra`` the parameters and FLOPs that it traces."""
    configs = [problem.space.sample(50_000 + 1000 * seed + i) for i in range(samples)]
    measured = [problem.measure(c, seed) for c in configs]
    configs += configs[::10]
    measured += [problem.measure(c, 500_000 + seed) for c in configs[:samples:10]]
    names = ("params", "flops") if extra else ()
    features = Features.of(problem.space, extra=names)

    def extras(config: Any) -> dict[str, float]:
        return {"params": problem.params(config), "flops": problem.flops(config)}

    give = extras if extra else None
    models = {
        name: Predictor.fit(name, features, configs, [m[name] for m in measured], extra=give)
        for name in quantities
    }
    return Predictors(models, device=problem.device.name, task=problem.dataset)


@lru_cache(maxsize=100)
def _profiled(dataset: str, samples: int, seed: int, quantities: tuple[str, ...]) -> Predictors:
    return profile(Problem(dataset), samples, seed=seed, quantities=quantities)


def evaluate(problem: Problem, config: dict[str, Any], limits: list[Limit], seed: int) -> Evaluation:
    true = {"power_w": problem.power_w(config), "memory_bytes": problem.memory_bytes(config)}
    violates = any(not limit.holds(true[limit.name]) for limit in limits)
    return Evaluation(config, problem.error(config, seed), violates, true["power_w"], true["memory_bytes"])


def run_sampler(
    problem: Problem, sampler: Sampler, limits: list[Limit], count: int, seed: int, gate: Gate | None = None
) -> Search:
    sampler.start(problem.space, objectives=1, seed=seed)
    found, cpu_s = [], 0.0
    for number in range(count):
        start = time.process_time()
        (config,) = sampler.ask(1)
        cpu_s += time.process_time() - start
        sampler.adopt(config, number)
        result = evaluate(problem, dict(config), limits, seed)
        if gate is not None and gate.refine:
            measured = problem.measure(dict(config), 1000 + seed)
            gate.observe(config, {limit.name: measured[limit.name] for limit in limits})
        sampler.tell(Observation(number, config, (result.error,)))
        found.append(result)
    return Search(found, cpu_s, *((0, 0) if gate is None else (gate.probes, gate.readings)))


def probe_of(problem: Problem, seed: int) -> Callable[[Any, int], dict[str, list[float]]]:
    """What measures a network that is not trained yet, as the profile's sensors do: each reading scatters anew."""
    taken = itertools.count(1_000_000 * (seed + 1))

    def probe(config: Any, count: int) -> dict[str, list[float]]:
        found = [problem.measure(dict(config), next(taken)) for _ in range(count)]
        return {name: [reading[name] for reading in found] for name in found[0]}

    return probe


# --- Penstock -----------------------------------------------------------------------------------------------

Runner = Callable[[Problem, list[Limit], int, int], Search]


def aware(
    make: Callable[[], Sampler],
    *,
    confidence: float = CONFIDENCE,
    refine: bool = True,
    samples: int = 100,
    probe: bool = False,
) -> Runner:
    def run(problem: Problem, limits: list[Limit], count: int, seed: int) -> Search:
        known = _profiled(problem.dataset, samples, seed, tuple(limit.name for limit in limits)).copy()
        gate = Gate(limits, known, confidence=confidence, refine=refine)
        gate.measured_by(probe_of(problem, seed) if probe else None)
        return run_sampler(problem, Limited(make(), gate), limits, count, seed, gate)

    return run


def unaware(make: Callable[[], Sampler]) -> Runner:
    def run(problem: Problem, limits: list[Limit], count: int, seed: int) -> Search:
        return run_sampler(problem, make(), limits, count, seed)

    return run


# --- peers --------------------------------------------------------------------------------------------------


def optuna_gp(problem: Problem, limits: list[Limit], count: int, seed: int) -> Search:
    """Optuna's GPSampler with the measured excess as its constraint."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore")
    sampler = optuna.samplers.GPSampler(
        seed=seed,
        n_startup_trials=5 + len(problem.space) // 2,
        constraints_func=lambda trial: trial.user_attrs["excess"],
        deterministic_objective=False,
    )
    study = optuna.create_study(sampler=sampler)
    distributions = {name: _optuna(problem.space[name]) for name in problem.space}
    found, cpu_s = [], 0.0
    for _ in range(count):
        start = time.process_time()
        trial = study.ask(distributions)
        cpu_s += time.process_time() - start
        result = evaluate(problem, dict(trial.params), limits, seed)
        measured = problem.measure(dict(trial.params), 1000 + seed)
        trial.set_user_attr("excess", [limit.excess(measured[limit.name]) for limit in limits])
        study.tell(trial, result.error)
        found.append(result)
    return Search(found, cpu_s)


def _optuna(domain: Any) -> Any:
    from optuna.distributions import FloatDistribution, IntDistribution

    kind = FloatDistribution if type(domain).__name__ == "Float" else IntDistribution
    return kind(domain.low, domain.high, log=domain.log)


def botorch_constrained(problem: Problem, limits: list[Limit], count: int, seed: int) -> Search:
    """BoTorch's constrained LogEI: a process of the error and one per limit, rounded to the grid afterwards."""
    return _botorch(problem, limits, count, seed, constrained=True)


def botorch_plain(problem: Problem, limits: list[Limit], count: int, seed: int) -> Search:
    """BoTorch's LogEI, unaware of limits."""
    return _botorch(problem, limits, count, seed, constrained=False)


def _botorch(problem: Problem, limits: list[Limit], count: int, seed: int, constrained: bool) -> Search:
    import torch
    from botorch.acquisition.analytic import LogConstrainedExpectedImprovement, LogExpectedImprovement
    from botorch.fit import fit_gpytorch_mll
    from botorch.models import ModelListGP, SingleTaskGP
    from botorch.models.transforms import Standardize
    from botorch.optim import optimize_acqf
    from gpytorch.mlls import ExactMarginalLogLikelihood, SumMarginalLogLikelihood

    warnings.simplefilter("ignore")
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    space = problem.space
    d = len(space)
    bounds = torch.stack([torch.zeros(d), torch.ones(d)]).double()
    points: list[list[float]] = []
    outcomes: list[list[float]] = []
    found, cpu_s = [], 0.0
    sobol = torch.quasirandom.SobolEngine(d, scramble=True, seed=seed)
    for number in range(count):
        start = time.process_time()
        if number < 5 + d // 2:
            point = sobol.draw(1)[0].double()
        else:
            x, y = torch.tensor(points).double(), torch.tensor(outcomes).double()
            models = [
                SingleTaskGP(x, y[:, k : k + 1], outcome_transform=Standardize(1)) for k in range(y.shape[1])
            ]
            kept = (y[:, 1:] <= 0).all(dim=1)
            if constrained and kept.any():
                model: Any = ModelListGP(*models)
                fit_gpytorch_mll(SumMarginalLogLikelihood(model.likelihood, model))
                acquisition: Any = LogConstrainedExpectedImprovement(
                    model,
                    best_f=y[kept, 0].max(),
                    objective_index=0,
                    constraints=dict.fromkeys(range(1, y.shape[1]), (None, 0.0)),
                )
            else:
                model = models[0]
                fit_gpytorch_mll(ExactMarginalLogLikelihood(model.likelihood, model))
                acquisition = LogExpectedImprovement(model, best_f=y[:, 0].max())
            chosen, _ = optimize_acqf(acquisition, bounds, q=1, num_restarts=10, raw_samples=256)
            point = chosen[0]
        cpu_s += time.process_time() - start
        config = space.decode(point.tolist())
        result = evaluate(problem, config, limits, seed)
        measured = problem.measure(config, 1000 + seed)
        points.append(space.encode(config))
        outcomes.append([-result.error, *(limit.excess(measured[limit.name]) for limit in limits)])
        found.append(result)
    return Search(found, cpu_s)


METHODS: dict[str, Runner] = {
    "HW-IECI": aware(Bayes),
    "HW-IECI, measured in doubt": aware(Bayes, probe=True),
    "HW-IECI, 50% sure": aware(Bayes, confidence=0.5),
    "HW-IECI, 95% sure": aware(Bayes, confidence=0.95),
    "HW-IECI, 99% sure": aware(Bayes, confidence=0.99),
    "HW-IECI, not refined": aware(Bayes, refine=False),
    "HW-CWEI": aware(lambda: Bayes(weight="probability")),
    "HW-CWEI, GP": aware(lambda: Bayes(weight="gp")),
    "Rand": aware(Random),
    "Rand-Walk": aware(Walk),
    "EI, unaware": unaware(Bayes),
    "Rand, unaware": unaware(Random),
    "Rand-Walk, unaware": unaware(Walk),
    "Optuna GPSampler": optuna_gp,
    "BoTorch LogEI, constrained": botorch_constrained,
}

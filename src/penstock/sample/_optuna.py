"""OptunaSampler: any sampler of Optuna, without Optuna's storage."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, final

from penstock.core import Config
from penstock.core.errors import InvalidInput
from penstock.sample._base import Observation, Sampler, started
from penstock.space import Space

if TYPE_CHECKING:
    from optuna.samplers import BaseSampler

    from penstock.sample._optuna_study import Engine


@final
class OptunaSampler(Sampler):
    """Runs a sampler of Optuna: ``OptunaSampler(optuna.samplers.CmaEsSampler)``.

    Conditional spaces, several objectives, pending trials, failures and rungs are passed on in Optuna's terms
    (see ``TPE``). The sampler's random generators are reseeded before each proposal from the study's seed, which takes
    the place of the sampler's own. A resume proposes again what was proposed before the interruption, for the
    sake of the state that samplers keep: it costs as much as the proposals did.

    Args:
        sampler: A sampler (copied), a class of samplers that takes ``seed``, or a function from a seed to a
            sampler: ``lambda seed: optuna.samplers.GPSampler(seed=seed, n_startup_trials=5)``.
    """

    def __init__(self, sampler: BaseSampler | type[BaseSampler] | Callable[[int], BaseSampler]) -> None:
        if not callable(sampler) and not hasattr(sampler, "sample_relative"):
            raise InvalidInput(
                f"OptunaSampler: {sampler!r} is not a sampler of Optuna. "
                "Write OptunaSampler(optuna.samplers.CmaEsSampler)."
            )
        self._source: Any = sampler
        self._engine: Engine | None = None

    def start(self, space: Space, *, objectives: int, seed: int) -> None:
        """Begin a study with a fresh sampler."""
        from penstock.sample._optuna_study import Engine

        sampler = self._fresh(seed % 2**32)
        self._engine = Engine(sampler, space, objectives=objectives, seed=seed, stateless=False)

    def ask(self, n: int) -> list[Config]:
        """``n`` proposals."""
        return started(self, self._engine).ask(n)

    def skip(self, configs: Sequence[Config], trials: Sequence[int]) -> None:
        """Propose again, so that the sampler is where it was."""
        started(self, self._engine).skip(configs, trials)

    def adopt(self, config: Config, trial: int) -> None:
        """Learn a trial's number; it is RUNNING to Optuna."""
        started(self, self._engine).adopt(config, trial)

    def tell(self, observation: Observation) -> None:
        """Learn a result."""
        started(self, self._engine).tell(observation)

    def _fresh(self, seed: int) -> BaseSampler:
        from optuna.samplers import BaseSampler

        source = self._source
        if isinstance(source, BaseSampler):
            sampler = copy.deepcopy(source)
            if isinstance(getattr(sampler, "_seed", None), int):  # QMC: the seed of its whole sequence
                sampler._seed = seed  # type: ignore[attr-defined]
            return sampler
        made = source(seed=seed) if isinstance(source, type) else source(seed)
        if not isinstance(made, BaseSampler):
            raise InvalidInput(f"OptunaSampler: {source!r} made {made!r}, not a sampler of Optuna.")
        return made

    def __repr__(self) -> str:
        return f"OptunaSampler({getattr(self._source, '__name__', type(self._source).__name__)})"

"""TPE: the tree-structured Parzen estimator, Optuna's implementation (Bergstra et al. 2011)."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, final

from penstock.core import Config
from penstock.core.errors import InvalidInput
from penstock.sample._base import Observation, Sampler, started
from penstock.space import Space

if TYPE_CHECKING:
    from penstock.sample._optuna_study import Engine


@final
class TPE(Sampler):
    """Optuna's TPE, without Optuna's storage.

    Pending trials count as bad ones (constant liar), so that parallel proposals differ. Under a multi-fidelity
    scheduler it learns from the longest training of which there are enough results, as BOHB does:
    ``Hyperband(sampler=TPE())``. Domains of a conditional space are modelled by groups that occur together.

    Args:
        options: Passed to ``optuna.samplers.TPESampler``: ``n_startup_trials``, ``n_ei_candidates``,
            ``multivariate``, ``group``, ``constant_liar`` ... The seed is the study's.
    """

    def __init__(self, **options: Any) -> None:
        if "seed" in options:
            raise InvalidInput(
                f"TPE: seed={options['seed']!r} is the study's to give. Write Study(..., seed=...)."
            )
        self._options = options
        self._engine: Engine | None = None

    def start(self, space: Space, *, objectives: int, seed: int) -> None:
        """Begin a study.

        Raises:
            InvalidInput: Optuna refuses an option.
        """
        from optuna.samplers import TPESampler

        from penstock.sample._optuna_study import Engine

        options: dict[str, Any] = {"constant_liar": True, **self._options}
        conditional = any(space[name].when is not None for name in space)
        if conditional and objectives == 1 and not {"multivariate", "group"} & options.keys():
            options |= {"multivariate": True, "group": True}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # experimental and deprecated marks of options
            try:
                sampler = TPESampler(seed=seed % 2**32, **options)
            except (TypeError, ValueError) as error:
                raise InvalidInput(f"TPE: Optuna refuses the options {self._options!r}: {error}") from error
        self._engine = Engine(sampler, space, objectives=objectives, seed=seed, stateless=True)

    def ask(self, n: int) -> list[Config]:
        """``n`` proposals."""
        return started(self, self._engine).ask(n)

    def skip(self, configs: Sequence[Config], trials: Sequence[int]) -> None:
        """Take proposals as answered."""
        started(self, self._engine).skip(configs, trials)

    def adopt(self, config: Config, trial: int) -> None:
        """Learn a trial's number; it is pending."""
        started(self, self._engine).adopt(config, trial)

    def tell(self, observation: Observation) -> None:
        """Learn a result."""
        started(self, self._engine).tell(observation)

    def __repr__(self) -> str:
        return f"TPE({', '.join(f'{name}={value!r}' for name, value in self._options.items())})"

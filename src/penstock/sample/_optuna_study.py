"""An Optuna study that lives in a list: what Optuna's samplers read and write, and nothing else.

Imports Optuna; imported lazily, by ``start`` of the samplers that need it.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Container, Iterator, Sequence
from datetime import datetime
from typing import Any, NoReturn, final

import numpy as np
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.pruners import NopPruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage
from optuna.study import Study, StudyDirection
from optuna.trial import FrozenTrial, TrialState

from penstock.core import Config
from penstock.core.errors import InvalidInput, Unsupported
from penstock.sample._base import Observation
from penstock.sample._seed import mixed
from penstock.space import Choice, Domain, Float, Int, Space

_EPOCH = datetime(2000, 1, 1)  # no sampler reads the time; a fixed one keeps the engine pure
_NAME = "penstock"


@final
class _Storage(BaseStorage):
    """Trials in a list, attributes in dicts. Nothing is copied or locked: one thread, and samplers don't mutate."""

    def __init__(self, objectives: int) -> None:
        self.trials: list[FrozenTrial] = []
        self._directions = [StudyDirection.MINIMIZE] * objectives
        self._system: dict[str, Any] = {}
        self._user: dict[str, Any] = {}

    def get_all_trials(
        self, study_id: int, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        if states is None:
            return self.trials[:]
        return [trial for trial in self.trials if trial.state in states]

    def get_trial(self, trial_id: int) -> FrozenTrial:
        return self.trials[trial_id]

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self.trials[trial_id].system_attrs[key] = value

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        self.trials[trial_id].user_attrs[key] = value

    def get_study_system_attrs(self, study_id: int) -> dict[str, Any]:
        return self._system

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        self._system[key] = value

    def get_study_user_attrs(self, study_id: int) -> dict[str, Any]:
        return self._user

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        self._user[key] = value

    def get_study_id_from_name(self, study_name: str) -> int:
        return 0

    def get_study_name_from_id(self, study_id: int) -> str:
        return _NAME

    def get_study_directions(self, study_id: int) -> list[StudyDirection]:
        return self._directions

    # A sampler has no business with what follows: the engine alone creates and ends trials.

    def get_all_studies(self) -> NoReturn:
        _refuse("lists studies")

    def create_new_study(self, directions: Any, study_name: str | None = None) -> NoReturn:
        _refuse("creates studies")

    def delete_study(self, study_id: int) -> NoReturn:
        _refuse("deletes studies")

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> NoReturn:
        _refuse("creates trials")

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: Any, distribution: Any
    ) -> NoReturn:
        _refuse("sets parameters of trials")

    def set_trial_state_values(self, trial_id: int, state: Any, values: Any = None) -> NoReturn:
        _refuse("ends trials")

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> NoReturn:
        _refuse("reports for trials")


def _refuse(what: str) -> NoReturn:
    raise Unsupported(
        f"This Optuna sampler {what} itself, which no sampler may under Penstock. Use another one."
    )


@final
class _Study(Study):
    """Optuna's Study over the list, without its caches, copies and threads."""

    def __init__(self, sampler: BaseSampler, storage: _Storage) -> None:
        super().__init__(_NAME, storage, sampler, NopPruner())
        self._list = storage
        self.stopped = False

    def _get_trials(
        self,
        deepcopy: bool = True,
        states: Container[TrialState] | None = None,
        use_cache: bool = False,
    ) -> list[FrozenTrial]:
        return self._list.get_all_trials(0, False, states)

    def get_trials(
        self, deepcopy: bool = True, states: Container[TrialState] | None = None
    ) -> list[FrozenTrial]:
        return self._list.get_all_trials(0, False, states)

    def stop(self) -> None:
        self.stopped = True


@final
class Engine:
    """Asks and tells one Optuna sampler.

    Trials are RUNNING from the proposal to their first result. A result of a rung (not final) counts as
    COMPLETE while there are few results of longer training, and as PRUNED, with its epoch as the step, once there
    are enough: BOHB's rule to learn from the largest budget that has d + 3 observations (Falkner et al. 2018,
    Algorithm 2). Optuna ranks PRUNED trials below COMPLETE ones and larger steps first.

    Args:
        sampler: Owned from now on.
        seed: All its random generators are reseeded from this and the count of proposals before each one.
        stateless: It keeps nothing between proposals but random generators and caches of the trials' list, so that
            ``skip`` need not ask it again. Otherwise ``skip`` proposes as ``ask`` does, for what the sampler keeps
            (CMA-ES its covariance, NSGA-II its generations, QMC its place in the sequence).
    """

    def __init__(
        self, sampler: BaseSampler, space: Space, *, objectives: int, seed: int, stateless: bool
    ) -> None:
        self._sampler, self._space, self._seed, self._stateless = sampler, space, seed, stateless
        self._objectives = objectives
        self._storage = _Storage(objectives)
        self._study = _Study(sampler, self._storage)
        self._distributions = {name: _distribution(space[name]) for name in space.names}
        self._reseeds: list[Callable[[int], None]] = []
        self._asked = 0
        self._configs: list[dict[str, Any]] = []
        self._index: dict[int, int] = {}  # the study's number -> place in the list
        self._nameless: list[int] = []  # asked, but not adopted yet
        self._epochs: dict[int, int] = {}  # place -> epoch of its result
        self._sorted_epochs: list[int] = []
        self._partial: set[int] = set()  # places whose result is a rung's
        self._level: float = 0
        self._over: set[int] = set()
        for part in _parts(sampler):
            if hasattr(part, "_warn_independent_sampling"):
                part._warn_independent_sampling = False  # conditional domains are sampled so by design

    def ask(self, n: int) -> list[Config]:
        """Up to ``n`` proposals; fewer when the sampler has called ``Study.stop``."""
        configs: list[Config] = []
        for _ in range(n):
            if self._study.stopped:
                break
            place = self._propose()
            self._nameless.append(place)
            configs.append(self._space.validate(self._configs[place]))
        return configs

    def skip(self, configs: Sequence[Config], trials: Sequence[int]) -> None:
        """Take proposals as asked and adopted."""
        for config, number in zip(configs, trials, strict=True):
            if self._stateless:
                self._asked += 1
                place = self._enter(config)
            else:
                place = self._propose()
                if self._configs[place] != config:  # another version of Optuna, or of a dependency of it
                    self._set(place, self._space.validate(config))
            self._index[number] = place

    def adopt(self, config: Config, number: int) -> None:
        """Learn the number of a proposal, or of a configuration from elsewhere."""
        if number in self._index:
            return
        for at, place in enumerate(self._nameless):
            if self._configs[place] == config:
                del self._nameless[at]
                self._index[number] = place
                return
        self._index[number] = self._enter(config)

    def tell(self, told: Observation) -> None:
        """Learn a result."""
        self.adopt(told.config, told.trial)
        place = self._index[told.trial]
        trial = self._storage.trials[place]
        values = told.values
        if values is not None and any(value != value for value in values):
            values = None
        if values is not None and len(values) != self._objectives:
            raise InvalidInput(
                f"Trial {told.trial} was told with {len(values)} values, but the study has {self._objectives}."
            )
        if values is None:
            if told.final:
                self._forget(place)
                self._end(place, TrialState.FAIL, None)
                trial.state = TrialState.FAIL
                trial.values = None
            return
        known = self._epochs.get(place)
        if known is None or told.epoch >= known:
            if known is not None:
                self._forget(place, keep_partial=known == told.epoch)
            self._epochs[place] = told.epoch
            bisect.insort(self._sorted_epochs, told.epoch)
            # A trial whose rung was told and that gets no further segment was dropped: its result stays a rung's.
            if not told.final:
                self._partial.add(place)
            trial.values = list(values)
            if self._objectives == 1:
                trial.intermediate_values[told.epoch] = values[0]
        self._settle(place)
        if told.final:
            self._end(place, trial.state, list(values))

    # --- inside -----------------------------------------------------------------------------------------

    def _propose(self) -> int:
        self._reseed(mixed(self._seed, self._asked) % 2**32)
        self._asked += 1
        place = self._new()
        trial, sampler, study = self._storage.trials[place], self._sampler, self._study
        sampler.before_trial(study, trial)
        config = self._configs[place]
        relative_space: dict[str, BaseDistribution] = {}
        relative: dict[str, Any] | None = None
        for name in self._space.order:
            if not self._space.active(name, config):
                continue
            domain, distribution = self._space[name], self._distributions[name]
            if distribution is None:
                config[name] = domain.value_at(0)
                continue
            if relative is None:
                # As optuna.Trial does it: once per trial, before its first parameter.
                relative_space = sampler.infer_relative_search_space(study, trial)
                relative = sampler.sample_relative(study, trial, relative_space)
            if name in relative and distribution._contains(distribution.to_internal_repr(relative[name])):
                value = relative[name]
            else:
                value = sampler.sample_independent(study, trial, name, distribution)
            config[name] = _value(domain, value)
            trial.params[name] = _param(domain, config[name])
            trial.distributions[name] = distribution
        if self._stateless:
            trial.system_attrs.clear()  # relative parameters, for other processes; all parameters are known now
        return place

    def _new(self) -> int:
        place = len(self._storage.trials)
        self._configs.append({})
        self._storage.trials.append(
            FrozenTrial(
                number=place,
                trial_id=place,
                state=TrialState.RUNNING,
                value=None,
                datetime_start=_EPOCH,
                datetime_complete=None,
                params={},
                distributions={},
                user_attrs={},
                system_attrs={},
                intermediate_values={},
            )
        )
        return place

    def _enter(self, config: Config) -> int:
        place = self._new()
        self._set(place, self._space.validate(config))
        return place

    def _set(self, place: int, config: dict[str, Any]) -> None:
        self._configs[place] = config
        trial = self._storage.trials[place]
        trial.params.clear()
        trial.distributions.clear()
        for name, value in config.items():
            distribution = self._distributions[name]
            if distribution is not None:
                trial.params[name] = _param(self._space[name], value)
                trial.distributions[name] = distribution

    def _forget(self, place: int, keep_partial: bool = False) -> None:
        epoch = self._epochs.pop(place, None)
        if epoch is not None:
            del self._sorted_epochs[bisect.bisect_left(self._sorted_epochs, epoch)]
        if not keep_partial:
            self._partial.discard(place)

    def _settle(self, place: int) -> None:
        """Set the state of the trial at ``place``, and of all rung results when the level moves."""
        enough = len(self._space) + 3
        level = self._sorted_epochs[-min(enough, len(self._sorted_epochs))]
        changed = self._partial if level != self._level else ()
        self._level = level
        for at in {place, *changed}:
            trial = self._storage.trials[at]
            if at not in self._partial or self._epochs[at] >= level:
                trial.state = TrialState.COMPLETE
            else:
                # Optuna defines no order of pruned trials with several objectives: there they stay pending.
                trial.state = TrialState.PRUNED if self._objectives == 1 else TrialState.RUNNING
            trial.datetime_complete = None if trial.state is TrialState.RUNNING else _EPOCH

    def _end(self, place: int, state: TrialState, values: list[float] | None) -> None:
        if place in self._over:
            return
        self._over.add(place)
        if state is TrialState.RUNNING:
            state = TrialState.PRUNED
        self._sampler.after_trial(self._study, self._storage.trials[place], state, values)

    def _reseed(self, seed: int) -> None:
        if not self._stateless or not self._reseeds:
            self._reseeds = [reseed for part in _parts(self._sampler) for reseed in _reseeds(part)]
        for reseed in self._reseeds:
            reseed(seed)


def _distribution(domain: Domain) -> BaseDistribution | None:
    """The domain in Optuna's terms; None for a constant, which no sampler needs to see."""
    match domain:
        case Float():
            top = domain.high if domain.count is None else domain.value_at(domain.count - 1)
            return FloatDistribution(domain.low, top, log=domain.log, step=domain.step)
        case Int():
            return IntDistribution(
                domain.low, domain.value_at(domain.count - 1), log=domain.log, step=domain.step or 1
            )
        case Choice():
            if domain.count == 1:
                return None
            return CategoricalDistribution(domain.values if _plain(domain) else tuple(range(domain.count)))
    raise Unsupported(f"Optuna has no counterpart of {domain!r}. Use Float, Int or Choice.")


def _plain(domain: Choice) -> bool:
    """Whether Optuna takes the values themselves, which a user may name to its samplers; lists go by their place."""
    return not any(isinstance(value, list) for value in domain.values)


def _param(domain: Domain, value: Any) -> Any:
    """A value of ours as Optuna holds it."""
    return domain.index(value) if isinstance(domain, Choice) and not _plain(domain) else value


def _value(domain: Domain, param: Any) -> Any:
    """A value of Optuna's as the domain gives it."""
    if isinstance(domain, Choice) and not _plain(domain):
        return domain.value_at(int(param))
    if isinstance(domain, Float | Int):
        return domain.check(min(max(param, domain.low), domain.high))
    return domain.check(param)


def _parts(sampler: BaseSampler) -> Iterator[Any]:
    """The sampler and every object of it in which a random generator may hide, each once."""
    seen: set[int] = set()
    todo: list[Any] = [sampler]
    while todo:
        part = todo.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield part
        if isinstance(part, dict):
            inner: Sequence[Any] = list(part.values())
        elif isinstance(part, list | tuple | set):
            inner = list(part)
        else:
            inner = list(getattr(part, "__dict__", {}).values())
        todo.extend(item for item in inner if _may_hide(item, sampler))


def _may_hide(item: Any, sampler: BaseSampler) -> bool:
    if isinstance(item, np.random.RandomState | np.random.Generator | random.Random | BaseSampler):
        return True
    if isinstance(item, dict | list | tuple | set):
        return 0 < len(item) <= 64
    if isinstance(item, type):
        return False
    home = type(item).__module__
    if home.startswith(("optuna.trial", "optuna.study", "optuna.distributions")):
        return False
    return home.startswith("optuna.") or home == type(sampler).__module__


def _reseeds(part: Any) -> Iterator[Callable[[int], None]]:
    """What puts the random generator that ``part`` is, or wraps, at the start of a seed."""
    if isinstance(part, np.random.RandomState):
        yield part.seed
    elif isinstance(part, np.random.Generator):
        bits = part.bit_generator

        def restart(seed: int) -> None:
            bits.state = type(bits)(seed).state

        yield restart
    elif isinstance(part, random.Random):
        yield part.seed
    elif type(part).__name__ == "LazyRandomState" and part._rng is None:
        yield part.rng.seed  # once it exists, it is found as a part of its own

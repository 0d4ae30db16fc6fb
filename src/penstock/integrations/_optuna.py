"""Optuna: a study written to an Optuna storage, and an Optuna study as a warm start."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from penstock.core import StudyState, TrialRecord, TrialStatus
from penstock.core.errors import InvalidInput, SpaceError, StoreCorrupt
from penstock.goal import Goal, metrics_of
from penstock.report._read import read_state
from penstock.sample import TPE, Observation, Sampler, WarmStart
from penstock.space import Choice, Domain, Float, Int, Space
from penstock.store import open_store

if TYPE_CHECKING:
    from penstock.study import Study

_NUMBER = "penstock:trial"
_BEGAN = "penstock:began_s"
_CONSTRAINTS = "constraints"  # Optuna's own
_STATES = {
    TrialStatus.WAITING: TrialState.WAITING,
    TrialStatus.RUNNING: TrialState.RUNNING,
    TrialStatus.PAUSED: TrialState.RUNNING,
    TrialStatus.COMPLETED: TrialState.COMPLETE,
    TrialStatus.STOPPED: TrialState.PRUNED,
    TrialStatus.FAILED: TrialState.FAIL,
}


def export_optuna(
    source: str | Path | Study,
    storage: str | optuna.storages.BaseStorage,
    *,
    name: str | None = None,
    study_name: str | None = None,
) -> optuna.Study:
    """Write a study, finished or running, to an Optuna storage, where ``optuna-dashboard`` and Optuna's plots read it.

    Called again with the same study, it brings the export up to date: ended trials stay as they are, those that went
    on get their new values, new ones are added; one that was given another configuration meanwhile (PBT) goes on as
    another trial. Reports of one objective are intermediate values. Energy, status and
    other metrics are user attributes. Trials that violate a limit violate a constraint there.

    Args:
        source: A store's path or URL, or a Study.
        storage: Optuna's: ``"sqlite:///optuna.db"``, or a storage object.
        name: The study's name in the store; None: the newest.
        study_name: Its name there; None: the same.

    Raises:
        InvalidInput: Something else was given, the storage can't be opened, or holds another study of that name.
    """
    _check_storage(storage)
    found, goal, state, space = _read(source, name)
    turned = [objective.maximize for objective in goal.objectives]
    directions = [StudyDirection.MAXIMIZE if each else StudyDirection.MINIMIZE for each in turned]
    with _storage_errors(storage):
        study = optuna.create_study(
            storage=storage, study_name=study_name or found, directions=directions, load_if_exists=True
        )
    if study.directions != directions:
        have, wanted = ([each.name.lower() for each in some] for some in (study.directions, directions))
        raise InvalidInput(
            f"{study.study_name!r} in the Optuna storage is another study: it has {', '.join(have)}, this one "
            f"{', '.join(wanted)}. Give study_name."
        )
    if not study.metric_names:
        with warnings.catch_warnings():  # experimental since Optuna 3.2
            warnings.simplefilter("ignore", ExperimentalWarning)
            study.set_metric_names([objective.metric for objective in goal.objectives])
    known = {trial.user_attrs.get(_NUMBER): trial for trial in study.get_trials(deepcopy=False)}
    # A study that was exported before its first run had no beginning yet.
    if None in known or (study.user_attrs.get(_BEGAN) or state.first_s) != state.first_s:
        raise InvalidInput(
            f"{study.study_name!r} in the Optuna storage has trials of another study. Give study_name."
        )
    study.set_user_attr(_BEGAN, state.first_s)
    if state.energy is not None:
        study.set_user_attr("penstock:energy_j", state.energy.joules)
        study.set_user_attr("penstock:energy_source", str(state.energy.source))
    distributions = _distributions(space, state)
    for record in state.trials.values():
        old = known.get(record.id)
        if old is not None and not old.state.is_finished() and old.params != _params(record, space):
            # PBT gave it another configuration, and Optuna's trials keep theirs: it goes on as another one.
            study._storage.set_trial_state_values(old._trial_id, TrialState.FAIL)
            old = None
        if old is None:
            study.add_trial(_frozen(record, goal, space, distributions))
        elif not old.state.is_finished():
            _update(study, old, record, goal)
    return study


def _update(study: optuna.Study, old: FrozenTrial, record: TrialRecord, goal: Goal) -> None:
    """Bring a trial that had not ended up to date."""
    storage, key = study._storage, old._trial_id
    if len(goal.objectives) == 1:
        for epoch, value in _curve(record, goal).items():
            if epoch not in old.intermediate_values:
                storage.set_trial_intermediate_value(key, epoch, value)
    for attribute, told in _attributes(record).items():
        if old.user_attrs.get(attribute) != told:
            storage.set_trial_user_attr(key, attribute, told)
    if record.violated:
        storage.set_trial_system_attr(key, _CONSTRAINTS, _excess(record))
    state = _state_of(record, goal)
    if state is not old.state:  # last: nothing of an ended trial can change
        storage.set_trial_state_values(key, state, _values(record, goal) if state.is_finished() else None)


def _read(source: str | Path | Study, name: str | None) -> tuple[str, Goal, StudyState, Space]:
    if not isinstance(source, str | Path):
        if not all(hasattr(source, each) for each in ("name", "goal", "state", "space")):
            raise InvalidInput(f"source takes a store's path or URL, or a Study, got {source!r}.")
        return source.name or "study", source.goal, source.state, source.space
    store = open_store(source, write=False)
    try:
        entry = store.find(name)
        state = StudyState()
        with suppress(
            StoreCorrupt
        ):  # what precedes the damage is exported; "penstock report" says what it is
            read_state(store, entry, state)
        return entry.name, Goal.from_json(entry.spec["goal"]), state, Space.from_json(entry.spec["space"])
    finally:
        store.close()


def _state_of(record: TrialRecord, goal: Goal) -> TrialState:
    state = _STATES[record.status]
    if state is TrialState.COMPLETE and goal.score(record) is None:
        return TrialState.FAIL  # Optuna has no completed trial without values
    if state is TrialState.PRUNED and len(goal.objectives) > 1:
        return TrialState.COMPLETE if goal.score(record) is not None else TrialState.FAIL
    return state


def _values(record: TrialRecord, goal: Goal) -> list[float] | None:
    values = goal.score(record)
    if values is None or record.status is TrialStatus.FAILED:
        return None
    signed = zip(values, goal.objectives, strict=True)
    return [-value if objective.maximize else value for value, objective in signed]


def _curve(record: TrialRecord, goal: Goal) -> dict[int, float]:
    metric = goal.objectives[0].metric
    return {report.epoch: report.metrics[metric] for report in record.reports if metric in report.metrics}


def _attributes(record: TrialRecord) -> dict[str, Any]:
    told: dict[str, Any] = {
        _NUMBER: record.id,
        "penstock:status": record.status.value,
        "epochs": record.epoch,
    }
    told |= metrics_of(record)
    if record.energy is not None:
        told["penstock:energy_source"] = str(record.energy.source)
    if record.reason:
        told["penstock:reason"] = record.reason
    return told


def _frozen(
    record: TrialRecord, goal: Goal, space: Space, distributions: Mapping[str, BaseDistribution]
) -> FrozenTrial:
    state = _state_of(record, goal)
    begun = datetime.fromtimestamp(record.started_s if record.started_s is not None else record.created_s)
    ended = datetime.fromtimestamp(record.ended_s or record.created_s)
    values = _values(record, goal) if state.is_finished() else None
    return FrozenTrial(
        number=-1,  # given by the storage
        trial_id=-1,
        state=state,
        value=None,
        values=values,
        datetime_start=None if state is TrialState.WAITING else begun,
        datetime_complete=ended if state.is_finished() else None,
        params=_params(record, space),
        distributions={name: distributions[name] for name in record.config},
        user_attrs=_attributes(record),
        system_attrs={_CONSTRAINTS: _excess(record)} if record.violated else {},
        intermediate_values=_curve(record, goal) if len(goal.objectives) == 1 else {},
    )


def _excess(record: TrialRecord) -> list[float]:
    """As Optuna keeps constraints: above 0 is violated, and the trial is never the best."""
    return [1.0 for _ in record.violated]


def _distributions(space: Space, state: StudyState) -> dict[str, BaseDistribution]:
    """By name; of batch sizes that SM2 tries beside the space, from the least to the greatest."""
    found = {name: _distribution(space[name]) for name in space.names}
    for name in {name for record in state.trials.values() for name in record.config} - set(found):
        values = [record.config[name] for record in state.trials.values() if name in record.config]
        found[name] = IntDistribution(min(values), max(values))
    return found


def _params(record: TrialRecord, space: Space) -> dict[str, Any]:
    return {
        name: _param(space[name], value) if name in space else value for name, value in record.config.items()
    }


def _distribution(domain: Domain) -> BaseDistribution:
    if isinstance(domain, Float):
        top = domain.high if domain.count is None else domain.value_at(domain.count - 1)
        return FloatDistribution(domain.low, top, log=domain.log, step=domain.step)
    if isinstance(domain, Int):
        top = domain.value_at(domain.count - 1)
        return IntDistribution(domain.low, top, log=domain.log, step=domain.step or 1)
    if isinstance(domain, Choice):
        return CategoricalDistribution([_param(domain, value) for value in domain.values])
    raise InvalidInput(f"Optuna has no counterpart of {domain!r}.")


def _param(domain: Domain, value: Any) -> Any:
    """A value as Optuna holds it: its choices can't be lists."""
    return repr(value) if isinstance(domain, Choice) and isinstance(value, list) else value


# --- the other way -------------------------------------------------------------------------------------------


def import_optuna(
    source: optuna.Study | str | optuna.storages.BaseStorage,
    space: Space | Mapping[str, Domain],
    *,
    study_name: str | None = None,
    first: int = 0,
    then: Sampler | None = None,
    minimize: str | Sequence[str] | None = None,
    maximize: str | Sequence[str] | None = None,
) -> WarmStart:
    """A sampler that knows an Optuna study: ``Study(..., sampler=import_optuna("sqlite:///old.db", space))``.

    Completed trials, and pruned ones at their last step, are told to ``then`` before its first proposal. The new
    study must have the same objectives. Trials that are no configurations of ``space`` (a value outside, a parameter
    missing) are left out; parameters that ``space`` does not have are ignored.

    Args:
        source: A study, or the storage it is in.
        space: The new study's.
        study_name: In the storage; None: the only one.
        first: Run so many of the best configurations again first.
        then: The sampler that follows; default TPE.
        minimize: As given to the new study, to be compared with the Optuna study's directions: a sampler that is told
            losses of accuracies would look for the worst.
        maximize: Likewise.

    Raises:
        InvalidInput: No trial of it is a configuration of the space, or there is no such storage or study.
    """
    if isinstance(first, bool) or not isinstance(first, int) or first < 0:
        raise InvalidInput(f"first takes how many configurations to run again, 0 or more, got {first!r}.")
    if not isinstance(space, Space | Mapping):
        raise InvalidInput(f"space takes a Space or a dict of domains by name, got {space!r}.")
    if then is not None and not isinstance(then, Sampler):
        raise InvalidInput(f"then takes a sampler, such as TPE(), got {then!r}.")
    study = source if isinstance(source, optuna.Study) else _load(source, study_name)
    space = space if isinstance(space, Space) else Space(**space)
    if minimize is not None or maximize is not None:
        _check_directions(study, Goal.of(minimize, maximize))
    signs = [-1.0 if direction.name == "MAXIMIZE" else 1.0 for direction in study.directions]
    observations: list[Observation] = []
    reason = "it has no trials that ended with a value"
    for trial in study.get_trials(deepcopy=False):
        if trial.state is TrialState.COMPLETE:
            values = trial.values
        elif trial.state is TrialState.PRUNED and trial.intermediate_values:
            values = [trial.intermediate_values[max(trial.intermediate_values)]]
        else:
            continue
        try:
            config = _config(space, trial.params)
        except SpaceError as error:
            reason = f"the last one: {error}"
            continue
        turned = tuple(sign * value for sign, value in zip(signs, values, strict=True))
        failed = any(math.isnan(value) for value in turned)  # pruned for it
        epoch = max(trial.intermediate_values, default=1)
        observations.append(Observation(trial.number, config, None if failed else turned, epoch, True))
    if all(told.values is None for told in observations):
        raise InvalidInput(f"No trial of the Optuna study {study.study_name!r} fits the space; {reason}.")
    finite = [told for told in observations if told.values and all(map(math.isfinite, told.values))]
    best = sorted(finite, key=lambda told: told.values or ())[:first] if len(signs) == 1 else []
    if first and len(signs) > 1:
        numbers = {trial.number for trial in study.best_trials}
        best = [told for told in observations if told.trial in numbers][:first]
    return WarmStart([told.config for told in best], then=then or TPE(), observations=observations)


def _check_directions(study: optuna.Study, goal: Goal) -> None:
    """Say if an Optuna study is after something else than a goal.

    Raises:
        InvalidInput: It has other directions, or names other metrics.
    """
    have = [direction is StudyDirection.MAXIMIZE for direction in study.directions]
    wanted = [objective.maximize for objective in goal.objectives]
    names = study.metric_names
    if have != wanted or (names is not None and names != [o.metric for o in goal.objectives]):
        told = [
            f"{'maximises' if each else 'minimises'} {name}"
            for each, name in zip(have, names or ["a value"] * len(have), strict=True)
        ]
        raise InvalidInput(
            f"The Optuna study {study.study_name!r} {' and '.join(told)}, but the new study is to {goal}. Its results "
            "would mislead the sampler."
        )


def _check_storage(storage: Any) -> None:
    """Say what is no storage at all.

    Raises:
        InvalidInput: It is something else.
    """
    if isinstance(storage, optuna.storages.BaseStorage):
        return
    if not isinstance(storage, str) or not storage:
        raise InvalidInput(
            f"storage takes a URL such as 'sqlite:///optuna.db' or a storage, got {storage!r}."
        )
    if "://" not in storage:
        raise InvalidInput(f"An Optuna storage is a URL, got {storage!r}: write 'sqlite:///{storage}'.")


@contextmanager
def _storage_errors(storage: Any) -> Iterator[None]:
    """Whatever Optuna and its database say of a storage that can't be opened, as one error."""
    from sqlalchemy.exc import SQLAlchemyError

    try:
        yield
    except InvalidInput:
        raise
    except (SQLAlchemyError, ImportError, OSError, StorageInternalError, RuntimeError, ValueError) as error:
        shown = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise InvalidInput(
            f"Optuna can't open the storage {_shown(storage)}: {shown}. Give one such as 'sqlite:///optuna.db' in a "
            "folder that can be written to."
        ) from error


def _shown(storage: Any) -> str:
    """A storage as a message names it: without a password."""
    return re.sub(r"(://[^:/@]*):[^@/]*@", r"\1:***@", storage) if isinstance(storage, str) else repr(storage)


def _load(storage: str | optuna.storages.BaseStorage, study_name: str | None) -> optuna.Study:
    _check_storage(storage)
    if isinstance(storage, str) and storage.startswith("sqlite") and ":memory:" not in storage:
        file = storage.partition(":///")[2].partition("?")[0]
        if file and not file.startswith("file:") and not Path(file).exists():  # SQLite would make one
            raise InvalidInput(f"There is no file {file!r}, which {storage!r} names.")
    with _storage_errors(storage):
        return _found(storage, study_name)


def _found(storage: str | optuna.storages.BaseStorage, study_name: str | None) -> optuna.Study:
    if study_name is None:
        names = optuna.get_all_study_names(storage)
        if len(names) != 1:
            raise InvalidInput(
                f"There are {len(names)} studies in the Optuna storage ({', '.join(names) or 'none'}): give study_name."
            )
        study_name = names[0]
    try:
        return optuna.load_study(study_name=study_name, storage=storage)
    except KeyError as error:
        names = optuna.get_all_study_names(storage)
        raise InvalidInput(
            f"There is no study {study_name!r} in the Optuna storage; it has {', '.join(names) or 'none'}."
        ) from error


def _config(space: Space, params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters as a configuration; lists were written as text by ``export_optuna``."""
    config: dict[str, Any] = {}
    for name, value in params.items():
        if name in space:
            domain = space[name]
            if isinstance(domain, Choice) and isinstance(value, str):
                texts = {repr(each): each for each in domain.values if isinstance(each, list)}
                value = texts.get(value, value)
            config[name] = value
    return space.validate(config)

"""Limits of a study: no trial that is predicted to violate one starts; what is measured teaches (HyperPower)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from penstock.core import Config, Noted, TrialRecord
from penstock.core.errors import InvalidInput
from penstock.core.state import VIOLATED
from penstock.goal import Limit, check_limits, measured
from penstock.predict import PREFIX, Features, Predictors
from penstock.sample import Gate, Limited, Sampler, WarmStart
from penstock.space import Space
from penstock.store import Store
from penstock.train import Profile, Task


def check_bounds(limits: Any, predictors: Any, confidence: Any) -> tuple[Limit, ...]:
    """The study's limits.

    Raises:
        InvalidInput: They are something else, or there are predictors and nothing to predict.
    """
    given = check_limits(limits)
    if predictors is not None and not isinstance(predictors, Predictors | str):
        raise InvalidInput(
            "predictors takes what Profile(task, space).collect() gives, or the name of a device model whose "
            f"profile is in the store, got {predictors!r}."
        )
    if predictors is not None and not given:
        raise InvalidInput("predictors are of use with limits=[...] only: give limits, or drop predictors.")
    if given:
        Gate(given, confidence=confidence)  # checks it
    return given


def check_probe(probe: Any, limits: tuple[Limit, ...]) -> Profile | None:
    """What measures networks whose limits are in doubt, or None.

    Raises:
        InvalidInput: It is something else, or there are no limits.
    """
    if probe is not None and not isinstance(probe, Profile):
        raise InvalidInput(
            f"probe takes a profile that can measure, probe=pk.Profile(task, space), got {probe!r}."
        )
    if probe is not None and not limits:
        raise InvalidInput("probe is of use with limits=[...] only: give limits, or drop probe.")
    return probe


def limited(
    sampler: Sampler,
    limits: Iterable[Limit],
    predictors: Predictors,
    confidence: float,
    first: Iterable[Config] | None = None,
) -> Limited:
    """The sampler under the limits, with configurations to try first (those that are allowed)."""
    gate = Gate(limits, predictors.copy(), confidence=confidence)
    return Limited(sampler if first is None else WarmStart(first, then=sampler), gate)


def gate_of(sampler: Sampler) -> Gate | None:
    """The limits a sampler keeps to, wherever they were given."""
    if isinstance(sampler, WarmStart):
        return gate_of(sampler.then)
    gate = getattr(sampler, "gate", None)
    return gate if isinstance(gate, Gate) else None


def allowed_by(sampler: Sampler) -> Callable[[Config], bool] | None:
    """Whether a configuration keeps the limits of a sampler, as far as is known; None: it has none."""
    gate = gate_of(sampler)
    return None if gate is None else lambda config: gate.check(config).allowed


def find_predictors(store: Store, work: Any, space: Space, device: str | None) -> Predictors:
    """The profile of a work in a store, or what learns from the study's own measurements alone.

    Args:
        store: The study's store.
        work: What is tuned.
        space: Its space.
        device: The device model; None: the only one there is a profile of, or this machine's.

    Raises:
        InvalidInput: There is none of that device, none of this space, or several to choose from.
    """
    profile = Profile(work, space) if isinstance(work, Task) else None
    name = profile.name if profile is not None else getattr(work, "__name__", "task")
    extra = None if profile is None else profile.traced
    found: dict[str, Predictors] = {}
    for key in store.keys(PREFIX):
        data = store.get(key)
        if isinstance(data, Mapping) and data.get("task") == name:
            predictors = Predictors.from_json(data, extra=extra)
            found[predictors.device] = predictors
    if device is None and len(found) > 1 and profile is not None and profile.device_name in found:
        device = profile.device_name
    if device is not None and device not in found:
        raise InvalidInput(
            f"There is no profile of {name} on {device!r} in the store: there are {sorted(found) or 'none'}. Run "
            "penstock profile on that device, or give predictors=Profile(...).collect()."
        )
    if device is None and len(found) > 1:
        raise InvalidInput(
            f"There are profiles of {name} on {sorted(found)}. Say which one limits are about: predictors='...'."
        )
    features = Features.of(space)
    if not found:
        exact = ("params", "flops") if profile is not None else ()
        return Predictors(features=features, extra=extra, exact=exact, task=name)
    chosen = found[device] if device is not None else next(iter(found.values()))
    if chosen.features != features:
        raise InvalidInput(
            f"The profile of {name} on {chosen.device} was made of another space: it looks at "
            f"{', '.join(chosen.features.names) if chosen.features else 'nothing'}, this space has "
            f"{', '.join(features.names)}. Profile again, or give predictors=."
        )
    return chosen


def violation_notes(gate: Gate, record: TrialRecord, time_s: float, *, so_far: bool = False) -> list[Noted]:
    """A note per limit that a trial's measured values violate; ``so_far``: it is not over."""
    found = gate.violated(measured(record))
    verdict = gate.check(record.config) if found else None
    notes = []
    for limit, value in found.items():
        predicted = None if verdict is None else verdict.predictions.get(limit.name)
        data: dict[str, Any] = {
            "limit": str(limit),
            "quantity": limit.name,
            "value": value,
            "bound": limit.bound,
            "predicted": None if predicted is None else predicted.mean,
        }
        if so_far:
            data["so_far"] = True
        notes.append(Noted(time_s, VIOLATED, data, record.id))
    return notes

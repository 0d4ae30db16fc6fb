"""Space: named domains, and the configurations they make."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from random import Random
from typing import Any, Protocol, final

from penstock.core.errors import SpaceError
from penstock.space._choice import Choice
from penstock.space._condition import Above, Among, Atom, Below, Condition, condition_from_json
from penstock.space._domain import Domain
from penstock.space._float import Float
from penstock.space._int import Int

FILLER = 0.5
"""Where an inactive domain lies in the unit cube."""


class Uniform(Protocol):
    """Anything that draws uniform numbers: ``random.Random``, a numpy Generator."""

    def random(self) -> float:
        """A number in [0, 1)."""


@final
class Space:
    """Named domains. Immutable.

    ``Space(lr=Float(1e-4, 1, log=True), batch_size=Choice(32, 64))`` or ``Space({"lr": Float(...)})``.

    A configuration is a dict of JSON-able values by name; a domain whose condition does not hold is absent
    from it. Equality takes the order of the domains into account, for sampling follows it.
    """

    __slots__ = ("_conditions", "_domains", "_free", "_order")

    def __init__(self, domains: Mapping[str, Domain] | None = None, /, **more: Domain) -> None:
        if domains is not None and not isinstance(domains, Mapping):
            raise SpaceError(f"Space({domains!r}) is not made of domains. Write Space(lr=Float(0, 1)).")
        twice = sorted(set(domains or ()) & set(more))
        if twice:
            raise SpaceError(f"Domain {twice[0]!r} is given twice. Rename one of them.")
        self._domains: dict[str, Domain] = {**(domains or {}), **more}
        for name, domain in self._domains.items():
            _check_entry(name, domain)
        self._conditions: dict[str, Condition | None] = {
            name: self._bound(name, domain) for name, domain in self._domains.items()
        }
        self._order = self._sorted()
        # What sampling needs, looked up once.
        self._free = tuple((n, self._domains[n].from_unit, self._conditions[n]) for n in self._order)

    # --- as a mapping of domains ------------------------------------------------------------------------

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the domains, in the given order."""
        return tuple(self._domains)

    @property
    def structural(self) -> tuple[str, ...]:
        """The names of the domains that change the network."""
        return tuple(name for name, domain in self._domains.items() if domain.structural)

    @property
    def transferring(self) -> tuple[str, ...]:
        """The names of the domains whose best value carries over to a wider model."""
        return tuple(name for name, domain in self._domains.items() if domain.transfers)

    @property
    def order(self) -> tuple[str, ...]:
        """The names with every parent before the domains that depend on it, otherwise in the given order."""
        return self._order

    def __iter__(self) -> Iterator[str]:
        return iter(self._domains)

    def __len__(self) -> int:
        return len(self._domains)

    def __contains__(self, name: object) -> bool:
        return name in self._domains

    def __getitem__(self, name: str) -> Domain:
        try:
            return self._domains[name]
        except KeyError:
            raise SpaceError(
                f"No domain {name!r}. There are: {', '.join(self._domains) or 'none'}."
            ) from None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Space):
            return NotImplemented
        return list(self._domains.items()) == list(other._domains.items())

    def __hash__(self) -> int:
        return hash(tuple(self._domains))

    def __repr__(self) -> str:
        return f"Space({', '.join(f'{name}={domain!r}' for name, domain in self._domains.items())})"

    # --- configurations ---------------------------------------------------------------------------------

    def active(self, name: str, config: Mapping[str, Any]) -> bool:
        """Whether the domain ``name`` is part of a configuration with these values of its parents."""
        condition = self._conditions[name]
        return condition is None or condition.holds(config)

    def sample(self, seed: int | Uniform) -> dict[str, Any]:
        """A random configuration from a seed, or from a generator that is moved on."""
        draw = _generator(seed).random
        config: dict[str, Any] = {}
        for name, from_unit, condition in self._free:
            if condition is None or condition.holds(config):
                config[name] = from_unit(draw())
        return config

    @property
    def middle(self) -> dict[str, Any]:
        """The configuration in the middle of all domains: of logarithms where they are ``log``, of choices as given."""
        return self.decode([0.5] * self.width())

    def validate(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The configuration as the space itself would give it: exact ints, plain Python values, in order.

        Raises:
            SpaceError: A value is missing, unknown, inactive or outside its domain; says which.
        """
        if not isinstance(config, Mapping):
            raise SpaceError(f"A configuration is a dict by domain name, not {config!r}.")
        for name in config:
            if name not in self._domains:
                raise SpaceError(
                    f"{name}={config[name]!r}: there is no domain {name!r}. "
                    f"Drop it, or use one of {', '.join(self._domains) or '(the space is empty)'}."
                )
        result: dict[str, Any] = {}
        for name in self._order:
            if not self.active(name, result):
                if name in config:
                    raise SpaceError(
                        f"{name}={config[name]!r}: {name!r} is only part of a configuration when "
                        f"{self._conditions[name]!r}. Drop it."
                    )
            elif name in config:
                result[name] = self._checked(name, config[name])
            else:
                raise SpaceError(
                    f"{name!r} is missing from the configuration {dict(config)!r}. Give it a value of {self[name]!r}."
                )
        return result

    def repair(self, config: Mapping[str, Any], seed: int | Uniform) -> dict[str, Any]:
        """The valid configuration nearest to ``config``: inactive values dropped, missing ones sampled.

        Raises:
            SpaceError: A value is unknown or outside its domain.
        """
        for name in config:
            self[name]
        draw = _generator(seed).random
        result: dict[str, Any] = {}
        for name in self._order:
            if self.active(name, result):
                known = name in config
                result[name] = self._checked(name, config[name]) if known else self[name].from_unit(draw())
        return result

    # --- unit cube --------------------------------------------------------------------------------------

    def width(self, *, one_hot: bool = False) -> int:
        """The length of an encoded configuration."""
        return sum(_width(domain, one_hot) for domain in self._domains.values())

    def encode(self, config: Mapping[str, Any], *, one_hot: bool = False) -> list[float]:
        """A valid configuration as a point of the unit cube, one number per domain in the order of ``names``.

        Discrete values lie in the middle of equal bins, log domains are spread by their logarithm, an inactive
        domain lies at 0.5. With ``one_hot`` a Choice takes one number per value: 1 for its value, 0 for the
        others, 0.5 for all when it is inactive.

        Raises:
            SpaceError: A value is not of its domain; says which.
        """
        if not isinstance(config, Mapping):
            raise SpaceError(f"A configuration is a dict by domain name, not {config!r}.")
        point: list[float] = []
        for name, domain in self._domains.items():
            if one_hot and isinstance(domain, Choice):
                if name in config:
                    try:
                        chosen = domain.index(config[name])
                    except SpaceError as error:
                        raise SpaceError(f"{name}={config[name]!r}: {error}") from None
                    point.extend(1.0 if i == chosen else 0.0 for i in range(domain.count))
                else:
                    point.extend([FILLER] * domain.count)
            elif name in config:
                try:
                    point.append(domain.to_unit(config[name]))
                except SpaceError as error:
                    raise SpaceError(f"{name}={config[name]!r}: {error}") from None
                except (TypeError, ValueError):
                    raise SpaceError(f"{name}={config[name]!r} is not of {domain!r}.") from None
            else:
                point.append(FILLER)
        return point

    def decode(self, point: Sequence[float], *, one_hot: bool = False) -> dict[str, Any]:
        """The configuration at a point; ``decode(encode(c)) == c``. Numbers outside [0, 1] are clipped.

        With ``one_hot``, a Choice takes the value of its largest number.

        Raises:
            SpaceError: The point has the wrong length or holds a NaN.
        """
        if isinstance(point, str | bytes | Mapping) or not hasattr(point, "__len__"):
            raise SpaceError(f"A point is a list of numbers, not {point!r}. Give what encode() returned.")
        if len(point) != self.width(one_hot=one_hot):
            raise SpaceError(
                f"A point of this space has {self.width(one_hot=one_hot)} numbers, not {len(point)}. "
                "Give what encode() returned."
            )
        try:
            units = [float(x) for x in point]
        except (TypeError, ValueError) as error:
            raise SpaceError(f"The point {point!r} holds something else than numbers: {error}.") from None
        if any(x != x for x in units):
            raise SpaceError(f"The point {units!r} holds a NaN. Give numbers between 0 and 1.")
        values: dict[str, Any] = {}
        at = 0
        for name, domain in self._domains.items():
            width = _width(domain, one_hot)
            if one_hot and isinstance(domain, Choice):
                part = units[at : at + width]
                values[name] = domain.value_at(part.index(max(part)))
            else:
                values[name] = domain.from_unit(min(max(units[at], 0.0), 1.0))
            at += width
        config: dict[str, Any] = {}
        for name in self._order:
            if self.active(name, config):
                config[name] = values[name]
        return config

    # --- all configurations -----------------------------------------------------------------------------

    @property
    def size(self) -> float:
        """How many configurations there are: an int, or infinity where a Float has no step."""
        atoms: dict[str, list[Atom]] = {}
        for condition in self._conditions.values():
            for atom in condition.atoms if condition is not None else ():
                atoms.setdefault(atom.name, []).append(atom)
        return self._count_from(0, {}, atoms)

    def grid(self, resolution: int | Mapping[str, int] | None = None) -> Iterator[dict[str, Any]]:
        """Every configuration of the full factorial, the last domain changing fastest, conditions respected.

        Args:
            resolution: How many values to take of each continuous domain (evenly spread, both ends included;
                log domains by their logarithm), or by name of any domain. Discrete domains that are not named
                are taken whole.

        Raises:
            SpaceError: A continuous domain has no resolution, or a resolution is no positive integer.
        """
        if isinstance(resolution, Mapping):
            for name in resolution:
                self[name]
        points: dict[str, Sequence[Any]] = {}
        for name, domain in self._domains.items():
            wanted: Any = None
            if isinstance(resolution, Mapping):
                wanted = resolution.get(name)
            elif domain.count is None:
                wanted = resolution
            if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1):
                raise SpaceError(f"The resolution of {name!r} is {wanted!r}. Give a positive integer.")
            if wanted is None and domain.count is None:
                raise SpaceError(
                    f"{name}={domain!r} is continuous: a grid needs its resolution. "
                    f"Give Grid(resolution={{{name!r}: 5}}), or a step."
                )
            points[name] = domain.points(wanted)
        return self._grid_from(0, {}, points)

    # --- JSON -------------------------------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """The space as JSON-able data; ``Space.from_json`` gives an equal space."""
        return {"domains": [[name, domain.to_json()] for name, domain in self._domains.items()]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Space:
        """The space that ``to_json`` wrote.

        Raises:
            SpaceError: The data is not a space.
        """
        try:
            return cls({name: _domain_from_json(entry) for name, entry in data["domains"]})
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            if isinstance(error, SpaceError):
                raise
            raise SpaceError(f"This is not a space written by to_json(): {error!r}.") from error

    # --- inside -----------------------------------------------------------------------------------------

    def _checked(self, name: str, value: Any) -> Any:
        try:
            return self._domains[name].check(value)
        except SpaceError as error:
            raise SpaceError(f"{name}={value!r}: {error}") from None

    def _bound(self, name: str, domain: Domain) -> Condition | None:
        """The domain's condition with its values checked against its parents."""
        condition = domain.when
        if condition is None:
            return None
        here = f"Domain {name!r} has when={condition!r}"
        for parent in condition.parents:
            if parent not in self._domains:
                raise SpaceError(
                    f"{here}, but there is no domain {parent!r}. Use one of {', '.join(self._domains)}."
                )
            if parent == name:
                raise SpaceError(f"{here}: it can't depend on itself. Drop the condition.")

        def check(atom: Atom, value: Any) -> Any:
            parent = self._domains[atom.name]
            if isinstance(atom, Among):
                if parent.count is None:
                    raise SpaceError(
                        f"{here}, but {atom.name!r} is continuous and equals a value never. "
                        f"Use greater() or less(), or give {atom.name!r} a step."
                    )
                try:
                    return parent.check(value)
                except SpaceError as error:
                    raise SpaceError(f"{here}, but {value!r} is no value of {atom.name!r}: {error}") from None
            if not isinstance(parent, Float | Int):
                raise SpaceError(f"{here}, but {atom.name!r} has no order. Use one_of({atom.name!r}, ...).")
            if value >= parent.high if isinstance(atom, Above) else value <= parent.low:
                raise SpaceError(
                    f"{here}, which never holds: {atom.name!r} is {parent!r}. "
                    f"Give a bound between {parent.low!r} and {parent.high!r}."
                )
            if not parent.low <= value <= parent.high:
                raise SpaceError(
                    f"{here}, but {value!r} is outside {atom.name!r}, {parent!r}. "
                    f"Give a bound between {parent.low!r} and {parent.high!r}."
                )
            return value

        bound = condition.mapped(check)
        for parent in dict.fromkeys(bound.parents):
            own = [atom for atom in bound.atoms if atom.name == parent]
            if not _possible(self._domains[parent], own):
                why = f"the tests on {parent!r} exclude each other. Drop one."
                if len(own) == 1:
                    why = f"{parent!r} is {self._domains[parent]!r}. Give a bound between two of its values."
                raise SpaceError(f"{here}, which never holds: {why}")
        return bound

    def _sorted(self) -> tuple[str, ...]:
        """Parents first, otherwise in the given order."""
        done: dict[str, None] = {}
        path: list[str] = []

        def visit(name: str) -> None:
            if name in done:
                return
            if name in path:
                ring = " -> ".join([*path[path.index(name) :], name])
                raise SpaceError(f"The conditions form a ring: {ring}. Drop one of them.")
            path.append(name)
            condition = self._conditions[name]
            for parent in condition.parents if condition is not None else ():
                visit(parent)
            path.pop()
            done[name] = None

        for name in self._domains:
            visit(name)
        return tuple(done)

    def _count_from(self, at: int, config: dict[str, Any], atoms: Mapping[str, Sequence[Atom]]) -> float:
        """Configurations from the ``at``-th domain on, given the parents before it.

        Values of a parent that no condition tells apart are counted together, so the cost depends on the
        conditions and not on the size of the domains.
        """
        total: float = 1
        while at < len(self._order):
            name = self._order[at]
            at += 1
            if not self.active(name, config):
                continue
            domain = self._domains[name]
            if name not in atoms:
                total *= math.inf if domain.count is None else domain.count
                continue
            rest: float = 0
            for value, weight in _classes(domain, atoms[name]):
                rest += weight * self._count_from(at, {**config, name: value}, atoms)
            return total * rest
        return total

    def _grid_from(
        self, at: int, config: dict[str, Any], points: Mapping[str, Sequence[Any]]
    ) -> Iterator[dict[str, Any]]:
        while at < len(self._order) and not self.active(self._order[at], config):
            at += 1
        if at == len(self._order):
            yield config
            return
        name = self._order[at]
        domain = self._domains[name]
        for point in points[name]:
            value = point if domain.count is None else domain.value_at(point)
            yield from self._grid_from(at + 1, {**config, name: value}, points)


def _generator(seed: Any) -> Uniform:
    if isinstance(seed, int):
        return Random(seed)
    if callable(getattr(seed, "random", None)):
        return seed  # type: ignore[no-any-return]
    if isinstance(seed, numbers.Integral):
        return Random(int(seed))
    raise SpaceError(f"A seed is a whole number, or a generator such as random.Random(7); got {seed!r}.")


def _check_entry(name: Any, domain: Any) -> None:
    if not isinstance(name, str) or not name.isidentifier():
        raise SpaceError(f"Domain name {name!r} is not an identifier. Use letters, digits and underscores.")
    if not isinstance(domain, Domain):
        one = ""
        if domain is None or isinstance(domain, str | bool | numbers.Real):
            one = f"; Choice({domain!r}) is a constant"
        elif isinstance(domain, list | tuple):
            one = f"; Choice({', '.join(map(repr, domain))}) is one of these"
        elif isinstance(domain, Mapping):
            inner = next(iter(domain), "lr")
            one = f". Spaces are flat: give each domain a name of its own, such as {name}_{inner}"
        elif isinstance(domain, type) and issubclass(domain, Domain):
            one = f", with its values: {domain.__name__}(...)"
        raise SpaceError(f"{name}={domain!r} is not a domain. Use Float, Int or Choice{one}.")


def _width(domain: Domain, one_hot: bool) -> int:
    return domain.count if one_hot and isinstance(domain, Choice) else 1


def _classes(domain: Domain, atoms: Sequence[Atom]) -> list[tuple[Any, float]]:
    """One value of each class that the tests can't tell apart, and how many values the class has."""
    if domain.count is None:
        # Only greater() and less() test a continuous domain; each open interval holds infinitely many.
        assert isinstance(domain, Float)
        bounds = {atom.bound for atom in atoms if isinstance(atom, Above | Below)}
        edges = sorted({domain.low, domain.high} | bounds)
        return [((a + b) / 2, math.inf) for a, b in pairwise(edges)]
    cuts = sorted({0, domain.count, *(cut for atom in atoms for cut in domain.cuts(atom))})
    cuts = [cut for cut in cuts if 0 <= cut <= domain.count]
    return [(domain.value_at(a), b - a) for a, b in pairwise(cuts)]


def _possible(domain: Domain, atoms: Sequence[Atom]) -> bool:
    """Whether a value of the domain passes all tests."""
    name = atoms[0].name
    return any(all(atom.holds({name: value}) for atom in atoms) for value, _ in _classes(domain, atoms))


def _domain_from_json(data: Mapping[str, Any]) -> Domain:
    when = data.get("when")
    flags: dict[str, Any] = {
        "when": None if when is None else condition_from_json(when),
        "structural": data.get("structural", False),
        "transfers": data.get("transfers", True),
    }
    match data["kind"]:
        case "float":
            return Float(
                data["low"], data["high"], log=data.get("log", False), step=data.get("step"), **flags
            )
        case "int":
            return Int(data["low"], data["high"], log=data.get("log", False), step=data.get("step"), **flags)
        case "choice":
            values = data["values"]
            return Choice.constant(values[0], **flags) if len(values) == 1 else Choice(*values, **flags)
    raise SpaceError(f"{data['kind']!r} is not a domain this version knows. Update Penstock.")

"""The contract of samplers as a test suite: subclass it in a test module and every test runs.

Example::

    class TestMine(SamplerConformance):
        def make(self) -> Sampler:
            return Mine()
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from typing import Any

from penstock.core import Config, Values
from penstock.sample import Observation, Sampler
from penstock.space import Choice, Float, Int, Space, equals, greater

FLAT = Space(lr=Float(1e-4, 1.0, log=True), momentum=Float(0.5, 0.99), batch_size=Choice(32, 64, 128))
STEPPED = Space(
    width=Int(8, 512, log=True),
    depth=Int(1, 9, step=2),
    dropout=Float(0.0, 0.5, step=0.1),
    layers=Choice([64, 64], [128], [32, 32, 32]),
    fixed=Choice("constant"),
)
CONDITIONAL = Space(
    optimizer=Choice("sgd", "adam", None),
    momentum=Float(0.0, 0.99, when=equals("optimizer", "sgd")),
    nesterov=Choice(True, False, when=greater("momentum", 0.5)),
    beta=Float(0.9, 0.999, when=equals("optimizer", "adam")),
    lr=Float(1e-5, 1e-1, log=True),
)


class SamplerConformance:
    """What every sampler must do. Override ``make``, and the attributes below where the sampler is special.

    Attributes:
        spaces: The spaces it is tried on.
        objectives: The numbers of objectives it can handle.
        seeded: Whether another seed gives other proposals.
        rounds: Proposals per test; enough to leave a model's start-up phase.
    """

    spaces: tuple[Space, ...] = (FLAT, STEPPED, CONDITIONAL)
    objectives: tuple[int, ...] = (1, 2)
    seeded: bool = True
    rounds: int = 16

    def make(self) -> Sampler:
        """A fresh sampler."""
        raise NotImplementedError("Override make() to return a fresh sampler.")

    # --- what it proposes --------------------------------------------------------------------------------

    def test_proposals_are_valid_plain_configurations(self) -> None:
        """Each is of the space, already normal, and comes back from JSON as it went."""
        for space in self.spaces:
            for objectives in self.objectives:
                for config in self._history(self._begin(space, objectives), space, objectives).configs:
                    assert space.validate(config) == config
                    assert json.loads(json.dumps(config)) == config

    def test_answers_as_many_as_asked_until_exhausted(self) -> None:
        """Fewer than asked means none from then on."""
        for space in self.spaces:
            sampler = self._begin(space)
            assert sampler.ask(0) == []
            exhausted = False
            for number in range(5):
                configs = sampler.ask(3)
                assert len(configs) == (0 if exhausted else min(len(configs), 3))
                exhausted = exhausted or len(configs) < 3
                for i, config in enumerate(configs):
                    sampler.adopt(config, 3 * number + i)

    def test_same_seed_and_results_give_same_proposals(self) -> None:
        """Two samplers with the same life answer alike."""
        for space in self.spaces:
            for objectives in self.objectives:
                one = self._history(self._begin(space, objectives), space, objectives)
                two = self._history(self._begin(space, objectives), space, objectives)
                assert one.configs == two.configs

    def test_another_seed_gives_other_proposals(self) -> None:
        """Unless the sampler says that it is not seeded."""
        if self.seeded:
            for space in self.spaces:
                one = self._history(self._begin(space, seed=1), space, 1)
                two = self._history(self._begin(space, seed=2), space, 1)
                assert one.configs != two.configs

    def test_start_resets(self) -> None:
        """A sampler that has been through a study starts like a new one."""
        for space in self.spaces:
            used = self._begin(self.spaces[0])
            self._history(used, self.spaces[0], 1)
            used.start(space, objectives=1, seed=7)
            fresh = self._begin(space)
            assert self._history(used, space, 1).configs == self._history(fresh, space, 1).configs

    def test_one_by_one_is_as_good_as_at_once_when_it_does_not_learn(self) -> None:
        """A scheduler may ask for all at once then."""
        for space in self.spaces:
            one, many = self._begin(space), self._begin(space)
            if not one.learns:
                assert many.ask(9) == [config for _ in range(9) for config in one.ask(1)]

    def test_results_change_nothing_when_it_does_not_learn(self) -> None:
        """``learns = False`` is a promise."""
        for space in self.spaces:
            told, untold = self._begin(space), self._begin(space)
            if not told.learns:
                asked = self._history(told, space, 1).configs
                assert asked == untold.ask(len(asked))

    # --- resume ------------------------------------------------------------------------------------------

    def test_a_resume_goes_on_as_if_never_interrupted(self) -> None:
        """Tells replayed and asks skipped, wherever it was cut: the next proposals are the same."""
        for space in self.spaces:
            for objectives in self.objectives:
                whole = self._begin(space, objectives)
                history = self._history(whole, space, objectives)
                after = whole.ask(3)
                resumed = self._begin(space, objectives)
                for step in history.steps:
                    if isinstance(step, Observation):
                        resumed.tell(step)
                    else:
                        resumed.skip([config for config, _ in step], [number for _, number in step])
                assert resumed.ask(3) == after

    def test_a_resume_may_happen_in_the_middle_of_a_batch(self) -> None:
        """Half of the proposals told, the others pending, and then it goes on asking and telling."""
        for space in self.spaces:
            whole = self._begin(space)
            configs = whole.ask(4)
            _adopt(whole, configs, 0)
            resumed = self._begin(space)
            resumed.skip(configs, range(len(configs)))
            for number, config in enumerate(configs[:2]):
                told = Observation(number, config, _values(space, config, 1), 1)
                whole.tell(told)
                resumed.tell(told)
            for round_ in range(3):
                one, two = whole.ask(2), resumed.ask(2)
                assert one == two
                for i, config in enumerate(one):
                    number = 4 + 2 * round_ + i
                    told = Observation(number, config, _values(space, config, 1), 1)
                    for sampler in (whole, resumed):
                        sampler.adopt(config, number)
                        sampler.tell(told)

    # --- what it is told ---------------------------------------------------------------------------------

    def test_failures_do_not_stop_it(self) -> None:
        """Even if everything fails."""
        for space in self.spaces:
            sampler = self._begin(space)
            for number in range(self.rounds):
                for config in sampler.ask(1):
                    sampler.adopt(config, number)
                    sampler.tell(Observation(number, config, None, 0))
            for config in sampler.ask(1):
                assert space.validate(config) == config

    def test_rungs_supersede_each_other(self) -> None:
        """A trial is told at 1, 3 and 9 epochs; some end in between, one fails after its first rung."""
        for space in self.spaces:
            for objectives in self.objectives:
                sampler = self._begin(space, objectives)
                configs = sampler.ask(9)
                _adopt(sampler, configs, 0)
                for epoch, alive in ((1, 9), (3, 3), (9, 1)):
                    for number, config in enumerate(configs[:alive]):
                        values = tuple(v / epoch for v in _values(space, config, objectives))
                        sampler.tell(Observation(number, config, values, epoch, final=epoch == 9))
                for number, config in enumerate(configs[1:8], start=1):
                    epoch = 3 if number < 3 else 1
                    values = tuple(v / epoch for v in _values(space, config, objectives))
                    sampler.tell(Observation(number, config, values, epoch, final=True))
                if len(configs) == 9:
                    sampler.tell(Observation(8, configs[8], None, 1, final=True))
                for config in sampler.ask(3):
                    assert space.validate(config) == config

    def test_takes_configurations_from_elsewhere(self) -> None:
        """Adopted and told without having been asked (warm start, a derived trial)."""
        for space in self.spaces:
            sampler = self._begin(space)
            foreign: list[Config] = [space.sample(i) for i in range(self.rounds)]
            _adopt(sampler, foreign, 100)
            for number, config in enumerate(foreign):
                sampler.tell(Observation(100 + number, config, _values(space, config, 1), 1))
            for config in sampler.ask(2):
                assert space.validate(config) == config

    def test_numbers_may_be_adopted_in_any_order(self) -> None:
        """The study numbers proposals; results come as they come."""
        for space in self.spaces:
            sampler = self._begin(space)
            configs = sampler.ask(5)
            for number in reversed(range(len(configs))):
                sampler.adopt(configs[number], number)
            for number in (3, 0, 4, 1, 2)[: len(configs)]:
                if number < len(configs):
                    told = configs[number]
                    sampler.tell(Observation(number, told, _values(space, told, 1), 1))
            for config in sampler.ask(1):
                assert space.validate(config) == config

    def test_keeps_its_hands_off_what_it_is_given_and_gives(self) -> None:
        """It changes no configuration it is told, and may have its proposals changed by others."""
        for space in self.spaces:
            one, two = self._begin(space), self._begin(space)
            for number in range(self.rounds):
                first, second = one.ask(1), two.ask(1)
                assert first == second
                for config in first:
                    kept = copy.deepcopy(config)
                    told = Observation(number, config, _values(space, config, 1), 1)
                    one.adopt(config, number)
                    one.tell(told)
                    assert config == kept
                for config in second:
                    two.adopt(copy.deepcopy(config), number)
                    two.tell(Observation(number, copy.deepcopy(config), _values(space, config, 1), 1))
                    _spoil(config)

    # --- inside ------------------------------------------------------------------------------------------

    def _begin(self, space: Space, objectives: int = 1, seed: int = 7) -> Sampler:
        sampler = self.make()
        sampler.start(space, objectives=objectives, seed=seed)
        return sampler

    def _history(self, sampler: Sampler, space: Space, objectives: int) -> _History:
        """A life with batches, pending trials, rungs and failures, the same for every sampler."""
        history = _History()
        waiting: list[tuple[int, Config]] = []
        number = 0
        while number < self.rounds:
            batch = sampler.ask(1 + number % 3)
            if not batch:
                break
            numbered = [(config, number + i) for i, config in enumerate(batch)]
            _adopt(sampler, batch, number)
            number += len(batch)
            history.steps.append(numbered)
            history.configs.extend(batch)
            waiting.extend((n, config) for config, n in numbered)
            while len(waiting) > 2:  # two stay pending
                which, config = waiting.pop(0)
                values: Values | None = _values(space, config, objectives)
                told = [Observation(which, config, values, 3)]
                if which % 5 == 3:
                    told = [Observation(which, config, None, 0)]
                elif which % 5 == 4 and values is not None:
                    rung = Observation(which, config, tuple(2 * v for v in values), 1, final=False)
                    told = [rung, *told]
                for observation in told:
                    sampler.tell(observation)
                    history.steps.append(observation)
        return history


class _History:
    def __init__(self) -> None:
        self.configs: list[Config] = []
        self.steps: list[Observation | list[tuple[Config, int]]] = []


def _adopt(sampler: Sampler, configs: Sequence[Config], first: int) -> None:
    for i, config in enumerate(configs):
        sampler.adopt(config, first + i)


def _values(space: Space, config: Config, objectives: int) -> Values:
    """Smooth objectives that conflict: distances of the encoded point from the corners of the cube."""
    point = space.encode(config)
    return tuple(sum((x - k) ** 2 for x in point) for k in range(objectives))


def _spoil(config: Any) -> None:
    for name, value in list(config.items()):
        if isinstance(value, list):
            value.append("spoilt")
        config[name] = "spoilt"

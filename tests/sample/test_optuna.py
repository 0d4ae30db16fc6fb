"""Optuna's own study is the reference: the adapter must propose what it proposes."""

import math
import subprocess
import sys
import warnings

import optuna
import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.trial import TrialState

from penstock.core.errors import InvalidInput, Unsupported
from penstock.sample import TPE, Observation, OptunaSampler
from penstock.sample._seed import mixed
from penstock.space import Choice, Float, Int, Space, equals

pytestmark = pytest.mark.filterwarnings(
    "ignore::optuna.exceptions.ExperimentalWarning", "ignore::FutureWarning"
)

SPACE = Space(
    x=Float(-5, 5),
    lr=Float(1e-5, 1, log=True),
    n=Int(1, 9, step=2),
    w=Int(4, 512, log=True),
    o=Choice("a", "b", "c"),
)
DISTRIBUTIONS = {
    "x": FloatDistribution(-5, 5),
    "lr": FloatDistribution(1e-5, 1, log=True),
    "n": IntDistribution(1, 9, step=2),
    "w": IntDistribution(4, 512, log=True),
    "o": CategoricalDistribution(("a", "b", "c")),
}


@pytest.fixture(autouse=True)
def quiet():
    optuna.logging.set_verbosity(optuna.logging.ERROR)


def loss(c):
    return (c["x"] - 1) ** 2 + abs(math.log10(c["lr"]) + 2) + c["n"] / 9 + c["w"] / 512 + (c["o"] != "b")


def other(c):
    return c["x"] + c["n"]


def begin(sampler, space=SPACE, objectives=1, seed=3):
    sampler.start(space, objectives=objectives, seed=seed)
    return sampler


def test_tpe_proposes_exactly_what_optunas_study_proposes():
    ours = begin(TPE(n_startup_trials=8))
    reference = optuna.create_study()
    for i in range(45):
        (config,) = ours.ask(1)
        ours.adopt(config, i)
        reference.sampler = _fresh_tpe(i, n_startup_trials=8, constant_liar=True)
        trial = reference.ask(DISTRIBUTIONS)
        assert config == trial.params, i
        if i % 7 == 5:
            ours.tell(Observation(i, config, None))
            reference.tell(trial, state=TrialState.FAIL)
        else:
            ours.tell(Observation(i, config, (loss(config),), 10))
            reference.tell(trial, loss(config))


def test_tpe_proposes_exactly_what_optunas_study_proposes_with_pending_trials():
    ours = begin(TPE(n_startup_trials=4))
    reference = optuna.create_study()
    pending = []
    for i in range(30):
        (config,) = ours.ask(1)
        ours.adopt(config, i)
        reference.sampler = _fresh_tpe(i, n_startup_trials=4, constant_liar=True)
        trial = reference.ask(DISTRIBUTIONS)
        assert config == trial.params, i
        pending.append((i, config, trial))
        if len(pending) == 4:
            number, config, trial = pending.pop(i % 3)
            ours.tell(Observation(number, config, (loss(config),), 10))
            reference.tell(trial, loss(config))


def test_tpe_proposes_exactly_what_optunas_study_proposes_for_two_objectives():
    ours = begin(TPE(n_startup_trials=6), objectives=2)
    reference = optuna.create_study(directions=["minimize", "minimize"])
    for i in range(30):
        (config,) = ours.ask(1)
        ours.adopt(config, i)
        reference.sampler = _fresh_tpe(i, n_startup_trials=6, constant_liar=True)
        trial = reference.ask(DISTRIBUTIONS)
        assert config == trial.params, i
        ours.tell(Observation(i, config, (loss(config), other(config)), 10))
        reference.tell(trial, (loss(config), other(config)))


def test_conditional_spaces_are_sampled_as_a_define_by_run_objective_does():
    space = Space(
        o=Choice("sgd", "adam"),
        m=Float(0, 1, when=equals("o", "sgd")),
        b=Float(0.5, 1, when=equals("o", "adam")),
        lr=Float(1e-5, 1, log=True),
    )

    def value(c):
        return abs(math.log10(c["lr"]) + 3) + (c["m"] if c["o"] == "sgd" else 2 - c["b"])

    options = {"n_startup_trials": 8, "multivariate": True, "group": True, "constant_liar": True}
    ours = begin(TPE(n_startup_trials=8), space)
    reference = optuna.create_study()
    for i in range(40):
        (config,) = ours.ask(1)
        ours.adopt(config, i)
        reference.sampler = _fresh_tpe(i, **options)
        trial = reference.ask()
        params = {"o": trial.suggest_categorical("o", ["sgd", "adam"])}
        if params["o"] == "sgd":
            params["m"] = trial.suggest_float("m", 0, 1)
        else:
            params["b"] = trial.suggest_float("b", 0.5, 1)
        params["lr"] = trial.suggest_float("lr", 1e-5, 1, log=True)
        assert config == params, i
        ours.tell(Observation(i, config, (value(config),), 10))
        reference.tell(trial, value(config))


def test_pruned_trials_are_told_as_optuna_would_know_them():
    """Rungs at 1 and 9 epochs, enough results at 9: those at 1 are PRUNED at step 1 in Optuna's study."""
    ours = begin(TPE(n_startup_trials=4))
    reference = optuna.create_study()
    configs = ours.ask(20)
    for i, config in enumerate(configs):
        ours.adopt(config, i)
        ours.tell(Observation(i, config, (2 + loss(config),), 1, final=False))
    for i, config in enumerate(configs[:10]):
        ours.tell(Observation(i, config, (loss(config),), 9))
    for i, config in enumerate(configs[10:], start=10):  # dropped after the first rung
        ours.tell(Observation(i, config, (2 + loss(config),), 1, final=True))
    for i, config in enumerate(configs):
        done = i < 10
        reference.add_trial(
            optuna.trial.create_trial(
                state=TrialState.COMPLETE if done else TrialState.PRUNED,
                value=loss(config) if done else 2 + loss(config),
                params=config,
                distributions=DISTRIBUTIONS,
                intermediate_values={1: 2 + loss(config)},
            )
        )
    reference.sampler = _fresh_tpe(20, n_startup_trials=4, constant_liar=True)
    assert ours.ask(1)[0] == reference.ask(DISTRIBUTIONS).params


def test_the_longest_training_with_enough_results_counts():
    """Results at 1 epoch say x=-4 is good, those at 9 epochs say x=4 is: TPE goes by the latter."""
    space = Space(x=Float(-5, 5))
    tpe = begin(TPE(n_startup_trials=5), space)
    for i in range(40):
        config = {"x": -5 + i / 4}
        tpe.adopt(config, i)
        tpe.tell(Observation(i, config, (abs(config["x"] + 4),), 1, final=False))
    misled = [c["x"] for c in tpe.ask(9)]
    assert sorted(misled)[4] < -2
    for i in range(20, 40):
        config = {"x": -5 + i / 4}
        tpe.tell(Observation(i, config, (abs(config["x"] - 4),), 9))
    right = [c["x"] for c in tpe.ask(9)]
    assert sorted(right)[4] > 2


def test_tpe_beats_random_search_on_a_smooth_function():
    from penstock.sample import Random

    def best(sampler, seed):
        begin(sampler, seed=seed)
        values = []
        for i in range(40):
            (config,) = sampler.ask(1)
            sampler.adopt(config, i)
            values.append(loss(config))
            sampler.tell(Observation(i, config, (values[-1],), 1))
        return min(values)

    wins = sum(best(TPE(), seed) < best(Random(), seed) for seed in range(5))
    assert wins >= 4


def test_gaussian_processes_resume_exactly():
    """Optuna's GP keeps fitted kernels between proposals; a resume must not lose them."""
    pytest.importorskip("torch")
    space = Space(x=Float(-5, 5), y=Float(0, 1))
    make = lambda seed: optuna.samplers.GPSampler(seed=seed, n_startup_trials=2)  # noqa: E731
    whole, resumed = begin(OptunaSampler(make), space), begin(OptunaSampler(make), space)
    for i in range(4):
        (config,) = whole.ask(1)
        whole.adopt(config, i)
        resumed.skip([config], [i])
        for sampler in (whole, resumed):
            sampler.tell(Observation(i, config, (config["x"] ** 2 + config["y"],), 1))
    assert whole.ask(1) == resumed.ask(1)


def test_a_resume_takes_the_journals_word_over_the_samplers():
    """Another version of Optuna may propose otherwise: what ran counts."""
    sampler = begin(OptunaSampler(optuna.samplers.TPESampler(n_startup_trials=3)), Space(x=Float(0, 1)))
    sampler.skip([{"x": 0.125}], [0])
    sampler.tell(Observation(0, {"x": 0.125}, (1.0,)))
    trials = sampler._engine._study.trials
    assert [trial.params for trial in trials] == [{"x": 0.125}]
    assert trials[0].value == 1.0


def test_a_samplers_stop_exhausts_it():
    space = Space(a=Choice("x", "y"), b=Int(1, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sampler = begin(OptunaSampler(lambda seed: optuna.samplers.BruteForceSampler(seed=seed)), space)
    seen = []
    for i in range(20):
        for config in sampler.ask(1):
            sampler.adopt(config, i)
            sampler.tell(Observation(i, config, (1.0,)))
            seen.append((config["a"], config["b"]))
    assert sorted(seen) == [(a, b) for a in "xy" for b in (1, 2, 3)]


def test_samplers_that_are_told_values_of_choices_find_them():
    space = Space(a=Choice("x", None, True), b=Int(1, 2))
    sampler = begin(OptunaSampler(optuna.samplers.GridSampler({"a": ["x", None, True], "b": [1, 2]})), space)
    seen = []
    for i in range(10):
        for config in sampler.ask(1):
            sampler.tell(Observation(i, config, (1.0,)))
            seen.append((config["a"], config["b"]))
    assert sorted(map(str, seen)) == sorted(str((a, b)) for a in ("x", None, True) for b in (1, 2))
    fixed = optuna.samplers.PartialFixedSampler({"a": None}, optuna.samplers.RandomSampler())
    assert {config["a"] for config in begin(OptunaSampler(fixed), space).ask(5)} == {None}
    listed = Space(a=Choice([1, 2], [3]), b=Int(1, 2))  # which Optuna would not take
    assert all(config["a"] in ([1, 2], [3]) for config in begin(TPE(), listed).ask(5))


def test_optunas_storage_and_logs_stay_out(capfd):
    optuna.logging.set_verbosity(optuna.logging.INFO)
    sampler = begin(OptunaSampler(optuna.samplers.TPESampler(multivariate=True, n_startup_trials=2)))
    for i in range(6):
        (config,) = sampler.ask(1)
        sampler.tell(Observation(i, config, (loss(config),)))
    assert capfd.readouterr() == ("", "")
    storage = sampler._engine._study._storage
    assert not isinstance(storage, optuna.storages.InMemoryStorage)
    with pytest.raises(Unsupported, match="creates trials"):
        storage.create_new_trial(0)


def test_the_study_that_samplers_see_is_one_of_optuna():
    """Samplers from elsewhere use the public API."""

    class Greedy(optuna.samplers.BaseSampler):
        def infer_relative_search_space(self, study, trial):
            return {}

        def sample_relative(self, study, trial, search_space):
            return {}

        def sample_independent(self, study, trial, name, distribution):
            assert trial in study.get_trials(states=(TrialState.RUNNING,))
            done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
            return study.best_params[name] if done else 0.25

    sampler = begin(OptunaSampler(Greedy()), Space(x=Float(0, 1)))
    assert sampler.ask(1) == [{"x": 0.25}]
    sampler.adopt({"x": 0.75}, 1)
    sampler.tell(Observation(1, {"x": 0.75}, (0.5,)))
    assert sampler.ask(1) == [{"x": 0.75}]


def test_wrong_arguments_are_refused_by_name():
    with pytest.raises(InvalidInput, match="'tpe' is not a sampler of Optuna"):
        OptunaSampler("tpe")
    with pytest.raises(InvalidInput, match="made 3, not a sampler"):
        begin(OptunaSampler(lambda seed: 3))
    with pytest.raises(InvalidInput, match="seed=1 is the study's to give"):
        TPE(seed=1)
    with pytest.raises(InvalidInput, match=r"Optuna refuses the options \{'n_startup': 3\}"):
        begin(TPE(n_startup=3))
    tpe = begin(TPE())
    with pytest.raises(InvalidInput, match="told with 2 values, but the study has 1"):
        tpe.tell(Observation(0, SPACE.sample(0), (1.0, 2.0)))


def test_optuna_is_imported_by_start_alone():
    code = (
        "import sys; from penstock.sample import TPE, OptunaSampler; TPE(); OptunaSampler(lambda seed: None);"
        "assert 'optuna' not in sys.modules; from penstock.space import Space, Float;"
        "TPE().start(Space(x=Float(0, 1)), objectives=1, seed=0); assert 'optuna' in sys.modules;"
        "assert 'torch' not in sys.modules and 'sqlalchemy.orm' not in sys.modules, 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def _fresh_tpe(index, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return optuna.samplers.TPESampler(seed=mixed(3, index) % 2**32, **options)

"""The package as a whole: what an import loads, what is public, that the docs run."""

import subprocess
import sys

import penstock as pk

HEAVY = ("torch", "ray", "optuna", "sqlalchemy", "numpy", "scipy", "pandas", "sklearn")


def loaded_by(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint('\\n'.join(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stderr.split()}


def test_import_loads_nothing_heavy():
    modules = loaded_by("import penstock")
    assert "penstock" in modules
    assert not modules & {*HEAVY, "rich", "typer"}


def test_help_loads_nothing_heavy():
    modules = loaded_by(
        "sys.argv = ['penstock', '--help']\n"
        "from penstock.cli import main\n"
        "try:\n    main()\nexcept SystemExit as done:\n    assert not done.code, done.code"
    )
    assert "typer" in modules
    assert not modules & set(HEAVY)


def test_a_whole_study_definition_loads_nothing_heavy_before_it_runs():
    modules = loaded_by(
        "import penstock as pk\n"
        "pk.Study(lambda run: None, pk.Space(x=pk.Float(0, 1)), minimize='loss', scheduler=pk.ASHA(),"
        " sampler=pk.TPE(), budget=pk.Budget(trials=3))"
    )
    assert not modules & {"torch", "ray", "optuna", "sqlalchemy"}


def test_every_public_name_resolves_and_the_list_is_guarded():
    assert set(pk.__all__) == PUBLIC
    for name in pk.__all__:
        assert getattr(pk, name) is not None
    assert set(pk.__all__) <= set(dir(pk))


PUBLIC = {
    "__version__",
    *(
        "ASHA",
        "Bayes",
        "Budget",
        "Choice",
        "Command",
        "Data",
        "Device",
        "Divergence",
        "EnergyLoader",
        "EtaCost",
        "Float",
        "Fluid",
        "Full",
        "Gate",
        "Grid",
        "Limit",
        "Limited",
        "Predictors",
        "Profile",
        "Quantity",
        "epoch_j",
        "epoch_s",
        "flops",
        "latency_s",
        "memory_bytes",
        "params",
        "power_w",
    ),
    *("Halving", "Hyperband", "Int", "LeastEnergy", "LeastEnergyWithin", "LeastTime", "Local", "Measurement"),
    *(
        "MedianStop",
        "Meter",
        "OptunaSampler",
        "bubbles",
        "elastic",
        "Overhead",
        "PBT",
        "Plateau",
        "PowerLimiter",
        "PowerLimits",
        "Random",
        "Ray",
        "RecurringJob",
        "Run",
        "SM2",
        "Shrink",
        "Simulated",
        "SimulatedGpus",
    ),
    *("Source", "Space", "Study", "TPE", "Task", "TrialStatus", "Walk", "WarmStart", "equals", "errors"),
    *("find_lr", "greater", "less", "one_of"),
}


def test_errors_are_a_module_of_their_own_that_has_all_of_them():
    from penstock.core import errors as defined
    from penstock.errors import PenstockError

    assert pk.errors is sys.modules["penstock.errors"]
    every = {name: each for name, each in vars(defined).items() if isinstance(each, type)}
    assert {name: getattr(pk.errors, name) for name in pk.errors.__all__} == every
    assert all(issubclass(each, PenstockError) for each in every.values())

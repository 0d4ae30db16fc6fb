"""What importing the integrations loads, and what is said where a library is missing."""

import subprocess
import sys

import pytest

import penstock.integrations as integrations

LIBRARIES = (
    "lightning",
    "pytorch_lightning",
    "transformers",
    "mlflow",
    "tensorboard",
    "prometheus_client",
    "sklearn",
)


def test_the_room_loads_no_library():
    code = "import penstock.integrations, sys; print(*sorted(n for n in sys.modules if '.' not in n))"
    names = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "penstock" in names
    assert not set(names) & {*LIBRARIES, "torch", "optuna", "numpy"}


@pytest.mark.parametrize("name", integrations.__all__)
def test_every_name_says_which_extra_it_needs(name, monkeypatch):
    import penstock as pk

    module, extra = integrations._HOME_OF[name]
    monkeypatch.delitem(vars(integrations), name, raising=False)
    monkeypatch.setitem(sys.modules, f"penstock.integrations.{module}", None)  # as if its import failed
    with pytest.raises(pk.errors.MissingDependency, match=rf"{name} needs the extra '{extra}'"):
        getattr(integrations, name)


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="Nothing"):
        integrations.Nothing

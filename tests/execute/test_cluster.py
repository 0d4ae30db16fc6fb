"""Nodes of a Ray cluster as devices, without Ray."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core import Share
from penstock.execute._cluster import bundles_of, devices_of, elsewhere, node_of, whole


def entry(ident: str = "0123456789", **resources: float) -> dict[str, Any]:
    return {"NodeID": ident, "NodeManagerHostname": "host", "Resources": resources}


GPUS = {"CPU": 10.0, "GPU": 4.0, "accelerator_type:V100": 1.0}


@pytest.mark.parametrize(
    ("resources", "options", "count", "cpu", "kind"),
    [
        ({"CPU": 6.0}, {}, 6, 1.0, "cpu"),
        ({"CPU": 6.0}, {"cpus": 4}, 1, 4, "cpu"),
        ({"CPU": 1.5}, {"cpus": 0.5}, 3, 0.5, "cpu"),
        ({}, {}, 0, 1.0, "cpu"),
        (GPUS, {"gpu": True}, 4, 2, "V100"),
        (GPUS, {"gpu": True, "cpus": 1}, 4, 1, "V100"),
        (GPUS, {"gpu": True, "cpus": 64}, 4, 2.5, "V100"),  # no more than there are
        (GPUS, {"gpu": True, "kinds": ("V100", "A100")}, 4, 2, "V100"),
        (GPUS, {"gpu": True, "kinds": ("A100",)}, 0, 0.0, "V100"),
        ({"CPU": 4.0, "GPU": 1.0}, {"gpu": True}, 1, 4, "GPU"),
        ({"CPU": 4.0}, {"gpu": True}, 0, 0.0, "GPU"),
    ],
)
def test_a_node_has_so_many_devices(
    resources: dict[str, float], options: dict[str, Any], count: int, cpu: float, kind: str
) -> None:
    node = node_of(entry(**resources), **{"gpu": False, "cpus": None, "kinds": None, **options})
    assert (node.count, node.cpu, node.kind) == (count, cpu, kind)
    assert node.name == "host-012345"


def test_the_first_devices_count_as_the_nodes_joined() -> None:
    one, two = (
        node_of(entry(ident, CPU=2.0), gpu=False, cpus=None, kinds=None) for ident in ("aaaaaa", "bbbbbb")
    )
    devices, home = devices_of([one, two], None)
    assert list(devices) == [
        "host-aaaaaa/cpu:0",
        "host-aaaaaa/cpu:1",
        "host-bbbbbb/cpu:0",
        "host-bbbbbb/cpu:1",
    ]
    assert [home[name].id for name in devices] == ["aaaaaa", "aaaaaa", "bbbbbb", "bbbbbb"]
    assert list(devices_of([one, two], 3)[0]) == list(devices)[:3]


def test_three_thirds_fit_into_one() -> None:
    third = whole({"CPU": 1 / 3})["CPU"]
    assert 3 * third <= 1.0
    assert whole({"CPU": 0.00001, "GPU": 0.5}) == {"GPU": 0.5}


def test_what_is_reserved() -> None:
    """Of one device all of it, however small the share; of several what they hold, by node."""
    one = node_of(entry("aaaaaa", CPU=4.0, GPU=2.0), gpu=True, cpus=None, kinds=None)
    two = node_of(entry("bbbbbb", CPU=4.0, GPU=2.0), gpu=True, cpus=None, kinds=None)
    _, home = devices_of([one, two], None)
    a, b, c, _ = home
    assert bundles_of([Share(a, 0.25)], home) == {one: {"CPU": 2.0, "GPU": 1.0}}
    assert bundles_of([Share(c), Share(a), Share(b, 0.5)], home) == {
        two: {"CPU": 2.0, "GPU": 1.0},
        one: {"CPU": 3.0, "GPU": 1.5},
    }


def test_other_devices_are_found_on_one_node() -> None:
    one = node_of(entry("aaaaaa", CPU=1.0), gpu=False, cpus=None, kinds=None)
    two = node_of(entry("bbbbbb", CPU=2.0), gpu=False, cpus=None, kinds=None)
    _, home = devices_of([one, two], None)
    a, b, c = home
    gone = [Share("x", 0.5), Share("y", 0.5)]
    assert elsewhere(gone[:1], {a: 0.25, c: 1.0}, home, least=1) == (Share(c, 0.5),)
    assert elsewhere(gone, {b: 1.0, c: 0.5}, home, least=2) == (Share(b, 0.5), Share(c, 0.5))
    assert elsewhere(gone, {a: 1.0, b: 1.0, c: 1.0}, home, least=2) == (Share(b, 0.5), Share(c, 0.5))
    assert elsewhere(gone, {a: 1.0, c: 1.0}, home, least=2) is None  # not on one node
    assert elsewhere(gone, {a: 1.0, c: 1.0}, home, least=1) == (Share(a, 0.5),)  # who can, makes do with one
    assert elsewhere(gone, {}, home, least=1) is None

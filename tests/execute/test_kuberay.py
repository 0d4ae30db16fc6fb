"""The manifest for KubeRay fits together, and fits what the documentation says to run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]


def test_every_mount_volume_claim_and_file_of_the_manifest_is_there() -> None:
    job, claim = yaml.safe_load_all((ROOT / "docs" / "kuberay.yaml").read_text())
    told = (ROOT / "docs" / "ray.md").read_text()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        assert all(isinstance(value, str) for value in group["rayStartParams"].values()), (
            "KubeRay takes strings"
        )
        pod: dict[str, Any] = group["template"]["spec"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes)
            assert container["resources"]["requests"] == container["resources"]["limits"]
        assert volumes["studies"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"], "several nodes write checkpoints"
    for workers in cluster["workerGroupSpecs"]:
        assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    # What `kubectl create configmap NAME --from-file=KEY=FILE` makes is what the job runs.
    command = re.search(r"kubectl create configmap (\S+) --from-file=(\S+?)=(\S+)", told)
    assert command is not None
    name, key, file = command.groups()
    assert (ROOT / file).exists()
    study = next(v for v in groups[0]["template"]["spec"]["volumes"] if v["name"] == "study")
    assert study["configMap"]["name"] == name
    mounts = groups[0]["template"]["spec"]["containers"][0]["volumeMounts"]
    folder = next(mount["mountPath"] for mount in mounts if mount["name"] == "study")
    assert f"{folder}/{key}" in job["spec"]["entrypoint"]
    pinned = re.search(r"^ray==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert cluster["rayVersion"] == pinned.group(1), "driver, head and nodes must be of one version"

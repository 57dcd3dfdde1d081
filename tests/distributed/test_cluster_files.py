"""The files for KubeRay and Slurm are well formed, and their commands are right."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
from typing import Any

import yaml

from dreamgym.config import load_config
from tests.conftest import ROOT

FOLDER = ROOT / "examples" / "cluster"


def settings_of(command: str) -> list[str]:
    words = shlex.split(command)
    assert words[:2] == ["dreamgym", "train"]
    return [after for word, after in itertools.pairwise(words) if word == "--set"]


def pinned_version() -> str:
    requirements = (ROOT / "integrations" / "ray" / "requirements.txt").read_text(encoding="utf-8")
    found = re.search(r"^ray\[default\]==(.+)$", requirements, re.M)
    assert found is not None
    return found[1]


def test_the_kuberay_job_runs_as_many_workers_as_its_nodes_have_cores() -> None:
    job: dict[str, Any] = yaml.safe_load((FOLDER / "kuberay.yaml").read_text(encoding="utf-8"))
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    config = load_config(overrides=settings_of(job["spec"]["entrypoint"]))
    assert config.cluster.address == "auto"
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["rayVersion"] == pinned_version()
    groups = cluster["workerGroupSpecs"]
    cores = sum(
        group["replicas"] * int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"])
        for group in groups
    )
    assert config.train.workers == cores
    for group in [cluster["headGroupSpec"], *groups]:
        spec = group["template"]["spec"]
        mounts = spec["containers"][0]["volumeMounts"]
        assert [each["name"] for each in mounts] == [each["name"] for each in spec["volumes"]] == ["runs"]


def test_the_slurm_script_is_valid_and_leaves_two_cores_to_the_driver() -> None:
    path = FOLDER / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(path)], check=True)
    text = path.read_text(encoding="utf-8")
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.M))
    assert options.keys() == {"job-name", "nodes", "ntasks-per-node", "cpus-per-task", "time", "output"}
    joined = text.replace("\\\n", " ").replace('"$address"', "node-1:6379")
    [command] = re.findall(r"dreamgym train .*$", joined, re.M)
    config = load_config(overrides=settings_of(command))
    assert config.cluster.address == "node-1:6379"
    assert config.train.workers == int(options["nodes"]) * int(options["cpus-per-task"]) - 2
    assert "ray start --head" in text
    assert 'ray start --address="$address"' in text

"""The examples of trainer pods: whether Kubernetes takes them, and whether they fit the chart's agents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from everstep_trainer.launch.options import LaunchOptions
from tests.support.documents.command_lines import launch_settings
from tests.support.services.helm import ROOT, Manifest, check_schema, command_line, environment, pod_specs, render

EXAMPLES = ROOT / "deploy" / "kubernetes" / "examples"
FILES = ("trainer-pod.yaml", "trainer-jobset.yaml")
CLUSTER = {"POD_IP": "10.1.2.3"}
each_file = pytest.mark.parametrize("file", FILES)


def example(file: str) -> Manifest:
    found: Manifest = yaml.safe_load((EXAMPLES / file).read_text())
    return found


def pod(file: str) -> Manifest:
    ((_, spec),) = pod_specs([example(file)])
    return spec


def agent_pod() -> Manifest:
    (spec,) = [spec for name, spec in pod_specs(render()) if name.startswith("DaemonSet/")]
    return spec


def launched(file: str) -> LaunchOptions:
    (container,) = pod(file)["containers"]
    program, *words = command_line(container, CLUSTER)
    assert program == "everstep-launch"
    words = [word.replace("/opt/everstep/", f"{ROOT}/") for word in words]  # where the image has the examples
    return launch_settings(words, environment(container, CLUSTER))


@pytest.mark.parametrize("version", ["1.31", "1.37"])
def test_examples_fit_the_schemas_of_kubernetes(version: str) -> None:
    """The schema of a JobSet is not Kubernetes' own; the Job inside it is checked."""
    check_schema(example("trainer-pod.yaml"), version)
    (job,) = example("trainer-jobset.yaml")["spec"]["replicatedJobs"]
    assert job.keys() == {"name", "replicas", "template"}
    check_schema({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "j"}, **job["template"]}, version)


@each_file
def test_example_command_line_is_accepted(file: str) -> None:
    options = launched(file)
    assert Path(options.script).is_file()
    assert options.job == example(file)["metadata"]["name"]
    assert options.waits.grace_s < pod(file)["terminationGracePeriodSeconds"]


def test_jobset_starts_one_launcher_more_than_the_job_needs() -> None:
    (job,) = example("trainer-jobset.yaml")["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    options = launched("trainer-jobset.yaml")
    assert spec["parallelism"] == spec["completions"] == options.max_nodes + 1
    assert options.rendezvous.local_addr == CLUSTER["POD_IP"]
    labels = spec["template"]["metadata"]["labels"]
    (rule,) = pod("trainer-jobset.yaml")["affinity"]["podAntiAffinity"][
        "requiredDuringSchedulingIgnoredDuringExecution"
    ]
    assert rule["labelSelector"]["matchLabels"] == labels, "no two launchers of the job on one node"


@each_file
def test_examples_share_directories_at_equal_paths(file: str) -> None:
    agent, trainer = agent_pod(), pod(file)
    shared = {}
    for spec in (agent, trainer):
        paths = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
        mounts = {mount["name"]: mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}
        assert all(mounts[name] == path for name, path in paths.items()), "the agent names paths to ranks"
        shared[id(spec)] = set(paths.values())
    assert shared[id(trainer)] == {"/run/everstep", "/dev/shm/everstep"}
    assert shared[id(trainer)] < shared[id(agent)]
    assert launched(file).agent_socket == "/run/everstep/agent.sock"


@each_file
def test_examples_run_as_the_agents_user_without_rights(file: str) -> None:
    trainer = pod(file)
    for key in ("runAsUser", "runAsGroup", "runAsNonRoot", "seccompProfile"):
        assert trainer["securityContext"][key] == agent_pod()["securityContext"][key]
    for container in trainer["containers"]:
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        assert container["securityContext"]["readOnlyRootFilesystem"]
    assert not trainer.keys() & {"hostPID", "hostNetwork", "hostIPC"}


def test_dockerfile_builds_the_images_that_the_chart_names() -> None:
    dockerfile = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
    targets = set(re.findall(r"^FROM .+ AS ([\w-]+)$", dockerfile, re.MULTILINE))
    specs = [*pod_specs(render()), *pod_specs([example(file) for file in FILES])]
    images = {
        container["image"] for _, spec in specs for container in (*spec.get("initContainers", ()), *spec["containers"])
    }
    names = {image.rpartition("/")[2].partition(":")[0].removeprefix("everstep-") for image in images}
    assert names == {"controller", "agent", "trainer"} <= targets
    for name in names:
        stage = dockerfile.split(f" AS {name}\n", 1)[1].partition("\nFROM ")[0]
        assert "USER everstep" in stage
    uid = re.search(r"useradd .*--uid (\d+)", dockerfile)
    assert uid is not None
    assert int(uid[1]) == agent_pod()["securityContext"]["runAsUser"]

"""What launches jobs: scripts run with stand-ins of their clouds, files have legal fields.

No cluster is here: what `srun`, `gcloud`, `docker` and others would get is recorded.
"""

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from scripts.cli import cli
from tests.toys import ROOT

LAUNCH = ROOT / "scripts" / "launch"
TRAIN = [
    "--model_dir=gs://bucket/runs/my run",
    "--gin_file=configs/runs/pod.gin",
    "--gin_param=TextFiles.train='gs://bucket/*.txt.zst'",
]
STAND_IN = """#!/bin/bash
name=$(basename "$0")
printf '%s\\0' "$name" "$@" >> "$LOG"; printf '\\n' >> "$LOG"
line=$(head -1 "$STATE/$name"); sed -i 1d "$STATE/$name"
case $line in *" "*) echo "${line#* }" ;; esac
exit "${line%% *}"
"""
"""Records its arguments; each line of a file of its name has an exit code, and what to print."""

Launch = Callable[..., tuple[int, str, list[list[str]]]]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Runs a script with answers in place of the programs that it calls."""

    def call(
        script: str, answers: dict[str, Sequence[str]], **variables: str
    ) -> tuple[int, str, list[list[str]]]:
        for name, lines in ({"sleep": ["0"] * 99} | answers).items():
            (tmp_path / name).write_text("".join(f"{line}\n" for line in lines))
            program = tmp_path / "bin" / name
            program.parent.mkdir(exist_ok=True)
            program.write_text(STAND_IN)
            program.chmod(0o755)
        log = tmp_path / "log"
        path = {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", str(LAUNCH / script), *TRAIN],
            cwd=ROOT, text=True, capture_output=True, timeout=180,
            env=os.environ | path | {"LOG": str(log), "STATE": str(tmp_path)} | variables,
        )  # fmt: skip
        calls = [line.split("\0")[:-1] for line in log.read_text().split("\n")[:-1]]
        calls = [call for call in calls if call[0] != "sleep"]
        return done.returncode, done.stdout + done.stderr, calls

    return call


def check_command(words: Sequence[str]) -> dict[str, Any]:
    """Parses a command line of `meshloom` with its real flags; returns the flags of `train`."""
    assert Path(words[0]).name == "meshloom"
    name, command, rest = cli.resolve_command(click.Context(cli), list(words[1:]))
    assert name is not None and command is not None
    flags = command.make_context(name, [word.replace("$BUCKET", "bucket") for word in rest]).params
    if name == "supervise":
        return check_command(flags["command"])
    for file in flags.get("gin_file", ()):
        assert file == "mine.gin" or (ROOT / file).exists(), file
    return flags


COMMAND = re.compile(
    r"(?:\w+=\S+ )*(?:exec |sbatch \S+ )?"
    r"(meshloom|scripts/launch/(?:slurm|tpu_vm|gke_xpk)\.sh) (.*)"
)


def lines_of(text: str) -> Iterator[list[str]]:
    """Yields the command lines of shell code: continued lines are one, scripts are `train`."""
    for line in text.replace("\\\n", " ").splitlines():
        if match := COMMAND.fullmatch(line.strip()):
            program, flags = match.groups()
            command = ["meshloom"] if program == "meshloom" else ["meshloom", "train"]
            yield [*command, *shlex.split(flags, comments=True)]


# SLURM


def test_slurm_runs_one_supervised_process_a_node(launch: Launch) -> None:
    code, _, calls = launch("slurm.sh", {"srun": ["0"]})
    assert code == 0
    [[_, binding, *command]] = calls
    assert binding == "--cpu-bind=none"
    assert check_command(command)["gin_param"] == (TRAIN[2].removeprefix("--gin_param="),)


@pytest.mark.parametrize(("code", "restarts", "is_queued"), [
    (143, "", True), (75, "7", True), (143, "100", False), (1, "", False), (2, "", False),
])  # fmt: skip
def test_slurm_queues_again_what_was_stopped_or_stalled(
    code: int, restarts: str, is_queued: bool, launch: Launch
) -> None:
    variables = {"SLURM_JOB_ID": "7"} | ({"SLURM_RESTART_COUNT": restarts} if restarts else {})
    ended, output, calls = launch("slurm.sh", {"srun": [str(code)], "scontrol": ["0"]}, **variables)
    assert (["scontrol", "requeue", "7"] in calls) == is_queued
    assert ended == (0 if is_queued else code)
    assert (f"Exit code {code}" in output) == (code in (75, 143))


def test_directives_of_slurm_are_legal() -> None:
    text = (LAUNCH / "slurm.sh").read_text()
    head, _, body = text.partition("set -uo")
    assert "#SBATCH" not in body  # sbatch reads them before the first command only
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", head, re.MULTILINE))
    assert len(directives) == head.count("\n#SBATCH ")
    legal = {
        "job-name": r"\w+", "nodes": r"\d+", "ntasks-per-node": "1", "gpus-per-node": r"\d+",
        "exclusive": "", "mem": "0", "time": r"\d+:\d\d:\d\d", "signal": r"TERM@\d+",
        "requeue": "", "open-mode": "append",
    }  # fmt: skip
    assert not [name for name in directives if not re.fullmatch(legal[name], directives[name])]


# TPU VMs

QUEUED = ["gcloud", "compute", "tpus", "queued-resources"]
SLICE = {"NAME": "mine", "ZONE": "us-west4-a", "IMAGE": "us-west4-docker.pkg.dev/p/m/m:tpu-1"}


def test_a_preempted_slice_is_asked_for_again(launch: Launch) -> None:
    """Not there; waits; active, no exit code; preempted, deleted; not there; ends."""
    asks_again = ["list", "storage rm", "create"]
    expected = [
        *asks_again, "list", "storage cat", "list", "storage cat", "list", "storage cat", "delete",
        *asks_again, "list", "storage cat", "delete", "storage rm",
    ]  # fmt: skip
    answers = [
        "0", "1", "0", "0 PROVISIONING", "1", "0 ACTIVE", "1", "0 SUSPENDED", "1", "0",
        "0", "1", "0", "0 ACTIVE", "0 0", "0", "0",
    ]  # fmt: skip
    code, output, calls = launch("tpu_vm.sh", {"gcloud": answers}, **SLICE)
    assert code == 0 and "ended with exit code 0" in output
    verbs = [call[4] if call[:4] == QUEUED else " ".join(call[1:3]) for call in calls]
    assert verbs == expected
    create = calls[2]
    assert {"--spot", "--accelerator-type=v5litepod-64", "--node-id=mine"} < set(create)
    [metadata] = [word for word in create if word.startswith("--metadata=")]
    assert metadata.endswith(",exit_code=gs://bucket/runs/my run/launch_exit_code")


def test_a_slice_ends_with_the_code_of_its_training(launch: Launch) -> None:
    answers = ["0 ACTIVE", "0 2", "0", "0"]
    assert launch("tpu_vm.sh", {"gcloud": answers}, **SLICE)[0] == 2


def test_calls_that_fail_are_made_again(launch: Launch) -> None:
    """A preempted slice is deleted at the second call, asked for at the second, and so at the end.

    What the first call asks for must be right.
    """
    answers = [
        "0 SUSPENDED", "1", "1", "0 SUSPENDED", "1", "0",
        "0", "1", "0", "0 FAILED", "1", "0", "0", "1", "1", "0", "1", "0",
        "0 ACTIVE", "0 3", "1", "0 ACTIVE", "1", "1", "0", "1",
    ]  # fmt: skip
    code, _, calls = launch("tpu_vm.sh", {"gcloud": answers}, **SLICE)
    verbs = [call[4] if call[:4] == QUEUED else " ".join(call[1:3]) for call in calls]
    assert code == 3
    assert verbs[-6:] == ["delete", "list", "delete", "list", "delete", "storage rm"]
    assert verbs.count("create") == 3
    gone = ["0 ACTIVE", "0 3", "1", "0", "0"]  # the call failed, and the slice is deleted
    assert launch("tpu_vm.sh", {"gcloud": gone}, **SLICE)[0] == 3
    assert launch("tpu_vm.sh", {"gcloud": ["0", "1", "1"]}, **SLICE)[0] == 1


def test_a_variable_that_is_missing_is_named(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "log").touch()
    code, output, calls = launch("tpu_vm.sh", {"gcloud": []}, **SLICE | {"ZONE": ""})
    assert code == 1 and "ZONE: such as us-west4-a" in output and not calls


@pytest.mark.parametrize(("code", "worker", "is_written"), [
    ("0", "0", True), ("2", "0", True), ("143", "0", False), ("0", "3", False),
])  # fmt: skip
def test_a_vm_trains_in_a_container(
    code: str, worker: str, is_written: bool, launch: Launch
) -> None:
    quoted = " ".join(map(shlex.quote, TRAIN))
    answers = {
        "curl": [f"0 {SLICE['IMAGE']}", f"0 {quoted}", f"0 {worker}", "0 gs://bucket/exit_code"],
        "docker": ["0", "0", code],
        "gcloud": ["0", "0"],
    }
    _, _, calls = launch("tpu_vm_startup.sh", answers)
    [run] = [call for call in calls if call[:2] == ["docker", "run"]]
    assert {"--privileged", "--network=host"} < set(run)
    flags = check_command(["meshloom", *run[run.index(SLICE["IMAGE"]) + 1 :]])
    assert str(flags["model_dir"]) == "gs://bucket/runs/my run" and flags["start_timeout_s"] == 900
    assert (["gcloud", "storage", "cp", "-", "gs://bucket/exit_code"] in calls) == is_written


# GKE and SkyPilot


def test_xpk_gets_the_command(launch: Launch) -> None:
    variables = SLICE | {"CLUSTER": "tpus", "PROJECT": "p"}
    code, _, [call] = launch("gke_xpk.sh", {"xpk": ["0"]}, **variables)
    assert code == 0 and call[1:3] == ["workload", "create"]
    flags = dict(word.removeprefix("--").split("=", 1) for word in call[3:])
    assert flags["restart-on-exit-codes"] == "1,75"
    command = shlex.split(flags["command"])
    assert command[0] == "exec"  # XPK sends SIGTERM to the shell that it starts
    assert str(check_command(command[1:])["model_dir"]) == "gs://bucket/runs/my run"


def test_the_jobset_is_complete() -> None:
    jobset = yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text())
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert jobset["spec"].keys() == {"failurePolicy", "replicatedJobs"}
    [slice_job] = jobset["spec"]["replicatedJobs"]
    job = slice_job["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    chips = container["resources"]["limits"]["google.com/tpu"]
    rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    assert job["completions"] == job["parallelism"] == rows * columns // chips
    assert pod["restartPolicy"] == "Never"  # a podFailurePolicy needs it
    [rule] = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {
        "containerName": container["name"],
        "operator": "In",
        "values": [2],
    }
    flags = check_command([*container["command"], *container["args"]])
    assert flags["gin_param"] == ("TextFiles.train='gs://BUCKET/text/*.txt.zst'",)


def test_the_task_of_skypilot_is_complete() -> None:
    task = yaml.safe_load((LAUNCH / "skypilot.yaml").read_text())
    assert task.keys() == {"name", "resources", "envs", "workdir", "setup", "run"}
    resources = task["resources"]
    assert resources["use_spot"] and resources["accelerators"] == "tpu-v5litepod-64"
    assert resources["job_recovery"]["recover_on_exit_codes"] == [75, 143]
    for script in (task["setup"], task["run"]):
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    [command] = lines_of(task["run"])
    assert check_command(command)["start_timeout_s"] == 900


# The image and the page


def test_the_image_copies_what_exists() -> None:
    lines = (ROOT / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    instructions = [line.split() for line in lines if line and not line.startswith("#")]
    stages = [words[3] for words in instructions if words[0] == "FROM" and len(words) == 4]
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert all((ROOT / name).exists() for name in kept)
    assert kept > {"configs", "data", "layouts", "models", "scripts", "trainer"}
    for name, *words in instructions:
        assert name in {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "ENTRYPOINT", "CMD"}
        if name == "COPY" and words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
        elif name == "COPY" and words[0] != ".":
            assert set(words[:-1]) <= kept
    extras = (ROOT / "pyproject.toml").read_text()
    assert all(f"\n{name} = [" in extras for name in ("plot", "serve", "gcs", "tpu", "cuda"))


def test_the_commands_of_the_page_are_legal() -> None:
    page = (ROOT / "docs" / "launching.md").read_text()
    commands = [
        line for block in re.findall(r"```\n(.*?)```", page, re.S) for line in lines_of(block)
    ]
    assert [line[1] for line in commands].count("train") == 4 and len(commands) == 7
    for command in commands:
        check_command(command)

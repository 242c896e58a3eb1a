"""How a process finds its place: by flags, by variables, from SLURM and from Open MPI."""

from typing import Any

import pytest

from configs.errors import UserError
from trainer.processes.join import Place, place_of

SLURM = {
    "SLURM_JOB_ID": "10",
    "SLURM_STEP_NODELIST": "node[3-6],other",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "3",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, None),
        (SLURM, Place("node3:61450", 4, 2)),
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        (OPEN_MPI, Place("10.96.0.1:62880", 3, 1)),
    ],
)
def test_the_cluster_tells_the_place(
    variables: dict[str, str], place: Place | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert place_of("auto") == place
    assert place_of("off") is None


def test_flags_win_over_the_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLURM.items():
        monkeypatch.setenv(name, value)
    place = Place("[::1]:8476", 2, 0)
    assert place_of("auto", *place) == place_of("manual", *place) == place
    assert place_of("manual", "host:8476", 1, 0) is None


def test_a_cluster_that_does_not_say_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SLURM | {"SLURM_NTASKS": "many"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"--distributed=auto: .*'many'.*--distributed=off"):
        place_of("auto")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("manual",), "--distributed=manual without --coordinator_address, --process_count, --pr"),
        (("auto", "host:1"), "--coordinator_address without --process_count, --process_index."),
        (("auto", None, 2), "--process_count without --coordinator_address, --process_index."),
        (("auto", "host:1", None, 1), "--coordinator_address, --process_index without --process_c"),
        (("off", "host:1"), "--distributed=off with --coordinator_address."),
        (("auto", "host:1", 2, 5), "--process_index=5 of --process_count=2.  Legal: 0, 1."),
        (("auto", "host:1", 20, 20), "--process_index=20 of --process_count=20.  Legal: 0 to 19."),
        (("auto", "garbage", 2, 1), "--coordinator_address=garbage: legal is HOST:PORT"),
        (("auto", "host:0", 2, 1), "--coordinator_address=host:0: legal is HOST:PORT"),
        (("auto", "host:70000", 2, 1), "--coordinator_address=host:70000: legal is"),
        (("auto", "http://host:80", 2, 1), "--coordinator_address=http://host:80: legal is"),
    ],
)
def test_flags_that_contradict_are_refused(flags: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError) as error:
        place_of(*flags)
    assert str(error.value).startswith(message)

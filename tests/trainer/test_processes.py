"""Several processes of one run compute what a single one does."""

import socket
from pathlib import Path

import numpy as np

from tests.trainer.command import Command, Process

STEPS = 20
# Devices add in another order, which moves a float32 sum by about 1e-7 of itself.
ROUND_OFF = 2e-6


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def test_two_processes_train_like_one(straight: Command, tmp_path: Path) -> None:
    """Four devices, two in each process, under data and model parallelism."""
    command, port = straight.elsewhere(tmp_path / "run"), free_port()

    def start(index: int) -> Process:
        return command.train(
            f"--coordinator_address=localhost:{port}",
            "--process_count=2",
            f"--process_index={index}",
            layout="data_and_model_parallel",
            devices=2,
            params=[f"Run.steps = {STEPS}", "Run.checkpoint_every = 10"],
        )

    processes = [start(0), start(1)]
    try:
        said = [process.finish() for process in processes]
    finally:
        for process in processes:
            process.popen.kill()
    assert all(f"Finished after step {STEPS}" in text for text in said)
    found, wanted = command.losses(), straight.losses()
    assert list(found) == list(range(1, STEPS + 1))
    np.testing.assert_allclose([*found.values()], [wanted[step] for step in found], rtol=ROUND_OFF)
    assert {path.name for path in command.model_dir.glob("checkpoints/*")} == {"10", "20"}

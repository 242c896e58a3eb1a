"""The real command line in processes of its own, on a text that the tests write."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.cache import prepare
from data.sources.text import TextFiles
from data.task import Task
from data.tokenizers.sentence_piece import SentencePiece
from tests.launch_local import free_port
from tests.toys import ROOT, ignoring, row_ids
from trainer.metrics.jsonl import read_lines

FLOAT64 = [
    "Transformer.precision = @Precision()", "Precision.store = 'float64'",
    "Precision.compute = 'float64'",
]  # fmt: skip
STEPS = 160
EVERY = 20
BATCH = 8
LENGTH = 24
WAIT_S = 300
"""Far beyond what any of this takes: a run that hangs fails here."""


def settings(text: Path) -> list[str]:
    """Of a model that trains in a second, on the lines of a file."""
    return [
        "Run.model = @Transformer()", "Transformer.vocab = 288", "Transformer.layers = 2",
        "Transformer.d_model = 32", "Transformer.d_ff = 40", "Transformer.heads = 4",
        "Transformer.d_kv = 6", f"Transformer.length = {LENGTH}", "Transformer.dropout = 0.1",
        "Run.task = @Task()", "Task.name = 'toy'", "Task.source = @TextFiles()",
        f"TextFiles.train = '{text}'", f"Task.length = {LENGTH}",
        "Task.vocab = @SentencePiece()", "SentencePiece.size = 288",
        f"Run.steps = {STEPS}", f"Run.batch_sequences = {BATCH}",
        f"Run.checkpoint_every = {EVERY}", "Run.evaluate_batches = 2",
        "Run.optimizer = @AdamW()", "AdamW.schedule = @Constant()", "Constant.peak = 0.002",
        "Constant.warmup_steps = 10",
    ]  # fmt: skip


def write_text(file: Path) -> Path:
    """Five hundred lines of made-up words."""
    rng = np.random.default_rng(0)
    words = [f"{a}{b}" for a in ("ka", "lo", "mi", "ne") for b in ("ra", "st", "tu", "vo")]
    lines = [" ".join(rng.choice(words, rng.integers(3, 9))) for _ in range(500)]
    file.write_text("\n".join(lines) + "\n")
    return file


@dataclasses.dataclass
class Process:
    """A training that is under way."""

    popen: subprocess.Popen[str]
    model_dir: Path

    def finish(self, code: int = 0) -> str:
        """Waits for the end; what was written to the standard error."""
        try:
            out, error = self.popen.communicate(timeout=WAIT_S)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            raise
        assert self.popen.returncode == code, f"{self.popen.returncode}: {out}{error}"
        return error

    def wait_for_step(self, step: int) -> None:
        """Waits until metrics.jsonl has a step beyond the newest checkpoint at or after `step`."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until and self.popen.poll() is None:
            saved = [int(path.name) for path in self.model_dir.glob("checkpoints/*")
                     if path.name.isdecimal()]  # fmt: skip
            lines = read_lines(self.model_dir / "metrics.jsonl")
            if lines and max(saved, default=0) >= step and lines[-1]["step"] > max(saved):
                return
            time.sleep(0.003)
        self.popen.kill()
        raise AssertionError(f"never got there: {self.popen.communicate()}")

    def send(self, number: signal.Signals) -> None:
        self.popen.send_signal(number)


@dataclasses.dataclass
class Command:
    """`meshloom train` with settings that stay the same, in one model directory."""

    model_dir: Path
    data_dir: Path
    text: Path
    float64: bool = False
    """Whether to compute in float64, to compare layouts (`tests.toys.ROUND_OFF`)."""

    @classmethod
    def on_new_text(cls, folder: Path, *, float64: bool = False) -> "Command":
        text = write_text(folder / "text.txt")
        return cls(folder / "run", folder / "data", text, float64)

    def elsewhere(self, model_dir: Path) -> "Command":
        """The same text and settings for another model directory."""
        return dataclasses.replace(self, model_dir=model_dir)

    def copied_to(self, model_dir: Path) -> "Command":
        shutil.copytree(self.model_dir, model_dir)
        return self.elsewhere(model_dir)

    @property
    def task(self) -> Task:
        return Task(name="toy", source=TextFiles(train=str(self.text)),
                    vocab=SentencePiece(size=288), length=LENGTH)  # fmt: skip

    def row_ids(self, step: int) -> np.ndarray:
        """The rows of the batch that makes this step's loss."""
        rows = prepare(self.task, self.data_dir).splits["train"]
        return row_ids(0, step - 1, BATCH, len(rows))

    def settings(self) -> list[str]:
        return [*settings(self.text), *(FLOAT64 if self.float64 else [])]

    def train(
        self, *flags: str, layout: str = "whole", params: Sequence[str] = (), devices: int = 1,
        ignores: str = "",
    ) -> Process:  # fmt: skip
        """Starts `meshloom train`, with some signals ignored, by their names for a shell."""
        command = [
            *ignoring(ignores),
            sys.executable, "-m", "scripts.meshloom", "train", f"--model_dir={self.model_dir}",
            f"--data_dir={self.data_dir}", f"--simulate_devices={devices}",
            f"--gin_file=layouts/{layout}.gin", *flags,
            *(f"--gin_param={setting}" for setting in [*self.settings(), *params]),
        ]  # fmt: skip
        environment = {
            **os.environ,
            "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache"),
            "JAX_ENABLE_X64": str(int(self.float64)),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # most of the time goes into compilation
        }
        popen = subprocess.Popen(command, cwd=ROOT, env=environment, text=True,
                                 stdout=subprocess.PIPE, stderr=subprocess.PIPE)  # fmt: skip
        return Process(popen, self.model_dir)

    def train_on(
        self, count: int, *flags: str, layout: str = "data_parallel", params: Sequence[str] = ()
    ) -> list[Process]:
        """Starts so many processes of one run, of a device each."""
        address = f"--coordinator_address=localhost:{free_port()}"
        return [
            self.train(
                address, f"--process_count={count}", f"--process_index={index}", *flags,
                layout=layout, params=params,
            )
            for index in range(count)
        ]  # fmt: skip

    def steps(self) -> set[int]:
        """The steps of the checkpoints."""
        names = {path.name for path in self.model_dir.glob("checkpoints/*")}
        return {int(name) for name in names if name.isdecimal()}

    def losses(self) -> dict[int, float]:
        """The loss by step; no step is there twice."""
        lines = read_lines(self.model_dir / "metrics.jsonl")
        losses = {int(line["step"]): line["loss"] for line in lines}
        assert len(losses) == len(lines)
        return losses

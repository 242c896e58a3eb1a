"""A classifier of images at the command line: what its user types, and what does not fit it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.scripts.conftest import Meshloom, call
from tests.toys import ROOT, example, optax_promotion

SETTINGS = """
import convnet
Run.task = @ImageTask()
ImageTask.name = "toy"
ImageTask.source = @Tsv()
ImageTask.height = 7
ImageTask.width = 5
Run.model = @ConvNet()
ConvNet.vocab = 3
ConvNet.d_model = 4
ConvNet.d_ff = 6
ConvNet.layers = 2
Run.steps = 2
Run.batch_sequences = 8
Run.optimizer = @AdamW()
AdamW.schedule = @Constant()
Constant.peak = 1e-2
Constant.warmup_steps = 1
Layout.mesh = "rows:2"
Layout.rules = "height:rows+"
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two steps in `run`, with its settings and images beside it."""
    example("convnet")
    folder, rng = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    images = rng.integers(0, 256, (21, 7, 5, 1)).astype(np.uint8)
    lines = [
        f"{example('image_task').image_text(image)}\t{'abc'[i % 3]}\n"
        for i, image in enumerate(images)
    ]
    (folder / "train.tsv").write_text("".join(lines[:16]))
    (folder / "validation.tsv").write_text("".join(lines[16:]))
    files = [f'Tsv.{name} = "{folder / name}.tsv"\n' for name in ("train", "validation")]
    (folder / "toy.gin").write_text(SETTINGS + "".join(files))
    with optax_promotion():
        code = call(
            "train", f"--model_dir={folder / 'run'}", f"--data_dir={folder / 'data'}",
            f"--gin_file={folder / 'toy.gin'}",
        )  # fmt: skip
    assert code == 0
    return folder


def test_rates_and_results_are_of_images(run: Meshloom, folder: Path) -> None:
    flags = [f"--model_dir={folder / 'run'}", f"--data_dir={folder / 'data'}"]
    whole = run("evaluate", *flags)
    of_file = run("evaluate", *flags, f"--input={folder / 'validation.tsv'}")
    assert whole.out == of_file.out and whole.out.splitlines()[0].split() == [
        "step", "loss", "accuracy", "examples"
    ]  # fmt: skip
    scores = run("score", flags[0], f"--input={folder / 'validation.tsv'}").out.splitlines()
    loss = -np.mean([float(line.split("\t")[0]) for line in scores[1:]])
    assert f"{loss:.4f}" == whole.out.splitlines()[1].split()[1]
    plan = run(
        "plan", f"--gin_file={folder / 'toy.gin'}", "--gin_param=Layout.mesh = 'data:-1,rows:2'",
        "--topology=v3:2x2", "--analytic",
    )  # fmt: skip
    assert "images/s" in plan.out and "tokens/s" not in plan.out


@pytest.mark.parametrize("command", ["decode", "evaluate", "score"])
def test_a_text_is_no_image(run: Meshloom, folder: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "text").write_text("kara lost\n")
    answer = run(command, f"--model_dir={folder / 'run'}", f"--input={tmp_path / 'text'}")
    expected = "cannot continue text" if command == "decode" else "line 1: 0 tabs"
    assert answer.code == 2 and expected in answer.error


def test_a_file_without_images_is_refused(run: Meshloom, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("")
    answer = run("evaluate", f"--model_dir={folder / 'run'}", f"--input={tmp_path / 'empty'}")
    assert answer.code == 2 and "the file is empty" in answer.error


@pytest.mark.parametrize(
    ("setting", "part"),
    [
        ("ConvNet.channels = 3", "provides images_BYXZ of channels 1, but Run.model = @ConvNet()"),
        ("ConvNet.vocab = 2", "ConvNet.vocab = 2: the vocabulary of task toy has 3 tokens"),
        ("ImageTask.width = 6", "found height 7, width 5, channels 1.  Legal: height 7, width 6"),
        ("Tsv.train = '/nowhere.tsv'", "Tsv.train: no file matches '/nowhere.tsv'"),
        ("Layout.rules = 'height:rows'", "height = 7 does not divide over rows = 2"),
    ],
)
def test_what_does_not_fit_is_refused(
    run: Meshloom, folder: Path, tmp_path: Path, setting: str, part: str
) -> None:
    answer = run(
        "train", f"--model_dir={tmp_path / 'run'}", f"--data_dir={folder / 'data'}",
        f"--gin_file={folder / 'toy.gin'}", f"--gin_param={setting}",
    )  # fmt: skip
    assert answer.code == 2 and part in answer.error


@pytest.mark.long
def test_a_unet_trains_on_files_of_volumes(run: Meshloom, tmp_path: Path) -> None:
    rng, examples = np.random.default_rng(0), ROOT / "docs" / "examples"
    for number in range(6):
        mask = np.zeros((4, 6, 8), bool)
        mask[1:3, 2:4, 2:6] = True
        volume = (mask * 90 + rng.integers(0, 99, mask.shape)).astype(np.uint8)
        np.savez(tmp_path / f"{number}.npz", volume=volume, mask=mask)
    settings = {
        "VolumeTask.source": "@VolumeFiles()", "VolumeFiles.train": f"{tmp_path}/[0-3].npz",
        "VolumeFiles.validation": f"{tmp_path}/4.npz", "VolumeFiles.test": f"{tmp_path}/5.npz",
        "VolumeTask.depth": 4, "VolumeTask.height": 6, "VolumeTask.width": 8,
        "VolumeTask.length": 192, "UNet.d_model": 2, "UNet.levels": 2, "Run.steps": 2,
        "Cosine.warmup_steps": 1, "Run.batch_sequences": 8, "Layout.mesh": "data:-1",
    }  # fmt: skip
    flags = [f"--gin_param={name} = {value if '@' in str(value) else repr(value)}"
             for name, value in settings.items()]  # fmt: skip
    train = [
        f"--model_dir={tmp_path / 'run'}", f"--data_dir={tmp_path}",
        f"--gin_import_path={examples}", f"--gin_file={examples / 'unet.gin'}", *flags,
    ]  # fmt: skip
    with optax_promotion():
        trained = run("train", *train)
    assert trained.code == 0 and "voxels/s" in trained.error
    dice = subprocess.run(
        [sys.executable, examples / "dice.py", train[0], train[1]],
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert re.search(r"Dice of 1 volumes: [01]\.\d{3}\n", dice.stdout), dice.stderr
    np.savez(tmp_path / "scan.npz", volume=volume.astype(np.int16) * 9, mask=mask)
    for setting, part in (
        (f"VolumeFiles.train = '{tmp_path}/scan.npz'", "`volume` has int16 from"),
        ("Precision.products = 'int8'", "@UNet() rounds no products.  Legal: 'compute'."),
        ("UNet.levels = 3", "volumes of 4 x 6 x 8 are halved 2 times.  Legal: sides that 4 divide"),
        ("VolumeTask.length = 191", "a volume of 4 x 6 x 8 has 192 voxels.  Legal: that number"),
        ("VolumeTask.width = 16", "has 384 voxels"),
        ("VolumeFiles.train = '/nowhere/*.npz'", "VolumeFiles.train = '/nowhere/*.npz': no such"),
    ):
        refused = run(
            "train", f"--model_dir={tmp_path / 'other'}", *train[1:], f"--gin_param={setting}"
        )
        assert refused.code == 2 and part in refused.error, refused

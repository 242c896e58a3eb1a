"""Computes the Dice score of a unet.py model on its test volumes.

python docs/examples/dice.py --model_dir=runs/unet
"""

import argparse
from pathlib import Path

import numpy as np

from configs import imports
from scripts.commands.common import data_dir_of
from scripts.commands.shared_flags import CheckpointFlags
from scripts.commands.trained import batch_of, trained_models
from scripts.exits import exits
from trainer.decoding.score import row_losses
from trainer.prepare import prepare


def dice(predicted: np.ndarray, mask: np.ndarray) -> float:
    """Returns twice the voxels in both masks, divided by the sum of their voxels (Dice 1945)."""
    return float(2 * np.sum(predicted & mask) / (np.sum(predicted) + np.sum(mask)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model_dir", type=Path, required=True)
    parser.add_argument("--data_dir", type=Path)
    given = parser.parse_args()
    imports.allow_folder(Path(__file__).parent)
    with trained_models(CheckpointFlags(model_dir=given.model_dir)) as models:
        data_dir, task = data_dir_of(given.data_dir, given.model_dir), models.run.task
        prepared = prepare(task, data_dir, vocabs=models.vocabs, content_hash=models.content_hash)
        rows, trained = prepared.splits["test"], models.restore(None)
        _, is_likeliest = row_losses(trained, rows, batch_of(trained, None))
    every = np.arange(len(rows))
    mask = np.asarray(rows.targets_BL[every]) == models.vocabs.target.encode(["object"])[0][0]
    volumes = np.asarray(rows.arrays["volumes"][every])
    thresholds = {level: dice(volumes > level, mask) for level in range(255)}
    best = max(thresholds, key=lambda level: thresholds[level])
    print(f"Dice of {len(rows)} volumes: {dice(is_likeliest == mask, mask):.3f}")
    print(f"Dice of the best threshold, {best}: {thresholds[best]:.3f}")


if __name__ == "__main__":
    exits(main)

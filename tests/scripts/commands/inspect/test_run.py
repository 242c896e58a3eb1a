"""What `meshloom inspect checkpoint` shows."""

import json
from pathlib import Path

import jax.numpy as jnp
import pytest

from scripts.commands.inspect.flags import InspectCheckpointFlags
from scripts.commands.inspect.run import checkpoint
from trainer.checkpoints.manager import Checkpoints


@pytest.mark.parametrize(("which", "step"), [("latest", 3), ("3", 3), ("0", 0)])
def test_the_checkpoint_that_is_named_is_shown(tmp_path: Path, which: str, step: int) -> None:
    with Checkpoints(tmp_path) as checkpoints:
        for saved in (0, 3):  # an import saves step 0
            checkpoints.save(saved, {"params": {"norm": {"scale_D": jnp.ones(4 + saved)}}})
    file = tmp_path / "arrays.json"
    checkpoint(InspectCheckpointFlags(model_dir=tmp_path, checkpoint=which, json_file=str(file)))
    shown = json.loads(file.read_text())
    assert (shown["step"], shown["steps"]) == (step, [0, 3])
    assert [array["shape"] for array in shown["arrays"]] == [str(4 + step)]

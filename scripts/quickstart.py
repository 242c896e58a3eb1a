"""Runs `make quickstart`: trains a small language model, evaluates it and prints samples."""

from pathlib import Path

from scripts.commands.decoding.decode import continuations
from scripts.commands.evaluation.evaluate import evaluate_model
from scripts.commands.evaluation.flags import EvaluateFlags, TextFlags
from scripts.commands.shared_flags import CheckpointFlags, SearchFlags, SettingsFlags
from scripts.commands.training.flags import TrainFlags
from scripts.commands.training.train import train
from scripts.devices import start_devices
from scripts.exits import exits

MODEL_DIR = Path("runs/quickstart")
GIN_FILE = "configs/runs/quickstart.gin"
PROMPTS = ("Return the", "This function", "If the array")


def main() -> None:
    """Trains (or resumes), evaluates on the test split, prints samples."""
    start_devices()
    train(TrainFlags(model_dir=MODEL_DIR, settings=SettingsFlags(gin_file=(GIN_FILE,))))
    model, text = CheckpointFlags(model_dir=MODEL_DIR), TextFlags(split="test")
    [result] = evaluate_model(EvaluateFlags(model=model, text=text))
    search = SearchFlags(temperature=0.7, max_tokens=30, seed=1)
    texts = continuations(PROMPTS, MODEL_DIR, search)
    summary = f"""
Per-word perplexity on the test split: {result["perplexity_per_word"]:.1f}
({result["words"]:,} words and {result["lines"]:,} line ends)
Bits per byte: {result["bits_per_byte"]:.3f}

Three prompts, continued:
""" + "".join(f"  {text}\n" for text in texts)
    print(summary)
    print(f"""The curves:      {MODEL_DIR}/loss.png
To continue:
  . .venv/bin/activate
  meshloom train --model_dir={MODEL_DIR} --gin_param=Run.steps=2000
  meshloom evaluate --model_dir={MODEL_DIR} --split=test
  echo "Return the" | meshloom decode --model_dir={MODEL_DIR} --input=- --temperature=0.7
  meshloom serve --model_dir={MODEL_DIR}
  pip install tensorboard && tensorboard --logdir={MODEL_DIR}/events
  meshloom train --model_dir=runs/split --gin_file={GIN_FILE} \\
    --gin_file=layouts/data_and_model_parallel.gin --simulate_devices=8""")


if __name__ == "__main__":
    exits(main)

"""`make quickstart`: trains a small language model, evaluates it, lets it speak."""

from pathlib import Path

from scripts.commands import decode as decoding
from scripts.commands import evaluate as evaluating
from scripts.commands.train import train
from scripts.meshloom import DATA_DIR, exits, start_devices

MODEL_DIR = Path("runs/quickstart")
GIN_FILE = "configs/runs/quickstart.gin"
PROMPTS = ("Return the", "This function", "If the array")


def main() -> None:
    """Trains (or goes on where it was stopped), evaluates on the test split, prints samples."""
    start_devices()
    train(MODEL_DIR, DATA_DIR, (GIN_FILE,), ())
    result = evaluating.evaluate_model(MODEL_DIR, DATA_DIR, split="test")[0]
    texts = decoding.continuations(PROMPTS, MODEL_DIR, temperature=0.7, max_tokens=30, seed=1)
    say = f"""
Per-word perplexity on the test split: {result["perplexity_per_word"]:.1f}
({result["words"]:,} words, one end of line each; {result["bits_per_byte"]:.3f} bits a byte)

Three prompts, continued:
""" + "".join(f"  {text}\n" for text in texts)
    print(say)
    print(f"""The curves:      {MODEL_DIR}/loss.png, or tensorboard --logdir={MODEL_DIR}/events
To continue:
  . .venv/bin/activate
  meshloom train --model_dir={MODEL_DIR} --gin_param=Run.steps=2000
  meshloom evaluate --model_dir={MODEL_DIR} --split=test
  echo "Return the" | meshloom decode --model_dir={MODEL_DIR} --input=- --temperature=0.7
  meshloom train --model_dir=runs/split --gin_file={GIN_FILE} \\
    --gin_file=layouts/data_and_model_parallel.gin --simulate_devices=8""")


if __name__ == "__main__":
    exits(main)

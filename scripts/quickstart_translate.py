"""Runs `make quickstart-translate`: trains a small translation model and measures it."""

from pathlib import Path

from scripts.commands.decoding.decode import continuations
from scripts.commands.evaluation.evaluate import evaluate_model
from scripts.commands.evaluation.flags import EvaluateFlags, TextFlags
from scripts.commands.shared_flags import CheckpointFlags, SearchFlags, SettingsFlags
from scripts.commands.training.flags import TrainFlags
from scripts.commands.training.train import train
from scripts.devices import start_devices
from scripts.exits import exits
from scripts.terminal import print_table
from trainer.model_dir import ModelDir
from trainer.run import Run
from trainer.translation.evaluate import evaluation_sets, subset

MODEL_DIR = Path("runs/quickstart_translate")
GIN_FILE = "configs/runs/quickstart_translate.gin"
SHOWN = 10


def main() -> None:
    """Trains (or resumes), measures BLEU on the test split, shows examples."""
    start_devices()
    train(TrainFlags(model_dir=MODEL_DIR, settings=SettingsFlags(gin_file=(GIN_FILE,))))
    model, text = CheckpointFlags(model_dir=MODEL_DIR), TextFlags(split="test")
    [result] = evaluate_model(EvaluateFlags(model=model, text=text))
    task = ModelDir(MODEL_DIR).load((), ()).make(Run).task
    [shown] = subset(evaluation_sets(task, "test"), SHOWN)
    texts = continuations(shown.sources, MODEL_DIR, SearchFlags(), batch_sequences=SHOWN)
    rows = list(zip(shown.sources, texts, shown.references[0], strict=True))
    print("\nTen sentences of the test split:")
    print_table(["source", "translation", "reference"], rows)
    print(f"""
BLEU on the test split: {result["bleu"]:.1f}  ({result["sentences"]:,} sentences, beam 4)
{result["bleu_signature"]}

The curves:      {MODEL_DIR}/loss.png
To continue:
  . .venv/bin/activate
  meshloom train --model_dir={MODEL_DIR} --gin_param=Run.steps=2000
  meshloom evaluate --model_dir={MODEL_DIR} --split=test
  echo "{shown.sources[0]}" | meshloom decode --model_dir={MODEL_DIR} --input=-
  meshloom serve --model_dir={MODEL_DIR}
  pip install tensorboard && tensorboard --logdir={MODEL_DIR}/events
  meshloom train --model_dir=runs/french --gin_file={GIN_FILE} \\
    --gin_param="Phrases.language='fr'" --gin_param="Translation.name='phrases_fr_en'\"""")


if __name__ == "__main__":
    exits(main)

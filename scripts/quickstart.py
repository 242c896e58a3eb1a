"""Trains a small model, evaluates it and shows its texts.

Run by `make quickstart`; with `translate` as an argument, trains a translation model.
"""

import sys
from pathlib import Path
from typing import Any

from scripts.commands.decoding.decode import continuations
from scripts.commands.evaluation.evaluate import evaluate_model
from scripts.commands.evaluation.flags import EvaluateFlags, TextFlags
from scripts.commands.shared_flags import CheckpointFlags, SearchFlags, SettingsFlags
from scripts.commands.training.flags import TrainFlags
from scripts.commands.training.train import train
from scripts.devices import start_devices
from scripts.exits import exits
from scripts.templates import render
from trainer.model_dir import ModelDir
from trainer.run import Run
from trainer.translation.evaluate import evaluation_sets, subset

PROMPTS = ("Return the", "This function", "If the array")
TRANSLATED = 10  # sentences to show


def language_model() -> None:
    """Trains or resumes, evaluates on the test split, and prints samples."""
    values = trained("quickstart")
    search = SearchFlags(temperature=0.7, max_tokens=30, seed=1)
    texts = continuations(PROMPTS, values["model_dir"], search)
    print(render("quickstart.txt", texts=texts, **values))


def translation() -> None:
    """Trains or resumes, measures BLEU on the test split, and shows examples."""
    values = trained("quickstart_translate")
    model_dir: Path = values["model_dir"]
    task = ModelDir(model_dir).load((), ()).make(Run).task
    [shown] = subset(evaluation_sets(task, "test"), TRANSLATED)
    texts = continuations(shown.sources, model_dir, SearchFlags(), batch_sequences=TRANSLATED)
    rows = [
        {"source": source, "translation": text, "reference": reference}
        for source, text, reference in zip(shown.sources, texts, shown.references[0], strict=True)
    ]
    print(render("quickstart_translate.txt", rows=rows, **values))


def trained(name: str) -> dict[str, Any]:
    """Trains or resumes a model, and evaluates it on the test split; returns values to show."""
    start_devices()
    model_dir, gin_file = Path("runs") / name, f"configs/runs/{name}.gin"
    train(TrainFlags(model_dir=model_dir, settings=SettingsFlags(gin_file=(gin_file,))))
    model, text = CheckpointFlags(model_dir=model_dir), TextFlags(split="test")
    [result] = evaluate_model(EvaluateFlags(model=model, text=text))
    return {"model_dir": model_dir, "gin_file": gin_file, "result": result}


if __name__ == "__main__":
    exits(translation if "translate" in sys.argv[1:] else language_model)

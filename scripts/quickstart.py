"""Trains a small model, evaluates it and shows its texts: `make quickstart` and

python -m scripts.quickstart translate
"""

import sys
from collections.abc import Sequence
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
from scripts.terminal import print_table
from trainer.model_dir import ModelDir
from trainer.run import Run
from trainer.translation.evaluate import evaluation_sets, subset

PROMPTS = ("Return the", "This function", "If the array")
TRANSLATED = 10  # sentences that are shown


def language_model() -> None:
    """Trains (or resumes), evaluates on the test split, prints samples."""
    model_dir, gin_file = Path("runs/quickstart"), "configs/runs/quickstart.gin"
    result = trained(model_dir, gin_file)
    search = SearchFlags(temperature=0.7, max_tokens=30, seed=1)
    texts = continuations(PROMPTS, model_dir, search)
    print(
        f"""
Per-word perplexity on the test split: {result["perplexity_per_word"]:.1f}
({result["words"]:,} words and {result["lines"]:,} line ends)
Bits per byte: {result["bits_per_byte"]:.3f}

Three prompts, continued:
"""
        + "".join(f"  {text}\n" for text in texts)
    )
    decode = (
        '"Return the" | meshloom decode --model_dir=runs/quickstart --input=- --temperature=0.7'
    )
    print_next(model_dir, decode, [
        f"meshloom train --model_dir=runs/split --gin_file={gin_file} \\",
        "  --gin_file=layouts/data_and_model_parallel.gin --simulate_devices=8",
    ])  # fmt: skip


def translation() -> None:
    """Trains (or resumes), measures BLEU on the test split, shows examples."""
    model_dir = Path("runs/quickstart_translate")
    gin_file = "configs/runs/quickstart_translate.gin"
    result = trained(model_dir, gin_file)
    task = ModelDir(model_dir).load((), ()).make(Run).task
    [shown] = subset(evaluation_sets(task, "test"), TRANSLATED)
    texts = continuations(shown.sources, model_dir, SearchFlags(), batch_sequences=TRANSLATED)
    rows = list(zip(shown.sources, texts, shown.references[0], strict=True))
    print("\nTen sentences of the test split:")
    print_table(["source", "translation", "reference"], rows)
    print(f"""
BLEU on the test split: {result["bleu"]:.1f}  ({result["sentences"]:,} sentences, beam 4)
{result["bleu_signature"]}
""")
    decode = f'"{shown.sources[0]}" | meshloom decode --model_dir={model_dir} --input=-'
    print_next(model_dir, decode, [
        f"meshloom train --model_dir=runs/french --gin_file={gin_file} \\",
        """  --gin_param="Phrases.language='fr'" --gin_param="Translation.name='phrases_fr_en'\"""",
    ])  # fmt: skip


def trained(model_dir: Path, gin_file: str) -> dict[str, Any]:
    """Trains a model, or resumes, and evaluates it on the test split."""
    start_devices()
    train(TrainFlags(model_dir=model_dir, settings=SettingsFlags(gin_file=(gin_file,))))
    model, text = CheckpointFlags(model_dir=model_dir), TextFlags(split="test")
    [result] = evaluate_model(EvaluateFlags(model=model, text=text))
    return result


def print_next(model_dir: Path, decode: str, variant: Sequence[str]) -> None:
    """Prints what to do with the model, and how to train another."""
    print(f"""The curves:      {model_dir}/loss.png
To continue:
  . .venv/bin/activate
  meshloom train --model_dir={model_dir} --gin_param=Run.steps=2000
  meshloom evaluate --model_dir={model_dir} --split=test
  echo {decode}
  meshloom serve --model_dir={model_dir}
  pip install tensorboard && tensorboard --logdir={model_dir}/events""")
    print(*(f"  {line}" for line in variant), sep="\n")


if __name__ == "__main__":
    exits(translation if "translate" in sys.argv[1:] else language_model)

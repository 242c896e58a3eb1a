"""What `evaluate` does: loss and perplexities, and the quality of translations."""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

from configs.errors import UserError
from data.cache import prepare
from data.packing.pair_rows import PairRows
from data.packing.rows import Rows, read_word_list
from data.sources.pairs import Pair, chosen_tag, tagged
from data.sources.text_files import read_lines
from data.task import Task
from scripts.commands.common import (
    Strings,
    batch_of,
    open_output,
    short,
    trained_models,
    write_json,
)
from scripts.commands.decode import Wishes, decoder_of
from scripts.terminal import Bar, print_table, tell
from trainer.checkpoints.restore import Trained, TrainedModels, chosen_steps
from trainer.evaluate import evaluate
from trainer.translation.evaluate import (
    EvaluationSet,
    TranslatedSet,
    evaluation_sets,
    subset,
    translate,
)
from trainer.translation.metrics import check_settings, check_texts
from trainer.translation.test_sets import read_test_set


@dataclasses.dataclass(frozen=True, kw_only=True)
class Text:
    """Which text is evaluated: a split of the task, files, or a test set by its name."""

    split: str = "validation"
    text_file: str | None = None
    references: Strings = ()
    test_set: str | None = None
    languages: str | None = None
    tag: str | None = None

    def given(self, task: Task) -> EvaluationSet | None:
        """Sources and references that are not the task's own."""
        if self.test_set is not None and self.languages is not None:
            name, (sources, references) = (
                f"{self.test_set} {self.languages}",
                read_test_set(self.test_set, self.languages),
            )
        elif self.text_file is not None and self.references:
            name, sources = self.text_file, list(read_lines(self.text_file))
            references = [list(read_lines(path)) for path in self.references]
        elif any((self.test_set, self.languages, self.text_file, self.references)):
            raise UserError(
                "A translation is evaluated on --input=SOURCES with --references=FILE, on "
                "--test_set=NAME with --languages=SRC-TGT, or on --split."
            )
        else:
            return None
        check_texts({name: sources}, references)
        return EvaluationSet(name, chosen_tag(self.tag, task.tags), sources, references)


def evaluate_model(
    model_dir: Path,
    data_dir: Path,
    gin_file: Strings = (),
    gin_param: Strings = (),
    checkpoint: str = "latest",
    average: int | None = None,
    json_file: str | None = None,
    batch_sequences: int | None = None,
    logit_scale: float = 1.0,
    sentences: int | None = None,
    tokenize: str | None = None,
    resamples: int = 1000,
    ter: bool = True,
    hypotheses: str | None = None,
    beam: int | None = None,
    alpha: float = 0.6,
    length_penalty: Any = "gnmt",
    **text: Any,
) -> list[dict[str, Any]]:
    """Some checkpoints on a text; of a translation task, also what their translations are worth.

    With sentences = 0 nothing is translated.
    """
    which, found = Text(**text), []
    check_settings(tokenize, which.languages)
    wishes = Wishes(beam=beam, alpha=alpha, length_penalty=length_penalty)
    with trained_models(model_dir, gin_file, gin_param) as models:
        steps = chosen_steps(models.checkpoints, checkpoint)
        task = models.run.task
        given = which.given(task) if task.has_source else None
        rows, train_pairs = evaluation_rows(models, data_dir, which, given)
        to_translate = translation_parts(models, which, given, sentences)
        for step in steps:
            trained = models.open(step, average)
            with Bar("evaluate") as bar:
                result, by_part = evaluate(
                    trained.model,
                    trained.params,
                    rows,
                    trained.mesh,
                    batch_sequences=batch_of(trained, batch_sequences),
                    logit_scale=logit_scale,
                    report=bar.update,
                )
            line = {"step": trained.step, **dataclasses.asdict(result)}
            parts = {name: part._asdict() for name, part in by_part.items()}
            if to_translate:
                made = translations(
                    trained, to_translate, wishes, tokenize=tokenize, resamples=resamples, ter=ter
                )
                line |= {**made[0].metrics.as_dict(), "is_subset": sentences is not None}
                for one in made[1:]:
                    own = parts.setdefault(one.part.name, {})
                    own |= one.metrics.as_dict() | {"train_pairs": train_pairs.get(one.part.name)}
                if made[1:]:
                    line["mean_bleu"] = mean_bleu(made[1:])
                show(made, is_subset=sentences is not None)
                write_hypotheses(hypotheses, made)
            found.append(line | ({"parts": parts} if parts else {}))
    numbers = ["step", *(field.name for field in dataclasses.fields(result))]
    print_table(numbers, [[short(line[name]) for name in numbers] for line in found])
    write_json(json_file, found if len(steps) > 1 else found[0])
    return found


def translations(
    trained: Trained, parts: list[EvaluationSet], wishes: Wishes, **metrics: Any
) -> list[TranslatedSet]:
    """What one checkpoint makes of the sources."""
    task = trained.run.task
    decoder = decoder_of([trained], wishes, None)
    with Bar("translate") as bar:
        return translate(
            decoder, parts, task, trained.vocabs, wishes.options(), trained.run.model.max_length,
            say=tell, progress=bar.update, **metrics,
        )  # fmt: skip


def translation_parts(
    models: TrainedModels, text: Text, given: EvaluationSet | None, sentences: int | None
) -> list[EvaluationSet]:
    """The sentences to translate; none of a language model's."""
    task = models.run.task
    if sentences == 0 or not task.has_source:
        return []
    parts = evaluation_sets(task, text.split) if given is None else [given]
    return parts if sentences is None else subset(parts, sentences)


def evaluation_rows(
    models: TrainedModels, data_dir: Path, text: Text, given: EvaluationSet | None
) -> tuple[Rows, dict[str, int]]:
    """The rows of a split of the model's task, or of files, with the model's vocabularies.

    Beside them how many pairs each part of the task has to train on.
    """
    task, (target, source) = models.run.task, models.vocabs
    if given is not None:
        pairs = [
            Pair(tagged(sentence, given.tag), reference)
            for sentence, reference in zip(given.sources, given.references[0], strict=True)
        ]
        lengths = (task.row_lengths["source_length"], task.length)
        rows: Rows = PairRows.from_pairs(pairs, models.vocabs.of_source, target, *lengths)
        if rows.counts.left_out:
            tell(f"{rows.counts.left_out} of {len(pairs)} pairs are longer than a row: no loss.")
        return rows, {}
    if text.text_file is not None:
        word_list = read_word_list(task.word_list)
        return Rows.from_lines(read_lines(text.text_file), target, task.length, word_list), {}
    splits = prepare(task, data_dir, vocab=target, source_vocab=source).splits
    if text.split not in splits:
        raise UserError(
            f"--split={text.split}: not in task {task.name}.  Legal: {', '.join(splits)}."
        )
    train_pairs = {part.name: part.counts.lines for part in splits["train"].parts}
    return splits[text.split], train_pairs


def show(made: list[TranslatedSet], *, is_subset: bool) -> None:
    for one in made:
        subset_of = " (a subset)" if is_subset else ""
        print(f"{one.part.name}{subset_of}: {one.metrics}")
    if made[1:]:
        print(f"BLEU of the {len(made[1:])} parts, averaged: {mean_bleu(made[1:]):.2f}")


def mean_bleu(made: list[TranslatedSet]) -> float:
    """The mean over parts, each of which counts alike."""
    return statistics.fmean(one.metrics.bleu.score for one in made)


def write_hypotheses(path: str | None, made: list[TranslatedSet]) -> None:
    if path is not None:
        with open_output(path) as file:
            file.writelines(text.replace("\n", " ") + "\n" for text in made[0].texts)

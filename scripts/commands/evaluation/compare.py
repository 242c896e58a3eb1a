"""Runs `meshloom compare`: measures translations and compares them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from configs.errors import UserError
from data.sources.text_files import read_lines
from scripts.commands.common import write_json
from scripts.commands.evaluation.flags import CompareFlags
from scripts.terminal import print_note, print_table, progress_bar
from trainer.translation import metrics as measures
from trainer.translation.metrics import Paired, TranslationMetrics, check_settings, check_texts
from trainer.translation.test_sets import read_test_set


def compare(flags: CompareFlags) -> dict[str, Any]:
    """Measures each file of translations; with several, computes p-values against the first."""
    if len(set(flags.system)) < len(flags.system):
        raise UserError("--system: a file is given twice.  Give each once.")
    if bool(flags.references) == (flags.test_set is not None):
        raise UserError("Give either --references=FILE or --test_set=NAME with --languages.")
    if (flags.test_set is None) != (flags.languages is None):
        raise UserError(
            "--test_set and --languages go together, as in --test_set=wmt14/full --languages=en-de."
        )
    check_settings(flags.metrics.tokenize, flags.languages)
    if flags.test_set is not None and flags.languages is not None:
        references = read_test_set(flags.test_set, flags.languages)[1]
    else:
        references = [list(read_lines(path)) for path in flags.references]
    texts = {path: list(read_lines(path)) for path in flags.system}
    check_texts(texts, references)
    metrics = dataclasses.asdict(flags.metrics)
    metrics |= {"test_set": flags.test_set, "languages": flags.languages}
    ter = metrics.pop("ter")
    with progress_bar("compare") as update:
        measured: dict[str, TranslationMetrics] = {}
        for path in texts:
            update(len(measured), len(texts) + 1)
            measured[path] = measures.compute_metrics(
                texts[path], references, ter=ter, name=path, **metrics
            )
        update(len(measured), len(texts) + 1)
        against = None
        if len(texts) > 1:
            against = measures.paired(references, texts, **metrics)
    show(measured, against)
    result = {
        "systems": [{"system": path, **one.as_dict()} for path, one in measured.items()],
        "paired": None if against is None else against.as_dict(),
    }
    write_json(flags.json_file, result)
    return result


def show(measured: Mapping[str, TranslationMetrics], against: Paired | None) -> None:
    rows = []
    for path, one in measured.items():
        for m in one.measures:
            interval = ("" if end is None else f"{end:.2f}" for end in (m.low, m.high))
            rows.append((path, m.name, f"{m.score:.2f}", *interval, m.signature))
    print_table(["system", "metric", "score", "low", "high", "signature"], rows)
    if against is not None:
        print()
        print_table(against.HEADERS, against.rows())
    one = next(iter(measured.values()))
    print_note(f"{one.sentences:,} sentences; hash of the references {one.references_hash}")

"""What `meshloom compare` does: measures translations and holds them against each other."""

from collections.abc import Mapping, Sequence
from typing import Any

from configs.errors import UserError
from data.sources.text_files import read_lines
from scripts.commands.common import Strings, write_json
from scripts.terminal import Bar, print_table, tell
from trainer.translation.metrics import (
    Paired,
    TranslationMetrics,
    check_settings,
    check_texts,
    compute_metrics,
    paired,
)
from trainer.translation.test_sets import read_test_set


def compare(
    system: Strings,
    references: Strings = (),
    test_set: str | None = None,
    languages: str | None = None,
    json_file: str | None = None,
    ter: bool = True,
    **settings: Any,
) -> dict[str, Any]:
    """The quality of each file of translations; with several, p-values against the first.

    `settings` are those that `compute_metrics` and `paired` share.
    """
    check_flags(system, references, test_set, languages)
    check_settings(settings.get("tokenize"), languages)
    wanted = read_references(references, test_set, languages)
    texts = {path: list(read_lines(path)) for path in system}
    check_texts(texts, wanted)
    settings |= {"test_set": test_set, "languages": languages}
    with Bar("compare") as bar:
        found: dict[str, TranslationMetrics] = {}
        for path in texts:
            bar.update(len(found), len(texts) + 1)
            found[path] = compute_metrics(texts[path], wanted, ter=ter, where=path, **settings)
        bar.update(len(found), len(texts) + 1)
        against = paired(wanted, texts, **settings) if len(texts) > 1 else None
    show(found, against)
    result = as_dict(found, against)
    write_json(json_file, result)
    return result


def check_flags(
    system: Strings, references: Strings, test_set: str | None, languages: str | None
) -> None:
    if len(set(system)) < len(system):
        raise UserError("--system: a file is given twice.  Give each once.")
    if bool(references) == (test_set is not None):
        raise UserError("Give either --references=FILE or --test_set=NAME with --languages.")
    if (test_set is None) != (languages is None):
        raise UserError(
            "--test_set and --languages go together, as in --test_set=wmt14/full --languages=en-de."
        )


def read_references(
    files: Strings, test_set: str | None, languages: str | None
) -> Sequence[Sequence[str]]:
    if test_set is not None and languages is not None:
        return read_test_set(test_set, languages)[1]
    return [list(read_lines(path)) for path in files]


def show(found: Mapping[str, TranslationMetrics], against: Paired | None) -> None:
    rows = [
        (path, m.name, f"{m.score:.2f}", percent(m.low), percent(m.high), m.signature)
        for path, one in found.items()
        for m in one.measures
    ]
    print_table(["system", "metric", "score", "low", "high", "signature"], rows)
    if against is not None:
        print()
        print_table(against.HEADERS, against.rows())
    one = next(iter(found.values()))
    tell(f"{one.sentences:,} sentences; hash of the references {one.references_hash}")


def percent(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def as_dict(found: Mapping[str, TranslationMetrics], against: Paired | None) -> dict[str, Any]:
    """What the JSON file holds: a list of systems, and the paired test where there are several."""
    return {
        "systems": [{"system": path, **one.as_dict()} for path, one in found.items()],
        "paired": None if against is None else against.as_dict(),
    }

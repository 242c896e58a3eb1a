"""Every run file of configs/runs: its settings, and the plans and hours that its header names."""

import itertools
import json
import os
import re
import shlex
from pathlib import Path

import pytest
import sacrebleu

from configs.load import load
from data.sources.text_files import read_lines
from layouts.layout import Layout
from tests.data.conftest import pairs_of
from tests.data.sources.test_tfds_pairs import build
from tests.scripts.conftest import Meshloom, run  # noqa: F401
from tests.toys import ROOT
from tests.trainer.conftest import optax_types  # noqa: F401
from trainer.checks import check_run
from trainer.run import Run

RECIPES = sorted((ROOT / "configs" / "runs").glob("*.gin"))
SHARED = Path(os.environ.get("MESHLOOM_SHARED_DATA", ROOT.parents[1] / "shared" / "data"))
# A prediction may improve a little without a change of every header.
TOLERANCE = 0.03


def header(text: str) -> list[str]:
    """The comment lines that a file begins with."""
    lines = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    return [line.removeprefix("#").strip() for line in lines]


def predicted(lines: list[str]) -> list[tuple[str, float]]:
    """The plans whose hours a header says, in the line above or in the table below.

    A command with the names of a table's columns stands for one with the values of each row.
    """
    plans = []
    for i, command in enumerate(lines):
        if not command.startswith("meshloom plan "):
            continue
        if hours := re.search(r" in ([\d.]+) hours", lines[i - 1]):
            plans.append((command, float(hours[1])))
        elif i + 1 < len(lines) and "HOURS" in (names := lines[i + 1].split()):
            for row in itertools.takewhile(
                lambda line: re.match(r"[\d.]+b ", line), lines[i + 2 :]
            ):
                filled, values = command, dict(zip(names, row.split(), strict=False))
                for name, value in values.items():
                    filled = filled.replace(name, value)
                plans.append((filled, float(values["HOURS"])))
    return plans


PLANS = {path: predicted(header(path.read_text())) for path in RECIPES}


def given(command: str, flag: str) -> list[str]:
    """The values of a flag in a command."""
    words = (word.partition("=") for word in shlex.split(command))
    return [value for name, _, value in words if name == f"--{flag}"]


# What stands for the file that an import of a model writes into its directory under runs/.
IMPORTED = """
include 'configs/models/tiny.gin'
Transformer.vocab = 512
VOCAB = @TokenizerJson()
TokenizerJson.path = 'tokenizer.json'
"""


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_command_of_a_recipe_makes_a_run(path: Path, tmp_path: Path) -> None:
    text = re.sub(r"\\\n#\s*", "", path.read_text())
    [command, *_] = re.findall(r"meshloom (?:train|plan) ([^)\n]+)", text)
    imported = tmp_path / "model.gin"
    imported.write_text(IMPORTED)
    files = [re.sub(r"^runs/.*", str(imported), file) for file in given(command, "gin_file")]
    assert str(path.relative_to(ROOT)) in files
    config = load(files, given(command, "gin_param"))
    made = config.make(Run)
    check_run(made)
    assert not config.unused(Run, Layout)
    rows = {"vocab.model": made.model.vocab_rows, "source_vocab.model": made.model.source_vocab}
    assert all(  # fewer tokens are a warning at the start
        settings.trained_size is None or settings.trained_size > 7 / 8 * (rows[file] or 0)
        for file, settings in made.task.vocab_settings.items()
    )


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("command", "hours"),
    # Of several sizes the last, the largest: a plan takes a second.
    [pytest.param(*plans[-1], id=path.stem) for path, plans in PLANS.items() if plans],
)
def test_a_recipe_fits_its_slice_and_takes_the_hours_that_it_says(
    run: Meshloom,  # noqa: F811
    tmp_path: Path,
    command: str,
    hours: float,
) -> None:
    file = tmp_path / "plan.json"
    answer = run(*shlex.split(command)[1:], f"--json={file}")
    assert answer.code == 0, answer.error
    figures = json.loads(file.read_text())
    assert figures["fits"] and figures["topology"] is not None
    assert figures["run_hours"] == pytest.approx(hours, rel=TOLERANCE)


def test_plans_and_their_hours_are_read() -> None:
    text = "# Fits in 1.5 hours, by\n#   meshloom plan --a\n# More.\nA = 1\n# meshloom plan --b\n"
    assert predicted(header(text)) == [("meshloom plan --a", 1.5)]
    text = "# meshloom plan --a=SIZE\n#   SIZE  HOURS\n#   0.1b  2.5\n#   0.2b  3 (4)\n# More.\n"
    assert predicted(header(text)) == [
        ("meshloom plan --a=0.1b", 2.5),
        ("meshloom plan --a=0.2b", 3),
    ]
    assert sum(map(len, PLANS.values())) > 10


# What makes a recipe's model and its batch toys; the rest stays as the recipe has it.
SMALL = [
    "Transformer.layers = 1", "Transformer.encoder_layers = 1", "Transformer.d_model = 16",
    "Transformer.d_ff = 28", "Transformer.heads = 2", "Transformer.d_kv = 6",
    "Transformer.vocab = 320", "SentencePiece.size = 280", "Translation.length = 32",
    "Translation.source_length = 24", "Run.steps = 5", "Run.batch_sequences = 8",
    "Run.checkpoint_every = 1",
]  # fmt: skip


@pytest.mark.long
def test_a_recipe_trains_and_evaluates_as_its_header_says(
    run: Meshloom,  # noqa: F811
    tmp_path: Path,
) -> None:
    """On small archives, which the builder of the real data set reads."""
    source = build("wmt14_translate/de-en", tmp_path)
    text = (ROOT / "configs/runs/wmt14_ende_base.gin").read_text()
    [train] = re.findall(r"^# (meshloom train .*)", text)
    [evaluate] = re.findall(r"#   (meshloom evaluate .*)", text)
    [signature] = re.findall(r"nrefs:\S*\|version:", text)
    folders = f"--model_dir={tmp_path / 'run'} --data_dir={tmp_path / 'data'}"
    params = (*SMALL, f"TfdsPairs.folder = '{source.folder}'")
    flags = ["--gin_file=layouts/whole.gin", *(f"--gin_param={param}" for param in params)]
    for command, more in ((train, flags), (evaluate, ["--no_ter", f"--json={tmp_path / 'bleu'}"])):
        words = shlex.split(re.sub(r"--model_dir=\S+", folders, command))[1:]
        answer = run(*words, *more)
        assert answer.code == 0, answer.error
    result = json.loads((tmp_path / "bleu").read_text())
    assert result["sentences"] == 2 and result["bleu_signature"].startswith(signature)


def test_the_test_set_of_wmt14_is_whole(tmp_path: Path) -> None:
    """From the builder's archive to what BLEU is measured against: newstest2014, line by line."""
    lines = {x: read_newstest(x) for x in ("de", "en")}

    def dev(language: str) -> dict[str, str]:
        sides = (("src", language), ("ref", "en"))
        files = {f"dev/newstest2013.{x}": "a\n" for x in lines}
        for side, x in sides:
            files[f"dev/newstest2014-{language}en-{side}.{x}.sgm"] = as_sgm(lines[x])
        return files

    source = build("wmt14_translate/de-en", tmp_path, dev=dev)
    pairs = list(pairs_of(source, "test"))
    assert sorted(pairs) == sorted(zip(lines["en"], lines["de"], strict=True))
    references = [target for _, target in pairs]
    assert len(pairs) == 3003
    assert sacrebleu.corpus_bleu(references, [references]).ref_len == 62_688


def read_newstest(language: str) -> list[str]:
    path = SHARED / "newstest" / "en-de" / f"newstest2014.{language}.gz"
    if not path.exists():
        pytest.skip(f"{path} is not here; set MESHLOOM_SHARED_DATA to the folder above newstest")
    return list(read_lines(str(path)))


def as_sgm(lines: list[str]) -> str:
    """Writes a test set as WMT's archive has it; the builder takes the text between the tags."""
    segments = (f'<seg id="{i}">{line}</seg>\n' for i, line in enumerate(lines, 1))
    return '<srcset setid="newstest2014" srclang="any">\n' + "".join(segments)


def test_lm1b_has_the_shards_of_published_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    top = tmp_path / "1-billion-word-language-modeling-benchmark-r13output"
    train = [f"training-monolingual.tokenized.shuffled/news.en-{i:05}-of-00100" for i in range(100)]
    held_out = "heldout-monolingual.tokenized.shuffled/news.en.heldout-{:05}-of-00050"
    for name in [*train, *map(held_out.format, range(50))]:
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(f"{name}\n")
    source = (
        load(
            [str(ROOT / "configs/runs/lm1b_mtf.gin"), str(ROOT / "configs/models/mtf_lm_0.14b.gin")]
        )
        .make(Run)
        .task.source
    )
    monkeypatch.chdir(tmp_path)
    assert list(source.lines("train")) == train[1:]
    assert list(source.lines("validation")) == [held_out.format(1)]
    assert list(source.lines("test")) == [held_out.format(0)]

"""What no check of the layout sees, the trace does: one message, exit code 2, no traceback."""

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from configs.errors import UserError
from data.tokenizers.sentence_piece import SentencePiece
from data.vocab import make
from data.vocabs import Vocabs
from layouts.layout import Layout
from layouts.lint.errors import Problem
from layouts.mesh import make_mesh
from models.loss import Criterion, LossSums
from models.transformer import TransformerModel
from scripts.commands.trained import note_layout
from tests.scripts.conftest import Meshloom, Place
from tests.trainer.planning.runs import DENSE, RUNS, toy_run
from trainer import checks

# 40 columns of d_ff do not divide over 3 devices, which only the blinded lint lets pass.
BROKEN = ["--gin_param=Layout.mesh = 'x:3'", "--gin_param=Layout.rules = 'd_ff:x'"]
NOTE = "(mesh 'x:3', rules 'd_ff:x').\n"  # before compilation, which may abort the process
COMMANDS = {
    "evaluate": ["--split=validation"],
    "score": ["--input={text}"],
    "decode": ["--input={text}", "--output={folder}/out"],
}


@pytest.fixture
def blinded_lint(monkeypatch: pytest.MonkeyPatch) -> None:
    def overlook(*_: Any) -> list[Problem]:
        return []

    monkeypatch.setattr(checks, "check", overlook)


def assert_explained(error: str) -> None:
    assert "Traceback" not in error
    assert "1 problem" in error and "models/feed_forward/mlp.py:" in error
    assert "wi_DF has d_ff over x" in error
    assert 'Layout.rules = ""' in error or "d_ff:x?" in error


def test_rows_that_no_text_has_are_said_once(caplog: pytest.LogCaptureFixture) -> None:
    vocab = make(SentencePiece(size=270), iter(["some words"]))
    for size, warnings in ((270, 0), (384, 0), (512, 1)):
        caplog.clear()
        run = toy_run(dataclasses.replace(DENSE, vocab=size))
        checks.check_vocabs(run, Vocabs(vocab, vocab))  # one for both sides
        assert len(caplog.records) == warnings
    assert "Transformer.vocab = 512: the vocabulary of task toy has 270 tokens" in caplog.text
    assert "Transformer.vocab = None uses the size of the vocabulary." in caplog.text
    with pytest.raises(UserError, match=r"Transformer.vocab = 256: .* has 270 tokens"):
        checks.check_vocabs(toy_run(dataclasses.replace(DENSE, vocab=256)), Vocabs(vocab, None))


@pytest.mark.usefixtures("blinded_lint")
def test_training_is_refused_before_anything_is_prepared(run: Meshloom, place: Place) -> None:
    answer = run("train", place.model_dir, *place.flags(), *BROKEN)
    assert answer.code == 2
    assert_explained(answer.error)
    assert NOTE in answer.error
    assert not (place.folder / "data").exists() and not (place.folder / "run").exists()


@pytest.mark.usefixtures("blinded_lint")
@pytest.mark.parametrize("command", COMMANDS)
def test_a_trained_model_is_refused(
    run: Meshloom, trained: Place, tmp_path: Path, command: str
) -> None:
    text = tmp_path / "in.txt"
    text.write_text("kara lost\n")
    flags = [flag.format(text=text, folder=tmp_path) for flag in COMMANDS[command]]
    data = [f"--data_dir={trained.folder / 'data'}"] * (command == "evaluate")
    answer = run(command, trained.model_dir, *data, *flags, *BROKEN)
    assert answer.code == 2, answer.error
    assert_explained(answer.error)
    assert NOTE in answer.error


@pytest.mark.usefixtures("blinded_lint")
@pytest.mark.parametrize("flags", [["plan", "--analytic"], ["plan", "--decode", "--analytic"]])
def test_a_plan_is_refused(run: Meshloom, place: Place, flags: list[str]) -> None:
    settings = [flag for flag in place.flags() if not flag.startswith("--data_dir")]
    answer = run(*flags, *settings, *BROKEN)
    assert answer.code == 2, answer.error
    assert_explained(answer.error)


def test_a_way_to_dispatch_is_refused_where_no_token_is_dropped(
    run: Meshloom, trained: Place, tmp_path: Path
) -> None:
    text = tmp_path / "in.txt"
    text.write_text("kara lost\n")
    for command in (["score", trained.model_dir, f"--input={text}"],
                    ["plan", "--decode", trained.model_dir]):  # fmt: skip
        answer = run(*command, "--gin_param=experts/Moe.dispatch = 'einsum'")
        assert answer.code == 2
        assert "it has no effect if no token is dropped" in answer.error


def test_a_bug_of_the_model_stays_a_bug(
    run: Meshloom, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails on one device as well, so that no layout is to blame."""
    loss = TransformerModel.loss

    def broken(self: TransformerModel, *arguments: Any) -> LossSums:
        if self.layout.mesh:  # or it is the lint's
            raise TypeError("a bug")
        return loss(self, *arguments)

    monkeypatch.setattr(TransformerModel, "loss", broken)
    answer = run("train", place.model_dir, *place.flags("Transformer.d_ff = 44", layout="fsdp"))
    assert answer.code == 1 and "TypeError: a bug" in answer.error


def test_a_step_is_traced_once(
    run: Meshloom, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check before training leaves its traces to the run: the step's, and the evaluation's."""
    traced, loss = [], TransformerModel.loss

    def counting(
        self: TransformerModel, params: Any, batch: Any, criterion: Criterion, key: Any = None
    ) -> LossSums:
        if self.layout.mesh:  # or it is the lint's
            traced.append("evaluation" if key is None else "step")
        return loss(self, params, batch, criterion, key)

    monkeypatch.setattr(TransformerModel, "loss", counting)
    flags = place.flags("Run.evaluate_every = 2", "Transformer.d_ff = 41", layout="fsdp")
    assert run("train", place.model_dir, *flags).code == 0
    assert sorted(traced) == ["evaluation", "step"]


@pytest.mark.parametrize(
    ("repeats", "microbatches", "warning"),
    [
        (1, 11, "4 stages of layers idle 21% of their time.  With 12 microbatches or more, 20% "),
        (1, 12, ""),
        (2, 4, "idle 27% of their time.  With 8 microbatches, or more by multiples of 4, 16%"),
        (2, 8, ""),
        (2, 9, "idle 25% of their time.  With 8 microbatches, "),
        (4, 4, ""),
    ],
)
def test_stages_that_idle_much_are_warned_of(repeats: int, microbatches: int, warning: str) -> None:
    run = dataclasses.replace(toy_run(), microbatches=microbatches, batch_sequences=microbatches)
    layout = Layout(mesh="pipe:4", rules="layers:pipe", pipeline_repeats=repeats)
    found = checks.check_bubble(run, layout, {"pipe": 4})
    assert len(found) == bool(warning) and warning in "".join(found)


@pytest.mark.parametrize("size", [2, -1])
def test_devices_that_a_mesh_leaves_out_are_counted(
    size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = Layout(mesh=f"data:{size}", rules="batch:data")
    note_layout(layout, make_mesh(layout), {})
    warning = "Warning: Layout.mesh = 'data:2' leaves 6 of 8 devices idle.  A size of -1 uses all."
    assert capsys.readouterr().err.splitlines()[:-1] == [warning] * (size == 2)


SIDES = "Translation.length or Translation.source_length"


@pytest.mark.parametrize(
    ("kind", "rules", "size"),
    [
        ("dense", "batch:x", "batch = 16 (Run.batch_sequences)"),
        ("microbatches", "batch:x", "batch = 8 (Run.batch_sequences / Run.microbatches)"),
        ("dense", "length:x", "length = 24 (Task.length)"),
        ("encoder-decoder", "length:x", f"length = 12 ({SIDES})"),
    ],
)
def test_a_size_that_does_not_divide_names_its_setting(kind: str, rules: str, size: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"{size} does not divide over x = 7.")):
        checks.check_layout(RUNS[kind], Layout(mesh="x:7", rules=rules), {"x": 7}, {})


def test_weights_of_8_bits_score_nearly_what_stored_ones_score(
    run: Meshloom, trained: Place, tmp_path: Path
) -> None:
    text = tmp_path / "in.txt"
    text.write_text("kara lost\n")
    scores = []
    for weights in ("stored", "int8"):
        output = tmp_path / weights
        flags = [f"--input={text}", f"--output={output}", f"--weights={weights}"]
        answer = run("score", trained.model_dir, *flags)
        assert answer.code == 0, answer.error
        scores.append(float(output.read_text().split("\n")[-2].split("\t")[0]))
    assert scores[0] != scores[1] == pytest.approx(scores[0], rel=0.01)
    answer = run("decode", trained.model_dir, f"--input={text}", "--weights=int8")
    assert answer.code == 0 and answer.out, answer.error

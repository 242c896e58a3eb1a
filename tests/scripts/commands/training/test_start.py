"""A run that goes on: what it remembers, what may change, and what is refused."""

import dataclasses
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from scripts.commands.training import start
from tests.scripts.conftest import Answer, Meshloom, Place
from trainer.metrics.jsonl import read_lines
from trainer.model_dir import teacher_spec
from trainer.resume.history import record_of, record_start, starts, time_now


@pytest.fixture
def copy(trained: Place, tmp_path: Path) -> Place:
    """A copy of a run of four steps, with the data where it was."""
    shutil.copytree(trained.folder / "run", tmp_path / "run")
    return Place(tmp_path, trained.text)


def losses(place: Place) -> dict[int, float]:
    return {line["step"]: line["loss"] for line in read_lines(place.folder / "run/metrics.jsonl")}


def history(run: Meshloom, place: Place) -> list[dict[str, object]]:
    file = place.folder / "checkpoint.json"
    assert run("inspect", "checkpoint", place.model_dir, f"--json={file}").code == 0
    starts = json.loads(file.read_text())["history"]
    assert isinstance(starts, list)
    return starts


def refused(answer: Answer) -> str:
    assert answer.code == 2 and "Traceback" not in answer.error
    return answer.error


def test_a_layout_goes_over_the_saved_settings(run: Meshloom, copy: Place) -> None:
    """The run remembers its data; the layout is a hint for those who want it again."""
    directory = copy.folder / "run"
    before = losses(copy)
    answer = run("train", copy.model_dir, "--gin_file=layouts/fsdp.gin", "--gin_param=Run.steps=5")
    assert answer.code == 0, answer.error
    assert "Attention of the decoder: plain, there is no kernel for these devices" in answer.error
    assert list(losses(copy)) == [1, 2, 3, 4, 5] and before.items() <= losses(copy).items()
    assert "Layout" not in (directory / "config.gin").read_text()
    answer = run("train", copy.model_dir)
    assert answer.code == 0 and f"--gin_file={directory / 'layout.gin'}" in answer.error
    answer = run("train", copy.model_dir, f"--gin_file={directory / 'layout.gin'}")
    assert answer.code == 0 and "layout.gin" not in answer.error


def test_a_start_begins_before_its_data_is_prepared(
    run: Meshloom, copy: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Goodput counts what a start takes, until its first step, as `starting`."""
    times, prepare = list[str](), start.prepared_data

    def noted(*args: Any, **options: Any) -> Any:
        times.append(time_now())
        return prepare(*args, **options)

    monkeypatch.setattr(start, "prepared_data", noted)
    assert run("train", copy.model_dir, "--gin_param=Run.steps=5").code == 0
    [*_, before, last] = [record["time"] for record in history(run, copy)]
    assert str(before) < str(last) < times[0]


def test_evaluation_reads_the_data_that_the_run_remembers(run: Meshloom, trained: Place) -> None:
    answer = run("evaluate", trained.model_dir)
    assert answer.code == 0 and "vocab of" not in answer.error  # nothing is built again
    assert run("inspect", "data", trained.model_dir, "--step=1").code == 0


def test_a_later_batch_that_does_not_divide_is_refused_at_the_start(
    run: Meshloom, tmp_path: Path
) -> None:
    flags = (f"--model_dir={tmp_path / 'run'}", "--gin_file=configs/runs/quickstart.gin")
    split = "--gin_file=layouts/data_parallel.gin", "--gin_param=Run.microbatches=1"
    said = refused(run("train", *flags, *split, "--gin_param=Run.batch_stages=((3, 16), (5, 12))"))
    assert "batch = 12 (Run.batch_stages) does not divide over data = 8" in said
    assert not (tmp_path / "run" / "config.gin").exists()


def test_what_changes_how_weights_develop_needs_an_override(run: Meshloom, copy: Place) -> None:
    before = {file: file.read_bytes() for file in copy.folder.rglob("*") if file.is_file()}
    rate, batch = "--gin_param=Constant.peak=0.001", "--gin_param=Run.batch_sequences=16"
    said = refused(run("train", copy.model_dir, rate, batch))
    assert "Constant.peak: 0.002 there, 0.001 now: legal with --override." in said
    assert "Run.batch_sequences: 8 there, 16 now: legal with --override." in said
    assert said.endswith("\n  Add --override to continue with the new values.\n")
    said = refused(
        run("train", copy.model_dir, rate, "--override", "--gin_param=Transformer.d_ff=48")
    )
    assert "Transformer.d_ff: 40 there, 48 now" in said and "Constant.peak" not in said
    assert said.endswith(
        "\n  Leave Transformer.d_ff unchanged, also in config.gin, or choose another --model_dir.\n"
    )
    assert {file: file.read_bytes() for file in copy.folder.rglob("*") if file.is_file()} == before

    answer = run("train", copy.model_dir, rate, batch, "--override", "--gin_param=Run.steps=6")
    assert answer.code == 0, answer.error
    assert "Rows 32 to 63 of the data order are skipped." in answer.error
    assert "Learning rate 0.0005; the schedule ends at step 6 with 0.0006." in answer.error
    rates = [line["learning_rate"] for line in read_lines(copy.folder / "run/metrics.jsonl")]
    assert rates[4:] == pytest.approx([0.0005, 0.0006])  # of a warmup of ten steps
    first, last = history(run, copy)
    assert first["step"] == 0 and first["changes"] == [] and last["step"] == 4
    assert {"name": "Constant.peak", "old": "0.002", "new": "0.001"} in last["changes"]
    first, *_, last = run("inspect", "checkpoint", copy.model_dir).out.splitlines()
    assert first.startswith("after step 4: ") and last.startswith("step 6 of ")
    assert run("train", copy.model_dir).code == 0  # the override is saved
    assert history(run, copy)[-1]["changes"] == []


def test_fewer_steps_than_the_checkpoint_has_train_nothing(run: Meshloom, copy: Place) -> None:
    answer = run("train", copy.model_dir, "--gin_param=Run.steps=3")
    assert answer.code == 0
    assert "the run ends at step 3, below step 4 of its checkpoint" in answer.error


def test_the_steps_of_an_average_are_named(run: Meshloom, trained: Place, tmp_path: Path) -> None:
    file = tmp_path / "numbers.json"
    answer = run("evaluate", trained.model_dir, "--average=2", f"--json={file}")
    assert answer.code == 0 and "Averaging the checkpoints of steps 2, 4." in answer.error
    assert json.loads(file.read_text())["averaged_steps"] == [2, 4]


def test_the_advice_after_a_loss_that_is_no_number_can_be_followed(
    run: Meshloom, copy: Place
) -> None:
    absurd = ["--gin_param=Constant.peak=1e38", "--gin_param=Run.steps=7"]
    answer = run("train", copy.model_dir, "--override", *absurd)
    assert answer.code == 1 and "Last good checkpoint: step 4." in answer.error
    commands = [line.partition("meshloom ")[2] for line in answer.error.split("\n")[1:]]
    train, inspect = (shlex.split(line) for line in commands if line)
    assert train[0] == "train" and train[-1] == "--gin_param=Constant.peak=5e+37"
    assert run(*inspect).code == 0
    assert run(*train[:-1], "--gin_param=Constant.peak=0.001").code == 0
    assert list(losses(copy)) == [1, 2, 3, 4, 5, 6, 7]


def test_other_text_is_refused_where_the_rows_of_the_run_are_missing(
    run: Meshloom, place: Place
) -> None:
    flags = place.flags("Run.steps = 1")
    assert run("train", place.model_dir, *flags).code == 0
    place.text.write_text(place.text.read_text() + "one more line\n")
    prepared = run("prepare", *flags)
    assert prepared.code == 0 and "next to toy, because the text changed." in prepared.error
    rows = run("inspect", "data", place.model_dir, "--rows=0")
    assert rows.code == 0 and "the run keeps its original rows" in rows.error
    assert len([f for f in (place.folder / "data").iterdir() if f.is_dir()]) == 2
    (place.folder / "run/history.jsonl").unlink()  # each checkpoint has the record
    elsewhere = f"--data_dir={place.folder / 'elsewhere'}"
    said = refused(run("train", place.model_dir, elsewhere, "--gin_param=Run.steps=2"))
    assert "other text of task toy" in said and "--data_dir" in said


def files(place: Place) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in place.folder.rglob("*") if file.is_file()}


def test_a_changed_vocabulary_is_named_by_every_command(run: Meshloom, copy: Place) -> None:
    file = copy.folder / "run/vocab.model"
    model = file.read_bytes()
    file.write_bytes(model.replace(b"a", b"e", 1))
    before = files(copy)
    for command in ("train", "evaluate", "score --input=/dev/null"):
        name, *flags = command.split()
        said = refused(run(name, copy.model_dir, *flags))
        assert "not the vocabulary of the run (vocab.model: hash " in said
    assert files(copy) == before
    for damage in (b"", b"garbage", model[:-1]):
        file.write_bytes(damage)
        said = refused(run("evaluate", copy.model_dir))
        assert "vocab.model: " in said and re.search(r"Copy it back from /.*\.\n$", said)
    doctor = run("doctor", copy.model_dir)
    assert doctor.code == 1 and "Copy it back from /" in doctor.out + doctor.error


def test_checkpoints_of_a_run_with_other_settings_are_refused(run: Meshloom, copy: Place) -> None:
    """Its text and its vocabulary are the same."""
    folder = copy.folder / "run"
    record = record_of(folder)
    assert record is not None and record.settings is not None
    other = record.settings.replace("Run.seed = 0", "Run.seed = 7")
    (folder / "history.jsonl").unlink()
    now = time_now()
    record_start(folder, dataclasses.replace(record, time=now, began=now, settings=other))
    _, *others = starts(folder)
    assert others  # the start of the checkpoint is one too, until the history is of the other alone
    (folder / "history.jsonl").write_text(json.dumps(others[-1].dump()) + "\n")
    (folder / "config.gin").write_text(other)
    for command in ("train", "evaluate", "score --input=/dev/null"):
        name, *flags = command.split()
        said = refused(run(name, copy.model_dir, *flags))
        assert f"different runs, or records are lost: began {record.began} there, {now}" in said


def test_an_older_checkpoint_of_another_run_is_refused(run: Meshloom, copy: Place) -> None:
    """It would be averaged, or evaluated, as if the run had saved it."""
    other, settings = copy.folder / "other", copy.folder / "run/config.gin"
    flags = f"--gin_file={settings}", "--gin_param=Run.seed=7", "--gin_param=Run.steps=3"
    answer = run("train", f"--model_dir={other}", f"--data_dir={copy.folder / 'data'}", *flags)
    assert answer.code == 0, answer.error
    shutil.copytree(other / "checkpoints/3", copy.folder / "run/checkpoints/3")
    for command in ("evaluate --average=3", "evaluate --checkpoint=3", "train", "export hf"):
        words = [*command.split(), copy.model_dir]
        if command.startswith("export"):
            words.append(f"--output={copy.folder / 'hf'}")
        said = refused(run(*words))
        assert "checkpoint 3 and history.jsonl are of different runs, or records are lost" in said
        assert " here.  Copy back what belongs together, or move that checkpoint" in said
    shutil.move(copy.folder / "run/checkpoints/3", copy.folder / "elsewhere")
    assert run("evaluate", copy.model_dir, "--average=2").code == 0


def test_changes_name_the_step_of_the_checkpoint_that_is_whole(run: Meshloom, copy: Place) -> None:
    """The newest one is damaged."""
    arrays = [file for file in (copy.folder / "run/checkpoints/4").rglob("*") if "d/" in str(file)]
    for file in arrays:
        file.write_bytes(b"")
    changes = "--gin_param=Run.batch_sequences=16", "--gin_param=Run.steps=3"
    answer = run("train", copy.model_dir, "--override", *changes)
    assert answer.code == 0 and "using step 2" in answer.error
    assert "Changed after step 2: Run.batch_sequences = 16, it was 8." in answer.error
    assert "Rows 16 to 31 of the data order are skipped." in answer.error
    assert "below step" not in answer.error and list(losses(copy)) == [1, 2, 3]


def test_going_back_behind_a_change_names_it_again(run: Meshloom, copy: Place) -> None:
    """What changes is compared with the checkpoint, not with the last start."""
    change = "--gin_param=Run.batch_sequences=16", "--gin_param=Run.steps=6"
    assert run("train", copy.model_dir, "--override", *change).code == 0
    for step in (6, 4):
        shutil.rmtree(copy.folder / f"run/checkpoints/{step}")
    shutil.copytree(copy.folder / "run", copy.folder / "as before")
    answer = run("train", copy.model_dir)
    assert "Changed after step 2: Run.batch_sequences = 16, it was 8." in answer.error
    assert "Rows 16 to 31 of the data order are skipped." in answer.error
    back = f"--model_dir={copy.folder / 'as before'}", "--gin_param=Run.batch_sequences=8"
    answer = run("train", *back, "--override")
    assert answer.code == 0 and "batch_sequences" not in answer.error and "Rows" not in answer.error


def test_a_lost_record_is_no_other_run(run: Meshloom, copy: Place) -> None:
    """What the lost start changed, the checkpoint knows; what later ones changed, they recorded."""
    folder = copy.folder / "run"
    changes = {6: "Constant.peak=0.003", 8: "Run.z_loss=0.0001"}
    for steps, change in changes.items():
        flags = ["--override", f"--gin_param=Run.steps={steps}", f"--gin_param={change}"]
        assert run("train", copy.model_dir, *flags).code == 0
    shutil.rmtree(folder / "checkpoints/8")  # as if the last start was killed before it saved one
    first, _, last = starts(folder)
    lines = [json.dumps(start.dump()) + "\n" for start in (first, last)]
    (folder / "history.jsonl").write_text("".join(lines))
    assert run("evaluate", copy.model_dir).code == 0
    # A run in which this change had another value before is another one.
    settings = (folder / "config.gin").read_text()
    settings = settings.replace("Constant.peak = 0.003", "Constant.peak = 0.001")
    other = dataclasses.replace(last, settings=settings, changes=())
    (folder / "history.jsonl").write_text(lines[0] + json.dumps(other.dump()) + "\n")
    (folder / "config.gin").write_text(settings)
    said = refused(run("evaluate", copy.model_dir))
    assert "Constant.peak: 0.003 there, 0.001 now" in said and "Run.z_loss" in said


def test_changed_settings_are_named_by_every_command(run: Meshloom, copy: Place) -> None:
    file = copy.folder / "run/config.gin"
    text = file.read_text()
    file.write_text(text.replace("Run.seed = 0", "Run.seed = 1"))
    before = files(copy)
    said = refused(run("evaluate", copy.model_dir))
    assert "not the settings of the run: Run.seed: 0 there, 1 now." in said
    for command in ("report", "inspect checkpoint"):
        assert refused(run(*command.split(), copy.model_dir)) == said
    shutil.copytree(file.parent, copy.folder / "copy")
    assert refused(run("report", str(file.parent), str(copy.folder / "copy"))) == said
    said = refused(run("train", copy.model_dir, "--override"))
    assert "Run.seed: 0 there, 1 now: no longer the same model" in said
    base = copy.flags(f"Run.start_from = '{copy.folder / 'run'}'")
    said = refused(run("train", f"--model_dir={copy.folder / 'new'}", *base))
    assert "not the settings of the run: Run.seed: 0 there, 1 now." in said
    assert {file: data for file, data in files(copy).items() if file in before} == before
    file.write_text(text.replace("Constant.peak = 0.002", "Constant.peak = 0.003") + "# comment\n")
    assert "0.003 now: legal with --override" in refused(run("train", copy.model_dir))
    assert run("train", copy.model_dir, "--override").code == 0
    assert run("evaluate", copy.model_dir).code == 0


def test_a_run_without_its_settings_does_not_take_others(run: Meshloom, copy: Place) -> None:
    (copy.folder / "run/config.gin").unlink()
    (copy.folder / "run/history.jsonl").unlink()  # the checkpoints have the record
    before = files(copy)
    flags = copy.flags("Run.label_smoothing = 0.2")
    said = refused(run("train", copy.model_dir, *flags))
    assert "it has checkpoints, but config.gin is missing" in said
    said = refused(run("train", copy.model_dir, "--override", *flags, "--gin_param=Run.seed=3"))
    assert "Run.seed: 0 there, 3 now: no longer the same" in said
    assert files(copy) == before


@pytest.mark.parametrize("has_record", [True, False])
def test_a_run_whose_checkpoints_are_missing_does_not_start_again(
    run: Meshloom, copy: Place, has_record: bool
) -> None:
    checkpoints = copy.folder / "run/checkpoints"
    if not has_record:
        (copy.folder / "run/history.jsonl").unlink()
    checkpoints.rename(copy.folder / "elsewhere")
    before = files(copy)
    said = refused(run("train", copy.model_dir))
    assert "its checkpoints are missing, but it reached step 4" in said and "--override" in said
    doctor = run("doctor", copy.model_dir)
    assert doctor.code == 1 and "has none, and its run reached step 4" in doctor.out
    evaluate = refused(run("evaluate", copy.model_dir))
    assert "no checkpoint there.  The run reached step 4: mount or copy" in evaluate
    assert files(copy) == before
    data = f"--data_dir={copy.folder / 'data'}"  # without its record, the run remembers none
    assert run("train", copy.model_dir, data, "--override", "--gin_param=Run.seed=5").code == 0
    assert "Resuming from step 4" in run("train", copy.model_dir).error
    assert list(losses(copy)) == [1, 2, 3, 4]
    replaced = read_lines(copy.folder / "run/metrics.jsonl.replaced")
    assert [line["step"] for line in replaced] == [1, 2, 3, 4]
    checkpoints.rename(copy.folder / "again")  # the old ones come back, after a run began again
    (copy.folder / "elsewhere").rename(checkpoints)
    said = [refused(run(command, copy.model_dir)) for command in ("train", "evaluate")]
    if has_record:
        assert all("Run.seed: 0 there, 5 now" in each for each in said)
        assert run("train", copy.model_dir, "--gin_param=Run.seed=0").code == 0
        assert run("evaluate", copy.model_dir, "--average=2").code == 0
        shutil.rmtree(checkpoints / "2")
        shutil.copytree(copy.folder / "again/2", checkpoints / "2")
        for command in ("train", "evaluate", "inspect checkpoint"):
            assert "checkpoint 2 and history" in refused(run(*command.split(), copy.model_dir))
        shutil.rmtree(checkpoints / "2")
        again = run("train", copy.model_dir, "--gin_param=Run.steps=5")
        assert again.code == 0 and "Resuming from step 4" in again.error
    else:
        assert all("different runs, or records are lost" in each for each in said)


def test_a_run_without_a_checkpoint_is_replaced_by_another(run: Meshloom, place: Place) -> None:
    """A run that failed before its first checkpoint neither binds nor colours the next one."""
    directory = place.folder / "run"
    absurd = ["Constant.peak = 1e38", "Constant.warmup_steps = 1", "Run.label_smoothing = 0.1"]
    assert run("train", place.model_dir, *place.flags(*absurd)).code == 1
    assert not list(directory.glob("checkpoints/*")) and (directory / "config.gin").exists()
    assert run("train", place.model_dir, *place.flags("Transformer.d_ff = 44")).code == 0
    saved = (directory / "config.gin").read_text()
    assert "label_smoothing = 0.0" in saved and "d_ff = 44" in saved


@pytest.fixture
def other_text(tmp_path: Path, trained: Place) -> Place:
    """A text of other words, with a run to start from."""
    text = tmp_path / "other.txt"
    text.write_text(trained.text.read_text().replace("a", "yes ").replace("o", "oh"))
    return Place(tmp_path, text)


def test_fine_tuning_takes_the_vocabulary_of_the_weights(
    run: Meshloom, trained: Place, other_text: Place
) -> None:
    """Another task from the weights of a run, as docs/resuming.md says."""
    base = trained.folder / "run"
    flags = other_text.flags("Task.name = 'other'", f"Run.start_from = '{base}'", "Run.steps = 1")
    answer = run("train", other_text.model_dir, *flags)
    assert answer.code == 0 and f"Run.start_from: weights of {base}, step 4." in answer.error
    vocab = other_text.folder / "run/vocab.model"
    assert vocab.read_bytes() == (base / "vocab.model").read_bytes()
    assert run("train", other_text.model_dir, "--gin_param=Run.steps=2").code == 0
    assert run("prepare", "--rebuild", *flags).code == 0
    cached = other_text.folder / "data/other/vocab.model"
    assert cached.read_bytes() == (base / "vocab.model").read_bytes()


def test_a_task_of_another_vocabulary_is_built_beside(
    run: Meshloom, trained: Place, other_text: Place
) -> None:
    flags = other_text.flags("Task.name = 'other'")
    start = f"--gin_param=Run.start_from='{trained.folder / 'run'}'"
    assert run("prepare", *flags).code == 0
    answer = run("prepare", *flags, start)
    assert answer.code == 0 and "next to other, because vocab was " in answer.error
    model = other_text.folder / "data/other/vocab.model"
    file = f"--gin_param=SentencePiece.model_file='{model}'"
    said = refused(run("train", other_text.model_dir, *flags, start, file))
    assert "belong to the vocabulary vocab.model there" in said
    assert not (other_text.folder / "run").exists()
    nowhere = f"--gin_param=Run.start_from='{other_text.folder}'"
    assert "no trained model there" in refused(run("train", other_text.model_dir, *flags, nowhere))


def test_a_run_of_epochs_has_the_steps_of_its_rows(run: Meshloom, place: Place) -> None:
    """Commands say how many as soon as they have the data or the record of the run."""
    params = "Run.steps = None", "Run.epochs = 0.125"
    flags, split = (place.flags(*params, layout=name) for name in ("whole", "data_parallel"))
    answer = run("plan", *split, "--analytic", "--topology=v3:2x2")
    assert answer.code == 0 and "utilisation" in answer.out and "steps in" not in answer.out
    said = f"depend on the rows of task toy, which are not in {place.folder / 'data'}"
    assert said in answer.error
    assert "the number of steps follows from it (Run.epochs)" in run("doctor", *flags).out

    answer = run("train", place.model_dir, *flags)
    assert answer.code == 0, answer.error
    rows = history(run, place)[-1]["train_rows"]
    assert isinstance(rows, int)
    steps, doubled = -(-rows // 64), -(-rows // 32)  # in batches of 8
    said = f"Run.epochs = 0.125: {steps} steps, for {rows:,} training rows."
    for command in ("prepare", "doctor", "inspect config", "plan"):
        answer = run(*command.split(), *flags)
        assert answer.code == 0 and said in answer.out + answer.error, command
    settings = (place.folder / "run/config.gin").read_text()
    assert "Run.epochs = 0.125\n" in settings and "Run.steps = None\n" in settings
    assert run("evaluate", place.model_dir).code == 0
    before = losses(place)
    assert list(before) == [*range(1, steps + 1)]
    answer = run("train", place.model_dir, "--gin_param=Run.epochs=0.25")
    assert f"Finished after step {doubled} of {doubled}." in answer.error
    assert before.items() <= losses(place).items() and len(losses(place)) == doubled

    shutil.rmtree(place.folder / "data")
    answer = run("plan", place.model_dir, f"--json={(file := place.folder / 'plan.json')}")
    assert f"0.25: {doubled} steps" in answer.error
    assert json.loads(file.read_text())["run_steps"] == doubled


def test_a_student_keeps_the_teacher_that_it_began_with(
    run: Meshloom, trained: Place, tmp_path: Path
) -> None:
    place, teacher = Place(tmp_path, trained.text), tmp_path / "teacher"
    shutil.copytree(trained.folder / "run", teacher)

    def taught(folder: Path, *params: str) -> list[str]:
        given = ["Run.teacher = @Teacher()", f"Teacher.model_dir = '{folder}'", *params]
        return place.flags("Transformer.d_model = 20", *given)

    assert run("train", place.model_dir, *taught(teacher, "Run.steps = 2")).code == 0
    moved = teacher.rename(tmp_path / "moved")
    assert run("evaluate", place.model_dir).code == 0  # which needs no teacher
    teacher_spec.cache_clear()  # as in another process
    said = refused(run("train", place.model_dir, "--gin_param=Run.steps = 4"))
    assert f"Teacher.model_dir = '{teacher}': no trained model there" in said
    where = f"--gin_param=Teacher.model_dir = '{moved}'"
    assert run("train", place.model_dir, where, "--gin_param=Run.steps = 4").code == 0
    assert list(losses(place)) == [1, 2, 3, 4]
    said = refused(run("train", place.model_dir, where, "--gin_param=Teacher.weight = 0.9"))
    assert "Teacher.weight: 0.5 there, 0.9 now: legal with --override" in said
    said = refused(run("train", place.model_dir, "--gin_param=Run.teacher = None"))
    assert "no longer the same" in said
    (moved / "checkpoints/4").rename(tmp_path / "gone")
    said = refused(run("train", place.model_dir, where, "--gin_param=Run.steps = 5"))
    assert "step 4, whose weights the run was trained with, is no longer there" in said


def test_documents_are_excluded_from_a_step_on(run: Meshloom, copy: Place) -> None:
    """Their tokens are no targets, whoever reads the step; if none are left, nothing is learned."""
    file = copy.folder / "data.json"

    def documents(step: int) -> dict[str, int]:
        answer = run("inspect", "data", copy.model_dir, f"--step={step}", f"--json={file}")
        assert answer.code == 0, answer.error
        return {segment["document"]: segment["tokens"] for segment in json.loads(file.read_text())}

    before = {step: documents(step) for step in (4, 5)}
    chosen = [*list(before[4])[:1], *list(before[5])[:2]]
    more = f"--gin_param=Run.exclude={tuple(chosen)}", "--gin_param=Run.steps=5"
    assert "Run.exclude: () there" in refused(run("train", copy.model_dir, *more))
    answer = run("train", copy.model_dir, "--gin_param=Run.exclude=('x:1',)", "--override")
    assert "'x:1': the rows contain no such file." in refused(answer)
    answer = run("train", copy.model_dir, *more, "--override")
    assert answer.code == 0, answer.error
    left = {name: size for name, size in before[5].items() if name not in chosen}
    assert documents(4) == before[4] and documents(5) == left
    lines = {line["step"]: line for line in read_lines(copy.folder / "run/metrics.jsonl")}
    assert lines[5]["tokens"] == sum(left.values())
    [change] = [c for start in history(run, copy) for c in start["changes"] if "ex" in c["name"]]
    assert change == {"name": "Run.exclude", "old": "()", "new": repr(tuple(chosen))}
    more = f"--gin_param=Run.exclude=('{copy.text}',)", "--gin_param=Run.steps=6"
    answer = run("train", copy.model_dir, *more, "--override")
    assert answer.code == 0
    assert "Step 6: its rows have no token to learn from (Run.exclude)." in answer.error
    last = list(read_lines(copy.folder / "run/metrics.jsonl"))[-1]
    assert (last["step"], last["tokens"], last["loss"], last["grad_norm"]) == (6, 0, 0, 0)


def test_a_running_run_takes_another_text_into_its_mixture(run: Meshloom, tmp_path: Path) -> None:
    """From a step on, as a run that knew it from the start; no earlier step changes."""
    for name in "abc":
        lines = [f"{name} {number} {name * (number % 5)}" for number in range(300)]
        (tmp_path / f"{name}.txt").write_text("\n".join(lines))
    place = Place(tmp_path, tmp_path / "a.txt")
    files = [f"{x}/TextFiles.train = '{tmp_path}/{x}.txt'" for x in "abc"]
    two, three = (
        [
            f"TextMixture.parts = ({''.join(f'@{x}/TextFiles(), ' for x in names)})",
            *(f"{x}/TextFiles.name = '{x}'" for x in names),
        ]
        for names in ("ab", "abc")
    )
    mixed = ["Task.source = @TextMixture()", "TextMixture.rates = (2, 1)"]
    answer = run("train", place.model_dir, *place.flags(*mixed, *two, *files[:2]))
    assert answer.code == 0, answer.error

    def documents(place: Place, step: int) -> list[str]:
        file = tmp_path / "data.json"
        answer = run("inspect", "data", place.model_dir, f"--step={step}", f"--json={file}")
        assert answer.code == 0, answer.error
        return [segment["document"] for segment in json.loads(file.read_text())]

    before = documents(place, 3)
    added = [*three, *files, "TextMixture.stages = ((4, (1, 0, 3)),)", "Run.steps = 8"]
    flags = ["--gin_file=layouts/whole.gin", *(f"--gin_param={setting}" for setting in added)]
    assert "TextMixture.parts: " in refused(run("train", place.model_dir, *flags))
    late = [*flags, "--gin_param=TextMixture.stages = ((3, (1, 0, 3)),)", "--override"]
    assert "stages that begin before step 4" in refused(run("train", place.model_dir, *late))
    text = (tmp_path / "b.txt").read_text()
    (tmp_path / "b.txt").write_text(text.replace("b 7", "b 8"))
    said = refused(run("train", place.model_dir, *flags, "--override"))
    assert "was trained on other text of task toy" in said
    (tmp_path / "b.txt").write_text(text)
    record = (tmp_path / "run/history.jsonl").read_bytes()
    other = place.text.parent / "list.txt"
    other.write_text(text)
    listed = [*flags, f"--gin_param=Task.word_list = '{other}'", "--override"]
    assert "Task.word_list: None there" in refused(run("train", place.model_dir, *listed))
    assert (tmp_path / "run/history.jsonl").read_bytes() == record
    answer = run("train", place.model_dir, *flags, "--override")
    assert answer.code == 0, answer.error
    assert documents(place, 3) == before
    assert not any("c.txt" in name for name in before) and "c.txt" in str(documents(place, 5))
    assert "b.txt" in str(before) and "b.txt" not in str(documents(place, 5))
    assert run("train", place.model_dir, *flags[:1], "--gin_param=Run.steps = 9").code == 0

    whole = Place(tmp_path / "whole", tmp_path / "a.txt")
    vocab = f"SentencePiece.model_file = '{tmp_path / 'run/vocab.model'}'"
    params = [*mixed, *added, vocab, "Run.steps = 9"]
    answer = run("train", whole.model_dir, *whole.flags(*params))
    assert answer.code == 0, answer.error
    assert losses(whole) == losses(place) and len(losses(whole)) == 9

"""Bad input ends with exit code 2 and a line that says where, what and how to fix it."""

import io
import shutil
import stat
import sys
from pathlib import Path

import pytest

from configs import imports
from tests.scripts.conftest import Meshloom, Place


def refused(run: Meshloom, *arguments: str) -> str:
    """What `meshloom` says where it refuses."""
    answer = run(*arguments)
    assert answer.code == 2, answer
    assert answer.out == ""
    assert "Traceback" not in answer.error
    return answer.error.removeprefix("meshloom: ")


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("params", "layout", "expected"),
    [
        (["TextFiles.train = '{folder}/texd.txt'"], "whole", ["no file matches", "text.txt"]),
        (["TextFiles.train = '{folder}/empty.txt'"], "whole", ["empty.txt is empty"]),
        (
            ["TextFiles.train = '{folder}/latin.txt'"],
            "whole",
            ["latin.txt, line 3", "byte 4", "iconv"],
        ),
        (["Transformer.d_modell = 8"], "whole", ["d_modell", "d_model", "--gin_param"]),
        (["Run.batch_sequence = 8"], "whole", ["batch_sequence", "batch_sequences"]),
        (["Transformer.layers = 'two'"], "whole", ["Transformer.layers", "'two'", "integer"]),
        (["Run.batch_sequences = 6"], "data_parallel", ["batch = 6", "data = 8", "batch 8"]),
        (
            ["Run.batch_sequences = 9", "Run.microbatches = 2"],
            "whole",
            ["Run.batch_sequences", "Run.microbatches"],
        ),
        (["Layout.rules = 'batsh:data'"], "whole", ["batsh", "batch"]),
        (["Layout.rules = 'batch:dada'"], "data_parallel", ["dada", "data"]),
        (["Layout.mesh = 'data:3,model:4'"], "data_parallel", ["12", "8"]),
        (["Layout.mesh = 'data:8;model:1'", "Layout.rules = 'heads:data'"], "whole", ["heads = 4"]),
        (["Task.length = 48"], "whole", ["Task.length = 48", "Transformer.length"]),
        (
            ["Transformer.feed_forward = @Moe()", "Moe.experts = 4", "Moe.group_tokens = 36"],
            "whole",
            ["Moe.group_tokens = 36", "8 rows of 24", "divisor of 192", "such as 32"],
        ),
        (["Transformer.vocab = 256"], "whole", ["Transformer.vocab = 256", "288"]),
        (["SentencePiece.size = 60"], "whole", ["SentencePiece.size = 60"]),
        (["Transformer.d_ff = 1000000000"], "whole", ["does not fit", "bytes of weights"]),
        (["Run.batch_sequences = 8000000000"], "data_parallel", ["does not fit", "of the batch"]),
        (["Run.seed = -1"], "whole", ["Run.seed = -1", "at least 0"]),
        ([f"Run.seed = {2**63}"], "whole", ["Run.seed = 9223372036854775808", "below 2147483648"]),
        (["Moe.router = @Router()"], "whole", ["@Router()", "abstract", "@Top2() or @TopK()"]),
        (["Task.source = @Source()"], "whole", ["@Source()", "abstract", "@TextFiles()"]),
        (["Task.source = @TextFile()"], "whole", ["TextFile", "TextFiles"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) and "=" in value[0] else "",
)
def test_training_is_refused_and_leaves_nothing(
    run: Meshloom, place: Place, params: list[str], layout: str, expected: list[str]
) -> None:
    (place.folder / "empty.txt").write_text("\n \n")
    (place.folder / "latin.txt").write_bytes(b"eins\nzwei\ndre\xfc\n")
    before = files(place.folder)
    params = [param.format(folder=place.folder) for param in params]
    said = refused(run, "train", place.model_dir, *place.flags(*params, layout=layout))
    for part in expected:
        assert part in said
    assert all(name.endswith(".lock") for name in files(place.folder) - before)


def test_a_cache_of_other_settings_is_not_reused(run: Meshloom, place: Place) -> None:
    assert run("prepare", *place.flags()).code == 0
    before = {name: (place.folder / name).read_bytes() for name in files(place.folder)}
    answer = run("prepare", *place.flags("Task.length = 16"))
    assert answer.code == 0 and "next to toy, because Task.length was 24 and is 16" in answer.error
    assert {name: (place.folder / name).read_bytes() for name in before} == before


def test_a_run_of_other_settings_is_not_continued(run: Meshloom, trained: Place) -> None:
    said = refused(run, "train", trained.model_dir, *trained.flags("Transformer.d_ff = 48"))
    assert "Transformer.d_ff: 40 there, 48 now" in said and "another --model_dir" in said


@pytest.mark.parametrize("command", ["evaluate", "decode", "score"])
def test_a_folder_without_a_run(run: Meshloom, tmp_path: Path, command: str) -> None:
    (tmp_path / "in.txt").write_text("kara\n")
    flags = [] if command == "evaluate" else [f"--input={tmp_path / 'in.txt'}"]
    said = refused(run, command, f"--model_dir={tmp_path / 'none'}", *flags)
    assert "no trained model there" in said and "meshloom train" in said
    assert "with --gin_file=FILE starts one" in said
    assert not (tmp_path / "none").exists()


def test_doctor_names_a_command_that_starts_a_run(run: Meshloom, tmp_path: Path) -> None:
    folder = tmp_path / "none"
    said = run("doctor", f"--model_dir={folder}", f"--data_dir={tmp_path}").out
    assert f"fix: meshloom train --model_dir={folder} --gin_file=FILE" in said


def test_a_received_model_directory_runs_no_code(
    run: Meshloom, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    (tmp_path / "hostile.py").write_text("import os; os.mkdir('ran')\n")
    (tmp_path / "config.gin").write_text("import hostile\n")
    config = ["inspect", "config", "--model_dir=."]
    for command in (config, ["evaluate", "--model_dir=."], ["train", "--model_dir=."]):
        assert "--gin_import_path=FOLDER" in refused(run, *command)
    assert not (tmp_path / "ran").exists()
    monkeypatch.setattr(imports, "_folders", [])
    run(*config, "--gin_import_path=.")
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("{folder}", "--json': {folder}: cannot be written: it is a folder"),
        ("{folder}/none/x", "--json': {folder}/none/x: cannot be written: there is no folder"),
        ("", "--json': the name of a file to write is empty"),
        ("/proc/x", "/proc/x: cannot be written"),
    ],
)
def test_an_output_that_cannot_be_written(
    run: Meshloom, tmp_path: Path, name: str, problem: str
) -> None:
    name, problem = name.format(folder=tmp_path), problem.format(folder=tmp_path)
    answer = run("inspect", "settings", "Run.steps", f"--json={name}")
    assert answer.code == 2 and problem in answer.error
    assert len(answer.error.splitlines()) == 1
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["decode", "score"])
def test_the_standard_input_is_read_as_a_file_is(
    run: Meshloom, trained: Place, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    def given(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content)))

    given(b"kara\nlo\xff\n")
    said = refused(run, command, trained.model_dir, "--input=-", "--output=-")
    assert "standard input, line 2: byte 3 is 0xff, not UTF-8" in said
    flags = [trained.model_dir, "--input=-", "--output=-"]
    given("\ufeffkara lost\r\n".encode())
    with_mark = run(command, *flags)
    given(b"kara lost\n")
    assert with_mark.code == 0 and run(command, *flags).out == with_mark.out


@pytest.mark.parametrize(
    "flag",
    ["--alpha=nan", "--temperature=inf", "--seed=-1", f"--seed={2**64}", "--beam=99999999999"],
)
def test_numbers_that_no_search_takes(run: Meshloom, trained: Place, flag: str) -> None:
    said = refused(run, "decode", trained.model_dir, f"--input={trained.text}", flag)
    assert f"Invalid value for '{flag.partition('=')[0]}'" in said and len(said.splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        (["decode", "--min_tokens=5", "--max_tokens=3"], "--min_tokens=5 is above --max_tokens=3"),
        (["decode", "--average=7"], "up to step 4 the run has fewer checkpoints.  Legal"),
        (["evaluate", "--average=7"], "up to step 4 the run has fewer checkpoints.  Legal"),
        (["decode", "--tag=de"], "--tag=de: toy is not a translation task"),
        (["score", "--tag=de"], "--tag=de: toy is not a translation task"),
        (["decode", "--prefix=de"], "--prefix: toy has no translations"),
        (
            ["evaluate", "--references=x", "--tag=de"],
            "--references, --tag: toy is not a translation task",
        ),
        (
            ["evaluate", "--max_tokens=9", "--sentences=5"],
            "--max_tokens, --sentences: toy is not a translation task",
        ),
        (["evaluate", "--test_set=wmt14"], "--test_set: toy is not a translation task"),
        (["evaluate", "--input=/dev/null"], "--input=/dev/null: the file is empty"),
        (["evaluate", "--input=x", "--split=test"], "--input=x with --split=test.  Remove one"),
        (["evaluate", "--batch_sequences=2000000000"], "--batch_sequences=2000000000: a batch"),
        (["decode", "--gin_param=Layout.rules='batch'"], "'batch': legal is name:name"),
    ],
    ids=str,
)
def test_flags_that_the_model_has_no_use_for(
    run: Meshloom, trained: Place, flags: list[str], wanted: str
) -> None:
    command, *rest = flags
    source = "--data_dir=" + str(trained.folder / "data")
    source = source if command == "evaluate" else f"--input={trained.text}"
    assert wanted in refused(run, command, trained.model_dir, source, *rest).splitlines()[-1]


def test_an_empty_text_has_no_scores(run: Meshloom, trained: Place) -> None:
    answer = run("score", trained.model_dir, "--input=/dev/null")
    assert (answer.code, answer.out) == (0, "log_likelihood\twords\ttokens\n")


def test_pairs_that_a_language_model_scores_as_texts_are_noted(
    run: Meshloom, trained: Place, tmp_path: Path
) -> None:
    (tmp_path / "pairs.tsv").write_text("kara lost\nkara\tlost\n")
    answer = run("score", trained.model_dir, f"--input={tmp_path / 'pairs.tsv'}")
    assert answer.code == 0 and len(answer.out.splitlines()) == 3
    assert "1 of 2 lines have tabs; toy scores them as texts." in answer.error


def test_an_output_may_be_a_device(run: Meshloom) -> None:
    settings = ["inspect", "settings", "Run.steps"]
    assert run(*settings, "--json=/dev/null").code == 0
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    answer = run(*settings, "--json=/dev/full")
    assert answer.code == 1 and "/dev/full: the disk is full" in answer.error


@pytest.mark.parametrize("command", ["evaluate", "inspect checkpoint"])
def test_a_checkpoint_that_is_not_there(run: Meshloom, trained: Place, command: str) -> None:
    for wrong in ("3", "newest", "9" * 5000):
        said = refused(run, *command.split(), trained.model_dir, f"--checkpoint={wrong}")
        assert f"--checkpoint={wrong[:50]}" in said and "2, 4" in said


def test_a_prompt_file_that_is_not_there(run: Meshloom, trained: Place) -> None:
    said = refused(run, "decode", trained.model_dir, f"--input={trained.folder / 'tex.txt'}")
    assert "tex.txt" in said and "text.txt" in said


@pytest.mark.parametrize("command", ["evaluate", "decode", "score"])
def test_a_layout_that_does_not_fit_the_model(run: Meshloom, trained: Place, command: str) -> None:
    flags = [] if command == "evaluate" else [f"--input={trained.text}"]
    layout = "--gin_file=layouts/model_parallel.gin"
    said = refused(run, command, trained.model_dir, layout, *flags)
    assert "heads = 4 does not divide over model = 8" in said
    assert "layouts/model_parallel.gin:" in said


def test_an_unknown_flag_is_a_usage_error(run: Meshloom) -> None:
    assert "--model_dirr" in refused(run, "train", "--model_dirr=x")


def test_a_truncated_checkpoint_is_passed_over(
    run: Meshloom, trained: Place, tmp_path: Path
) -> None:
    shutil.copytree(trained.folder / "run", tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / "4"
    largest = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-100])
    data = f"--data_dir={trained.folder / 'data'}"
    answer = run("evaluate", f"--model_dir={tmp_path / 'run'}", data, f"--json={tmp_path / 'j'}")
    assert answer.code == 0
    assert "4" in answer.error and "2" in answer.error
    assert '"step": 2' in (tmp_path / "j").read_text()


@pytest.mark.parametrize("name", ["az://bucket/x", "gs:/bucket/x", "file:///tmp/x"])
@pytest.mark.parametrize(
    "arguments",
    [
        "train --model_dir=X FLAGS",
        "train --model_dir=new --data_dir=X --gin_file=layouts/whole.gin",
        "train --model_dir=new FLAGS --gin_file=X",
        "train --model_dir=new FLAGS --gin_param=Task.name='new' --gin_param=TextFiles.train='X'",
        "train --model_dir=new FLAGS --gin_param=Task.word_list='X'",
        "train --model_dir=new FLAGS --gin_param=SentencePiece.model_file='X'",
        "train --model_dir=new FLAGS --gin_param=Run.start_from='X'",
        "train --model_dir=new FLAGS --gin_import_path=X",
        "prepare FLAGS --gin_param=Task.source=@Tfds() --gin_param=Tfds.folder='X'"
        " --gin_param=Tfds.name='lm1b' --gin_param=Tfds.feature='text' --gin_param=Task.name='new'",
        "evaluate --model_dir=RUN --input=X",
        "evaluate --model_dir=RUN --json=X",
        "decode --model_dir=RUN --input=X",
        "decode --model_dir=RUN --input=text --output=X",
        "score --model_dir=RUN --input=X",
        "inspect checkpoint --model_dir=X",
        "inspect data --model_dir=RUN --data_dir=X",
        "report --model_dir=X",
        "doctor --data_dir=X",
        "gains --baseline=X --evaluation=text --output=x.png",
        "import hf --input=X --model_dir=new",
        "export hf --model_dir=RUN --output=X",
        "supervise -- false --model_dir=X",
    ],
)
def test_a_path_of_another_scheme_is_refused_everywhere(
    run: Meshloom,
    trained: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: str,
    name: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("kara lost\n")
    words = arguments.replace("X", name).replace("RUN", str(trained.folder / "run")).split(" ")
    at = words.index("FLAGS") if "FLAGS" in words else None
    if at is not None:
        words[at : at + 1] = trained.flags()
    error = refused(run, *words)
    assert f"{name}: " in error and "gs://bucket/name" in error
    assert [path.name for path in tmp_path.iterdir()] == ["text"]

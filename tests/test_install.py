"""An editable install works, any other is refused; what is installed is known by its hash."""

import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from configs.errors import UserError
from data.sources.pair_kinds import Phrases
from data.sources.tfds import Tfds
from scripts.commands.serving.flags import ServeFlags
from scripts.commands.serving.serve import serve
from scripts.commands.shared_flags import CheckpointFlags
from tests.toys import ROOT, example
from trainer.metrics.plots import png_of

SERVED = ServeFlags(model=CheckpointFlags(model_dir=Path("x")))


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def build(checkout: Path, target: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hatchling", "build", "-t", target]
    return subprocess.run(command, cwd=checkout, capture_output=True, text=True)


def test_a_wheel_is_refused_in_one_line(checkout: Path) -> None:
    done = build(checkout, "wheel:standard")
    assert done.returncode != 0
    (line,) = done.stderr.strip().splitlines()
    assert "clone" in line and "pip install -e ." in line
    assert not list(checkout.glob("dist/*.whl"))


def test_an_editable_install_builds(checkout: Path) -> None:
    done = build(checkout, "wheel:editable")
    assert done.returncode == 0, done.stderr
    assert len(list(checkout.glob("dist/*.whl"))) == 1


def test_extras_are_installed_from_the_checkout() -> None:
    """No index has the package `meshloom`: a command that names it would take a stranger's."""
    folders = ("configs", "data", "docs", "layouts", "models", "scripts", "trainer")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    texts = [
        *ROOT.glob("*.md"),
        *(f for f in files if f.suffix in (".gin", ".ipynb", ".md", ".py")),
    ]
    wrong = re.compile(r"pip install \S*\bmeshloom")
    assert len(texts) > 100
    assert [str(text) for text in texts if wrong.search(text.read_text())] == []


@pytest.mark.parametrize("name", ["requirements.lock", "audit.lock", "docs.lock"])
def test_every_locked_package_has_a_hash(name: str) -> None:
    entries = re.split(r"^(?=[a-zA-Z])", (ROOT / name).read_text(), flags=re.MULTILINE)[1:]
    assert entries
    for entry in entries:
        assert re.match(r"[\w.-]+==\S+", entry) and "--hash=sha256:" in entry, entry


def test_packages_are_installed_by_their_hashes() -> None:
    makefile = (ROOT / "Makefile").read_text()
    installs = [line for line in makefile.splitlines() if ".lock" in line and "--no-deps" in line]
    assert len(installs) == 5 and all("--require-hashes" in line for line in installs)


def test_the_lock_of_the_installer_is_its_entry_alone(tmp_path: Path) -> None:
    """`make install` takes uv from requirements.lock before it can install the rest with it."""
    (command,) = re.findall(r"\t(sed .*) > ", (ROOT / "Makefile").read_text())
    shell = command.replace("$$", "$")
    done = subprocess.run(shell, shell=True, cwd=ROOT, capture_output=True, text=True, check=True)
    first, *rest = done.stdout.splitlines()
    assert first.startswith("uv==") and rest
    assert all(line.strip().startswith("--hash=sha256:") for line in rest)


@pytest.mark.parametrize(
    ("package", "extra", "use"),
    [
        ("matplotlib", "plot", lambda: png_of(lambda pyplot: pyplot.figure())),
        ("matplotlib", "plot", lambda: next(example("glyphs").Glyphs().read("train"))),
        ("babel", "phrases", lambda: next(Phrases(train=1).read("train"))),
        ("babel", "phrases", lambda: Phrases().fingerprint()),
        ("tensorflow_datasets", "tfds", lambda: next(Tfds(name="lm1b").lines("train"))),
        (
            "starlette",
            "serve",
            lambda: serve(ServeFlags(model=CheckpointFlags(model_dir=Path("x")))),
        ),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, package: str, extra: str, use: Callable[[], object]
) -> None:
    import data.corpora

    for module in [name for name in sys.modules if name.startswith("data.corpora.phrase")]:
        monkeypatch.delitem(sys.modules, module)
        monkeypatch.delattr(data.corpora, module.rpartition(".")[2])
    imported = ("scripts.commands.serving.", "starlette.")  # by another test
    for module in [name for name in sys.modules if name.startswith(imported)]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, package, None)
    message = rf"needs {package}, which is not installed: pip install -e '\.\[{extra}\]'"
    with pytest.raises(UserError, match=message):
        use()


def test_training_and_decoding_need_no_extra() -> None:
    """Their modules are imported where the packages of extras are missing."""
    script = (
        "import sys\n"
        "for package in ('starlette', 'babel', 'matplotlib', 'lm_eval', 'gcsfs', 's3fs'):\n"
        "    sys.modules[package] = None\n"
        "import scripts.commands.training.train, scripts.commands.decoding.decode\n"
        "import scripts.commands.evaluation.evaluate, scripts.commands.conversion.hf\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=ROOT)

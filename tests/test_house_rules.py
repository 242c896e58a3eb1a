"""Rules of the house that no linter knows: import edges, names that tell the truth, gin files."""

import ast
import graphlib
import re
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import pytest

from data.task import Task
from layouts.axes import BY_LETTER
from tests.toys import ROOT

FOLDERS = ("configs", "data", "layouts", "models", "scripts", "trainer")
# Who may import whom, beside itself.
EDGES = {
    "configs": set(),
    "layouts": {"configs"},
    "models": {"layouts", "configs"},
    "data": {"configs"},
    "trainer": {"models", "layouts", "data", "configs"},
    "scripts": {"trainer", "models", "layouts", "data", "configs"},
}
NNX_NAMES = {"Module", "Param", "Rngs", "split", "merge", "to_pure_dict"}
MODEL_FILES = sorted((ROOT / "models").rglob("*.py"))


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The top-level names that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_imports_flow_one_way(folder: str) -> None:
    for path in python_files(folder):
        wrong = imported(path) & set(FOLDERS) - EDGES[folder] - {folder}
        assert not wrong, f"{path.relative_to(ROOT)} imports {wrong}; legal: {EDGES[folder]}"


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_modules(source: str, modules: Collection[str]) -> set[str]:
    """The modules among these that a file imports, at its top or inside a function."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names & set(modules)


def import_cycle(sources: Mapping[str, str]) -> list[str]:
    """The modules of one import cycle, of sources by module name; empty where there is none."""
    imports = {name: imported_modules(text, sources) - {name} for name, text in sources.items()}
    try:
        list(graphlib.TopologicalSorter(imports).static_order())
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_import_cycle(folder: str) -> None:
    sources = {module_name(path): path.read_text() for path in python_files(folder)}
    assert not import_cycle(sources)


def test_an_import_cycle_is_found() -> None:
    sources = {
        "models.spec": "def model():\n    from models.transformer import Model",
        "models.transformer": "from models import blocks",
        "models.blocks": "import models.spec",
    }
    assert set(import_cycle(sources)) == set(sources)
    assert not import_cycle(sources | {"models.spec": "from models.api import ModelSpec"})


@pytest.mark.parametrize("folder", ["configs", "data"])
def test_settings_and_data_do_not_import_jax(folder: str) -> None:
    for path in python_files(folder):
        assert "jax" not in imported(path), path


def kinds_asked_for(source: str) -> set[str]:
    """The kinds of tasks and of rows that some code tells apart by isinstance."""
    kinds = {kind.__name__ for kind in Task.__subclasses__()} | {"PairRows"}
    calls = [node for node in ast.walk(ast.parse(source)) if called(node) == "isinstance"]
    return {
        name for call in calls for node in ast.walk(call) if (name := target_name(node)) in kinds
    }


def test_only_a_task_knows_its_kind() -> None:
    for folder in FOLDERS:
        for path in python_files(folder):
            if path != ROOT / "data" / "task.py":
                assert not kinds_asked_for(path.read_text()), path
    assert kinds_asked_for("isinstance(run.task, Mixture | task.Translation)") == {"Translation"}


def test_no_tensorflow_at_run_time() -> None:
    for folder in FOLDERS:
        for path in python_files(folder):
            assert "tensorflow" not in imported(path), path


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.name)
def test_models_use_the_stable_part_of_nnx(path: Path) -> None:
    used = set(re.findall(r"\bnnx\.(\w+)", path.read_text()))
    assert used <= NNX_NAMES


def target_name(node: ast.AST) -> str | None:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None


def called(node: ast.AST) -> str | None:
    return target_name(node.func) if isinstance(node, ast.Call) else None


def first_text(node: ast.Call) -> str | None:
    """The first argument where it is a plain string."""
    if node.args and isinstance(node.args[0], ast.Constant):
        value = node.args[0].value
        return value if isinstance(value, str) else None
    return None


def lies(source: str) -> list[str]:
    """Assignments whose name does not say the axes that its value has."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        name, value = target_name(node.targets[0]), node.value
        if name is None or not isinstance(value, ast.Call):
            continue
        text = first_text(value)
        if called(value) == "einsum" and text is not None:
            axes = text.split("->")[1]
        elif called(value) in ("normal", "ones", "zeros") and text is not None:
            axes = text
        elif called(value) in ("reshard", "take", "iota") and isinstance(
            value.args[-1], ast.Constant
        ):
            axes = str(value.args[-1].value)
            if called(value) == "iota":
                axes = str(text)
        else:
            continue
        if name.rpartition("_")[2] != axes:
            found.append(f"line {node.lineno}: {name} has axes {axes}")
    return found


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.name)
def test_names_of_arrays_tell_their_axes(path: Path) -> None:
    assert not lies(path.read_text())


def test_a_name_that_lies_is_found() -> None:
    assert lies('x_BLD = einsum("BLD,DF->BLF", x, w)')
    assert lies('self.wi_DF = weights.normal("FD", fan_in="D")')
    assert lies('m_LM = layout.iota("BLM", shape, "M")')
    assert not lies('x_BLF = einsum("BLD,DF->BLF", x, w)')


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.name)
def test_suffixes_use_letters_of_the_table(path: Path) -> None:
    names = {
        node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)
    }
    for name in names:
        suffix = name.rpartition("_")[2]
        if (
            "_" in name
            and not name.isupper()
            and re.fullmatch(r"[A-Za-z1]*[A-Z][A-Za-z1]*", suffix)
        ):
            assert set(suffix.upper()) - {"1"} <= set(BY_LETTER), name


GIN_FILES = sorted([*(ROOT / "configs").rglob("*.gin"), *(ROOT / "layouts").glob("*.gin")])


@pytest.mark.parametrize("path", GIN_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_gin_file_begins_with_what_it_is_for(path: Path) -> None:
    assert path.read_text().startswith("# ")


SURFACE = ROOT / "tests" / "golden" / "config_surface.txt"


def config_surface() -> str:
    """Every name that a gin file can bind, with its type and default, in a fresh process."""
    script = """
import dataclasses
import scripts.commands.common
from configs.spec import SPECS, legal
for name, spec in sorted(SPECS.items()):
    for field in dataclasses.fields(spec):
        info = spec.__pydantic_fields__[field.name]
        default = "required" if info.is_required() else repr(info.default)
        words = legal(info.annotation, tuple(info.metadata))
        print(f"{name}.{field.name}: {words}; {default}")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_config_surface_changes_only_on_purpose() -> None:
    """After a wanted change: python -m tests.test_house_rules writes the file anew."""
    assert config_surface() == SURFACE.read_text()


if __name__ == "__main__":
    SURFACE.parent.mkdir(exist_ok=True)
    SURFACE.write_text(config_surface())

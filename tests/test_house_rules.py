"""Rules of the house that no linter knows: import edges, names that tell the truth, gin files."""

import ast
import fnmatch
import functools
import graphlib
import importlib
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

from data.task import Task
from layouts.axes import alphabet
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
    computed = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            computed |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            computed.add(node.module.split(".")[0])
    return computed


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
    return imported_names(source) & set(modules)


@functools.cache
def imported_names(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


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


def reachable_modules(start: str) -> set[str]:
    """The modules of the product that a module imports, directly or through others."""
    files = {module_name(path): path for folder in FOLDERS for path in python_files(folder)}
    reachable, waiting = set[str](), {start}
    while waiting:
        name = waiting.pop()
        reachable.add(name)
        waiting |= imported_modules(files[name].read_text(), files) - reachable
    return reachable


@pytest.mark.parametrize(
    ("command", "plans"),
    [("decoding.decode", False), ("evaluation.evaluate", False), ("serving.serve", False),
     ("planning.plan", True)],
)  # fmt: skip
def test_only_planning_and_training_import_the_planner(command: str, plans: bool) -> None:
    modules = reachable_modules(f"scripts.commands.{command}")
    planners = {name for name in modules if name.startswith("trainer.planning")}
    assert bool(planners) == plans, planners


# Modules without a test file of their name: folders and patterns, and what tests them.
TESTED_ELSEWHERE = {
    "configs/read.py": "configs/test_load.py",
    "data/corpora/phrase_*.py": "data/corpora/test_phrases.py",
    "data/tasks/pairs.py": "data/tasks/test_translation.py",
    "layouts/cost/hardware.py": "layouts/cost/test_interconnect.py",  # a table
    "layouts/lint/errors.py": "layouts/lint/test_report.py",
    "models/api.py": "models/test_transformer.py",  # protocols
    "models/attention/*": "models/attention/test_flash.py",  # kernels
    "models/network_model.py": "models/test_convolutional.py",
    "models/parts.py": "models/layers/test_blocks.py",  # protocols and defaults
    "scripts/benchmarks/*": "scripts/benchmarks/test_rounds.py",  # run by hand
    # Flags have no logic, and a command few calls: tests run it as a user does.
    "scripts/*flags.py": "scripts/test_command_line.py",
    "scripts/commands/papers/*": "scripts/commands/papers/test_papers.py",
    "scripts/commands/planning/*": "scripts/commands/planning/test_plan.py",
    "scripts/commands/serving/*": "scripts/commands/serving/test_serve.py",
    "scripts/commands/*": "scripts/test_commands.py",
    "scripts/cli.py": "scripts/test_command_line.py",
    "scripts/devices.py": "scripts/test_command_line.py",
    "scripts/flag.py": "scripts/test_command_line.py",
    "scripts/meshloom.py": "scripts/test_exits.py",
    "scripts/quickstart.py": "test_readme.py",
    "trainer/checks.py": "scripts/commands/test_trained.py",
    "trainer/prepare.py": "scripts/test_processes.py",
    "trainer/traces.py": "trainer/planning/test_training.py",
}


def test_tests_mirror_the_modules() -> None:
    """A module has a test file of its name, doctests, or a line above that is in use."""
    unused, missing = set(TESTED_ELSEWHERE), []
    for path in (path for folder in FOLDERS for path in python_files(folder)):
        module = path.relative_to(ROOT)
        mirror = ROOT / "tests" / module.with_name(f"test_{module.name}")
        if path.stem == "__init__" or mirror.exists() or ">>> " in path.read_text():
            continue
        patterns = [p for p in TESTED_ELSEWHERE if fnmatch.fnmatch(str(module), p)]
        unused -= {*patterns[:1]}
        missing += [str(module)] if not patterns else []
    assert not missing, "Add a test file of the same name in the same folder of tests/."
    assert not unused
    assert all((ROOT / "tests" / name).exists() for name in TESTED_ELSEWHERE.values())


@pytest.mark.parametrize("folder", ["configs", "data"])
def test_settings_and_data_do_not_import_jax(folder: str) -> None:
    for path in python_files(folder):
        assert "jax" not in imported(path), path


def derived(kind: type) -> Iterator[type]:
    """The classes that are derived from another, at any distance."""
    for child in kind.__subclasses__():
        yield child
        yield from derived(child)


def kinds_asked_for(source: str) -> set[str]:
    """The kinds of tasks and of rows that some code tells apart by isinstance."""
    for path in python_files("data/tasks"):  # a kind is known once its module is imported
        importlib.import_module(f"data.tasks.{path.stem}")
    kinds = {kind.__name__ for kind in derived(Task)} | {"PairRows"}
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


# What turns a file that someone else wrote into running code, or into files anywhere.
UNSAFE_MODULES = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "code",
                  "zipfile"}  # fmt: skip
UNSAFE_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load",
                "yaml.load", "shutil.unpack_archive"}  # fmt: skip
UNSAFE_METHODS = {"extract", "extractall"}  # of tarfile, whose extractfile only reads
UNSAFE_FLAGS = {"allow_pickle", "shell"}


def unsafe_parts(source: str) -> list[str]:
    """Returns what a file uses of pickles, evaluated text, shells and archives."""
    parts = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names} & UNSAFE_MODULES
        elif isinstance(node, ast.ImportFrom):
            imports = {f"{node.module}.{alias.name}" for alias in node.names}
            names = ({node.module or ""} & UNSAFE_MODULES) | (imports & UNSAFE_CALLS)
        elif isinstance(node, ast.Call):
            flags = {flag.arg or "" for flag in node.keywords if ast.unparse(flag.value) != "False"}
            called = ast.unparse(node.func)
            method = {node.func.attr} if isinstance(node.func, ast.Attribute) else set()
            names = ({called} & UNSAFE_CALLS) | (method & UNSAFE_METHODS) | (flags & UNSAFE_FLAGS)
        else:
            continue
        parts += sorted(names)
    return parts


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_file_becomes_code(folder: str) -> None:
    for path in python_files(folder):
        assert not unsafe_parts(path.read_text()), path


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from pickle import load", "from os import system", "import x, zipfile",
     "tarfile.open(x).extractall(y)", "tar.extract(member)",
     "y = eval(x)", "f(exec(x))", "np.load(x, allow_pickle=True)", "run(x, shell=shell)",
     "shutil.unpack_archive(x)", "torch.load(x)"],
)  # fmt: skip
def test_what_becomes_code_is_found(source: str) -> None:
    assert unsafe_parts(source)
    assert not unsafe_parts("model.eval(); re.compile(x); np.load(x, allow_pickle=False)")


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


def einsum_terms(node: ast.Call) -> list[str]:
    """Patterns of an einsum's operands and result; what an f-string fills in may be anything."""
    text = node.args[0] if node.args else None
    parts = text.values if isinstance(text, ast.JoinedStr) else [text]
    literals = [str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts]
    equation = "".join(literals)
    if "->" not in equation:
        return []
    inputs, out = equation.split("->")
    return [term.replace("*", "[A-Za-z]*") for term in (*inputs.split(","), out)]


def array_name(node: ast.AST) -> str | None:
    """The name of an array, or of a weight that is read by `[...]`."""
    if isinstance(node, ast.Subscript):
        whole = isinstance(node.slice, ast.Constant) and node.slice.value is ...
        return target_name(node.value) if whole else None
    return target_name(node)


def wrong_operands(call: ast.Call) -> list[str]:
    """Operands of an einsum whose letters are others than its equation says.

    A row is its own memory in self-attention, so L may stand for M.  Names without letters pass.
    """
    problems = []
    for term, operand in zip(einsum_terms(call)[:-1], call.args[1:], strict=False):
        name = array_name(operand) or ""
        suffix = name.rpartition("_")[2]
        has_letters = "_" in name and re.fullmatch(r"[A-Za-z]*[A-Z][A-Za-z]*", suffix)
        if has_letters and not re.fullmatch(term.replace("M", "[LM]"), suffix):
            problems.append(f"line {call.lineno}: {name} stands for {term}")
    return problems


def lies(source: str) -> list[str]:
    """Names of arrays that do not say the axes that the arrays have."""
    problems = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and called(node) == "einsum":
            problems += wrong_operands(node)
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        name, value = target_name(node.targets[0]), node.value
        if name is None or not isinstance(value, ast.Call):
            continue
        text = first_text(value)
        if called(value) == "einsum" and einsum_terms(value):
            axes = einsum_terms(value)[-1]
            if "*" in axes and "_" not in name:
                continue  # letters that only a call knows
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
        if not re.fullmatch(axes, name.rpartition("_")[2]):
            problems.append(f"line {node.lineno}: {name} has axes {axes}")
    return problems


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.name)
def test_names_of_arrays_show_their_axes(path: Path) -> None:
    assert not lies(path.read_text())


def test_a_name_that_lies_is_found() -> None:
    assert lies('x_BLD = einsum("BLD,DF->BLF", x, w)')
    assert lies('self.wi_DF = weights.normal("FD", fan_in="D")')
    assert lies('m_LM = layout.iota("BLM", shape, "M")')
    assert lies('x_BLD = einsum(f"B{length}D,DF->B{length}F", x, w)')
    assert lies('y = f(einsum("BLD,DF->BLF", x_BLF, self.wi_DF[...]))')
    assert lies('y = f(einsum(f"B{length}D,DF->BLF", x_BLD, self.wo_FD[...]))')
    assert not lies('x_BLF = einsum("BLD,DF->BLF", x, w)')
    assert not lies('x_BLF = einsum(f"B{length}D,DF->B{length}F", x_BLD, self.wi_DF[...])')


def names_in(source: str) -> set[str]:
    """Variables, attributes and parameters of functions."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {target_name(node) or "" for node in nodes}
    return names | {node.arg for node in nodes if isinstance(node, ast.arg)}


def test_parameters_are_among_the_names_that_are_checked() -> None:
    assert {"x_BLD", "key", "wi_DF"} <= names_in("def f(x_BLD, *, key): return self.wi_DF")


@pytest.mark.parametrize("path", MODEL_FILES, ids=lambda path: path.name)
def test_suffixes_use_letters_that_are_common_or_declared(path: Path) -> None:
    modules = imported_names(path.read_text()) & {module_name(file) for file in MODEL_FILES}
    files = [path, *(ROOT / f"{module.replace('.', '/')}.py" for module in modules)]
    texts = [file.read_text() for file in files if file.exists()]  # a package has no such file
    declared = set(re.findall(r'Axis\("([A-Z])"', "\n".join(texts)))
    for name in names_in(path.read_text()):
        suffix = name.rpartition("_")[2]
        if (
            "_" in name
            and not name.isupper()
            and re.fullmatch(r"[A-Za-z1]*[A-Z][A-Za-z1]*", suffix)
        ):
            assert set(suffix.upper()) - {"1"} <= declared | set(alphabet().by_letter), name


GIN_FILES = sorted([*(ROOT / "configs").rglob("*.gin"), *(ROOT / "layouts").glob("*.gin")])


@pytest.mark.parametrize("path", GIN_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_gin_file_begins_with_what_it_is_for(path: Path) -> None:
    assert path.read_text().startswith("# ")

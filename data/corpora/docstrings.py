"""Finds English prose in the docstrings of installed packages, without importing them."""

import ast
import contextlib
import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import inspect
import platform
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from data.corpora.prose import paragraphs

PACKAGES = ("python", "numpy", "jax")
# Test trees hold little prose and are the greater part of the bytes to parse.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "internal_test_util"}
_LARGEST_FILE_BYTES = 2_000_000  # larger ones are generated tables
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@functools.cache
def corpus(packages: tuple[str, ...] = PACKAGES) -> dict[str, list[str]]:
    """Returns the paragraphs of each split: no paragraph occurs twice, in one split or in two."""
    splits: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    keys: set[str] = set()
    with _no_garbage_collection():
        for package, root, path in _files(packages):
            rows = splits[split_of(f"{package}/{path}")]
            for text in _paragraphs_of_file(root / path):
                key = "".join(filter(str.isalpha, text.lower()))
                if key not in keys:
                    keys.add(key)
                    rows.append(text)
    return splits


def split_of(name: str) -> str:
    """Assigns a source file to a split by its path inside its package: 96, 2 and 2 of 100."""
    place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
    return "validation" if place < 2 else "test" if place < 4 else "train"


def versions() -> dict[str, str]:
    """Names what the text depends on: the packages' versions and the rules that read them."""
    rules = b"".join(
        Path(__file__).with_name(n).read_bytes() for n in ("docstrings.py", "prose.py")
    )
    return {
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in PACKAGES[1:]},
        "rules": hashlib.sha256(rules).hexdigest()[:16],
    }


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Saves 30 % of the time in a process that holds jax: syntax trees have no cycles to find."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _files(packages: tuple[str, ...]) -> Iterator[tuple[str, Path, str]]:
    for package in packages:
        root = _root(package)
        for path in sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py")):
            *folders, _ = path.split("/")
            if not _SKIPPED_FOLDERS.intersection(folders):
                yield package, root, path


def _root(package: str) -> Path:
    if package == "python":
        return Path(sysconfig.get_paths()["stdlib"])
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None, f"{package} is a dependency"
    return Path(spec.origin).parent


def _paragraphs_of_file(path: Path) -> list[str]:
    if path.stat().st_size > _LARGEST_FILE_BYTES:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an installed file's odd escape is not the user's concern
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):  # a template, or another Python's syntax
            return []
    strings = (inspect.cleandoc(string) for string in _docstrings(tree.body))
    return [text for string in strings for text in paragraphs(string)]


def _docstrings(statements: Iterable[ast.stmt]) -> Iterator[str]:
    """Yields docstrings, and the help texts that a module states in a call or a table."""
    for statement in statements:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                yield from _strings(statement.body[0])
                yield from _docstrings(s for s in statement.body if isinstance(s, _SCOPES))
            case ast.ClassDef() | ast.If() | ast.Try() | ast.With():
                yield from _docstrings(statement.body)
            case ast.Expr(ast.Call()) | ast.Assign(value=ast.Dict() | ast.Constant()):
                # numpy's add_newdoc, the table behind help("topics"), texts shared by docstrings.
                for node in ast.walk(statement):
                    yield from _strings(node)
            case _:
                yield from _strings(statement)


def _strings(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.Expr(ast.Constant(str(text))) | ast.Constant(str(text)) if " " in text:
            yield text

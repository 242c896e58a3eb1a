"""Finds English prose in the docstrings of installed packages, without importing them.

Code, tables, headers and lists of names are dropped.
"""

import ast
import functools
import gc
import hashlib
import importlib.metadata
import importlib.util
import inspect
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

PACKAGES = ("python", "numpy", "jax")
# Test trees hold little prose and are the greater part of the bytes to parse.
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "internal_test_util"}
_LARGEST_FILE_BYTES = 2_000_000  # larger ones are generated tables
_WORDS_FILE = Path(__file__).with_name("function_words.txt")
_FUNCTION_WORDS = frozenset(_WORDS_FILE.read_text().split())
_UNDERLINE = re.compile(r"([-=~^*#\"'`+.])\1{2,}")
_BULLET = re.compile(r"(?:[-*+•]|\(?\d{1,2}[.)]|\(?[a-z]\))\s+(?=\S)")
# "x: what it is", "x (int): what it is", "``x`` -- what it is": the name goes, the sentence stays.
_ARGUMENT = re.compile(r"(?::param )?[`*]*[\w.]+[`*]*(?: ?\([^)]*\))?(?: ?: +| +--? +)(?=\S)")
_TYPED_NAME = re.compile(r"[\w*]+(?:, [\w*]+)* : ")  # "x, y : array_like", in numpy's manner
_DIRECTIVE = re.compile(r"\.\. ?(\[?[\w:#-]+\]?)(?:::|\s|$)(.*)")
_PROSE_DIRECTIVES = {"note", "warning", "important", "tip", "versionadded", "versionchanged"}
_ROLE = re.compile(r":[\w:+-]+:`[~!]?([^`<]*?)(?:\s*<[^`]*>)?`")
_LINK = re.compile(r"`([^`<]+?)\s*<[^`]*>`_{0,2}")
_WORD = re.compile(r"[A-Za-z]+(?:['\u2019-][A-Za-z]+)*")
_MARKS = str.maketrans("", "", "`*|")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@functools.cache
def corpus(packages: tuple[str, ...] = PACKAGES) -> dict[str, list[str]]:
    """Returns the paragraphs of each split: no paragraph occurs twice, in one split or in two."""
    splits: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    keys: set[str] = set()
    was_enabled = gc.isenabled()  # syntax trees have no cycles to collect: 30 % of the time
    gc.disable()
    try:
        for package, root, path in _files(packages):
            rows = splits[split_of(f"{package}/{path}")]
            for text in _paragraphs_of_file(root / path):
                key = "".join(filter(str.isalpha, text.lower()))
                if key not in keys:
                    keys.add(key)
                    rows.append(text)
    finally:
        if was_enabled:
            gc.enable()
    return splits


def split_of(name: str) -> str:
    """Assigns a source file to a split by its path inside its package: 96, 2 and 2 of 100."""
    place = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % 100
    return "validation" if place < 2 else "test" if place < 4 else "train"


def versions() -> dict[str, str]:
    """Names what the text depends on: the packages' versions and the rules that read them."""
    rules = Path(__file__).read_bytes() + _WORDS_FILE.read_bytes()
    return {
        "python": platform.python_version(),
        **{package: importlib.metadata.version(package) for package in PACKAGES[1:]},
        "rules": hashlib.sha256(rules).hexdigest()[:16],
    }


def _files(packages: tuple[str, ...]) -> Iterator[tuple[str, Path, str]]:
    for package in packages:
        root = Path(sysconfig.get_paths()["stdlib"])
        if package != "python":
            spec = importlib.util.find_spec(package)
            assert spec is not None and spec.origin is not None, f"{package} is a dependency"
            root = Path(spec.origin).parent
        for path in sorted(p.relative_to(root).as_posix() for p in root.rglob("*.py")):
            *folders, _ = path.split("/")
            if not _SKIPPED_FOLDERS.intersection(folders):
                yield package, root, path


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


def paragraphs(text: str) -> Iterator[str]:
    """Yields the prose paragraphs of a docstring, each on one line."""
    for unit in _units(text):
        line = _plain(" ".join(unit.split()))
        if reads_as_english(line):
            yield line


def reads_as_english(line: str) -> bool:
    """Tells a sentence from code, a table row or a list of names, by its words."""
    tokens = line.split()
    if len(tokens) < 5 or ">>>" in line or not (line[0].isalnum() or line[0] in "\"'("):
        return False
    if line[-1] not in ".!?:;)\"'" and not line[0].isupper():
        return False
    words = [w for t in tokens if _WORD.fullmatch(w := t.strip(".,;:!?()\"'[]"))]
    function_words = sum(w.lower() in _FUNCTION_WORDS for w in words)
    return len(words) >= 0.72 * len(tokens) and function_words >= 0.16 * len(tokens)


def _units(text: str) -> Iterator[str]:
    """Splits at blank lines, bullets, argument names and changes of indentation."""
    skipped_below = None  # the indentation at which a literal block ends
    for block in re.split(r"\n[ \t]*\n", text.expandtabs()):
        lines = [line for line in block.split("\n") if line.strip()]
        if not lines:
            continue
        indent = _indent(lines[0])
        if skipped_below is not None and indent > skipped_below:
            continue
        skipped_below = None
        directive = _DIRECTIVE.match(lines[0].strip())
        if directive and directive[1].lower() not in _PROSE_DIRECTIVES:
            skipped_below = indent
            continue
        if directive:
            lines[0] = " " * indent + re.sub(r"^\s*[\d.]+\s*$", "", directive[2])
        yield from _units_of_block(lines)
        if lines[-1].rstrip().endswith("::"):
            skipped_below = _indent(lines[-1])


def _units_of_block(lines: list[str]) -> Iterator[str]:
    unit: list[str] = []
    indent, hanging = -1, False
    for line in lines:
        body = line.strip()
        if _UNDERLINE.fullmatch(body):
            unit = []  # what it underlines is a header
            continue
        if _TYPED_NAME.match(body):
            yield "\n".join(unit)
            unit, indent = [], -1
            continue
        if body.startswith((">>>", "... ", "$ ", "%", "In [", "|", "+-", "==", "--", "~~", "@")):
            break  # a doctest, a shell line or a table ends the prose of its block
        marker = _BULLET.match(body) or _ARGUMENT.match(body)
        depth = _indent(line)
        continues = unit and (depth == indent or (hanging and depth > indent)) and not marker
        if not continues:
            yield "\n".join(unit)
            unit, indent, hanging = [], depth, bool(marker)
            body = body[marker.end() :] if marker else body
        elif hanging and depth > indent and len(unit) == 1:
            indent, hanging = depth, False
        unit.append(body)
    yield "\n".join(unit)


def _plain(line: str) -> str:
    line = _LINK.sub(r"\1", _ROLE.sub(r"\1", line)).translate(_MARKS)
    return line[:-1] if line.endswith("::") else line


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())

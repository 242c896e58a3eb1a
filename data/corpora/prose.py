"""Takes English sentences out of a docstring; drops code, tables, headers, lists of names."""

import re
from collections.abc import Iterator

_FUNCTION_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        a an and are as at be been but by can could do does for from had has have if in into is
        it its may must no not of on only or other same should so such than that the their them
        then there these they this those to use used was were when where which while who will
        with would you your
        """,
    )
)
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

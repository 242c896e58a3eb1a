"""Collects the findings of `meshloom doctor`, from one process or from several."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from configs.errors import RunError, UserError


class Finding(NamedTuple):
    """Holds one line of the report."""

    check: str
    status: Literal["ok", "warning", "error"]
    text: str
    fix: str | None = None
    """The command or change that fixes it."""
    is_common: bool = False
    """Whether the finding must be the same in all processes of a run."""
    processes: tuple[int, ...] = (0,)
    """The processes of the run that have this finding."""


def warning(check: str, is_bad: bool, text: str, fix: str) -> Finding:
    """Makes a finding that is a warning with its fix, or else is ok."""
    return Finding(check, "warning", text, fix) if is_bad else Finding(check, "ok", text)


Check = Callable[[], Iterable[Finding]]


def findings_of(checks: Iterable[tuple[str, Check]]) -> list[Finding]:
    """Runs the checks; an error that a check raises becomes a finding."""
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += check()
        except (UserError, RunError, OSError, RuntimeError) as error:
            findings.append(failure(name, error))
    return findings


def failure(check: str, error: Exception) -> Finding:
    """Makes a finding from an error; the last sentence of Meshloom's messages is the fix."""
    if isinstance(error, UserError | RunError):
        text, _, fix = str(error).rstrip().rpartition("  ")
        return Finding(check, "error", text or fix, fix if text else None)
    return Finding(check, "error", " ".join(str(error).split()) or type(error).__name__)


def merged(by_process: Sequence[Sequence[Sequence[Any]]]) -> list[Finding]:
    """Joins the findings of a run's processes: one line for equal problems, and one for ok."""
    lines: dict[tuple[object, ...], Finding] = {}
    for process, findings in enumerate(by_process):
        for finding in (Finding(*values[:5]) for values in findings):
            is_same = finding.status == "ok" and not finding.is_common
            key = (finding.check, None) if is_same else finding[:4]
            processes = lines[key].processes if key in lines else ()
            lines[key] = lines.get(key, finding)._replace(processes=(*processes, process))
    common: dict[str, list[Finding]] = {}  # by check; if there are several, processes differ
    for line in lines.values():
        if line.is_common:
            common.setdefault(line.check, []).append(line)
    text = "the processes differ: see the lines above"
    return [
        *lines.values(),
        *(Finding(check, "error", text, different[0].fix, processes=())
          for check, different in common.items() if len(different) > 1),
    ]  # fmt: skip

"""Collects what the checks of `meshloom doctor` find, in one process or in several."""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

from configs.errors import RunError, UserError


class Finding(NamedTuple):
    """Holds one line of the report."""

    check: str
    status: Literal["ok", "warning", "error"]
    text: str
    mend: str | None = None
    """The command or change that fixes it."""
    is_common: bool = False
    """Whether all processes of a run must find the same."""
    processes: tuple[int, ...] = (0,)
    """Which processes of the run found it."""


Check = Callable[[], Iterable[Finding]]


def findings_of(checks: Iterable[tuple[str, Check]]) -> list[Finding]:
    """Makes the checks; what a check raises is its finding."""
    findings: list[Finding] = []
    for name, check in checks:
        try:
            findings += check()
        except (UserError, RunError, OSError, RuntimeError) as error:
            findings.append(failure(name, error))
    return findings


def failure(check: str, error: Exception) -> Finding:
    """Makes a finding of an error; the last sentence of our messages is the fix."""
    if isinstance(error, UserError | RunError):
        text, _, mend = str(error).rstrip().rpartition("  ")
        return Finding(check, "error", text or mend, mend if text else None)
    return Finding(check, "error", " ".join(str(error).split()) or type(error).__name__)


def merged(by_process: Sequence[Sequence[Finding]]) -> list[Finding]:
    """Joins what the processes of a run found: equal problems, and what is well, are one line."""
    lines: dict[tuple[object, ...], Finding] = {}
    for process, findings in enumerate(by_process):
        for finding in findings:
            is_same = finding.status == "ok" and not finding.is_common
            key = (finding.check, None) if is_same else finding[:4]
            processes = lines[key].processes if key in lines else ()
            lines[key] = lines.get(key, finding)._replace(processes=(*processes, process))
    return [*lines.values(), *disagreements(list(lines.values()))]


def disagreements(lines: Sequence[Finding]) -> list[Finding]:
    """Returns an error for each check in which processes should agree and do not."""
    common = [line for line in lines if line.is_common]
    return [
        Finding(
            check,
            "error",
            "the processes differ: see the lines above",
            next(line.mend for line in common if line.check == check),
            processes=(),
        )
        for check in dict.fromkeys(line.check for line in common)
        if sum(line.check == check for line in common) > 1
    ]


def written(findings: Sequence[Finding]) -> str:
    """Writes the findings of a process for another one to read."""
    return json.dumps(findings)


def read(text: str) -> list[Finding]:
    """Reads what `written` wrote."""
    return [Finding(*values[:5]) for values in json.loads(text)]

"""How the findings of several processes become one list."""

import json

from configs.errors import UserError
from scripts.commands.doctor.findings import Finding, findings_of, merged


def test_what_a_check_raises_is_its_finding() -> None:
    def fails() -> list[Finding]:
        raise UserError("x: is broken.  Run: fix x.")

    [finding] = findings_of([("x", fails)])
    assert finding[:4] == ("x", "error", "x: is broken.", "Run: fix x.")


def test_equal_findings_are_one_line_and_processes_must_agree() -> None:
    def process(rate: str, content_hash: str, *more: Finding) -> list[list[object]]:
        findings = [Finding("disk", "ok", rate), *more,
                    Finding("data", "ok", content_hash, "copy it", is_common=True)]  # fmt: skip
        return list(json.loads(json.dumps(findings)))  # as another process gets them

    full = Finding("memory", "warning", "full", "free some")
    lines = merged([process("1 MB/s", "a", full), process("2 MB/s", "a", full)])
    assert [(line.check, line.text, line.processes) for line in lines] == [
        ("disk", "1 MB/s", (0, 1)), ("memory", "full", (0, 1)), ("data", "a", (0, 1)),
    ]  # fmt: skip
    *_, last = merged([process("1 MB/s", "a"), process("1 MB/s", "b")])
    assert (last.check, last.status, last.fix) == ("data", "error", "copy it")

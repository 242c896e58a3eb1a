"""Tables and log records on a terminal or in a pipe."""

import logging

import pytest

from scripts.terminal import LogHandler, print_table, show_log_records


def test_a_table_in_a_pipe_keeps_each_row_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(["path", "bytes"], [("wi_DF " + "x" * 150, 1234567), ("[b]:x:", 3)])
    header, first, second = capsys.readouterr().out.splitlines()
    assert header.split() == ["path", "bytes"]
    assert first.endswith("x  1,234,567") and len(first) == len(second.rstrip()) == len(header)
    assert second.startswith("[b]:x:")  # neither markup nor an emoji


def test_log_records_are_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        show_log_records("a_toy_logger")
    logger = logging.getLogger("a_toy_logger")
    assert [type(handler) for handler in logger.handlers] == [LogHandler]
    logging.getLogger("a_toy_logger.below").info("[b] %d steps", 3)
    assert capsys.readouterr().err == "[b] 3 steps\n"

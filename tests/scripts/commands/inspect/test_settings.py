"""The list of settings is fresh, complete and searchable."""

import subprocess
import sys

import pytest

from configs.errors import UserError
from docs.site.settings import PAGE
from scripts.commands.inspect.flags import InspectSettingsFlags
from scripts.commands.inspect.settings import Setting, inspect_settings, settings_of
from tests.toys import ROOT
from trainer.run import Run


def test_the_page_of_settings_is_fresh() -> None:
    """After a change of a setting: python -m docs.site.settings."""
    command = [sys.executable, "-c", "from docs.site.settings import page; print(page(), end='')"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == PAGE.read_text()


def test_a_setting_has_its_type_its_default_and_its_docstring() -> None:
    settings = {setting.name: setting for setting in settings_of(Run)}
    assert settings["Run.batch_sequences"].default == "required"
    assert settings["Run.keep_last"] == Setting(
        "Run.keep_last", "an integer of at least 1", "3", settings["Run.keep_last"].meaning
    )
    assert settings["Run.keep_last"].meaning
    assert settings["Run.optimizer"].default == "@Adafactor()"


def test_every_setting_says_what_it_means() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) > 100
    assert not [row for row in rows if row.endswith("|  |")]


def test_a_name_prints_its_settings(capsys: pytest.CaptureFixture[str]) -> None:
    inspect_settings(InspectSettingsFlags(name="Run.steps"))
    assert "Run.steps" in (shown := capsys.readouterr().out)
    assert "Run.seed" not in shown
    inspect_settings(InspectSettingsFlags(name="Top2"))  # with what it takes from Router
    assert {"Top2.random_second", "Top2.jitter"} <= set(capsys.readouterr().out.split())


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(UserError, match=r"Run\.stepz: no such setting\.  Did you mean Run\.steps"):
        inspect_settings(InspectSettingsFlags(name="Run.stepz"))

"""`import` lines of gin files: the project's modules, and those of listed folders."""

import sys

import pytest

from configs import imports
from configs.errors import UserError
from configs.imports import CHECKOUT
from configs.load import load
from configs.write import dump
from tests.configs.gin_specs import message


def test_the_checkout_is_the_folder_above_configs():
    assert (CHECKOUT / "configs" / "load.py").is_file()


@pytest.fixture
def imported(folder, monkeypatch):
    """Lets gin files import the modules of the folder, for one test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(imports, "_folders", [])
    imports.allow_folder(folder)


def test_import_lines_make_specs_known(write, imported):
    source = "from configs.spec import spec\n@spec\nclass GinMine:\n    x: int = 1\n"
    write(source, "gin_extension.py")
    config = load([write("import gin_extension\nGinMine.x = 2\n")])
    made = config.make(sys.modules["gin_extension"].GinMine)
    assert made.x == 2
    text = dump([made], config.imports)
    assert text == "import gin_extension\n\nGinMine.x = 2\n"


def test_a_missing_module_is_reported_but_a_broken_one_raises(write, imported):
    error = message(write("import no_such_module_here.mine\n"))
    assert error.startswith(
        "run.gin:1: import no_such_module_here.mine: no module named no_such_module_here."
    )
    unknown = "import no_such_module_here.mine\nUnknown.size = 3\nGinMine.x = @Unknown()\n"
    assert message(write(unknown)) == error  # the module may define what is not known
    write("import no_such_module_there\n", "gin_broken.py")
    with pytest.raises(ModuleNotFoundError, match="no_such_module_there"):
        load([write("import gin_broken\n")])


def test_a_gin_file_runs_code_only_from_listed_folders(write, imported, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(folder := tmp_path / "elsewhere")
    write("import os; os.mkdir('ran')\n", "elsewhere/gin_hostile.py")
    write(
        "import os; os.mkdir('ran')\n", "elsewhere/gin_package/gin_module.py"
    )  # has no __init__.py
    for name in ("gin_hostile", "gin_package.gin_module", "os.path", "sys", "tests.toys", "gin"):
        error = message(write(f"import {name}\n"))
        assert f"import {name}: {name.partition('.')[0]} is a module of" in error
        assert "--gin_import_path=FOLDER" in error
    assert not (tmp_path / "ran").exists()
    imports.allow_folder(folder)
    assert load([write("import gin_hostile\nimport models.api\n")]).imports[0] == "gin_hostile"
    assert (tmp_path / "ran").exists()
    with pytest.raises(UserError, match=r"--gin_import_path=.*run.gin: no such folder"):
        imports.allow_folder(tmp_path / "run.gin")

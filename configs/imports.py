"""Imports modules that gin files name: the project's, and those in folders that the user allows.

A gin file may come with someone else's model, so its `import` lines run no other code.
"""

import importlib
import sys
from importlib import util
from pathlib import Path

from configs.errors import UserError

CHECKOUT = Path(__file__).resolve().parent.parent
PYTHON = Path(sys.base_prefix)
PACKAGES = ("configs", "data", "layouts", "models", "scripts", "trainer")
FLAG = "--gin_import_path"

_folders: list[Path] = []  # of the whole process, like `sys.modules` and `sys.path`


def allow_folder(folder: Path) -> None:
    """Lets gin files import the modules in a folder.  Installed modules come first."""
    if not folder.is_dir():
        raise UserError(f"{FLAG}={folder}: no such folder.")
    resolved = folder.resolve()
    if resolved not in _folders:
        _folders.append(resolved)
        sys.path.append(str(resolved))


def import_module(name: str) -> str | None:
    """Imports a module that a gin file names.  Returns the reason if it may not or cannot."""
    top = name.partition(".")[0]
    places = _folders_of(top)
    if not places:
        return f"no module named {top}.  Give {FLAG}=FOLDER, the folder that holds it."
    legal = {*_folders, *([CHECKOUT] if top in PACKAGES else [])}
    if not places <= legal:
        return (
            f"{top} is a module of {min(map(str, places))}.  Legal: the modules of this project, "
            f"and those of a FOLDER whose code you trust, with {FLAG}=FOLDER."
        )
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):
            raise  # the module is there, and its own imports are broken
        return f"no module named {error.name}."
    return None


def _folders_of(top: str) -> set[Path]:
    """Returns the folders that contain a top-level module, without running its code."""
    try:
        spec = util.find_spec(top)
    except ValueError:  # __main__ has no spec
        return {PYTHON}
    if spec is None:
        return set()
    files = list(spec.submodule_search_locations or ())
    if not files and spec.has_location and spec.origin:
        files = [spec.origin]
    return {Path(file).resolve().parent for file in files} or {PYTHON}

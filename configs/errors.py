"""Defines the two kinds of errors, and how a message lists and suggests."""

import contextlib
import difflib
import textwrap
from collections.abc import Iterable, Iterator, Sequence

MAX_SHOWN = 20
MAX_LENGTH = 200  # of a name that is compared with the legal ones, as the comparison is slow


class UserError(ValueError):
    """Reports a mistake of the user's.  The command line prints it and exits with 2."""


class RunError(RuntimeError):
    """Reports a run that failed.  The command line exits with 1."""


@contextlib.contextmanager
def extra_required(extra: str, user: str) -> Iterator[None]:
    """Says which extra of `pip install` has a package that is missing."""
    try:
        yield
    except ModuleNotFoundError as error:  # also importlib.metadata's PackageNotFoundError
        package = (error.name or "a package").partition(".")[0]
        raise UserError(
            f"{user} needs {package}, which is not installed: pip install -e '.[{extra}]'  in "
            "the folder of Meshloom."
        ) from None


def did_you_mean(name: str, legal: Iterable[str]) -> str:
    """Suggests the legal name nearest to the one given, or nothing where none is near."""
    if len(name) > MAX_LENGTH:
        return ""
    names = {name.lower(): name for name in legal}
    nearest = difflib.get_close_matches(name.lower(), names, n=1)
    return f"  Did you mean {names[nearest[0]]}?" if nearest else ""


def brief(value: str, length: int = 120) -> str:
    """Shortens a long value to what a message can show."""
    half = length // 2
    if len(value) <= length + half:
        return value
    return f"{value[:half]} … {value[-half:]} ({len(value):,} characters)"


def one_line(error: BaseException) -> str:
    """Returns the text of an error in one line of moderate length."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def listed(title: str, problems: Sequence[str]) -> str:
    """Joins all problems into one message; a single problem stands alone."""
    if len(problems) == 1:
        return problems[0]
    more = len(problems) - MAX_SHOWN
    shown = [*problems[:MAX_SHOWN], *([f"… and {more:,} more."] if more > 0 else [])]
    return f"{title}: {len(problems):,} problems.\n" + textwrap.indent("\n".join(shown), "  ")

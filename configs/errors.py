"""Defines the two types of errors, and helpers that word their messages."""

import contextlib
import difflib
import textwrap
from collections.abc import Iterable, Iterator, Sequence

MAX_SHOWN = 20
MAX_LENGTH = 200  # longer names get no suggestion, as the comparison is slow


class UserError(ValueError):
    """Reports a mistake by the user.  The command line prints it and exits with status 2."""


class RunError(RuntimeError):
    """Reports a run that failed.  The command line exits with status 1."""


@contextlib.contextmanager
def extra_required(extra: str, user: str) -> Iterator[None]:
    """Raises a `UserError` that names the extra to install where a package is missing."""
    try:
        yield
    except ModuleNotFoundError as error:  # also importlib.metadata's PackageNotFoundError
        package = (error.name or "a package").partition(".")[0]
        raise UserError(
            f"{user} needs {package}, which is not installed: pip install -e '.[{extra}]'  in "
            "the folder of Meshloom."
        ) from None


def did_you_mean(name: str, legal: Iterable[str]) -> str:
    """Suggests the legal name most similar to the given one; returns "" if none is similar."""
    if len(name) > MAX_LENGTH:
        return ""
    names = {name.lower(): name for name in legal}
    nearest = difflib.get_close_matches(name.lower(), names, n=1)
    return f"  Did you mean {names[nearest[0]]}?" if nearest else ""


def brief(value: str, length: int = 120) -> str:
    """Shortens a long value to fit into a message."""
    half = length // 2
    if len(value) <= length + half:
        return value
    return f"{value[:half]} … {value[-half:]} ({len(value):,} characters)"


def one_line(error: BaseException) -> str:
    """Returns the text of an error on one line, cut to 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__


def listed(title: str, problems: Sequence[str]) -> str:
    """Joins all problems into one message; returns a single problem unchanged."""
    if len(problems) == 1:
        return problems[0]
    more = len(problems) - MAX_SHOWN
    shown = [*problems[:MAX_SHOWN], *([f"… and {more:,} more."] if more > 0 else [])]
    return f"{title}: {len(problems):,} problems.\n" + textwrap.indent("\n".join(shown), "  ")

"""Defines the two kinds of errors, and how a message lists and suggests."""

import difflib
import textwrap
from collections.abc import Iterable, Sequence


class UserError(ValueError):
    """Reports a mistake of the user's.  The command line prints it and exits with 2."""


class RunError(RuntimeError):
    """Reports a run that failed.  The command line exits with 1."""


def did_you_mean(name: str, legal: Iterable[str]) -> str:
    """Suggests the legal name nearest to the one given, or nothing where none is near.

    >>> did_you_mean("d_fff", ["d_ff", "d_model", "heads"])
    '  Did you mean d_ff?'
    >>> did_you_mean("d_fff", ["batch"])
    ''
    """
    names = {name.lower(): name for name in legal}
    nearest = difflib.get_close_matches(name.lower(), names, n=1)
    return f"  Did you mean {names[nearest[0]]}?" if nearest else ""


def listed(title: str, problems: Sequence[str]) -> str:
    """Joins all problems into one message; a single problem stands alone.

    >>> print(listed("Run", ["Run.steps is missing.", "Run.seed is missing."]))
    Run: 2 problems.
      Run.steps is missing.
      Run.seed is missing.
    """
    if len(problems) == 1:
        return problems[0]
    return f"{title}: {len(problems)} problems.\n" + textwrap.indent("\n".join(problems), "  ")

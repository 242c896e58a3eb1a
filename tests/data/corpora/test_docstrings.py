"""The docstrings corpus: enough text, no paragraph twice, the same text each time."""

import hashlib
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

from data.corpora import docstrings
from data.corpora.docstrings import paragraphs, reads_as_english


@pytest.fixture(scope="module")
def corpus():
    return docstrings.corpus()


def test_there_is_enough_english(corpus):
    words = {split: sum(len(line.split()) for line in lines) for split, lines in corpus.items()}
    assert words["train"] > 400_000
    assert words["validation"] > 3_000 and words["test"] > 3_000


def test_no_paragraph_occurs_twice_in_one_split_or_two(corpus):
    lines = [line for split in corpus.values() for line in split]
    assert len(set(lines)) == len(lines)
    assert not any("\n" in line or ">>>" in line for line in lines)


READ = "from data.corpora.docstrings import corpus; print(hash_of(corpus(('numpy',))))"


def test_another_process_reads_the_same_text():
    code = f"import hashlib\n{inspect.getsource(hash_of)}\n{READ}"
    environment = {**os.environ, "PYTHONHASHSEED": "123"}
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == hash_of(docstrings.corpus(("numpy",))), done.stderr


def test_about_96_of_100_files_are_for_training():
    splits = [docstrings.split_of(f"python/{i}.py") for i in range(20_000)]
    assert 0.955 < splits.count("train") / 20_000 < 0.965
    assert 0.017 < splits.count("test") / 20_000 < 0.023


def hash_of(corpus):
    return hashlib.sha256(repr(sorted(corpus.items())).encode()).hexdigest()


DOCSTRING = """
    Return the sum of the array elements over a given axis.

    This goes over
    two lines, with ``marks`` and a :func:`role <target>` in it.  An example is::

        this_is = code(that, should, not, be, here)

    Parameters
    ----------
    a : array_like
        Elements to sum; what is not an array will be
        converted to one.
    axis : int
    count (int): How many of the elements are to be used for the result.

    Returns:
        - a list of the results that were found along the axis.

    >>> np.sum([0.5, 1.5])
    2.0

    ========  ===========
    the name  of the thing is in a table
    ========  ===========

    .. code-block:: python

        for the_name in a_list: print(the_name)

    sin, cos, tan, arcsin, arccos, arctan
"""


def test_sentences_stay_and_the_rest_goes():
    assert list(paragraphs(inspect.cleandoc(DOCSTRING))) == [
        "Return the sum of the array elements over a given axis.",
        "This goes over two lines, with marks and a role in it. An example is:",
        "Elements to sum; what is not an array will be converted to one.",
        "How many of the elements are to be used for the result.",
        "a list of the results that were found along the axis.",
    ]


@pytest.mark.parametrize(
    "line",
    ["x = f(a, b) if a else g(b)", "sin, cos, tan, exp, log, sqrt.", "See Also", "0 1 2 3 4 5 6."],
)
def test_code_and_lists_are_no_english(line):
    assert not reads_as_english(line)

"""Prose: what of a docstring is English."""

import inspect

import pytest

from data.corpora.prose import paragraphs, reads_as_english

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

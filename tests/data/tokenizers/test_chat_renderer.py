"""Chat templates that are hostile: what they take has limits, and the next chat is rendered."""

import pytest

from configs.errors import UserError
from data.tokenizers.chat_template import BadMessages, chat_template

CHAT = [{"role": "user", "content": " hi "}]


def test_constants_of_a_template_have_limits():
    """jinja2 computes them as it compiles."""
    with pytest.raises(UserError, match=r"chat template: cannot be read: .*too much time"):
        chat_template({"chat_template.jinja": "{{ 7 ** 100000000 % 10 }}"})


LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    ("hostile", "reason"),
    [
        (LOOP, "too much time"),
        ("{{ 'a' * 10 ** 10 }}", "more than 512 MB"),
        ("{{ messages[0].content * 10 ** 10 }}", "more than 512 MB"),
        ("{% for i in range(99999) %}{{ 'aaaaaaaaaaaaaaaa' }}{% endfor %}", "1,000,000 characters"),
        ("{{ messages[0].content / 0 }}", "unsupported operand"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('two\nlines') }}", "two lines"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
    ],
)
def test_a_template_has_limits(hostile, reason):
    guarded = "{% if messages[0].role == 'attack' %}" + hostile + "{% else %}hi{% endif %}"
    template = chat_template({"chat_template.jinja": guarded})
    with pytest.raises(BadMessages, match=reason) as refusal:
        template.render([{"role": "attack", "content": "a"}])
    assert "\n" not in str(refusal.value)
    assert template.render(CHAT) == "hi"

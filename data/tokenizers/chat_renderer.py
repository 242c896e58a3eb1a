"""Renders chat templates, which come with a model and may be hostile, in a process with limits.

Each line of its input is a request in JSON, each line of its output the answer.  It imports nothing
of the project, so that it starts in a tenth of a second.
"""

import contextlib
import datetime
import functools
import json
import resource
import sys
from collections.abc import Mapping, Sequence

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY_BYTES = 2**29
PROCESSOR_S = 2
"""Of a request, rounded up to whole seconds."""
ADDED_CHARACTERS = 1_000_000
"""How much longer than its messages a text may be."""


class _Answers(jinja2.ext.Extension):
    """Reads what is between `generation` and `endgeneration`, where templates mark answers."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


@functools.lru_cache(1)
def compiled(text: str) -> jinja2.Template:
    """Compiles a template, with the functions of Hugging Face's `apply_chat_template`."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Answers]
    )
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment.from_string(text)


def render(template: str, tokens: Mapping[str, str], messages: Sequence[Mapping[str, str]]) -> str:
    """Returns the text of a chat, with the beginning of the next answer."""
    text = ""
    longest = ADDED_CHARACTERS + sum(len(message["content"]) for message in messages)
    for piece in compiled(template).generate(
        messages=messages, tools=None, documents=None, add_generation_prompt=True, **tokens
    ):
        text += piece
        if len(text) > longest:
            raise ValueError(f"the text is over {ADDED_CHARACTERS:,} characters too long")
    text.encode()  # raises where half of a surrogate pair is in it
    return text


def main() -> None:
    """Answers requests until the input ends; a limit ends the process."""
    with contextlib.suppress(ValueError, OSError):  # where the system has no such limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most_s = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin:
        used = resource.getrusage(resource.RUSAGE_SELF)
        limit_s = int(used.ru_utime + used.ru_stime) + 1 + PROCESSOR_S
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, most_s))
        template, *chat = json.loads(line)
        try:
            answer = {"text": render(template, *chat) if chat else str(compiled(template))}
        except MemoryError:
            answer = {"error": f"it takes more than {MEMORY_BYTES // 2**20} MB"}
        except Exception as error:  # of any kind: the template decides what fails
            answer = {"error": " ".join(str(error)[:1000].split()) or type(error).__name__}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()

"""The texts of an answer: all of each, however its tokens come."""

import asyncio
import json
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from scripts.commands.serving.bodies import CompletionBody
from scripts.commands.serving.completions import AnswerChoice, CompletionForm, event, events
from tests.data.test_vocab import Digits
from trainer.decoding.decoder import Request
from trainer.decoding.text_stream import TextStream
from trainer.serving.service import Job


def choice_of(*stops: str, vocab: Digits | None = None) -> AnswerChoice:
    return AnswerChoice(0, Job(Request([4], 9)), TextStream(vocab or Digits(), [4], stops))


def test_a_text_that_ends_while_it_is_read_is_complete():
    class Interrupted(Digits):
        def _text(self, ids):
            if ids[-1:] == [5] and choice.job.finish is None:  # another thread adds the last token
                choice.job.tokens.append(6)
                choice.job.finish = "length"
            return super()._text(ids)

    choice = choice_of(vocab=Interrupted())
    choice.job.tokens.append(5)
    pieces = []
    while not choice.is_done:
        pieces.append(choice.update())
    assert pieces == ["5", "6"] and choice.finish == "length" and choice.new_tokens == 2


@pytest.mark.parametrize("at_once", [1, 2, 3, 6])
def test_a_stop_ends_the_same_text_however_many_tokens_come_at_once(at_once):
    """123 begins earlier than 2 and 34, but 2 is complete first."""
    choice, text = choice_of("34", "123", "2"), ""
    for token in range(0, 6, at_once):
        choice.job.tokens += [0, 1, 2, 3, 4, 5][token : token + at_once]
        text += choice.update()
    assert (text, choice.finish, choice.new_tokens) == ("01", "stop", 3)


def test_a_stream_that_nobody_reads_ends_without_an_error():
    class Left:
        async def changes(self):
            yield
            raise ClientDisconnect

    async def sent(exchange: Any, served: Any = None) -> list[str]:
        body = CompletionBody(prompt="a", stream=True)
        form = CompletionForm(body, Digits())
        return [event async for event in events(exchange, [], {}, body, served, form)]

    assert asyncio.run(sent(Left())) == []


def test_an_event_is_one_line_for_every_client():
    """Python's str.splitlines, by which some clients read, knows more line ends than the format."""
    text = "a\nb\x85c\u2028d\u2029é"
    sent = event({"text": text})
    assert len(sent.splitlines()) == 2 and "é" in sent
    assert json.loads(sent.removeprefix("data: ")) == {"text": text}

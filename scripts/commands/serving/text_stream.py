"""Makes text of tokens as they come, and finds where it stops."""

import bisect
from collections.abc import Iterable, Sequence

from data.vocab import Vocab

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what the bytes of half a character decode to


class TextStream:
    """Keeps how much of a text has been given out, and whether it has reached a stop."""

    def __init__(self, vocab: Vocab, prompt: Iterable[int], stops: Sequence[str]):
        self.vocab, self.prompt, self.stops = vocab, [*map(int, prompt)], stops
        self.prompt_text = vocab.text(self.prompt)
        self.text = ""
        """What has been given out."""
        self.stopped_after: int | None = None
        """Tokens up to the end of a stop."""

    @property
    def is_stopped(self) -> bool:
        return self.stopped_after is not None

    def add(self, tokens: Sequence[int], *, is_done: bool) -> str:
        """Returns what all the new tokens so far add to the text that was given out.

        What may become part of a stop, or a whole character, is kept back until it is known.  The
        stop that is complete first ends the text, however many tokens come at once.
        """
        if self.is_stopped:
            return ""
        text = self._text_of(tokens)
        stops = [(at + len(stop), at) for stop in self.stops if (at := text.find(stop)) >= 0]
        if stops:
            end, at = min(stops)
            stop, text = text[at:end], text[:at]
            self.stopped_after = bisect.bisect_left(
                range(len(tokens)), True, key=lambda count: stop in self._text_of(tokens[:count])
            )
        elif not is_done:
            text = without_start_of_stop(text.rstrip(UNFINISHED), self.stops)
        if not text.startswith(self.text):
            return ""
        added, self.text = text[len(self.text) :], text
        return added

    def _text_of(self, tokens: Sequence[int]) -> str:
        """Returns what tokens add to the prompt."""
        return self.vocab.text([*self.prompt, *tokens])[len(self.prompt_text) :]


def without_start_of_stop(text: str, stops: Sequence[str]) -> str:
    """Drops the end of a text where a stop may begin.

    >>> without_start_of_stop("one, tw", ["two", "x"]), without_start_of_stop("one", ["two"])
    ('one, ', 'one')
    """
    starts = {stop[:length] for stop in stops for length in range(1, len(stop))}
    longest = max((len(start) for start in starts if text.endswith(start)), default=0)
    return text[: len(text) - longest]

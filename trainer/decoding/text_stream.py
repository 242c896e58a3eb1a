"""Turns tokens into text as they arrive, and detects where the text stops."""

import bisect
from collections.abc import Collection, Iterable, Sequence

from data.vocab import Vocab

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # the text of an incomplete character


class TextStream:
    """Tracks how much of a text has been returned, and whether it has reached a stop.

    Each call detokenizes only the last tokens, so the total time is linear in the tokens.
    """

    def __init__(
        self, vocab: Vocab, prompt: Iterable[int], stops: Sequence[str], *, apart: bool = False
    ):
        self.vocab, self.prompt, self.stops = vocab, [*map(int, prompt)], stops
        self.stop_ids: Collection[int] = ()  # tokens that also stop the text
        self.prompt_text = vocab.text(self.prompt)
        # A text apart from its prompt begins like an independent one, without a space.
        self._before, self._text_before = ([], "") if apart else (self.prompt, self.prompt_text)
        self.stopped_after: int | None = None
        """Number of tokens up to the end of the stop."""
        self._given, self._ids = list[str](), [*self.prompt]
        self._whole, self._context = len(self.prompt), len(self.prompt) - len(self._before)
        """Number of tokens up to the last complete character, and the start of the last of them.
        New tokens are detokenized together with those: a text's first token may lose its space."""
        self._context_text = self._text_before
        self._kept = ""
        """Complete characters that are held back, because a stop may begin with them."""

    @property
    def text(self) -> str:
        """Returns the text that has been returned so far."""
        return "".join(self._given)

    @property
    def is_stopped(self) -> bool:
        return self.stopped_after is not None

    def add(self, tokens: Sequence[int], *, is_done: bool) -> str:
        """Returns the text that all new tokens so far add to what has been returned.

        Text that may become part of a stop, or of a character, is held back.  The stop that is
        completed first ends the text, however many tokens arrive at once.
        """
        new = tokens[len(self._ids) - len(self.prompt) :]
        if self.is_stopped or not (new or is_done):
            return ""
        hit = next((n for n, token in enumerate(new) if token in self.stop_ids), None)
        if hit is not None:
            new, is_done = new[:hit], True
        self._ids += new
        if is_done:
            added = self._text_of(self._ids[len(self.prompt) :])[len(self.text) :]
        else:
            # What the tokens after the last complete character add.
            added = self.vocab.text(self._ids[self._context :])[len(self._context_text) :]
            added = self._kept + added
        stops = [(at + len(stop), at) for stop in self.stops if (at := added.find(stop)) >= 0]
        if stops:
            end, at = min(stops)
            self.stopped_after = self._tokens_until(len(self.text) + at, added[at:end])
            added = added[:at]
        elif hit is not None:
            self.stopped_after = len(self._ids) - len(self.prompt) + 1
        elif not is_done:
            added = self._settled(added)
        self._given.append(added)
        return added

    def _settled(self, added: str) -> str:
        """Returns the part of the added text that cannot change, and holds back the rest."""
        if added.endswith(UNFINISHED) or added == self._kept:
            return ""
        last_text = self.vocab.text(self._ids[self._whole :])
        if last_text.strip():
            self._context, self._context_text = self._whole, last_text
        else:
            self._context_text = self.vocab.text(self._ids[self._context :])
        self._whole = len(self._ids)
        starts = (start_of_stop(added, stop) for stop in self.stops)
        settled = added[: min(starts, default=len(added))]
        self._kept = added[len(settled) :]
        return settled

    def _tokens_until(self, start: int, stop: str) -> int:
        """Returns the number of new tokens up to the end of a stop."""
        tokens = self._ids[len(self.prompt) :]
        return bisect.bisect_left(
            range(len(tokens)), True, key=lambda n: stop in self._text_of(tokens[:n])[start:]
        )

    def _text_of(self, tokens: Sequence[int]) -> str:
        """Returns the text that tokens add to the prompt."""
        return self.vocab.text([*self._before, *tokens])[len(self._text_before) :]


def start_of_stop(text: str, stop: str) -> int:
    """Returns the start of the longest end of a text with which a stop begins."""
    at = text.find(stop[0], max(len(text) - len(stop) + 1, 0))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)

"""Defines tasks: which text, which vocab, and how examples are packed into rows.

Kinds of tasks differ in their methods; no other code checks the kind of a task.
"""

import dataclasses
import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, TypeAlias, TypeVar

from pydantic import Field

from configs.errors import UserError
from configs.spec import spec
from data.packing import rows as packing
from data.packing.pack import Packed, place_dtype
from data.packing.rows import Counts, RowArray, Rows
from data.sources import json_lines as json_lines  # task files name specs in it
from data.sources import mixing as mixing
from data.sources import pair_kinds as pair_kinds
from data.sources import tables as tables
from data.sources import tfds as tfds
from data.sources.pairs import Pair, Pairs, chosen_tag
from data.sources.text import Source
from data.sources.text_files import without_carriage_return
from data.tokenizers import sentence_piece as sentence_piece
from data.tokenizers import tokenizer_json as tokenizer_json
from data.vocab import UNK_WORD, Tokenizer, Vocab, make
from data.vocabs import TARGET_FILE, Vocabs

logger = logging.getLogger(__name__)

Length = Annotated[int, Field(ge=2, le=1 << 20)]
T = TypeVar("T")
Example = str | Pair
Digest: TypeAlias = "hashlib._Hash"
PackChunk = Callable[[Sequence[Any], str | None, bool], tuple[Packed, Counts]]
"""Encodes and packs some examples, given their tag, if any, and whether they are for training."""

_BORDER = b"\xff part\n"
"""Separates the parts of a mixture in hashes; no example contains such a byte."""


class PartOfText(NamedTuple):
    """Holds one part of a split; `dropped` is complete once the last example is read."""

    name: str
    examples: Iterator[Example]
    dropped: Counter[str]
    tag: str | None = None


@spec
class Task:
    """Defines what `prepare` turns into rows: here text, for a language model."""

    name: str
    """Names the cache: a folder of data_dir."""
    source: Source
    """Where the text comes from."""
    vocab: Tokenizer
    """How the text is tokenized."""
    length: Length
    """Tokens per row."""
    packs: bool = True
    """Packs several examples into a row; otherwise each example gets its own row."""
    word_list: str | None = None
    """A file of words, one per line. All other words become <UNK>, as in LM1B."""

    takes_pairs: ClassVar[bool] = False
    """Whether the source yields pairs."""
    has_answers: ClassVar[bool] = False
    """Whether decoded texts are answers, which are written without their prompts."""
    has_rejected: ClassVar[bool] = False
    """Whether training has answers that are not to be given."""
    has_chats: ClassVar[bool] = False
    """Whether examples are chats of several messages."""
    unit: ClassVar[str] = "tokens"
    """Unit of what a model predicts, in counts and rates."""
    left_out: ClassVar[tuple[str, ...]] = ()
    """Names the reason for which packing leaves out examples, where it does."""
    rows_kind: ClassVar[type[Rows]] = Rows

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", self.name):
            raise UserError(
                f"{kind}.name = {self.name!r}: it names a folder of data_dir.  "
                "Legal: letters, digits, '_', '-' and '.', with no '.' or '-' in front."
            )
        if isinstance(self.source, Pairs):
            has_rejected, takes_pairs = self.source.has_rejected, self.takes_pairs
            chats = {part.has_chats for part in getattr(self.source, "all_parts", [self.source])}
            is_unread = chats != {self.has_chats} or (has_rejected and not self.has_answers)
            if not takes_pairs or is_unread:
                legal = "@PreferenceTask()" if has_rejected else "@Translation() or @PromptTask()"
                legal = "@ChatTask(), which only reads chats," if True in chats else legal
                raise UserError(
                    f"{kind}.source = @{type(self.source).__name__}(): it yields pairs"
                    f"{' of answers' * has_rejected}.  Use {legal} instead of @{kind}()."
                )
        if "train" not in self.source.splits():
            raise UserError(
                f"{kind}.source = @{type(self.source).__name__}(): it has no text to train on.  "
                f"Found: {', '.join(self.source.splits())}."
            )

    @property
    def has_source(self) -> bool:
        """Returns whether examples have a source side, which an encoder reads."""
        return "source_length" in self.row_lengths

    @property
    def translates(self) -> bool:
        """Returns whether examples are a source and its translation."""
        return self.has_source and self.takes_pairs

    @property
    def has_newlines(self) -> bool:
        """Returns whether what a model reads may contain newlines."""
        return self.source.has_newlines

    @property
    def row_lengths(self) -> dict[str, int]:
        """Returns the row length of each side in tokens, by the parameter that sets it."""
        return {"length": self.length}

    @property
    def array_lengths(self) -> dict[str, int]:
        """Returns the arrays of a batch, each with its length per row."""
        names = ("inputs_BL", "targets_BL", "segments_BL", "positions_BL")
        return dict.fromkeys(names, self.length)

    @property
    def array_shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the arrays of a batch, each with its shape per row."""
        return {name: (length,) for name, length in self.array_lengths.items()}

    def with_rows_of(self, length: int) -> "Task":
        """Returns the task with its rows cut into shorter ones; raises if that is illegal."""
        kind = type(self).__name__
        if self.rows_kind is not Rows:
            raise UserError(f"the rows of a @{kind}() cannot be cut.  Legal: those of a @Task().")
        if self.length % length:
            raise UserError(f"{kind}.length = {self.length} does not divide into rows of {length}.")
        return dataclasses.replace(self, length=length)

    @property
    def tags(self) -> tuple[str, ...]:
        """Returns the tags that a source line may have."""
        return ()

    def prompt(self, line: str) -> str:
        """Returns what a model reads for a line that it is to continue."""
        return line

    def test_pairs(self, split: str) -> Iterator[tuple[str, str | None, list[Pair]]]:
        """Yields name, tag and pairs of each part of a split; nothing without a source side."""
        return iter(())

    # Vocabs

    @property
    def source_vocab_file(self) -> str | None:
        """Returns the file of the source's vocab, or the target's if both sides share one."""
        return None

    @property
    def vocab_settings(self) -> dict[str, Tokenizer]:
        """Returns the settings of each vocab, by file name."""
        return {TARGET_FILE: self.vocab}

    def make_vocabs(self, given: Vocabs | None) -> Vocabs:
        """Returns the given vocabs; trains or loads them if none are given."""
        vocab = given.target if given else self._make_vocab(self.vocab, "vocab", self.vocab_words)
        if self.has_newlines and "\n" not in vocab.decode(vocab.encode(["a\nb"])[0]):
            logger.warning(
                "Warning: %s: its examples have newlines, which its vocab does not keep.  Use one "
                "that does, such as one that the task trains with SentencePiece.byte_fallback.",
                self.name,
            )
        return Vocabs(vocab, None)

    @property
    def vocab_words(self) -> Sequence[str]:
        """Returns the words that become one sub-word each in a vocab that the task trains."""
        words = [] if self.word_list is None else [UNK_WORD]
        return [*words, *(["\n"] if self.source.has_newlines else [])]

    def vocab_text(self, name: str) -> Iterator[str]:
        """Yields the text to train a vocab on: the "vocab", "source vocab" or "target vocab"."""
        for example in self.source.lines("train"):
            first, *others = without_carriage_return(example).split("\n")
            yield first
            yield from ("\n" + line for line in others)  # as it begins inside an example

    def _make_vocab(self, settings: Tokenizer, name: str, words: Sequence[str]) -> Vocab:
        vocab = make(settings, self.vocab_text(name), words=words)
        logger.info("%s: %s of %d tokens", self.name, name, vocab.size)
        return vocab

    # Rows

    def pack_lines(
        self, lines: Sequence[str], vocabs: Vocabs, tag: str | None
    ) -> tuple[Rows, Sequence[str]]:
        """Packs lines in memory: texts, or pairs as a source, a tab and its target.

        Returns the rows, and what a model predicts for each line.
        """
        if not self.takes_pairs:
            vocab = vocabs.target
            packed, counts = packing.packed_lines(lines, vocab, self.length, None, self.packs)
            return self.rows(packed.arrays, counts, vocabs, pieces=packed.pieces), lines
        pairs = []
        for number, line in enumerate(lines, 1):
            halves = line.split("\t")
            if len(halves) != 2:
                raise UserError(
                    f"line {number}: {len(halves) - 1} tabs; a pair is its source, one tab and its "
                    "target."
                )
            pairs.append(Pair(*halves))
        packed, counts = self.chunk_packer(vocabs)(pairs, chosen_tag(tag, self.tags), False)
        rows = self.rows(packed.arrays, counts, vocabs, pieces=packed.pieces)
        return rows, [pair.target for pair in pairs]

    def rows_of_text(self, lines: Iterable[str], vocabs: Vocabs) -> Rows:
        """Packs a text in memory, unchanged, to compute its loss."""
        words = packing.read_word_list(self.word_list)
        packed, counts = packing.packed_lines(lines, vocabs.target, self.length, words, packs=True)
        return Rows(packed.arrays, counts, packed.pieces, begin_id=vocabs.target.begin_id)

    def columns(self, vocabs: Vocabs) -> dict[str, tuple[int, type]]:
        """Returns the arrays of a split's rows in the cache, each with its columns and its type."""
        segments = (self.length, place_dtype(self.length))
        return {"targets": (self.length, vocabs.target.dtype), "segments": segments}

    def parts_of_text(self, split: str, digest: Digest) -> Iterator[PartOfText]:
        """Yields the parts of a split in order; adds the borders between them to `digest`."""
        for number, (name, part) in enumerate(self.source.parts_of(split).items()):
            if number:
                digest.update(_BORDER)
            yield self.part_of_text(name, part, split, digest)

    def part_of_text(self, name: str, part: Any, split: str, digest: Digest) -> PartOfText:
        """Reads one part of a split; adds the raw text to `digest` as it is read."""
        lines = hashed(part.lines(split), digest, packing.hashed_bytes)
        return PartOfText(name, lines, Counter())

    def chunk_packer(self, vocabs: Vocabs) -> PackChunk:
        """Returns the function that packs the examples of one chunk."""
        words = packing.read_word_list(self.word_list)
        return lambda lines, tag, training: packing.packed_lines(
            lines, vocabs.target, self.length, words, packs=self.packs
        )

    def part_entries(
        self, dropped: Mapping[str, int], parts: Sequence[Mapping[str, Any]]
    ) -> dict[str, Any]:
        """Returns what a manifest stores for the parts of a split: nothing if there is only one."""
        return {"parts": list(parts)} if len(parts) > 1 else {}

    def cached_rows(
        self, split: str, entry: Mapping[str, Any], arrays: Mapping[str, RowArray], vocabs: Vocabs
    ) -> Rows:
        """Returns the rows of a split, given its arrays and its entry in the manifest."""
        parts = list(packing.rows_of_parts(entry.get("parts", []), *self.left_out))
        sizes = [part.counts.rows for part in parts]
        mix = self.source.mix(sizes) if parts and split == "train" else None
        return self.rows(arrays, Counts.read(entry), vocabs, mix=mix, parts=parts)

    def rows(
        self, arrays: Mapping[str, RowArray], counts: Counts, vocabs: Vocabs, **known: Any
    ) -> Rows:
        """Returns rows; `known` holds further fields of `Rows`."""
        known |= self.row_settings(vocabs)
        return self.rows_kind(arrays, counts, begin_id=vocabs.target.begin_id, **known)

    def row_settings(self, vocabs: Vocabs) -> dict[str, Any]:
        """Returns the fields that rows of this kind have beyond those of `Rows`."""
        return {}

    def fills(self, counts: Counts) -> dict[str, float]:
        """Returns the share of positions in the rows that hold a token."""
        return {"fill": counts.tokens / (counts.rows * self.length)}

    def numbers(self, counts: Counts) -> dict[str, int | str]:
        """Returns what a table shows about the rows of a split."""
        shown = {name: getattr(counts, name) for name in ("words", "bytes", "tokens", "rows")}
        return {"examples": counts.lines, **shown, "fill": f"{self.fills(counts)['fill']:.1%}"}

    def summary(self, counts: Counts) -> str:
        """Describes the rows of a split in one line."""
        return (
            f"{counts.lines:,} {'examples' if self.source.has_newlines else 'lines'}, "
            f"{counts.words:,} words, {counts.tokens:,} tokens in "
            f"{counts.rows:,} rows of {self.length}, {self.fills(counts)['fill']:.1%} full"
        )


def hashed(examples: Iterable[T], digest: Digest, as_bytes: Callable[[T], bytes]) -> Iterator[T]:
    """Yields examples, and adds their bytes to `digest`."""
    for example in examples:
        digest.update(as_bytes(example))
        yield example

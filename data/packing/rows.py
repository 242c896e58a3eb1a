"""Reads batches by row number from packed rows, in memory or on disk."""

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from pydantic import NonNegativeInt

from configs.errors import UserError
from data.documents import Documents
from data.mixture import BLOCK, MixtureOrder
from data.packing import pack
from data.sources.pairs import Pair, tagged
from data.sources.text_files import read_lines, without_carriage_return
from data.storage.arrays import CheckedArray, MaskedArray
from data.vocab import PAD, UNK_WORD, Vocab
from data.vocabs import Vocabs

NO_ROW = -1  # the row number of an empty row, which fills up the last batch of an evaluation
_LINES_PER_CHUNK = 16_384
_NOT_SPACE = re.compile(r"\S+")

T = TypeVar("T")
RowArray = np.ndarray | CheckedArray | MaskedArray


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Counts what rows were made from.

    Words are separated by white space in the raw text; the end of a line is not a word.

    Bytes are those of a text file: a line that ends with "\\r\\n" counts both, and a last line
    without a newline counts one as well.  A byte order mark does not count, nor do blank lines that
    are not examples.  For pairs, the texts count, with one newline each.
    """

    lines: NonNegativeInt = 0
    words: NonNegativeInt = 0
    bytes: NonNegativeInt = 0  # of the raw lines in UTF-8, with one newline per line
    tokens: NonNegativeInt = 0  # with one end token per line
    rows: NonNegativeInt = 0
    # Only for pairs, for which the numbers above count the targets.
    source_words: NonNegativeInt = 0
    source_bytes: NonNegativeInt = 0
    source_tokens: NonNegativeInt = 0
    left_out: NonNegativeInt = 0  # examples that fit no row; no other number counts them

    def __add__(self, other: "Counts") -> "Counts":
        a, b = dataclasses.asdict(self), dataclasses.asdict(other)
        return Counts(**{name: a[name] + b[name] for name in a})

    @classmethod
    def of(cls, lines: Sequence[str], *, tokens: int = 0) -> "Counts":
        return cls(
            lines=len(lines),
            words=sum(len(line.split()) for line in lines),
            bytes=sum(len(line.encode()) + 1 for line in lines),
            tokens=tokens,
        )

    @classmethod
    def of_pairs(cls, pairs: Sequence[Sequence[str]], **others: int) -> "Counts":
        """Counts the texts of some pairs; `others` are the numbers that the texts do not show."""
        sources, targets = (cls.of([pair[side] for pair in pairs]) for side in (0, 1))
        texts = {"source_words": sources.words, "source_bytes": sources.bytes}
        return dataclasses.replace(targets, **texts, **others)

    @classmethod
    def read(cls, entry: Mapping[str, Any]) -> "Counts":
        """Reads the counts from an entry of a manifest; older ones lack some."""
        return cls(**{f.name: entry.get(f.name, f.default) for f in dataclasses.fields(cls)})


class RowsOfPart(NamedTuple):
    """Holds the rows of one source of a mixture, and counts its pairs in no row by reason.

    A reason that drops no pair has 0.
    """

    name: str
    rows: range
    counts: Counts
    dropped: dict[str, int]

    @property
    def read(self) -> int:
        """Returns how many pairs the source has."""
        return self.counts.lines + sum(self.dropped.values())


@dataclasses.dataclass(frozen=True, eq=False)
class Rows:
    """Holds the rows of one split."""

    arrays: Mapping[str, RowArray]
    """Tokens, segments and so on, by the names of the cache's files."""
    counts: Counts
    pieces: np.ndarray | None = None
    """A (line, row, segment) for each piece of each line; only for rows packed in memory."""
    mix: MixtureOrder | None = None
    """The order of the rows of a mixture in training."""
    parts: Sequence[RowsOfPart] = ()
    """The rows of each source of a mixture."""
    begin_id: int = PAD
    """The token that a decoder reads before a target."""
    documents: Documents | None = None
    """Where the examples come from; only for rows of a cache."""
    batch_length: int | None = None
    """Length of the shorter rows into which a batch cuts each row. None: rows stay whole."""

    def __len__(self) -> int:
        return len(self.targets_BL)

    @property
    def targets_BL(self) -> RowArray:
        return self.arrays["targets"]

    @property
    def segments_BL(self) -> RowArray:
        return self.arrays["segments"]

    @property
    def counted_BL(self) -> np.ndarray:
        """Returns which tokens of all rows the loss counts: all but padding, or those in a mask."""
        mask_BL = self.arrays.get("loss_mask", self.segments_BL)
        return read_rows(np.arange(len(self)), mask_BL)[0] > 0

    @property
    def order(self) -> MixtureOrder:
        """Returns the order of the rows in training."""
        return self.mix or MixtureOrder((len(self),), (BLOCK,), first_stream=0)

    @property
    def known_documents(self) -> Documents:
        """Returns where the examples come from; raises if the cache does not know."""
        if self.documents is None:
            raise UserError(
                "these rows are from an older version, which did not record their documents.  Run "
                "meshloom prepare --rebuild with the same flags; the rows stay the same."
            )
        return self.documents

    def without(self, names: Sequence[str]) -> "Rows":
        """Returns rows in which some documents become padding; all others stay where they are."""
        if not names:
            return self
        index = self.known_documents
        documents = np.unique(np.concatenate([index.named(name) for name in names]))
        masked = index.pieces_of(documents)[:, 1:]
        sides = {True: self.arrays.get("source_segments"), False: self.segments_BL}
        arrays = {
            name: MaskedArray(array, sides[name.startswith("source")], masked)
            for name, array in self.arrays.items()
        }
        return dataclasses.replace(self, arrays=arrays)

    @property
    def per_row(self) -> int:
        """Returns how many rows of a batch each row becomes."""
        return 1 if self.batch_length is None else self.targets_BL.shape[1] // self.batch_length

    def cut(self, rows_BL: np.ndarray) -> np.ndarray:
        """Cuts rows into `per_row` shorter ones each, as in a batch."""
        return rows_BL if self.batch_length is None else rows_BL.reshape(-1, self.batch_length)

    def batch(self, row_ids: np.ndarray) -> dict[str, np.ndarray]:
        """Returns a batch of rows as int32 arrays; NO_ROW gives a row of padding."""
        rows = read_rows(row_ids, self.targets_BL, self.segments_BL)
        targets_BL, segments_BL = map(self.cut, rows)
        return {
            "inputs_BL": pack.inputs(targets_BL, segments_BL, self.begin_id),
            "targets_BL": targets_BL.astype(np.int32),
            "segments_BL": segments_BL.astype(np.int32),
            "positions_BL": pack.positions(segments_BL),
        }


class PairRows(Rows):
    """Holds the rows of one split of a translation; the parts of a mixture follow each other."""

    def batch(self, row_ids: np.ndarray) -> dict[str, np.ndarray]:
        arrays = self.arrays["sources"], self.arrays["source_segments"]
        sources_BM, segments_BM = read_rows(row_ids, *arrays)
        return {
            "inputs_BM": sources_BM.astype(np.int32),
            "segments_BM": segments_BM.astype(np.int32),
            "positions_BM": pack.positions(segments_BM),
            **super().batch(row_ids),
        }


def read_rows(row_ids: np.ndarray, *arrays: RowArray) -> list[np.ndarray]:
    """Copies rows from some arrays; NO_ROW gives a row of zeros."""
    empty = np.asarray(row_ids) == NO_ROW
    rows = [array[np.where(empty, 0, row_ids)] for array in arrays]
    for row in rows:
        row[empty] = 0
    return rows


def packed_lines(
    lines: Iterable[str], vocab: Vocab, length: int, words: frozenset[str] | None, packs: bool
) -> tuple[pack.Packed, Counts]:
    """Encodes and packs raw lines in chunks; a blank line is an example without words.

    Words outside `words` become <UNK>; None keeps all words.
    """
    packer = pack.Packer(pack.Side(length, vocab.dtype, vocab.end_id), packs=packs)
    counts = Counts()
    for chunk in chunks(lines):
        texts = [without_carriage_return(line) for line in chunk]
        examples = vocab.encode(texts if words is None else with_unk(texts, words))
        packer.add(examples)
        counts += Counts.of(chunk, tokens=sum(map(len, examples)) + len(examples))
    packed = packer.finish()
    return packed, dataclasses.replace(counts, rows=packed.rows)


def packed_pairs(
    pairs: Iterable[Pair], vocabs: Vocabs, lengths: Sequence[int], packs: bool, tag: str | None
) -> tuple[pack.Packed, Counts]:
    """Encodes and packs pairs in chunks, each source with the tag in front.

    `lengths` are the row lengths of targets and sources; a pair with a longer half has no piece.
    """
    sides = (vocabs.target, vocabs.of_source)
    packer = pack.Packer(
        *(pack.Side(n, v.dtype, v.end_id) for n, v in zip(lengths, sides, strict=True)), packs=packs
    )
    counts = Counts()
    for chunk in chunks(pairs):
        sources = vocabs.of_source.encode([tagged(pair.source, tag) for pair in chunk])
        targets = vocabs.target.encode([pair.target for pair in chunk])
        kept = np.flatnonzero(packer.fits(targets, sources))
        packer.add(targets, sources)
        counts += Counts.of_pairs(
            [chunk[i] for i in kept],
            tokens=sum(len(targets[i]) + 1 for i in kept),
            source_tokens=sum(len(sources[i]) + 1 for i in kept),
            left_out=len(chunk) - len(kept),
        )
    packed = packer.finish()
    return packed, dataclasses.replace(counts, rows=packed.rows)


def rows_of_parts(entries: list[dict[str, Any]], *left_out: str) -> Iterator[RowsOfPart]:
    """Yields the rows of each part; left_out names the reason why some examples are in no row."""
    first = 0
    for entry in entries:
        counts = Counts.read(entry)
        dropped = entry["dropped"] | dict.fromkeys(left_out, counts.left_out)
        rows = range(first, first := first + counts.rows)
        yield RowsOfPart(entry["name"], rows, counts, dropped)


def hashed_bytes(example: str) -> bytes:
    """Returns what an example adds to a content hash; bytes that are not UTF-8 count as they are.

    A newline inside an example is followed by a byte that UTF-8 never contains, so that one example
    of two lines differs from two examples of one line.
    """
    return example.encode("utf-8", "surrogatepass").replace(b"\n", b"\n\xff") + b"\n"


def hashed_pair(pair: Pair) -> bytes:
    """Returns what a pair adds to a content hash; tabs inside a half differ from the separator."""
    return b"\t".join(hashed_bytes(half)[:-1].replace(b"\t", b"\t\xff") for half in pair) + b"\n"


def with_unk(lines: Iterable[str], word_list: frozenset[str]) -> list[str]:
    """Replaces each word outside the list with <UNK>; white space is unchanged."""

    def known(word: re.Match[str]) -> str:
        return word[0] if word[0] in word_list else UNK_WORD

    return [_NOT_SPACE.sub(known, line) for line in lines]


def read_word_list(path: str | None) -> frozenset[str] | None:
    """Reads a file with one word per line; ignores anything after a word, such as its count."""
    if path is None:
        return None
    return frozenset(line.split()[0] for line in read_lines(path) if line and not line.isspace())


def chunks(examples: Iterable[T]) -> Iterator[list[T]]:
    """Yields lists of some thousands of examples."""
    rest = iter(examples)
    while chunk := list(itertools.islice(rest, _LINES_PER_CHUNK)):
        yield chunk

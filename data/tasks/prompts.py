"""Defines tasks of prompts and answers; a decoder learns only the answers."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from configs.errors import UserError
from configs.spec import spec
from data.packing.pack import Packed, Packer, Side, inputs
from data.packing.rows import Counts, Rows, read_rows
from data.sources.pair_kinds import Preferences
from data.sources.pairs import Pair, Pairs, Preference
from data.task import PackChunk
from data.tasks.pairs import PairTask
from data.vocab import Tokenizer, Vocab
from data.vocabs import Vocabs

PROMPT = "{prompt}"


@dataclasses.dataclass(frozen=True, eq=False)
class PromptRows(Rows):
    """Holds the rows of one split; a mask marks the tokens of answers."""

    reads_begin: bool = True
    """Whether a decoder reads begin_id before a prompt, or the prompt alone."""

    def batch(self, row_ids: np.ndarray) -> dict[str, np.ndarray]:
        (loss_mask_BL,) = read_rows(row_ids, self.arrays["loss_mask"])
        batch = {**super().batch(row_ids), "loss_mask_BL": loss_mask_BL.astype(np.int32)}
        if self.reads_begin:
            return batch
        # A decoder then reads a text from its first token on, which nothing predicts.
        segments_BL = batch["segments_BL"]
        moved = {  # one to the left inside each segment, which then ends with 0
            name: inputs(batch[name][:, ::-1], segments_BL[:, ::-1])[:, ::-1]
            for name in ("targets_BL", "loss_mask_BL")
        }
        return {**batch, **moved, "inputs_BL": batch["targets_BL"]}


@spec
class PromptTask(PairTask):
    """Defines a task of pairs for a decoder, which reads the source and predicts the target.

    The target follows the source in the same row; the loss counts only the target and its end.
    """

    source: Pairs
    """Where the text comes from: prompts and answers."""
    vocab: Tokenizer
    """How prompts and answers are tokenized."""
    template: str = "{prompt}\n"
    """Text before an answer, in training and decoding; {prompt} is the prompt."""

    rows_kind = PromptRows

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.template.count(PROMPT) != 1:
            raise UserError(
                f"{type(self).__name__}.template = {self.template!r}: found {PROMPT} "
                f"{self.template.count(PROMPT)} times.  Legal: once."
            )
        if self.source.tags:
            raise UserError(
                f"{type(self).__name__}.source: its tags ({', '.join(self.source.tags)}) are for "
                "encoders.  Unset them; the template sets the text around each prompt."
            )

    @property
    def has_newlines(self) -> bool:
        """Returns whether what a model reads is sure to have newlines: those of the template."""
        return "\n" in self.template

    has_answers = True

    def prompt(self, line: str) -> str:
        """Returns what a model reads before it answers."""
        return self.template.replace(PROMPT, line)

    def pairs_of(self, part: Pairs, split: str) -> Iterator[Pair]:
        """Yields the pairs of one part of a split, which may have tabs and newlines."""
        return part.read_prompts(split, self.clean.errors)

    @property
    def array_lengths(self) -> dict[str, int]:
        return {**super().array_lengths, "loss_mask_BL": self.length}

    def columns(self, vocabs: Vocabs) -> dict[str, tuple[int, type]]:
        return {**super().columns(vocabs), "loss_mask": (self.length, np.uint8)}

    def chunk_packer(self, vocabs: Vocabs) -> PackChunk:
        def pack(pairs: Sequence[Any], tag: str | None, training: bool) -> tuple[Packed, Counts]:
            prompted = [pair._replace(source=self.prompt(pair.source)) for pair in pairs]
            packed = packed_preferences if training and self.has_rejected else packed_prompts
            return packed(prompted, vocabs.target, self.length, packs=self.packs)

        return pack

    def row_settings(self, vocabs: Vocabs) -> dict[str, Any]:
        return {"reads_begin": vocabs.target.reads_begin}

    def fills(self, counts: Counts) -> dict[str, float]:
        """Returns the share of positions in the rows that hold a token of a prompt or an answer."""
        return {"fill": (counts.tokens + counts.source_tokens) / (counts.rows * self.length)}

    def summary(self, counts: Counts) -> str:
        return (
            f"{counts.lines:,} prompts of {counts.source_tokens:,} tokens with answers of "
            f"{counts.words:,} words, {counts.tokens:,} tokens, in {counts.rows:,} rows of "
            f"{self.length}, {self.fills(counts)['fill']:.1%} full; {counts.left_out:,} longer "
            "than a row"
        )


@spec
class PreferenceTask(PromptTask):
    """Defines a task of prompts, each with a preferred and a rejected answer, for `@Dpo()`.

    A training row contains both answers, each after its prompt: segments 1 and 2, 3 and 4 and so on
    are the preferred and the rejected answer.  The other splits contain only the preferred answers.
    """

    source: Preferences
    """Where the text comes from."""

    has_rejected = True

    def summary(self, counts: Counts) -> str:
        return (
            f"{counts.lines:,} prompts with two answers each, of {counts.tokens:,} tokens, in "
            f"{counts.rows:,} rows of {self.length}, {self.fills(counts)['fill']:.1%} full; "
            f"{counts.left_out:,} longer than a row"
        )


def packed_prompts(
    pairs: Sequence[Pair], vocab: Vocab, length: int, *, packs: bool
) -> tuple[Packed, Counts]:
    """Packs pairs of a prompt and, right after it, its answer; leaves out those that do not fit."""
    prompts = vocab.encode([pair.source for pair in pairs])
    answers = vocab.encode([pair.target for pair in pairs])
    halves = zip(prompts, answers, strict=True)
    examples = [np.r_[-1 - read.astype(np.int32), said.astype(np.int32)] for read, said in halves]
    kept, packed = packed_answers(examples, length, vocab.end_id, vocab.dtype, packs=packs)
    # Without begin_id, nothing predicts the first token after an empty prompt.
    read_only = 0 if vocab.reads_begin else sum(not len(prompts[i]) for i in kept)
    counts = Counts.of_pairs(
        [pairs[i] for i in kept],
        tokens=sum(len(answers[i]) + 1 for i in kept) - read_only,
        rows=packed.rows,
        source_tokens=sum(len(prompts[i]) for i in kept) + read_only,
        left_out=len(pairs) - len(kept),
    )
    return packed, counts


def packed_answers(
    examples: Sequence[np.ndarray], length: int, end_id: int, dtype: type, *, packs: bool
) -> tuple[list[int], Packed]:
    """Packs the examples that fit a row, for a loss on answers only; returns their indices, too.

    A packer has a single array of tokens.  In it, tokens of prompts are negative: -1 - id.
    """
    kept = [i for i, example in enumerate(examples) if len(example) < length]
    packer = Packer(Side(length, np.int32, end_id), packs=packs)
    packer.add([examples[i] for i in kept])
    packed = packer.finish()
    signed_BL, segments_BL = packed.arrays["targets"], packed.arrays["segments"]
    arrays = {
        "targets": np.where(signed_BL < 0, -1 - signed_BL, signed_BL).astype(dtype),
        "segments": segments_BL,
        "loss_mask": ((signed_BL >= 0) & (segments_BL > 0)).astype(np.uint8),
    }
    pieces = packed.pieces.copy()
    pieces[:, 0] = np.array(kept, np.int64)[pieces[:, 0]]
    return kept, Packed(arrays, pieces)


def packed_preferences(
    pairs: Sequence[Preference], vocab: Vocab, length: int, *, packs: bool
) -> tuple[Packed, Counts]:
    """Packs both answers of each prompt into one row, each right after the prompt."""
    prompts, chosen, rejected = (vocab.encode([pair[i] for pair in pairs]) for i in range(3))
    # While they are packed, the ids of rejected answers are larger by `far`.
    far, end = vocab.size, np.array([vocab.end_id])
    examples = list[np.ndarray]()
    for prompt, good, bad in zip(prompts, chosen, rejected, strict=True):
        read = -1 - prompt.astype(np.int32)
        parts = (read, good, end, read - far, bad.astype(np.int32) + far)
        examples.append(np.concatenate(parts).astype(np.int32))
    kept, packed = packed_answers(examples, length, vocab.end_id + far, np.int32, packs=packs)
    ids_BL, segments_BL = packed.arrays["targets"], packed.arrays["segments"]
    is_rejected_BL = (ids_BL >= far) & (segments_BL > 0)
    of_answers_BL = np.where(segments_BL > 0, 2 * segments_BL - 1 + is_rejected_BL, 0)
    arrays = packed.arrays | {
        "targets": (ids_BL - far * is_rejected_BL).astype(vocab.dtype),
        "segments": of_answers_BL.astype(segments_BL.dtype),
    }
    example, row, segment = packed.pieces.T
    pieces = [np.stack([example, row, 2 * segment - which], axis=1) for which in (1, 0)]
    counts = Counts.of_pairs(
        [pairs[i] for i in kept],
        tokens=sum(len(chosen[i]) + len(rejected[i]) + 2 for i in kept),
        rows=packed.rows,
        source_tokens=2 * sum(len(prompts[i]) for i in kept),
        left_out=len(pairs) - len(kept),
    )
    return Packed(arrays, np.stack(pieces, axis=1).reshape(-1, 3)), counts

"""Defines tasks of translation, for models with an encoder."""

from collections.abc import Iterator

from configs.errors import UserError
from configs.spec import spec
from data.packing.rows import Counts, packed_pairs
from data.sources.pairs import Pair, tag_word
from data.task import Length, PackChunk
from data.tasks.pairs import EncoderTask, PairTask
from data.vocab import Tokenizer
from data.vocabs import SOURCE_FILE, TARGET_FILE, Vocabs


@spec
class Translation(PairTask, EncoderTask):
    """Defines a translation task: pairs of a source and a target, for an encoder-decoder."""

    vocab: Tokenizer
    """The target's tokenizer. If source_vocab is None, it serves and is trained on both sides."""
    source_vocab: Tokenizer | None = None
    """A separate vocabulary for the source. None: both sides share one."""
    length: Length
    """Target tokens per row."""
    source_length: Length
    """Source tokens per row. Pairs that are longer than a row on either side are dropped."""

    @property
    def tags(self) -> tuple[str, ...]:
        return self.source.tags

    def test_pairs(self, split: str) -> Iterator[tuple[str, str | None, list[Pair]]]:
        for name, part in self.source.parts_of(split).items():
            yield name, part.tag, list(self.pairs_of(part, split))

    @property
    def source_vocab_file(self) -> str:
        return TARGET_FILE if self.source_vocab is None else SOURCE_FILE

    @property
    def vocab_settings(self) -> dict[str, Tokenizer]:
        source_settings = {} if self.source_vocab is None else {SOURCE_FILE: self.source_vocab}
        return {**super().vocab_settings, **source_settings}

    def make_vocabs(self, given: Vocabs | None) -> Vocabs:
        tags = list(dict.fromkeys(map(tag_word, self.tags)))
        if given is not None:
            target, source = given.target, given.of_source
        elif self.source_vocab is None:
            source = target = self._make_vocab(self.vocab, "vocab", tags)
        else:
            source = self._make_vocab(self.source_vocab, "source vocab", tags)
            target = self._make_vocab(self.vocab, "target vocab", [])
        for tag in tags:
            [ids] = source.encode([tag])
            if len(ids) != 1:
                raise UserError(
                    f"{self.name}: its source vocab splits {tag} into {len(ids)} sub-words, but a "
                    "tag must be one.  Use a vocab that was trained with it, or let the task train "
                    "one."
                )
        return Vocabs(target, source)

    def chunk_packer(self, vocabs: Vocabs) -> PackChunk:
        lengths = self.length, self.source_length
        return lambda pairs, tag, training: packed_pairs(pairs, vocabs, lengths, self.packs, tag)

    def numbers(self, counts: Counts) -> dict[str, int | str]:
        fills = self.fills(counts)
        return {
            "pairs": counts.lines,
            "source words": counts.source_words,
            "words": counts.words,
            "source tokens": counts.source_tokens,
            "tokens": counts.tokens,
            "rows": counts.rows,
            "source fill": f"{fills['source_fill']:.1%}",
            "fill": f"{fills['fill']:.1%}",
        }

    def summary(self, counts: Counts) -> str:
        fills = self.fills(counts)
        return (
            f"{counts.lines:,} pairs, {counts.source_words:,} and {counts.words:,} words, "
            f"{counts.source_tokens:,} and {counts.tokens:,} tokens in {counts.rows:,} rows of "
            f"{self.source_length} and {self.length}, {fills['source_fill']:.1%} and "
            f"{fills['fill']:.1%} full"
        )

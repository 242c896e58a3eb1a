"""Defines what tasks of models with an encoder have in common."""

from configs.spec import abstract_spec
from data.packing.pack import place_dtype
from data.packing.pair_rows import PairRows
from data.packing.rows import Counts
from data.task import Length, Task
from data.vocabs import TARGET_FILE, Vocabs


@abstract_spec
class EncoderTask(Task):
    """Defines a task whose rows have a source, which an encoder reads, and a target."""

    source_length: Length
    """Source tokens per row."""

    rows_kind = PairRows

    @property
    def row_lengths(self) -> dict[str, int]:
        return {**super().row_lengths, "source_length": self.source_length}

    @property
    def array_lengths(self) -> dict[str, int]:
        names = ("inputs_BM", "segments_BM", "positions_BM")
        return {**dict.fromkeys(names, self.source_length), **super().array_lengths}

    @property
    def source_vocab_file(self) -> str:
        return TARGET_FILE

    def columns(self, vocabs: Vocabs) -> dict[str, tuple[int, type]]:
        return {
            **super().columns(vocabs),
            "sources": (self.source_length, vocabs.of_source.dtype),
            "source_segments": (self.source_length, place_dtype(self.source_length)),
        }

    def fills(self, counts: Counts) -> dict[str, float]:
        """Returns the share of slots in the rows that hold a token, on each side."""
        source_fill = counts.source_tokens / (counts.rows * self.source_length)
        return {**super().fills(counts), "source_fill": source_fill}

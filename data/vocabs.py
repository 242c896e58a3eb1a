"""The vocabs of a task: of the target, and of the source where there is one."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from configs.errors import UserError
from data.sources.pairs import tag_word
from data.task import Task, Translation
from data.vocab import UNK_WORD, SentencePiece, Vocab, make

Report = Callable[[str], None]
Side = Literal["target", "source", "both"]

TARGET_FILE, SOURCE_FILE = "vocab.model", "source_vocab.model"


class Vocabs(NamedTuple):
    """A language model has no source; the two of a joint vocab are equal."""

    target: Vocab
    source: Vocab | None

    @property
    def of_source(self) -> Vocab:
        assert self.source is not None, "only a translation has a source"
        return self.source

    def hashes(self) -> dict[str, str]:
        """Names the hash of each, as a manifest keeps it."""
        found = {"vocab_hash": self.target.hash}
        return found if self.source is None else {**found, "source_vocab_hash": self.source.hash}

    def files(self) -> dict[str, bytes]:
        """Names the files that keep them, with their content."""
        found = {TARGET_FILE: self.target.model}
        if self.source is not None and self.source.hash != self.target.hash:
            found[SOURCE_FILE] = self.source.model
        return found

    def save(self, folder: Path) -> None:
        for name, model in self.files().items():
            (folder / name).write_bytes(model)

    @classmethod
    def load(cls, folder: Path, task: Task) -> "Vocabs":
        target = Vocab.load(folder / TARGET_FILE)
        if not isinstance(task, Translation):
            return cls(target, None)
        joint = task.source_vocab is None
        return cls(target, target if joint else Vocab.load(folder / SOURCE_FILE))


def make_vocabs(
    task: Task, vocab: Vocab | None, source_vocab: Vocab | None, report: Report
) -> Vocabs:
    """Trains the vocabs of a task, or loads them, but for those that are given."""

    def made(settings: SentencePiece, side: Side, words: list[str]) -> Vocab:
        name = "vocab" if side == "both" else f"{side} vocab"
        report(f"{task.name}: {name} of {settings.size} sub-words")
        return make(settings, _text(task, side), words=words)

    tags = [tag_word(tag) for tag in task.tags]
    if not isinstance(task, Translation):
        words = [] if task.word_list is None else [UNK_WORD]
        return Vocabs(vocab or made(task.vocab, "both", words), None)
    if task.source_vocab is None:
        source = target = vocab or made(task.vocab, "both", tags)
    else:
        source = source_vocab or made(task.source_vocab, "source", tags)
        target = vocab or made(task.vocab, "target", [])
    _check_tags(task, source)
    return Vocabs(target, source)


def _text(task: Task, side: Side) -> Iterator[str]:
    """Yields what a vocab is trained on."""
    if not isinstance(task, Translation):
        yield from task.source.lines("train")
        return
    for part in task.source.parts_of("train").values():
        pairs = part.untagged("train", task.clean.errors)
        for source, target in task.clean.kept(pairs, "train", Counter()):
            if side != "target":
                yield source
            if side != "source":
                yield target


def _check_tags(task: Task, vocab: Vocab) -> None:
    for tag in task.tags:
        [ids] = vocab.encode([tag_word(tag)])
        if len(ids) != 1:
            raise UserError(
                f"{task.name}: its source vocab spells the tag {tag!r} with {len(ids)} sub-words, "
                "and a tag is one.  Take a vocab that was trained with it, or let the task train "
                "one."
            )

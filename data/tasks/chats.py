"""Defines tasks of chats, in which a decoder learns the answers."""

import json
from collections.abc import Sequence

import numpy as np

from configs.errors import UserError, brief
from configs.spec import spec
from data.packing.pack import Packed
from data.packing.rows import Counts, Rows
from data.sources.pairs import Pair, Pairs
from data.task import PackChunk
from data.tasks.prompts import PromptTask, packed_answers
from data.tokenizers.tokenizer_json import CONFIG, TEMPLATE, TokenizerJson, TokenizerJsonVocab
from data.vocabs import Vocabs


@spec
class ChatTask(PromptTask):
    """Defines a task of chats with any number of messages, for a decoder.

    The chat template of the vocab formats a chat as one text.  The loss counts the tokens of the
    assistant's messages: those between `{% generation %}` and `{% endgeneration %}` in the
    template.  Without them, it counts what each of these messages adds to the text, with its end.
    """

    source: Pairs
    """Where the chats come from, such as @JsonlChats()."""
    vocab: TokenizerJson
    """How chats are tokenized; it includes the chat template."""
    template: str = "{prompt}"
    """Text that `decode` and `/v1/completions` give to the model; {prompt} is the prompt. Only
    `/v1/chat/completions` uses the chat template of the vocab."""

    has_chats = True

    def pack_lines(
        self, lines: Sequence[str], vocabs: Vocabs, tag: str | None
    ) -> tuple[Rows, Sequence[str]]:
        """Packs lines in memory, each a message, a tab and the answer."""
        chats = []
        for said, tab, answer in (line.partition("\t") for line in lines):
            chat = {"role": "user", "content": said}, {"role": "assistant", "content": answer}
            chats.append(f"{json.dumps(chat)}{tab}{answer}")
        return super().pack_lines(chats, vocabs, tag)

    def chunk_packer(self, vocabs: Vocabs) -> PackChunk:
        from data.tokenizers.chat_template import BadMessages, chat_template

        vocab = vocabs.target
        template = chat_template(vocab.files, *vocab.pieces([vocab.end_id]))
        if template is None or not isinstance(vocab, TokenizerJsonVocab):
            raise UserError(
                f"{self.name}: its vocab has no chat template ({TEMPLATE}, or chat_template in "
                f"{CONFIG}).  Use the tokenizer of a chat model, or @PromptTask()."
            )
        begin = [-1 - vocab.begin_id] if vocab.reads_begin else []

        def read(chat: str) -> np.ndarray:
            """Returns the tokens of a chat up to its last answer, as `encode_marked` does."""
            try:
                ids = vocab.encode_marked(*template.answers(json.loads(chat)))
            except BadMessages as error:
                problem = f"the chat template rejects a chat: {error}.  The chat: {brief(chat)}"
                raise UserError(f"{self.name}: {problem}") from None
            is_read_anyway = begin and ids[:1].tolist() == begin
            return ids[bool(is_read_anyway) : 1 + np.flatnonzero(ids >= 0).max(initial=-1)]

        def pack(pairs: Sequence[Pair], tag: str | None, training: bool) -> tuple[Packed, Counts]:
            chats = [read(pair.source) for pair in pairs]
            end = -1 - vocab.end_id  # not learned: the template ends an answer
            kept, packed = packed_answers(chats, self.length, end, vocab.dtype, packs=self.packs)
            tokens = int(packed.arrays["loss_mask"].sum())
            return packed, Counts.of_pairs(
                [pairs[i] for i in kept],
                tokens=tokens,
                rows=packed.rows,
                source_tokens=sum(len(chats[i]) for i in kept) - tokens,
                left_out=len(pairs) - len(kept),
            )

        return pack

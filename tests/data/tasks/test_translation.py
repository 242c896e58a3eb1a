"""Tasks of translation: tags, and what they refuse."""

import pytest

from configs.errors import UserError
from data.sources.pair_kinds import Mixture, Phrases
from data.sources.text import Docstrings
from data.task import Task
from data.tasks.translation import Translation
from data.tokenizers.sentence_piece import SentencePiece


def translation(**changes):
    settings = {"name": "x", "source": Phrases(), "vocab": SentencePiece(), "length": 9}
    return Translation(**(settings | {"source_length": 7} | changes))


def test_a_translation_has_no_word_list():
    with pytest.raises(UserError, match=r"Translation.word_list = 'words'"):
        translation(word_list="words")


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_tag_of_a_language_needs_the_languages_of_a_mixture(is_mixed):
    part = Phrases(language="{language}", tag="2{language}")
    source = Mixture(parts=[part]) if is_mixed else part
    with pytest.raises(UserError, match=r"tag = '2\{language\}': only Mixture.languages replace"):
        translation(source=source)
    spoken = translation(source=Mixture(parts=[part], languages=["de", "fr"]))
    assert spoken.tags == ("2de", "2fr")


def test_a_task_knows_the_tags_of_its_parts():
    parts = [Phrases(language="en", target_language=x, tag=f"2{x}") for x in ("de", "fr", "de")]
    assert translation(source=Mixture(parts=parts)).tags == ("2de", "2fr")
    assert translation().tags == ()
    assert Task(name="x", source=Docstrings(), vocab=SentencePiece(), length=8).tags == ()

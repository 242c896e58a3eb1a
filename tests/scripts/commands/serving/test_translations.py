"""A server of a translation model: n-best with scores, equal to those of `decode`."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from configs.errors import UserError
from models.spec import TransformerSpec
from scripts.commands.shared_flags import BeamFlags
from tests.scripts.commands.serving.browser import opened
from tests.scripts.commands.serving.client import Client
from tests.scripts.commands.serving.servers import decoded, restored, serving
from tests.scripts.conftest import Place, call
from tests.scripts.test_translation import params, write_pairs
from tests.toys import optax_promotion


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A translation model of two steps."""
    folder = tmp_path_factory.mktemp("served_translation")
    write_pairs(folder)
    place = Place(folder, folder / "train.src")
    settings = [
        *params(folder),
        "Run.steps = 2",
        "Translation.source_length = 16",
        "Run.evaluate_every = None",
        "Run.best_by = 'loss'",
    ]
    flags = ["--gin_file=layouts/whole.gin", *(f"--gin_param={line}" for line in settings)]
    with optax_promotion():
        assert call("train", place.model_dir, f"--data_dir={folder / 'data'}", *flags) == 0
    return place


@pytest.fixture(scope="module")
def client(place: Place) -> Iterator[Client]:
    with serving(place.folder / "run", queue=100) as client:
        yield client


def test_translations_are_those_of_decode(client: Client, place: Place) -> None:
    lines = ["kara lora", "mitu", "", "nera karalost mira kavo"]

    def ask(count: int) -> Any:
        return client.post("/v1/translate", text=lines, n=count, stream=False).json["translations"]

    with ThreadPoolExecutor(4) as pool:
        answers = [*pool.map(ask, (1, 2, 3, 4))]
    assert client.metric("meshloom_compilations_total") == 0
    with restored(place.folder / "run") as model:
        expected = decoded(model, lines)
    for count, answer in enumerate(answers, 1):
        assert [each["source"] for each in answer] == lines
        for each, hypotheses in zip(answer, expected, strict=True):
            texts = [one["text"] for one in each["hypotheses"]]
            scores = [(one["score"], one["log_probability"]) for one in each["hypotheses"]]
            assert texts == [one.text for one in hypotheses[:count]]
            np.testing.assert_allclose(scores, [one[1:] for one in hypotheses[:count]], rtol=1e-5)
    assert [len(each["hypotheses"]) for each in answers[-1]] == [4, 4, 1, 4]


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"text": "kara", "n": 5}, 422, ["n = 5", "1 to 4"]),
        ({"text": "kara " * 40}, 422, ["text = ", "at most 15 tokens"]),
        ({"text": "kara", "max_tokens": 999}, 422, ["max_tokens = 999"]),
        ({"text": "kara", "tag": "de"}, 422, ["tag = 'de'", "no tags"]),
        ({"prompt": "kara"}, 422, ["text is missing"]),
        ({"text": "kara", "stream": True}, 422, ["stream = True", "false"]),
        ({"text": ["kara"] * 101 + [""]}, 422, ["text = ", "at most 100 texts, not 101: --queue"]),
    ],
    ids=lambda value: value if isinstance(value, int) else "",
)
def test_a_bad_request_is_explained(
    client: Client, fields: dict[str, Any], status: int, words: list[str]
) -> None:
    answer = client.post("/v1/translate", **fields)
    assert answer.status == status
    assert all(word in answer.json["error"]["message"] for word in words), answer.text


def test_the_maximum_of_tokens_may_exceed_what_sources_suggest(place: Place) -> None:
    with serving(place.folder / "run", slots=1, search=BeamFlags(max_tokens=70)) as client:
        [answer] = client.post("/v1/translate", text="kara lora").json["translations"]
        assert client.metric("meshloom_compilations_total") == 0
    with restored(place.folder / "run") as model:
        [expected] = decoded(model, ["kara lora"], max_tokens=70)
    assert answer["hypotheses"][0]["text"] == expected[0].text


def test_translations_begin_with_the_prefix_of_the_server(place: Place) -> None:
    with serving(place.folder / "run", prefix="lora mitu") as client:
        [answer] = client.post("/v1/translate", text="kara lora").json["translations"]
        assert client.metric("meshloom_compilations_total") == 0
    with restored(place.folder / "run") as model:
        [expected] = decoded(model, ["kara lora"], prefix="lora mitu")
    assert [each["text"] for each in answer["hypotheses"]] == [expected[0].text]
    assert expected[0].text.startswith("lora mitu")


def test_a_prefix_leaves_room_for_a_translation(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TransformerSpec, "max_length", 40)
    with (
        pytest.raises(UserError, match=r"--prefix has \d+ tokens, which leave no room"),
        serving(place.folder / "run", prefix="lora mitu " * 40),
    ):
        pass


def test_a_translation_model_continues_no_prompts(client: Client) -> None:
    assert client.post(prompt="kara").status == 404
    assert client.get("/v1/models").json["data"][0]["kind"] == "translation"


def test_the_page_shows_the_best_translations_with_scores(client: Client) -> None:
    [answer] = client.post("/v1/translate", text="kara lora", n=4).json["translations"]
    with opened(client) as page:
        page.fill("textarea", "kara lora")
        page.get_by_role("button", name="Translate").click()
        page.wait_for_selector("#answers li")
        texts = page.locator("#answers .text").all_inner_texts()
        scores = page.locator("#answers .score").all_inner_texts()
        page.fill("[name=max_tokens]", "7")
        page.fill("textarea", "kara " * 40)
        page.keyboard.press("Control+Enter")
        page.wait_for_selector("#error:not([hidden])")
        assert "at most 15 tokens" in page.inner_text("#error")
    assert texts == [one["text"] or "(empty)" for one in answer["hypotheses"]]
    assert [score.split()[1] for score in scores] == [
        f"{one['score']:.3f}" for one in answer["hypotheses"]
    ]

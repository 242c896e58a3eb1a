"""Answers to lm-evaluation-harness: those of its Hugging Face backend, and of one text at a time.

To record them again, with lm_eval, torch and transformers: `python -m tests.trainer.test_harness`
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from lm_eval.api.instance import Instance
from tokenizers import decoders, models, processors

from configs.errors import UserError
from data.vocab import EOS, PAD
from layouts.layout import Layout
from models.transformer import Transformer
from scripts.commands.decoding.decode import decoder_of
from scripts.commands.shared_flags import SearchFlags
from tests.toys import ROOT
from tests.trainer.checkpoints.huggingface import test_convert as huggingface
from tests.trainer.word_models import DECODER, LENGTH, PAIR, SPLIT, VOCAB, losses, toy
from trainer import harness
from trainer.checkpoints.restore import TrainedModel
from trainer.harness import HarnessModel

GOLDEN = ROOT / "tests" / "golden" / "harness.json"
CASES = ("llama", "qwen2")
"""Their tokenizers put a begin token before texts, and none."""
MERGES = [" a", " b", "ab", "cd", "ef", " ab", "abcd", "de", "fg", "hi", "ij", "kl", "mn", "op",
          "qr", "st", "uv", "wx", "yz"]  # fmt: skip
LONG = "ab cd, ij a " * 20
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAIRS = [
    ("a b", "c d"), ("ef a ", "b"), ("", " ab"), ("", "cd ij"), (LONG, " ef"), ("a", "bcd ef"),
    ("no", LONG[:50]), ("a b", " ab"), ("a b", "g"), ("ef a", "cd"),
    *(("so ab ", x) for x in LETTERS),
]  # fmt: skip
TEXTS = ["", "a", "ab cd ef", LONG, LONG * 2, "hi " * 40]
CONTINUED = [
    *((x, {"until": ["jaz", "gggg"], "max_gen_toks": 40}) for x in ("a b", "ef a", "cd", LONG)),
    *((x, {"until": "\n", "do_sample": False, "max_gen_toks": 9}) for x in ("a b", "hi")),
]


def instances(kind: Any, arguments: list[Any]) -> list[Instance]:
    return [Instance(kind, {}, tuple(args), i, ("toy", i, 1)) for i, args in enumerate(arguments)]


def ask(model: Any) -> dict[str, Any]:
    """What a model answers to all requests, as JSON has it."""
    answers = {
        "pairs": model.loglikelihood(instances("loglikelihood", PAIRS)),
        "texts": model.loglikelihood_rolling(
            instances("loglikelihood_rolling", [[text] for text in TEXTS])
        ),
        "continued": model.generate_until(instances("generate_until", CONTINUED)),
    }
    restored: dict[str, Any] = json.loads(json.dumps(answers))
    return restored


def write_model(folder: Path, name: str) -> None:
    """Writes a recorded model with a tokenizer of 50 tokens, some of which join words."""
    huggingface.write_model(folder, huggingface.golden()[name])
    tokens = ["<pad>", "<s>", "</s>", *LETTERS, " ", ","]
    merges = [(pair[:-1], pair[-1]) if len(pair) < 4 else ("ab", "cd") for pair in MERGES]
    vocab = {token: i for i, token in enumerate([*tokens, *MERGES])}
    made = tokenizers.Tokenizer(models.BPE(vocab, merges))
    made.decoder = decoders.Fuse()
    made.add_special_tokens(["<pad>", "<s>", "</s>"])
    if name == "llama":
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
        )
    (folder / "tokenizer.json").write_text(made.to_str())
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    template = "{% for message in messages %}{{ message.content }}, {% endfor %}"
    (folder / "chat_template.jinja").write_text(template)


def harness_model(trained: TrainedModel, **settings: Any) -> HarnessModel:
    return HarnessModel(
        trained, 4, lambda: decoder_of([trained], SearchFlags(beam=1), 4), **settings
    )


@pytest.fixture(scope="module", params=CASES)
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A recorded model on four devices, and its name."""
    folder = tmp_path_factory.mktemp("harness")
    write_model(folder / "model", request.param)
    huggingface.import_hf(folder / "model", folder / "run")
    layout = Layout(mesh="data:2,model:2", rules="batch:data;vocab:model;kv_heads:model")
    return request.param, huggingface.trained_of(folder / "run", layout)


@pytest.mark.few(1)
def test_answers_are_those_of_the_hugging_face_backend(
    imported: tuple[str, TrainedModel], log_lines: list[str]
) -> None:
    name, trained = imported
    expected, answers = json.loads(GOLDEN.read_text())[name], ask(harness_model(trained))
    scores, flags = zip(*answers["pairs"], strict=True)
    expected_scores, expected_flags = zip(*expected["pairs"], strict=True)
    np.testing.assert_allclose(scores, expected_scores, rtol=0, atol=1e-4)
    assert flags == expected_flags and len(set(flags)) == 2
    np.testing.assert_allclose(answers["texts"], expected["texts"], rtol=1e-6, atol=1e-4)
    assert answers["continued"] == expected["continued"]
    assert sum("do not fit a row" in line for line in log_lines) == 2


def test_a_chat_is_rendered_by_the_template_of_the_tokenizer(
    imported: tuple[str, TrainedModel],
) -> None:
    model = harness_model(imported[1])
    chat = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    assert model.apply_chat_template(chat) == "ab, c, "
    with pytest.raises(UserError, match="gen_prefix"):
        model.apply_chat_template(chat, add_generation_prompt=False)


@pytest.mark.parametrize("spec", [DECODER, PAIR], ids=["decoder", "encoder and decoder"])
def test_scores_are_those_of_one_text_at_a_time(spec: Transformer) -> None:
    """Of models trained here, which read padding first."""
    model = harness_model(toy(spec, SPLIT))
    pairs = [("kara", " lost"), ("nevo lost tura mitu", " mitu lora neka"), ("kara", " tura")]
    scores = model.loglikelihood(instances("loglikelihood", pairs))
    for (context, text), (score, _) in zip(pairs, scores, strict=True):
        before, ids = (VOCAB.encode([part])[0].tolist() for part in (context, text.strip()))
        np.testing.assert_allclose(score, -losses(spec, before, [ids])[0, : len(ids)].sum(), 1e-5)
    before = VOCAB.encode(["kara"])[0].tolist()
    likeliest = int(losses(spec, before, [[i] for i in range(spec.vocab)])[:, 0].argmin())
    answers = model._loglikelihood_tokens(
        [(("kara", ""), model.tok_encode("kara"), [i]) for i in (likeliest, likeliest - 1)]
    )
    assert [is_likeliest for _, is_likeliest in answers] == [True, False]


def test_a_text_is_scored_without_the_padding_before_it() -> None:
    model, text = harness_model(toy(DECODER, SPLIT)), "kara lost mitu"
    [score] = model.loglikelihood_rolling(instances("loglikelihood_rolling", [(text,)]))
    ids = [*map(int, VOCAB.encode([text])[0])]
    assert PAD not in ids
    np.testing.assert_allclose(score, -losses(DECODER, [], [ids])[0, : len(ids)].sum(), 1e-5)


@pytest.mark.parametrize("spec", [DECODER, PAIR], ids=["decoder", "encoder and decoder"])
def test_texts_are_the_likeliest_tokens_up_to_a_stop(
    spec: Transformer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looking for a stop after some tokens changes nothing."""
    contexts, new = ["kara", "nevo lost tura", "miru miru", "lora neka kara"], 6
    plain = []
    for context in contexts:
        before, tokens = [*map(int, VOCAB.encode([context])[0])], list[int]()
        while len(tokens) < new and EOS not in tokens:
            choices = [[*tokens, token] for token in range(spec.vocab)]
            tokens.append(int(np.argmin(losses(spec, before, choices)[:, len(tokens)])))
        plain.append(VOCAB.decode(tokens))
    stop = plain[1][2:4]
    expected = [text.split(stop)[0] for text in plain]
    assert len(set(expected)) > 2 and expected != plain
    requests = [(context, {"until": [stop], "max_gen_toks": new}) for context in contexts]
    for first in (2, new):
        monkeypatch.setattr(harness, "FIRST_NEW_TOKENS", first)
        model = harness_model(toy(spec, SPLIT))
        assert model.generate_until(instances("generate_until", requests)) == expected


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_gen_toks": LENGTH}, f"{LENGTH} new tokens"),
        ({"max_gen_toks": 2, "num_beams": 3}, "has num_beams"),
    ],
)
def test_a_generation_that_is_impossible_is_refused(settings: dict[str, Any], words: str) -> None:
    model = harness_model(toy(DECODER))
    with pytest.raises(UserError, match=words):
        model.generate_until(instances("generate_until", [("kara", settings)]))


def test_requests_that_no_row_holds_are_refused() -> None:
    model = harness_model(toy(DECODER))
    for text, words in (("kara " * 40, "Legal: 1 to 26"), ("", "has 0 tokens")):
        with pytest.raises(UserError, match=words):
            model._loglikelihood_tokens([(("", text), [PAD], model.tok_encode(text, False))])
    with pytest.raises(UserError, match="--harness=toy: it needs a model with no encoder"):
        harness_model(toy(PAIR)).loglikelihood_rolling(
            instances("loglikelihood_rolling", [("kara",)])
        )
    with pytest.raises(UserError, match="no chat template"):
        model.apply_chat_template([])
    with pytest.raises(UserError, match="--tag=de"):
        harness_model(toy(DECODER), tag="de")


if __name__ == "__main__":
    import tempfile

    import transformers
    from lm_eval.models.huggingface import HFLM

    answers = {}
    for name in CASES:
        with tempfile.TemporaryDirectory() as folder:
            write_model(Path(folder), name)
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
            # The cache of lm_eval 0.4.13 gives wrong sums of windows that share their tokens.
            model = HFLM(
                folder, device="cpu", dtype="float32", tokenizer=tokenizer, logits_cache=False
            )
            answers[name] = ask(model)
    GOLDEN.write_text(json.dumps(answers) + "\n")


def test_how_a_task_wants_its_texts_generated() -> None:
    settings = {"until": ["\n"], "do_sample": True, "temperature": 0.5, "top_k": 3}
    sampling, new_tokens, stops = harness.generation_of(settings)
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 3, None)
    assert (new_tokens, stops) == (256, ["\n"])

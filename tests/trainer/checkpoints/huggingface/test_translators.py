"""Translation models: logits, greedy texts and beams of Hugging Face's, recorded and live.

To record the numbers again, with torch and transformers:
`python -m tests.trainer.checkpoints.huggingface.test_translators`
"""

import dataclasses
import functools
import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import sentencepiece
from jax.sharding import NamedSharding
from safetensors.numpy import load_file, save_file

from configs.errors import UserError
from layouts.axes import letters_of
from layouts.layout import Layout
from models.api import Batch, Params
from models.decoding.beam import Beam
from models.decoding.generate import Search
from models.decoding.sampling import Sampling
from models.feed_forward.mlp import Mlp
from models.loss import Criterion
from models.norms import LayerNorm
from models.positions.absolute import Sinusoidal
from models.transformer import TransformerModel
from tests.scripts.conftest import call
from tests.toys import ROOT, WHOLE
from tests.trainer.checkpoints.huggingface.test_convert import (
    LAYOUTS,
    Case,
    change,
    drawn,
    export_hf,
    file_bytes,
    import_hf,
    trained_of,
)
from trainer.checkpoints.huggingface.convert import (
    check_settings,
    closest_family,
    exported_settings,
    settings_of,
    spec_of,
)
from trainer.checkpoints.restore import TrainedModel
from trainer.decoding.decoder import Decoder, Request
from trainer.metrics.jsonl import read_lines

GOLDEN = ROOT / "tests" / "golden" / "translators.json"
CLOSE = 1e-5
"""Of the spread of the logits."""
EVERY = 5
ROWS, SOURCE, TARGET, NEW = 6, 9, 11, 14
LENGTHS = (9, 1, 4, 7, 2, 6)
PADDED = Layout(mesh="x:3", rules="heads:x+;vocab:x+;d_ff:x+;batch:x")
BEAM = Beam(width=4, alpha=1.0, penalty="power")
SIZES = {
    "d_model": 20, "encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 28,
    "decoder_ffn_dim": 28, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "marian": {"activation_function": "swish", "scale_embedding": True},
    "marian, relu": {"activation_function": "relu", "encoder_layers": 1, "decoder_layers": 3},
}
SEEDS = {"marian": 21, "marian, relu": 38}
"""Under which some texts end early and not all."""


@functools.cache
def pieces() -> tuple[bytes, bytes]:
    """Models of SentencePiece for sources and for targets."""
    made = []
    for lines in (
        ["eins zwei drei vier fünf", "sechs sieben acht neun zehn", "eins drei sieben neun"],
        ["one two three four five", "six seven eight nine ten", "one three seven nine"],
    ):
        model = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(lines * 20), model_writer=model, vocab_size=30, bos_id=-1,
            hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip
        made.append(model.getvalue())
    return made[0], made[1]


@functools.cache
def vocabulary() -> dict[str, int]:
    """Ids of Marian: those of both models of SentencePiece, and padding as the last."""
    every = ["</s>", "<unk>", ">>eng<<"]
    for model in pieces():
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        every += [processor.id_to_piece(i) for i in range(processor.vocab_size())]
    return {piece: i for i, piece in enumerate(dict.fromkeys([*every, "<pad>"]))}


PAD, END = len(vocabulary()) - 1, 0


def write_model(folder: Path, case: Case) -> None:
    """Writes the model of a case as Hugging Face does."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case["config"]))
    tensors = {
        name: (tensor * scale_of(name)).astype(np.float32)
        for name, tensor in drawn(case["seed"], case["shapes"]).items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "vocab.json").write_text(json.dumps(vocabulary()))
    for name, model in zip(("source.spm", "target.spm"), pieces(), strict=True):
        (folder / name).write_bytes(model)
    names = {"tokenizer_class": "MarianTokenizer", "source_lang": "deu", "target_lang": "eng"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def scale_of(name: str) -> float:
    """Of random weights, so that texts follow from the sources: biases alone would decide."""
    if name.endswith("bias"):
        return 3.0 if name == "final_logits_bias" else 0.1
    return 3.0 if re.search(r"[qk]_proj|fc\d", name) else 1.0


def pairs(seed: int) -> dict[str, np.ndarray]:
    """Random sources, which end as texts do, and what a decoder reads and predicts."""
    rng = np.random.default_rng(seed)
    sources = rng.integers(1, PAD, (ROWS, SOURCE))
    lengths = np.array(LENGTHS)
    sources[np.arange(ROWS), lengths - 1] = END
    mask = np.arange(SOURCE) < lengths[:, None]
    targets = rng.integers(1, PAD, (ROWS, TARGET))
    inputs = np.pad(targets, ((0, 0), (1, 0)), constant_values=PAD)[:, :-1]
    return {
        "sources": np.where(mask, sources, 0), "mask": mask, "inputs": inputs, "targets": targets,
    }  # fmt: skip


# What Hugging Face says


def record(name: str, folder: Path, seed: int) -> Case:
    """Saves a random model, and returns what it makes of random pairs."""
    import transformers

    given = {
        **SIZES, "vocab_size": PAD + 1, "pad_token_id": PAD, "decoder_start_token_id": PAD,
        "eos_token_id": END, "forced_eos_token_id": None, **CASES[name],
    }  # fmt: skip
    config = transformers.AutoConfig.for_model(name.split(",")[0], **given)
    transformers.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
    shapes = {n: list(x.shape) for n, x in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    case: Case = {"config": config, "shapes": shapes, "seed": seed}
    write_model(folder, case)
    return {**case, **computed_by_hugging_face(folder, pairs(seed))}


def computed_by_hugging_face(folder: Path, given: dict[str, np.ndarray]) -> Case:
    import torch
    import transformers

    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    read = {"input_ids": tensors["sources"], "attention_mask": tensors["mask"].long()}
    ways = {
        "texts": {"num_beams": 1},
        "beams": {"num_beams": 4, "early_stopping": True, "length_penalty": 1.0},
        "patient": {"num_beams": 4, "length_penalty": 1.0},
    }
    with torch.no_grad():
        case: Case = {"logits": model(**read, decoder_input_ids=tensors["inputs"]).logits.numpy()}
        for name, way in ways.items():
            texts = model.generate(
                **read, max_new_tokens=NEW, do_sample=False, bad_words_ids=[[PAD]], **way
            ).numpy()[:, 1:]
            case[name] = [until_end(row) for row in texts.tolist()]
    return case


def until_end(tokens: list[int]) -> list[int]:
    return tokens[: tokens.index(END)] if END in tokens else tokens


@functools.cache
def golden() -> dict[str, Case]:
    cases: dict[str, Case] = json.loads(GOLDEN.read_text())
    return cases


# What comes out here


def batch_of(trained: TrainedModel, layout: Layout, given: dict[str, np.ndarray]) -> Batch:
    case = {name: array.astype(np.int32) for name, array in given.items()}
    rows = np.ones((ROWS, 1), np.int32)
    arrays = {
        "inputs_BM": case["sources"], "segments_BM": case["mask"],
        "positions_BM": rows * np.arange(SOURCE, dtype=np.int32),
        "inputs_BL": case["inputs"], "targets_BL": case["targets"],
        "segments_BL": np.ones_like(case["targets"]),
        "positions_BL": rows * np.arange(TARGET, dtype=np.int32),
    }  # fmt: skip
    return {
        name: jax.device_put(array, NamedSharding(trained.mesh, layout.place(letters_of(name))))
        for name, array in arrays.items()
    }


@functools.partial(jax.jit, static_argnums=0)
def teacher_forced(model: TransformerModel, params: Params, batch: Batch) -> jax.Array:
    network = model.network(params)
    x_BLD = network(batch)[0] * model.spec.logit_scale
    logits_BLV = model.layout.einsum("BLD,VD->BLV", x_BLD, network.output_weights())
    bias_V = model.logit_bias(params)
    if bias_V is None:
        return logits_BLV
    return logits_BLV + model.layout.broadcast_like(bias_V, "V", "BLV")


def logits_of(trained: TrainedModel, layout: Layout, given: dict[str, np.ndarray]) -> np.ndarray:
    batch = batch_of(trained, layout, given)
    with jax.set_mesh(trained.mesh):
        return np.asarray(teacher_forced(trained.model, trained.params, batch))


def decoded(trained: TrainedModel, search: Search, given: dict[str, np.ndarray]) -> list[list[int]]:
    """The best text of each source, without its end."""
    requests = [
        Request([], NEW, source=row[:length].tolist())
        for row, length in zip(given["sources"], LENGTHS, strict=True)
    ]
    decoder = Decoder(
        trained.model, trained.params, trained.mesh, search, ROWS, **trained.vocabs.target.special
    )
    texts = [text for batch in decoder.decode(requests) for text in batch]
    return [hypotheses[0].tokens for _, hypotheses in sorted(texts, key=lambda one: one[0])]


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded models and what they became; tests may read their folders."""
    place = tmp_path_factory.mktemp("translators")
    for name, case in golden().items():
        write_model(place / name, case)
        import_hf(place / name, place / f"{name} run")
    return place


def check_logits(logits: np.ndarray, expected: np.ndarray) -> None:
    assert np.ptp(expected, axis=-1).min() > 0.5  # it has opinions
    np.testing.assert_allclose(logits, expected, rtol=0, atol=CLOSE * np.ptp(expected))


@pytest.mark.parametrize("name", CASES)
def test_recorded_logits_losses_and_texts_come_out(imported: Path, name: str) -> None:
    case, trained = golden()[name], trained_of(imported / f"{name} run", WHOLE)
    given = pairs(case["seed"])
    check_logits(logits_of(trained, WHOLE, given)[..., ::EVERY], np.array(case["logits"]))
    if name == "marian":
        assert len({len(text) for text in case["texts"]}) > 2
        assert decoded(trained, Sampling(temperature=0), given) == case["texts"]
        assert decoded(trained, BEAM, given) == case["beams"] != case["texts"]
        bias_V = trained.params["logit_bias_V"]
        raised = dataclasses.replace(
            trained, params={**trained.params, "logit_bias_V": bias_V.at[PAD].add(99.0)}
        )
        assert decoded(raised, Sampling(temperature=0), given) == case["texts"]  # never padding


@pytest.mark.parametrize("layout", ["fsdp", "padded"])
def test_no_layout_changes_logits_or_texts(imported: Path, layout: str) -> None:
    case = golden()["marian"]
    split = LAYOUTS["fsdp"] if layout == "fsdp" else PADDED
    trained, given = trained_of(imported / "marian run", split), pairs(case["seed"])
    logits = logits_of(trained, trained.model.layout, given)[..., : PAD + 1]
    check_logits(logits[..., ::EVERY], np.array(case["logits"]))
    assert decoded(trained, BEAM, given) == case["beams"]


def with_settings(trained: TrainedModel, **changes: Any) -> TransformerModel:
    assert isinstance(trained.model, TransformerModel)
    return dataclasses.replace(
        trained.model, spec=dataclasses.replace(trained.model.spec, **changes)
    )


@functools.partial(jax.jit, static_argnums=(0, 3))
def smoothed(
    model: TransformerModel, params: Params, batch: Batch, smoothing: float
) -> tuple[jax.Array, Params]:
    """The objective with label smoothing, and its gradients."""

    def objective(params: Params) -> jax.Array:
        return model.loss(params, batch, Criterion(label_smoothing=smoothing)).objective

    return jax.value_and_grad(objective)(params)


@pytest.mark.long
def test_losses_are_those_of_the_logits(imported: Path) -> None:
    """In training and in scoring, also where logits are made slice by slice and split."""
    given, smoothing = pairs(golden()["marian"]["seed"]), 0.1
    trained = trained_of(imported / "marian run", PADDED)
    layout = trained.model.layout
    wide = logits_of(trained, layout, given)[..., : PAD + 1].astype(np.float64)
    losses = np.logaddexp.reduce(wide, -1)[..., None] - wide
    gold = np.take_along_axis(losses, given["targets"][..., None], -1)[..., 0]
    batch, model = batch_of(trained, layout, given), with_settings(trained, loss_chunks=TARGET)
    with jax.set_mesh(trained.mesh):
        scored = np.asarray(trained.model.token_losses(trained.params, batch).loss_BL)
        objective, gradients = smoothed(model, trained.params, batch, smoothing)
    np.testing.assert_allclose(scored, gold, rtol=0, atol=1e-4)
    expected = (1 - smoothing) * gold.sum() + smoothing * losses.mean(-1).sum()
    assert float(objective) == pytest.approx(expected, rel=1e-5)
    assert not np.any(gradients["logit_bias_V"]) and np.any(gradients["embed_VD"])


@pytest.mark.parametrize(
    "changes",
    [
        {"embed_scale": 1.0},
        {"positions": Sinusoidal()},
        {"feed_forward": Mlp(activation="relu", biases=True)},
        {"norm": LayerNorm(epsilon=0.1)},
    ],
    ids=str,
)
def test_each_setting_of_a_marian_matters(imported: Path, changes: dict[str, Any]) -> None:
    case, trained = golden()["marian"], trained_of(imported / "marian run", WHOLE)
    batch = batch_of(trained, WHOLE, pairs(case["seed"]))
    with jax.set_mesh(trained.mesh):
        model = with_settings(trained, **changes)
        logits = np.asarray(teacher_forced(model, trained.params, batch))
    assert np.abs(logits[..., ::EVERY] - case["logits"]).max() > 1e-3


@pytest.mark.parametrize("name", CASES)
def test_a_round_trip_keeps_every_bit(imported: Path, tmp_path: Path, name: str) -> None:
    export_hf(imported / f"{name} run", tmp_path / "out")
    assert file_bytes(tmp_path / "out") == file_bytes(imported / name)
    kept = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    assert kept.keys() == {file.name for file in (imported / name).iterdir()}
    for file in kept.keys() - {"model.safetensors"}:
        assert kept[file] == (imported / name / file).read_bytes()


@pytest.mark.parametrize("name", CASES)
def test_live_hugging_face_gives_the_same_before_and_after(name: str, tmp_path: Path) -> None:
    for module in ("torch", "transformers"):
        pytest.importorskip(module)
    case = record(name, tmp_path / "model", seed=77)
    import_hf(tmp_path / "model", tmp_path / "run")
    trained, given = trained_of(tmp_path / "run", WHOLE), pairs(77)
    check_logits(logits_of(trained, WHOLE, given), case["logits"])
    assert decoded(trained, Sampling(temperature=0), given) == case["texts"]
    assert decoded(trained, BEAM, given) == case["beams"]
    export_hf(tmp_path / "run", tmp_path / "out")
    again = computed_by_hugging_face(tmp_path / "out", given)
    np.testing.assert_array_equal(again["logits"], case["logits"])
    assert again["beams"] == case["beams"]


def test_settings_that_are_made_from_a_model_make_the_same_model() -> None:
    for case in golden().values():
        spec = spec_of(case["config"], "float32", "config.json")
        made = settings_of(spec, "marian")
        check_settings(made, "made")
        assert spec_of(made, "float32", "made") == spec
        assert closest_family(spec) == ("marian", [])
        with pytest.raises(UserError, match=r"Mlp\.gated = True, legal: False"):
            exported_settings(
                dataclasses.replace(spec, feed_forward=Mlp(gated=True, biases=True)), None
            )


@pytest.mark.long
def test_every_command_takes_an_imported_marian(imported: Path, tmp_path: Path) -> None:
    model, tuned, lines = imported / "marian run", tmp_path / "tuned", tmp_path / "lines"
    train = tmp_path / "pairs.tsv"
    train.write_text("eins zwei\tone two\ndrei vier\tthree four\n" * 4)
    lines.write_text("eins zwei\n\n>>eng<< sieben\n")
    settings = (
        "Run.task = @Translation()", "Translation.source = @Tsv()", "Run.steps = 2",
        f"Tsv.train = '{train}'", f"Tsv.validation = '{train}'", "Run.batch_sequences = 2",
        "Translation.length = 24", "Translation.source_length = 32", "Translation.name = 'pairs'",
        "Translation.vocab = %VOCAB", "Translation.source_vocab = %SOURCE_VOCAB",
        f"Run.start_from = '{model}'", "Run.optimizer = @Adafactor()",
    )  # fmt: skip
    flags = [f"--gin_file={model / 'model.gin'}", *(f"--gin_param={one}" for one in settings)]
    layout, data = "--gin_param=Layout.mesh = 'data:1'", f"--data_dir={tmp_path / 'data'}"
    assert call("train", f"--model_dir={tuned}", layout, data, *flags) == 0
    assert [line["step"] for line in read_lines(tuned / "metrics.jsonl")] == [1, 2]
    texts, decode = tmp_path / "texts", ("--beam=1", "--max_tokens=4")
    where = (f"--model_dir={tuned}", layout, f"--input={lines}", f"--output={texts}")
    assert call("decode", *where, *decode) == 0
    assert len(texts.read_text().split("\n")) == 4
    export_hf(tuned, tmp_path / "out")
    before, after = (
        load_file(folder / "model.safetensors")
        for folder in (imported / "marian", tmp_path / "out")
    )
    assert before.keys() == after.keys()
    same = {name for name in before if (before[name] == after[name]).all()}
    assert same == {"final_logits_bias"}  # as in Hugging Face's library, no training changes it
    assert (tmp_path / "out" / "source.spm").read_bytes() == pieces()[0]


def test_a_marian_without_the_files_of_an_import_is_not_exported(
    imported: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(imported / "marian run", tmp_path / "run")
    shutil.rmtree(run / "huggingface")
    with pytest.raises(UserError, match=r"vocab\.json, source\.spm and target\.spm"):
        export_hf(run, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change(normalize_before=True), "normalize_before = True: legal: False"),
        (change(encoder_ffn_dim=30), "encoder_ffn_dim = 30: legal: 28, as decoder_ffn_dim"),
        (change(tie_word_embeddings=False), "tie_word_embeddings = False: legal: True"),
        (change(activation_function="mish"), "activation_function = 'mish': legal: 'silu'"),
        (change(scale_embedding=1), "scale_embedding = 1: legal: true or false"),
        (change(decoder_start_token_id=3), f"begins texts with id {PAD}"),
        (change(share_encoder_decoder_embeddings=False), "share_encoder_decoder_embeddings"),
        (lambda folder: (folder / "target.spm").unlink(), "target.spm"),
        (lambda folder: (folder / "source.spm").unlink(), "source.spm"),
        (lambda folder: (folder / "vocab.json").unlink(), "vocab.json"),
    ],
)
def test_an_import_is_refused_and_leaves_nothing(
    imported: Path, tmp_path: Path, damage: Callable[[Path], object], words: str
) -> None:
    folder = shutil.copytree(imported / "marian", tmp_path / "model")
    damage(folder)
    with pytest.raises(UserError, match=re.escape(words)):
        import_hf(folder, tmp_path / "run")
    assert not (tmp_path / "run").exists()


if __name__ == "__main__":
    import sys
    import tempfile

    cases = dict(golden()) if GOLDEN.exists() else {}
    for name in CASES:
        if name in cases:  # remove it from the file to record it again
            continue
        with tempfile.TemporaryDirectory() as folder:
            case = record(name, Path(folder), seed=SEEDS[name])
        few = np.round(case["logits"][..., ::EVERY].astype(float), 6)
        cases[name] = {**case, "logits": few.tolist()}
        for way in ("texts", "beams", "patient"):
            print(name, way, case[way], file=sys.stderr)
    GOLDEN.write_text(json.dumps(cases))

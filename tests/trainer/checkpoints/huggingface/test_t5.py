"""T5: the logits and the greedy texts of Hugging Face's, recorded and live, and exact round trips.

To record the numbers again, with torch and transformers:
`python -m tests.trainer.checkpoints.huggingface.test_t5`
"""

import dataclasses
import functools
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import sentencepiece
import tokenizers
from jax.sharding import NamedSharding
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from configs.errors import UserError
from data.tokenizers.sentence_piece import SentencePiece
from data.vocab import make
from layouts.axes import letters_of
from models.api import Batch, Params
from models.decoding.generate import DecodeInputs, generate
from models.decoding.sampling import Sampling
from models.feed_forward.mlp import Mlp
from models.positions.relative import Relative
from models.transformer import Transformer, TransformerModel
from scripts.commands.conversion.vocabularies import tokenizer_of
from tests.scripts.conftest import call
from tests.toys import ROOT, WHOLE
from tests.trainer.checkpoints.huggingface.test_convert import export_hf, import_hf
from trainer.checkpoints.huggingface.convert import exported_settings
from trainer.checkpoints.huggingface.tokenizer import sentence_piece_tokenizer
from trainer.checkpoints.manager import Checkpoints
from trainer.checkpoints.restore import ModelRestorer, TrainedModel
from trainer.metrics.jsonl import read_lines
from trainer.model_dir import ModelDir
from trainer.run import Run

VERSIONS = {"v1_0": 52, "v1_1": 36, "umt5": 36, "madlad": 36}
"""Each with a seed under which some texts end early and not all."""
SPREAD = {"v1_0": 1.3}
"""Of weights: more would make Hugging Face's own float32 stray from float64 by the tolerance."""
CLOSE = 1e-4
ROWS, PLACES, NEW = 6, 24, 12
LENGTHS = (24, 1, 7, 22, 13, 4)  # beyond max_distance, too
SIZES = {
    "vocab_size": 50, "d_model": 10, "d_kv": 4, "d_ff": 14, "num_heads": 6, "num_layers": 3,
    "num_decoder_layers": 2, "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 20, "dropout_rate": 0.2,
}  # fmt: skip
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
FORMS: dict[str, dict[str, Any]] = {
    "v1_0": {"feed_forward_proj": "relu"},
    "v1_1": GATED,
    "mt5": GATED,
    "umt5": GATED,
    "madlad": {**GATED, "pad_token_id": 1, "eos_token_id": 2},
}
CLASSES = {"mt5": "MT5", "umt5": "UMT5"}
FILES = ("config.json", "model.safetensors")
Case = dict[str, np.ndarray]


# What Hugging Face says


def record(version: str, folder: Path, seed: int) -> Case:
    """Saves a random T5, and returns what it makes of random pairs."""
    import torch
    import transformers

    rng = np.random.default_rng(seed)
    kind, end = CLASSES.get(version, "T5"), FORMS[version].get("eos_token_id", 1)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **FORMS[version])
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config).eval()
    if version != "v1_0":
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.shared.weight))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            spread = SPREAD.get(version, 1.0)
            weight.copy_(torch.from_numpy(drawn(rng, name, tuple(weight.shape), spread, end)))
    model.save_pretrained(folder)
    write_vocab(version, folder)
    sources, targets = (rng.integers(2, SIZES["vocab_size"], (ROWS, PLACES)) for _ in range(2))
    mask = np.arange(PLACES) < np.array(LENGTHS)[:, None]
    sources = np.where(mask, sources, 0)
    inputs = np.pad(targets, ((0, 0), (1, 0)))[:, :-1]
    given = {"input_ids": torch.from_numpy(sources), "attention_mask": torch.from_numpy(mask)}
    with torch.no_grad():
        logits = model(**given, decoder_input_ids=torch.from_numpy(inputs)).logits.numpy()
        texts = model.generate(
            **given, max_new_tokens=NEW, do_sample=False, num_beams=1, decoder_start_token_id=0
        ).numpy()[:, 1:]
    texts = padded(texts, end)
    pairs = {"sources": sources, "mask": mask, "inputs": inputs, "targets": targets}
    return {**pairs, "logits": logits, "texts": texts}


def padded(texts: np.ndarray, end: int) -> np.ndarray:
    """Texts of Hugging Face with zeros after their end, whatever pads them."""
    texts = np.pad(texts, ((0, 0), (0, NEW - texts.shape[1])))
    ended = np.cumsum(texts == end, axis=1) - (texts == end) > 0
    return np.where(ended, 0, texts)


def drawn(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], spread: float, end: int
) -> np.ndarray:
    """Weights that matter, all of them; coarse ones, which a golden file holds in little space."""
    if "norm" in name:
        weight = rng.uniform(0.5, 1.5, shape)
    elif name in ("shared.weight", "lm_head.weight") or "bias" in name:
        weight = rng.normal(0, 1, shape)
        weight[0] = 0  # padding comes up seldom, the end often
        weight[end] *= 1.5
    else:
        weight = rng.normal(0, spread * shape[1] ** -0.5, shape)
    return np.round(weight * 64).astype(np.float32) / 64


def golden(version: str) -> Path:
    return ROOT / "tests" / "golden" / f"t5_{version}.npz"


@functools.cache
def spiece(size: int = SIZES["vocab_size"]) -> bytes:
    text = ["eins zwei drei vier", "one two three four five", "sechs sieben acht six seven"]
    return make(SentencePiece(size=size, byte_fallback=False), iter(text * 9)).model


def write_vocab(version: str, folder: Path) -> None:
    """Writes the vocabulary of a T5, or one with the ids of MADLAD-400: <unk>, <s> and </s>."""
    if version != "madlad":
        (folder / "spiece.model").write_bytes(spiece())
        return
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), ("▁", -2.0)]
    words = ["eins", "zwei", "drei", "vier", "one", "two", "three", "four"]
    pieces += [(f"▁{word}", -1.0) for word in words]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 0))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"eos_token": "</s>", "pad_token": "<s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    other_ids(folder)  # as MADLAD-400 has it: the decoder's first token is not its <s>


def other_ids(folder: Path) -> None:
    """Writes a vocab with SentencePiece's own ids, as Llama's."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["one two"] * 9), model_writer=model, vocab_size=10
    )
    (folder / "spiece.model").write_bytes(model.getvalue())


# What comes out here


@dataclasses.dataclass
class Imported:
    """A T5 as Hugging Face wrote it, what it says, and the model directory that it became."""

    folder: Path
    case: Case
    model_dir: Path

    @property
    def run(self) -> Run:
        return ModelDir(self.model_dir).load((), ()).make(Run)

    @functools.cached_property
    def trained(self) -> TrainedModel:
        with ModelRestorer(self.model_dir, self.run, WHOLE) as models:
            return models.restore(0)

    @property
    def batch(self) -> Batch:
        case = {name: array.astype(np.int32) for name, array in self.case.items()}
        places = np.tile(np.arange(PLACES, dtype=np.int32), (ROWS, 1))
        return {
            name: jax.device_put(
                array, NamedSharding(self.trained.mesh, WHOLE.place(letters_of(name)))
            )
            for name, array in {
                "inputs_BM": case["sources"], "segments_BM": case["mask"], "positions_BM": places,
                "inputs_BL": case["inputs"], "targets_BL": case["targets"],
                "segments_BL": np.ones_like(places), "positions_BL": places,
            }.items()
        }  # fmt: skip

    def logits(self, part: str | None = None, **changes: Any) -> np.ndarray:
        """Of every next target; under other settings, of a part or of all, if there are changes."""
        spec = self.trained.run.model
        assert isinstance(spec, Transformer)
        if part is not None:
            changes = {part: dataclasses.replace(getattr(spec, part), **changes)}
        model = TransformerModel(dataclasses.replace(spec, **changes), WHOLE)
        with jax.set_mesh(self.trained.mesh):
            return np.asarray(teacher_forced(model, self.trained.params, self.batch))


@functools.partial(jax.jit, static_argnums=0)
def teacher_forced(model: TransformerModel, params: Params, batch: Batch) -> jax.Array:
    network = model.network(params)
    x_BLD = network(batch)[0] * model.spec.logit_scale
    return WHOLE.einsum("BLD,VD->BLV", x_BLD, network.output_weights())


def check_like_hugging_face(imported: Imported) -> None:
    """Logits, losses and greedy texts."""
    case, trained, batch = imported.case, imported.trained, imported.batch
    assert np.ptp(case["logits"], axis=-1).min() > 0.5  # it has opinions
    np.testing.assert_allclose(imported.logits(), case["logits"], rtol=0, atol=CLOSE)

    wide = case["logits"].astype(np.float64)
    gold = np.take_along_axis(wide, case["targets"][..., None], -1)[..., 0]
    with jax.set_mesh(trained.mesh):
        losses = np.asarray(trained.model.token_losses(trained.params, batch).loss_BL)
    np.testing.assert_allclose(losses, np.logaddexp.reduce(wide, -1) - gold, rtol=0, atol=CLOSE)

    none, vocab = np.zeros((ROWS, 0), np.int32), trained.vocabs.target
    max_new_tokens = np.full(ROWS, NEW, np.int32)
    source = {name: array for name, array in batch.items() if name.endswith("M")}
    requested = DecodeInputs(
        none, np.zeros(ROWS, np.int32), np.zeros(ROWS, np.uint32), max_new_tokens, source=source,
        begin_id=vocab.begin_id, stop_ids=vocab.stop_ids,
    )  # fmt: skip
    with jax.set_mesh(trained.mesh):
        greedy = Sampling(temperature=0)
        computed = generate(trained.model, greedy, NEW, trained.params, requested)
    np.testing.assert_array_equal(np.asarray(computed.tokens_BWT)[:, 0], case["texts"])


@pytest.fixture(scope="module", params=VERSIONS)
def imported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Imported:
    """The recorded T5s; tests may read their folders."""
    place = tmp_path_factory.mktemp(request.param)
    case = unpack(request.param, place / "t5")
    return made_of(place / "t5", case, place / "run")


def unpack(version: str, folder: Path) -> Case:
    """Writes the recorded T5 as Hugging Face did, and returns what it said."""
    folder.mkdir()
    with np.load(golden(version)) as file:
        case = dict(file)
    for name in FILES:
        (folder / name).write_bytes(case.pop(name).tobytes())
    write_vocab(version, folder)
    return case


def made_of(folder: Path, case: Case, model_dir: Path) -> Imported:
    import_hf(folder, model_dir)
    return Imported(folder, case, model_dir)


@pytest.fixture
def tied(tmp_path: Path) -> Path:
    """The folder of a T5 v1.0 that a test may change."""
    unpack("v1_0", tmp_path / "t5")
    return tmp_path / "t5"


# Against Hugging Face


@pytest.mark.few(2)
def test_recorded_logits_losses_and_greedy_texts_come_out(imported: Imported) -> None:
    ended = imported.case["texts"][:, -1] == 0
    assert ended.any() and not ended.all()
    assert len(np.unique(imported.case["texts"])) > 10
    check_like_hugging_face(imported)


@pytest.mark.parametrize(
    "changes",
    [
        {"embed_scale": None},
        {"part": "attention", "query_scale": None},
        {"logit_scale": 0.5},
        {"part": "feed_forward", "activation": "silu"},
        {"part": "positions", "max_distance": 128},
    ],
    ids=str,
)
def test_each_setting_of_a_t5_matters(imported: Imported, changes: dict[str, Any]) -> None:
    assert np.abs(imported.logits(**changes) - imported.case["logits"]).max() > 100 * CLOSE


def test_an_mt5_is_a_t5_of_version_1_1(tmp_path: Path) -> None:
    case = unpack("v1_1", tmp_path / "t5")
    settings = json.loads((tmp_path / "t5" / "config.json").read_text())
    # Its official files do not scale hidden states, and its library never does.
    del settings["scale_decoder_outputs"], settings["feed_forward_proj"]
    settings |= {"model_type": "mt5", "tie_word_embeddings": False}
    (tmp_path / "t5" / "config.json").write_text(json.dumps(settings))
    imported = made_of(tmp_path / "t5", case, tmp_path / "run")
    np.testing.assert_allclose(imported.logits(), case["logits"], rtol=0, atol=CLOSE)


def test_a_tokenizer_json_has_sentinels_that_a_spiece_model_lacks(tmp_path: Path) -> None:
    """So it is the vocabulary, where a folder has both."""
    model = spiece()
    (tmp_path / "spiece.model").write_bytes(model)
    ids = {"decoder_start_token_id": 0, "eos_token_id": 1}
    assert isinstance(tokenizer_of(tmp_path, ids), SentencePiece)
    tokenizer = sentence_piece_tokenizer(ModelProto.FromString(model))
    tokenizer.add_special_tokens([f"<extra_id_{i}>" for i in range(100)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    names = {"eos_token": "</s>", "pad_token": "<pad>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(names))
    vocab = make(tokenizer_of(tmp_path, ids), iter(()))
    assert (vocab.begin_id, vocab.end_id) == (0, 1)
    [tokens] = vocab.encode(["a <extra_id_7>"])
    assert vocab.pieces(tokens)[-1] == "<extra_id_7>"


def test_texts_begin_and_end_at_the_ids_of_the_settings(tmp_path: Path) -> None:
    unpack("madlad", tmp_path / "t5")
    change(decoder_start_token_id=0)(tmp_path / "t5")
    import_hf(tmp_path / "t5", tmp_path / "run")
    run = ModelDir(tmp_path / "run").load((), ()).make(Run)
    vocab = ModelDir(tmp_path / "run").vocabs(run.task).target
    assert (vocab.begin_id, vocab.end_id, vocab.pad_id) == (0, 2, 1)
    assert vocab.decode([4, 5, 2, 6]) == "eins zwei"
    export_hf(tmp_path / "run", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    ids = ("decoder_start_token_id", "eos_token_id", "pad_token_id")
    assert [written[name] for name in ids] == [0, 2, 1]
    import_hf(tmp_path / "out", tmp_path / "again")
    assert ModelDir(tmp_path / "again").vocabs(run.task).hashes() == (
        ModelDir(tmp_path / "run").vocabs(run.task).hashes()
    )


@pytest.mark.parametrize("version", FORMS)
def test_live_hugging_face_gives_the_same_before_and_after(version: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    folder, output = tmp_path / "t5", tmp_path / "out"
    imported = made_of(folder, record(version, folder, seed=7), tmp_path / "run")
    check_like_hugging_face(imported)
    shutil.rmtree(imported.model_dir / "huggingface")  # the export writes all files again
    export_hf(imported.model_dir, output)
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(output).eval()
    end = FORMS[version].get("eos_token_id", 1)
    given = {name: torch.from_numpy(imported.case[name]) for name in ("sources", "mask", "inputs")}
    with torch.no_grad():
        logits = model(
            input_ids=given["sources"], attention_mask=given["mask"],
            decoder_input_ids=given["inputs"],
        ).logits.numpy()  # fmt: skip
        texts = model.generate(given["sources"], attention_mask=given["mask"], max_new_tokens=NEW)
    np.testing.assert_array_equal(logits, imported.case["logits"])
    np.testing.assert_array_equal(padded(texts.numpy()[:, 1:], end), imported.case["texts"])


# Round trips


def file_bytes(file: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Type, shape and bytes of every tensor."""
    return {n: (x.dtype.name, x.shape, x.tobytes()) for n, x in load_file(file).items()}


def test_a_round_trip_keeps_every_bit(imported: Imported, tmp_path: Path) -> None:
    export_hf(imported.model_dir, tmp_path)
    expected = file_bytes(imported.folder / "model.safetensors")
    assert file_bytes(tmp_path / "model.safetensors") == expected
    others = {file.name for file in imported.folder.iterdir()} - {"model.safetensors"}
    assert {"config.json"} < others == {f.name for f in tmp_path.iterdir()} - {"model.safetensors"}
    for name in others:
        assert (tmp_path / name).read_bytes() == (imported.folder / name).read_bytes()
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_round_trip_keeps_the_type(tied: Path, tmp_path: Path, dtype: str) -> None:
    tensors = load_file(tied / "model.safetensors")
    save_file(
        {n: x.astype(jax.numpy.dtype(dtype)) for n, x in tensors.items()},
        tied / "model.safetensors",
    )
    expected = file_bytes(tied / "model.safetensors")
    import_hf(tied, tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "out")
    assert file_bytes(tmp_path / "out" / "model.safetensors") == expected
    assert {kind for kind, _, _ in expected.values()} == {dtype}


def test_a_sharded_t5_is_the_same_in_one_file(tied: Path, tmp_path: Path) -> None:
    expected = file_bytes(tied / "model.safetensors")
    tensors = load_file(tied / "model.safetensors")
    (tied / "model.safetensors").unlink()
    files = {name: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for part in set(files.values()):
        save_file({n: x for n, x in tensors.items() if files[n] == part}, tied / part)
    (tied / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    import_hf(tied, tmp_path / "run")
    export_hf(tmp_path / "run", tmp_path / "out")
    assert file_bytes(tmp_path / "out" / "model.safetensors") == expected


def test_copies_and_what_t5_never_reads_are_left_out(
    tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = file_bytes(tied / "model.safetensors")
    tensors = load_file(tied / "model.safetensors")
    shared = tensors["shared.weight"]
    copies = {f"{name}.weight": shared for name in
              ("encoder.embed_tokens", "decoder.embed_tokens", "lm_head")}  # fmt: skip
    unread = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    more = {**copies, unread: np.ones((8, 6), np.float32)}
    save_file(tensors | more, tied / "model.safetensors")
    import_hf(tied, tmp_path / "run")
    said = capsys.readouterr().err
    assert all(f"Left out: {name}," in said for name in more)
    export_hf(tmp_path / "run", tmp_path / "out")
    assert file_bytes(tmp_path / "out" / "model.safetensors") == expected


def test_several_types_become_float32(
    tied: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = load_file(tied / "model.safetensors")
    tensors["shared.weight"] = tensors["shared.weight"].astype(np.float16)
    save_file(tensors, tied / "model.safetensors")
    import_hf(tied, tmp_path / "run")
    assert "float16 and float32" in capsys.readouterr().err
    saved = Checkpoints(tmp_path / "run").describe(0)
    assert saved["params/embed_VD"].dtype == np.float32


def test_an_old_file_without_the_newer_settings_is_read_as_hugging_face_reads_it(
    tied: Path, tmp_path: Path
) -> None:
    """Those of 2020 say neither the activation, nor the largest distance, nor both depths."""
    names = (
        "feed_forward_proj", "relative_attention_max_distance", "num_decoder_layers",
        "scale_decoder_outputs", "tie_word_embeddings", "is_gated_act", "dense_act_fn", "dtype",
    )  # fmt: skip
    settings = json.loads((tied / "config.json").read_text())
    left = {name: value for name, value in settings.items() if name not in names}
    (tied / "config.json").write_text(json.dumps({**left, "num_layers": 2}))
    tensors = load_file(tied / "model.safetensors")
    kept = {name: x for name, x in tensors.items() if not name.startswith("encoder.block.2")}
    save_file(kept, tied / "model.safetensors")
    import_hf(tied, tmp_path / "run")
    spec = Imported(tied, {}, tmp_path / "run").run.model
    assert isinstance(spec, Transformer)
    assert (spec.encoder_layers, spec.layers, spec.tied) == (2, 2, True)
    assert spec.positions == Relative(buckets=8, max_distance=128, shared=True)
    assert spec.feed_forward == Mlp(activation="relu", gated=False)
    assert spec.logit_scale == 10**-0.5


# A run like any other


@pytest.mark.long
def test_every_command_takes_an_imported_t5(tied: Path, tmp_path: Path) -> None:
    run, out, pairs = tmp_path / "run", tmp_path / "out", tmp_path / "pairs.tsv"
    pairs.write_text("eins zwei\tone two\ndrei vier\tthree four\n" * 4)
    (tmp_path / "lines").write_text("eins zwei\n\nsieben\n")
    settings = (
        "Run.task = @Translation()", "Translation.source = @Tsv()", "Run.steps = 2",
        f"Tsv.train = '{pairs}'", f"Tsv.validation = '{pairs}'", "Run.batch_sequences = 2",
        "Translation.length = 24", "Translation.source_length = 32", "Translation.vocab = %VOCAB",
        "Translation.name = 'pairs'", f"Run.start_from = '{run}'", "Run.optimizer = @AdamW()",
    )  # fmt: skip
    import_hf(tied, run)
    flags = (f"--model_dir={run}", "--gin_param=Layout.mesh = 'data:1'")
    lines, texts = f"--input={tmp_path / 'lines'}", f"--output={tmp_path / 'texts'}"
    assert call("decode", *flags, lines, texts, "--beam=1", "--max_tokens=4") == 0
    assert len((tmp_path / "texts").read_text().split("\n")) == 4
    assert call("score", *flags, f"--input={pairs}", f"--output={tmp_path / 'scores'}") == 0
    assert len((tmp_path / "scores").read_text().splitlines()) == 9
    assert call("inspect", "params", *flags) == 0
    tuned = tmp_path / "tuned"
    more = (f"--gin_file={run / 'model.gin'}", *(f"--gin_param={one}" for one in settings))
    data = f"--data_dir={tmp_path / 'data'}"
    assert call("train", f"--model_dir={tuned}", flags[1], data, *more) == 0
    assert [line["step"] for line in read_lines(tuned / "metrics.jsonl")] == [1, 2]

    export_hf(tuned, out)
    before, after = (load_file(folder / "model.safetensors") for folder in (tied, out))
    assert before.keys() == after.keys()
    assert all((before[name] != after[name]).any() for name in before if "bias" not in name)
    export_hf(run, tmp_path / "again")
    again = file_bytes(tmp_path / "again" / "model.safetensors")
    assert again == file_bytes(tied / "model.safetensors")


# What is refused


def change(**settings: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        computed = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(computed | settings))

    return apply


def replace(name: str, tensor: np.ndarray | None) -> Callable[[Path], None]:
    """Another tensor of this name, or none."""

    def apply(folder: Path) -> None:
        tensors = {**load_file(folder / "model.safetensors"), name: tensor}
        kept = {name: x for name, x in tensors.items() if x is not None}
        save_file(kept, folder / "model.safetensors")

    return apply


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def write(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def other_index(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {"shared.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "wanted"),
    [
        (shutil.rmtree, ["t5", "no such folder"]),
        (remove("config.json"), ["config.json is missing", "save_pretrained"]),
        (remove("model.safetensors"), ["model.safetensors is missing"]),
        (remove("spiece.model"), ["tokenizer.json is missing"]),
        (other_index, ["model-00001-of-00001.safetensors is missing"]),
        (write("config.json", b"{"), ["config.json", "not JSON"]),
        (write("config.json", b"[]"), ["config.json", "object (found [])"]),
        (write("model.safetensors", b"x" * 100), ["model.safetensors", "cannot be read"]),
        (write("spiece.model", b"x"), ["spiece.model is not a SentencePiece model"]),
        (other_ids, ["begins texts with id 1 and ends them with 2", "config.json says 0"]),
        (change(model_type="bert"), ["config.json", "model_type = 'bert'", "'t5'"]),
        (
            change(feed_forward_proj="mish", layer_norm_epsilon=-1, d_kv=None),
            ["3 problems", "'mish'", "gated-gelu", "layer_norm_epsilon = -1", "d_kv"],
        ),
        (change(eos_token_id=2), ["ends them with 1", "2 (eos_token_id)"]),
        (change(eos_token_id="2"), ["eos_token_id = '2'", "an integer of at least 0"]),
        (
            change(decoder_start_token_id=2),
            ["begins texts with id 0", "2 (decoder_start_token_id)"],
        ),
        (change(decoder_start_token_id=-1), ["decoder_start_token_id = -1"]),
        (change(is_encoder_decoder=False), ["is_encoder_decoder"]),
        (change(dropout_rate=1), ["dropout_rate = 1"]),
        (change(vocab_size="50"), ["vocab_size = '50'", "integer"]),
        (
            change(num_layers=1),
            ["unexpected", "encoder.block.1.layer.0.SelfAttention.q.weight", "... and"],
        ),
        (change(num_layers=4), ["8 missing", "encoder.block.3.layer.0.SelfAttention.q.weight"]),
        (
            change(d_kv=5),
            ["another shape", "SelfAttention.q.weight: found (24, 10), legal: (30, 10)", "and 18"],
        ),
        (change(feed_forward_proj="gated-gelu"), ["missing", "wi_0", "unexpected", "wi.weight"]),
        (change(tie_word_embeddings=False), ["1 missing", "lm_head.weight"]),
        (
            replace("shared.weight", np.ones((50, 10), np.int32)),
            ["shared.weight", "I32", "float32"],
        ),
        (replace("shared.weight", None), ["1 missing", "shared.weight"]),
        (replace("extra", np.ones(3, np.float32)), ["1 unexpected", "extra"]),
    ],
)
def test_an_import_is_refused_and_leaves_nothing(
    tied: Path, tmp_path: Path, damage: Callable[[Path], object], wanted: list[str]
) -> None:
    damage(tied)
    with pytest.raises(UserError) as error:
        import_hf(tied, tmp_path / "run")
    for words in wanted:
        assert words in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        (
            "Transformer.d_ff = 15",
            ["Transformer.d_ff: 14 in the files, 15 set", "Transformer.scan"],
        ),
        ("Mlp.activation = 'silu'", ["Mlp.activation"]),
        ("SentencePiece.model_file = 'other.model'", ["vocabulary"]),
        ("Translation.source_vocab = @SentencePiece()", ["source_vocab"]),
        ("Transformer.d_fff = 15", ["d_fff", "d_ff"]),
    ],
)
def test_settings_that_are_not_the_t5s_are_refused(
    tied: Path, tmp_path: Path, setting: str, wanted: list[str]
) -> None:
    with pytest.raises(UserError) as error:
        import_hf(tied, tmp_path / "run", gin_param=(setting,))
    for words in wanted:
        assert words in str(error.value)
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_beyond_the_embedding_is_refused(tied: Path, tmp_path: Path) -> None:
    (tied / "spiece.model").write_bytes(spiece(60))
    with pytest.raises(UserError, match=r"Transformer\.vocab = 50.*60 tokens"):
        import_hf(tied, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_no_run_and_no_model_is_overwritten(imported: Imported, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in imported.model_dir.rglob("*") if p.is_file()}
    with pytest.raises(UserError, match="already contains a run"):
        import_hf(imported.folder, imported.model_dir)
    with pytest.raises(UserError, match=r"contains model\.safetensors, config\.json, "):
        export_hf(imported.model_dir, imported.folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        import_hf(imported.folder, tmp_path / "file")
    with pytest.raises(UserError, match="is a file"):
        export_hf(imported.model_dir, tmp_path / "file")
    assert before == {p: p.read_bytes() for p in imported.model_dir.rglob("*") if p.is_file()}


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        (
            ["Transformer.positions = @Sinusoidal()"],
            ["Transformer.positions = @Sinusoidal(), legal: @Relative()"],
        ),
        (["Transformer.kv_heads = 3"], ["t5 cannot express", "Transformer.kv_heads = 3, legal: 6"]),
        (["Transformer.encoder_layers = 0"], ["Transformer.positions = @Relative()"]),
        (["Transformer.source_vocab = 60"], ["Transformer.source_vocab = 60"]),
        (
            ["Transformer.feed_forward = @Moe()", "Moe.experts = 2"],
            ["Transformer.feed_forward = @Moe(), legal: @Mlp()"],
        ),
    ],
    ids=str,
)
def test_a_model_that_t5_cannot_express_is_not_exported(
    imported: Imported, settings: list[str], wanted: list[str]
) -> None:
    run = ModelDir(imported.model_dir).load((), tuple(settings)).make(Run)
    with pytest.raises(UserError) as error:
        exported_settings(run.model, None)
    for words in wanted:
        assert words in str(error.value).replace("umt5", "t5")


def test_an_export_multiplies_weights_by_the_scales_that_t5_lacks(
    tied: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    import_hf(tied, run)
    shutil.rmtree(run / "huggingface")
    scales = (
        "Transformer.embed_scale = 3.0", "MultiHead.query_scale = 0.4",
        "Transformer.logit_scale = 0.7",
    )  # fmt: skip
    config = ModelDir(run).load((), scales)
    ModelDir(run).save(config, config.make(Run), ModelDir(run).vocabs(config.make(Run).task))
    export_hf(run, tmp_path / "out")
    import_hf(tmp_path / "out", tmp_path / "again")
    with np.load(golden("v1_0")) as file:
        case = {name: array for name, array in file.items() if name not in FILES}
    before, after = (Imported(tied, case, folder).logits() for folder in (run, tmp_path / "again"))
    assert np.abs(before - case["logits"]).max() > 0.5
    np.testing.assert_allclose(after, before, rtol=0, atol=CLOSE)


if __name__ == "__main__":
    import tempfile

    for version, seed in VERSIONS.items():
        with tempfile.TemporaryDirectory() as name:
            case = record(version, Path(name), seed=seed)
            files = {
                file: np.frombuffer((Path(name) / file).read_bytes(), np.uint8) for file in FILES
            }
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **case, **files)
        golden(version).write_bytes(buffer.getvalue())
        print(golden(version), len(buffer.getvalue()), case["texts"], sep="\n")

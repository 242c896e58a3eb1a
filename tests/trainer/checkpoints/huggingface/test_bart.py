"""BART, mBART, M2M-100 and NLLB: logits and texts of Hugging Face's, recorded and live.

To record the numbers again, with torch and transformers:
`python -m tests.trainer.checkpoints.huggingface.test_bart`
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from safetensors.numpy import load_file, save_file
from tokenizers import models, pre_tokenizers, processors

from configs.errors import UserError
from models.decoding.generate import Search
from models.decoding.sampling import Sampling
from models.positions.absolute import Learned, Sinusoidal
from models.transformer import Transformer
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
from tests.trainer.checkpoints.huggingface.test_translators import (
    BEAM,
    EVERY,
    LENGTHS,
    NEW,
    PADDED,
    ROWS,
    SIZES,
    SOURCE,
    TARGET,
    check_logits,
    logits_of,
    scale_of,
)
from trainer.checkpoints.huggingface.convert import closest_family, settings_of, spec_of
from trainer.checkpoints.restore import TrainedModel
from trainer.decoding.decoder import Decoder, Request, TokenHypothesis

pytestmark = pytest.mark.usefixtures("float64")
WIDE = ('Precision.compute = "float64"',)
GOLDEN = ROOT / "tests" / "golden" / "bart.json"
WORDS = [
    "eins", "zwei", "drei", "vier", "fünf", "sechs", "sieben", "acht", "neun", "zehn", "one", "two",
    "three", "four", "five",
]  # fmt: skip
TOKENS = ["<s>", "<pad>", "</s>", "<unk>", *WORDS, "deu_Latn", "eng_Latn"]
PAD, END = 1, 2
GERMAN, ENGLISH = map(TOKENS.index, ("deu_Latn", "eng_Latn"))
CASES: dict[str, dict[str, Any]] = {
    "m2m_100": {},
    "bart": {"activation_function": "gelu", "forced_eos_token_id": None},
    "mbart": {
        "activation_function": "relu", "scale_embedding": True, "encoder_layers": 1,
        "decoder_start_token_id": END, "forced_eos_token_id": None,
    },
}  # fmt: skip
SEEDS = {"m2m_100": 118, "bart": 74, "mbart": 68}
"""Under which some texts end early and not all."""


def write_model(folder: Path, case: Case) -> None:
    """Writes the model of a case as Hugging Face does, with a tokenizer such as NLLB's."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(case["config"]))
    tensors = {
        name: (tensor * scale_of(name)).astype(np.float32)
        for name, tensor in drawn(case["seed"], case["shapes"]).items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    ids = {token: i for i, token in enumerate(TOKENS)}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([*TOKENS[:4], *TOKENS[-2:]])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="deu_Latn $A </s>", special_tokens=[("deu_Latn", GERMAN), ("</s>", END)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))


def pairs(seed: int) -> dict[str, np.ndarray]:
    """Random sources, each after its language, and what a decoder reads and predicts."""
    rng = np.random.default_rng(seed)
    sources = rng.integers(3, GERMAN, (ROWS, SOURCE))
    sources[:, 0], lengths = GERMAN, np.maximum(LENGTHS, 2)
    sources[np.arange(ROWS), lengths - 1] = END
    mask = np.arange(SOURCE) < lengths[:, None]
    targets = rng.integers(3, GERMAN, (ROWS, TARGET))
    targets[:, 0] = ENGLISH
    inputs = np.pad(targets, ((0, 0), (1, 0)), constant_values=END)[:, :-1]
    return {
        "sources": np.where(mask, sources, PAD), "mask": mask, "inputs": inputs,
        "targets": targets,
    }  # fmt: skip


def computed_by_hugging_face(folder: Path, given: dict[str, np.ndarray]) -> Case:
    import torch
    import transformers

    wide = torch.float64  # both sides compute in it, as round-off grows in some of these models
    model = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=wide).eval()
    tensors = {name: torch.from_numpy(array) for name, array in given.items()}
    read = {"input_ids": tensors["sources"], "attention_mask": tensors["mask"].long()}
    ways = {"texts": {"num_beams": 1}, "beams": {"num_beams": 4, "early_stopping": True}}
    with torch.no_grad():
        case: Case = {"logits": model(**read, decoder_input_ids=tensors["inputs"]).logits.numpy()}
        for name, way in ways.items():
            rows = model.generate(
                **read, max_new_tokens=NEW, do_sample=False, forced_bos_token_id=ENGLISH,
                length_penalty=1.0, **way,
            ).numpy()[:, 1:]  # fmt: skip
            assert (rows[:, 0] == ENGLISH).all()
            texts = [row[1:] for row in rows.tolist()]
            case[name] = [row[: row.index(END)] if END in row else row for row in texts]
    return case


def record(kind: str, folder: Path, seed: int) -> Case:
    """Saves a random model, and returns what it makes of random pairs."""
    import transformers

    given = {**SIZES, "vocab_size": len(TOKENS), "pad_token_id": PAD, **CASES[kind]}
    config = transformers.AutoConfig.for_model(kind, **given)
    transformers.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder)
    shapes = {n: list(x.shape) for n, x in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    case: Case = {"config": config, "shapes": shapes, "seed": seed}
    write_model(folder, case)
    return {**case, **computed_by_hugging_face(folder, pairs(seed))}


def decoded(
    trained: TrainedModel, search: Search, given: dict[str, np.ndarray]
) -> list[list[TokenHypothesis]]:
    """The texts of each source after the target's language."""
    requests = [
        Request([ENGLISH], NEW - 1, source=row[row != PAD].tolist()) for row in given["sources"]
    ]
    special = trained.vocabs.target.special
    decoder = Decoder(trained.model, trained.params, trained.mesh, search, ROWS, **special)
    texts = [text for batch in decoder.decode(requests) for text in batch]
    return [hypotheses for _, hypotheses in sorted(texts, key=lambda one: one[0])]


def greedy_texts(trained: TrainedModel, given: dict[str, np.ndarray]) -> list[list[int]]:
    return [text.tokens for [text] in decoded(trained, Sampling(temperature=0), given)]


def ranked_as_there(text: TokenHypothesis) -> float:
    """Hugging Face counts the language of a text in its length, and its end if it has one."""
    return text.log_probability / (len(text.tokens) + 1 + (len(text.tokens) < NEW - 1))


def golden(kind: str) -> Case:
    return json.loads(GOLDEN.read_text())[kind]


@pytest.fixture(scope="module")
def folders(float64: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The recorded models and what they became; tests may read their folders."""
    places = {kind: tmp_path_factory.mktemp(kind) for kind in CASES}
    for kind, place in places.items():
        write_model(place / "model", golden(kind))
        import_hf(place / "model", place / "run", WIDE)
    return places


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("m2m_100", "whole"),
        ("m2m_100", "fsdp"),
        ("bart", "whole"),
        ("bart", "padded"),
        ("mbart", "fsdp"),
    ],
)
def test_recorded_logits_and_texts_come_out(
    folders: dict[str, Path], kind: str, layout: str
) -> None:
    case = golden(kind)
    split = {"whole": WHOLE, "padded": PADDED}.get(layout) or LAYOUTS["fsdp"]
    trained, given = trained_of(folders[kind] / "run", split), pairs(case["seed"])
    logits = logits_of(trained, trained.model.layout, given)[..., : len(TOKENS)]
    check_logits(logits[..., ::EVERY], np.array(case["logits"]))
    assert len({len(text) for text in case["texts"]}) > 1
    assert greedy_texts(trained, given) == case["texts"]
    beams = [max(texts, key=ranked_as_there).tokens for texts in decoded(trained, BEAM, given)]
    assert beams == case["beams"]


@pytest.mark.parametrize("kind", CASES)
def test_a_model_and_its_export_are_equal(
    folders: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    export_hf(folders[kind] / "run", tmp_path / "out")
    assert file_bytes(tmp_path / "out") == file_bytes(folders[kind] / "model")
    spec = spec_of(golden(kind)["config"], "float32", "config.json")
    learned = Learned(by_stack=True, scaled=False, first=2)
    assert spec.positions == (Sinusoidal(first=2) if kind == "m2m_100" else learned)
    assert spec_of(settings_of(spec, kind), "float32", "made") == spec
    assert closest_family(spec) == (kind, [])


@pytest.mark.parametrize("kind", CASES)
def test_live_hugging_face_gives_the_same_before_and_after(tmp_path: Path, kind: str) -> None:
    for module in ("torch", "transformers"):
        pytest.importorskip(module)
    case = record(kind, tmp_path / "model", seed=78)
    import_hf(tmp_path / "model", tmp_path / "run", WIDE)
    trained, given = trained_of(tmp_path / "run", WHOLE), pairs(78)
    check_logits(logits_of(trained, WHOLE, given), case["logits"])
    assert greedy_texts(trained, given) == case["texts"]
    export_hf(tmp_path / "run", tmp_path / "out")
    again = computed_by_hugging_face(tmp_path / "out", given)
    np.testing.assert_array_equal(again["logits"], case["logits"])


def test_decode_takes_both_languages(folders: dict[str, Path], tmp_path: Path) -> None:
    imported = folders["m2m_100"]
    lines, texts = tmp_path / "lines", tmp_path / "texts"
    lines.write_text("deu_Latn eins zwei drei\ndeu_Latn sechs\n")
    where = (f"--model_dir={imported / 'run'}", f"--input={lines}", f"--output={texts}")
    layout = "--gin_param=Layout.mesh = 'data:1'"
    assert call("decode", *where, layout, "--prefix=eng_Latn", "--beam=1", "--max_tokens=6") == 0
    trained = trained_of(imported / "run", WHOLE)
    sources = [[GERMAN, *(TOKENS.index(w) for w in line), END] for line in (WORDS[:3], WORDS[5:6])]
    requests = [Request([ENGLISH], 6, source=source) for source in sources]
    special = trained.vocabs.target.special
    greedy = Sampling(temperature=0)
    decoder = Decoder(trained.model, trained.params, trained.mesh, greedy, 2, **special)
    hypotheses = dict(text for batch in decoder.decode(requests) for text in batch)
    expected = [trained.vocabs.target.decode(hypotheses[i][0].tokens) for i in range(2)]
    assert [text.strip() for text in texts.read_text().splitlines()] == expected


def test_a_file_may_lack_the_prefix_and_the_bias_of_logits(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    """As that of facebook/bart-base does, whose class is BartModel."""
    folder = shutil.copytree(folders["bart"] / "model", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["final_logits_bias"]
    bare = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(bare, folder / "model.safetensors", {"format": "pt"})
    change(architectures=["BartModel"], forced_bos_token_id=0, min_length=3)(folder)
    import_hf(folder, tmp_path / "run", WIDE)
    spec = trained_of(tmp_path / "run", WHOLE).run.model
    assert isinstance(spec, Transformer) and not spec.logit_bias
    export_hf(tmp_path / "run", tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(exported[name], tensor)


def test_rows_beyond_the_table_of_positions_are_refused(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trained = trained_of(folders["bart"] / "run", WHOLE)
    limit = SIZES["max_position_embeddings"]
    assert trained.run.task.row_lengths == {"length": limit, "source_length": limit}
    (lines := tmp_path / "lines.tsv").write_text("eins\tone\n")
    where = f"--model_dir={folders['bart'] / 'run'}", "--gin_param=Layout.mesh = 'data:1'"
    longer = "--gin_param=Translation.source_length=65"
    assert call("score", *where, f"--input={lines}", longer) == 2
    assert "source_length = 65: the model has positions for 64" in capsys.readouterr().err


def test_another_padding_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["m2m_100"] / "model", tmp_path / "model")
    change(pad_token_id=0)(folder)
    with pytest.raises(UserError, match=re.escape("pad_token_id = 0: legal: 1")):
        import_hf(folder, tmp_path / "run")


if __name__ == "__main__":
    import sys
    import tempfile

    recorded = dict[str, Case]()
    for name, number in SEEDS.items():
        with tempfile.TemporaryDirectory() as made:
            case = record(name, Path(made), seed=number)
        print(name, case["texts"], case["beams"], file=sys.stderr)
        few = np.round(case["logits"][..., ::EVERY].astype(float), 6)
        recorded[name] = {**case, "logits": few.tolist()}
    GOLDEN.write_text(json.dumps(recorded))

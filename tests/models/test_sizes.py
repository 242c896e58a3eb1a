"""Parameter counts of the published models, counted without allocating a weight."""

import math

import jax
import pytest

from configs.load import load
from layouts.lint.recorder import record
from models.transformer import Transformer
from scripts.commands.inspect.layout import model_of
from tests.toys import ROOT
from trainer.run import Run

# Shazeer et al. 2018, Tables 2 and 3, in billions.
LANGUAGE = ["0.14", "0.22", "0.37", "0.67", "1.28", "2.48", "4.90"]
TRANSLATION = ["0.15", "0.24", "0.42", "0.77", "1.48", "2.89", "0.21"]
# Vaswani et al. 2017, Table 3, in millions.
ATTENTION = {"base": 65, "big": 213}


def counted(name: str) -> tuple[Transformer, int]:
    """A model's settings and its weights, as many as its file says."""
    path = f"configs/models/{name}.gin"
    spec = model_of(load([path]))
    assert isinstance(spec, Transformer)
    weights = record(lambda layout: spec.model(layout).init(jax.random.key(0))).weights
    count = sum(math.prod(weight.shape) for weight in weights)
    assert f" {count:,} weights" in (ROOT / path).read_text()
    return spec, count


@pytest.mark.parametrize("billions", LANGUAGE)
def test_mesh_tensorflow_language_models_have_their_published_sizes(billions: str) -> None:
    spec, count = counted(f"mtf_lm_{billions}b")
    assert spec.vocab == 32_768 and not spec.has_encoder
    assert f"{count / 1e9:.2f}" == billions


@pytest.mark.parametrize("billions", TRANSLATION)
def test_mesh_tensorflow_translation_models_have_their_published_sizes(billions: str) -> None:
    spec, count = counted(f"mtf_wmt_{billions}b")
    assert spec.vocab == 32_640 and spec.source_vocab is None
    assert spec.tied == (billions == "0.21")
    assert f"{count / 1e9:.2f}" == billions


@pytest.mark.parametrize("size", ATTENTION)
def test_attention_is_all_you_need_has_about_its_published_sizes(size: str) -> None:
    spec, count = counted(f"attention_is_all_you_need_{size}")
    assert spec.tied and spec.source_vocab is None
    # Theirs have offsets, and a vocabulary that the paper rounds.
    assert count == pytest.approx(ATTENTION[size] * 1e6, rel=0.04)


def test_transformer_tiny_has_its_published_size() -> None:
    assert f"{counted('transformer_tiny')[1] / 1e6:.1f}" == "2.6"


# Lepikhin et al. 2020, Table 1, in billions.
GSHARD = {"12.5b": 12.5, "37b": 37, "50b": 50, "150b": 150, "200b": 200, "600b": 600, "1t": 1000}


@pytest.mark.parametrize("name", GSHARD)
def test_gshards_models_have_about_their_published_sizes(name: str) -> None:
    spec, count = counted(f"gshard_{name}")
    assert spec.vocab == 32_000 and spec.source_vocab == 64_000 and spec.moes
    # The seven numbers fit a billion of 1000 x 2^20, rounded.
    assert count / (1000 * 2**20) == pytest.approx(GSHARD[name], rel=0.02)


@pytest.mark.parametrize(("name", "layers"), [("dense_2.3b", 96), ("bilingual_0.4b", 12)])
def test_gshards_dense_baselines_have_their_sizes(name: str, layers: int) -> None:
    spec, count = counted(f"gshard_{name}")
    assert spec.layers + spec.encoder_layers == layers and not spec.moes
    assert f"{count / 1e9:.1f}b" == name.partition("_")[2]


# The Giant Models guide, Table 1, in billions.
GIANT = {"64b": 64, "128b": 128, "1t": 1000, "4t": 4000}


@pytest.mark.parametrize("size", GIANT)
def test_giant_models_have_their_published_sizes(size: str) -> None:
    spec, count = counted(f"giant_{size}")
    assert spec.d_kv * spec.heads == 2 * spec.d_model  # the guide names heads of 128 and the width
    assert count == pytest.approx(GIANT[size] * 1e9, rel=0.11)  # it rounds to powers of two


def test_the_guide_prints_one_exact_number() -> None:
    assert counted("giant_128b")[1] == 137_702_416_384


# MaxText's scale rule from its 1B, in billions beside the embeddings, and the rows on each chip.
MAXTEXT = {"16b": (15.6, 6), "32b": (31.1, 4), "64b": (62.3, 2), "128b": (124.6, 1)}


@pytest.mark.parametrize("size", MAXTEXT)
def test_maxtexts_models_have_their_published_sizes(size: str) -> None:
    spec, count = counted(f"maxtext_{size}")
    billions, rows = MAXTEXT[size]
    embeddings = 2 * spec.vocab * spec.d_model
    assert (count - embeddings) / 1e9 == pytest.approx(billions, rel=0.003)
    run = load([f"configs/models/maxtext_{size}.gin"]).make(Run)
    assert run.batch_sequences == 256 * rows and run.task.length == spec.length == 2048


def test_llama_2_has_its_published_size() -> None:
    assert counted("llama2_70b")[1] == 68_976_648_192
    assert counted("llama3_8b")[1] == 8_030_261_248
    assert counted("llama3_70b")[1] == 70_553_706_496


def test_mixtral_has_its_published_size() -> None:
    assert counted("mixtral_8x7b")[1] == 46_702_792_704


RECIPES = sorted(
    path.stem
    for family in ("mtf", "attention", "gshard", "giant", "maxtext", "llama2")
    for path in (ROOT / "configs/models").glob(f"{family}_*.gin")
    if "include 'configs/models/" in path.read_text()  # a size, not what sizes share
)


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_for_accelerators_compute_in_bfloat16(name: str) -> None:
    """GShard's compute in float32, except the 1T (section 4.3)."""
    spec = model_of(load([f"configs/models/{name}.gin"]))
    assert isinstance(spec, Transformer)
    stored = "bfloat16" if name == "giant_4t" else "float32"
    computed = "float32" if name.startswith("gshard") and name != "gshard_1t" else "bfloat16"
    assert (spec.precision.compute, spec.precision.store) == (computed, stored)

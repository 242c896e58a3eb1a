"""Adapters of one model in one server: each answers as its run does alone, and wrong ones."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from configs.errors import UserError
from scripts.commands.shared_flags import CheckpointFlags
from tests.scripts.commands.serving.servers import decoded, restored, serving
from tests.scripts.conftest import Place, call
from tests.toys import optax_promotion

ADAPTERS = {
    "all": ("Lora.rank = 3",),
    "mlp": ("Lora.rank = 2", "Lora.targets = ('mlp/w*',)", "Run.seed = 5"),
}
OTHERS = {
    "narrow": ("Precision.store = 'bfloat16'", "Precision.compute = 'bfloat16'"),
    "embed": ("Lora.targets = ('embed', 'wq')",),
    "capped": ("Transformer.logit_cap = 9.0",),
}
PROMPTS = ("lo", "ipsum do", "a")


@pytest.fixture(scope="module")
def runs(trained: Place, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """The directories of a model, and of adapters of it that change what it says."""
    folder = tmp_path_factory.mktemp("adapters")
    base = trained.folder / "run"
    common = ("Transformer.adapter = @Lora()", f"Run.start_from = '{base}'", "Constant.peak = 0.3",
              "Run.optimizer = @AdamW()", "AdamW.schedule = @Constant()")  # fmt: skip
    with optax_promotion():
        for name, settings in (ADAPTERS | OTHERS).items():
            flags = trained.flags(*common, *settings)
            assert call("train", f"--model_dir={folder / name}", *flags) == 0
    yield {"run": base, **{name: folder / name for name in ADAPTERS | OTHERS}}


def test_each_adapter_answers_as_its_run_alone(runs: dict[str, Path]) -> None:
    base, *adapters = (runs[name] for name in ("run", *ADAPTERS))
    expected = {}
    for name, model_dir in zip(("run", *ADAPTERS), (base, *adapters), strict=True):
        with restored(model_dir) as model:
            texts = decoded(model, PROMPTS, max_tokens=9, temperature=0)
            expected |= {(name, p): best.text for p, [best] in zip(PROMPTS, texts, strict=True)}
    names = {name for name, _ in expected}
    assert len({tuple(expected[name, p] for p in PROMPTS) for name in names}) == 3
    given = tuple(map(str, adapters))
    with serving(base, adapter=given) as client, ThreadPoolExecutor(6) as pool:
        how = {"max_tokens": 9, "temperature": 0, "echo": True}
        answers = pool.map(lambda x: client.post(model=x[0], prompt=x[1], **how), expected)
        for (name, prompt), answer in zip(expected, answers, strict=True):
            assert answer.status == 200 and answer.json["model"] == name
            assert answer.json["choices"][0]["text"] == expected[name, prompt], (name, prompt)
            assert answer.json["system_fingerprint"] == ("step-4" if name == "run" else "step-4+4")
        assert client.post(prompt="lo").json["model"] == "run"
        refused = client.post(model="other", prompt="lo")
        assert refused.status == 404
        assert "Legal: 'run', 'all', 'mlp'" in refused.json["error"]["message"]
        listed = client.get("/v1/models").json["data"]
        assert [model["id"] for model in listed] == ["run", "all", "mlp"]
        assert [model.get("adapter_step") for model in listed] == [None, 4, 4]


def test_the_types_of_a_run_and_the_name_of_a_link_do_not_matter(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "poems").symlink_to(runs["narrow"])
    with serving(runs["run"], adapter=(str(tmp_path / "poems"),)) as client:
        assert client.post(model="poems", prompt="lo", max_tokens=3).json["model"] == "poems"


def test_what_is_no_adapter_of_the_model_is_refused(
    runs: dict[str, Path], trained: Place, tmp_path: Path
) -> None:
    base = runs["run"]
    older = CheckpointFlags(model_dir=base, checkpoint="2")
    shutil.copytree(runs["all"], tmp_path / "mlp")
    (tmp_path / "plain").symlink_to(base)
    for adapters, model, problem in (
        ((tmp_path / "plain",), {}, "no adapters there"),
        ((base,), {}, "two models are named run"),
        ((tmp_path,), {}, "no trained model there"),
        ((runs["all"],), {"model": older}, "step 2 is served.*--checkpoint=4 serves that step"),
        ((runs["embed"],), {}, r"embed: adapters of embed_VD are not served with others"),
        ((runs["capped"],), {}, r"of another model than the one served: Transformer.logit_cap = "),
        ((runs["mlp"], tmp_path / "mlp"), {}, "two models are named mlp"),
        ((runs["all"],), {"model": CheckpointFlags(model_dir=base, weights="int8")}, "legal with"),
    ):
        given = tuple(map(str, adapters))
        with pytest.raises(UserError, match=problem), serving(base, adapter=given, **model):
            pass

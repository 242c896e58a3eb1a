"""A newer checkpoint takes the place of the one that is served; no request is dropped."""

import dataclasses
import json
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.scripts.commands.serving.client import WAIT_S, Client, Reply
from tests.scripts.commands.serving.servers import decoded, restored, serving
from tests.scripts.conftest import Place
from trainer.resume.history import record_of, time_now


def test_a_newer_checkpoint_is_served_without_dropping_requests(
    trained: Place, tmp_path: Path
) -> None:
    """Each answer is that of the checkpoint that it names."""
    made, model_dir = trained.folder / "run", tmp_path / "run"
    shutil.copytree(made, model_dir)
    newest = model_dir / "checkpoints" / "4"
    shutil.move(newest, tmp_path / "4")

    def ask(client: Client, seed: int) -> Reply:
        return client.post(prompt="lo", max_tokens=9, seed=seed, echo=True)

    with serving(model_dir, reload_s=0.05, max_length=15) as client, ThreadPoolExecutor(6) as pool:
        before = [*pool.map(lambda seed: ask(client, seed), range(6))]
        during = [pool.submit(ask, client, seed) for seed in range(30)]
        shutil.move(tmp_path / "4", newest)
        until = time.monotonic() + WAIT_S
        while client.metric("meshloom_checkpoint_step") < 4:
            assert time.monotonic() < until
            during.append(pool.submit(ask, client, len(during)))
            time.sleep(0.01)
        after = [*pool.map(lambda seed: ask(client, seed), range(6))]
        answers = [*before, *(answer.result() for answer in during), *after]
        assert client.metric("meshloom_reloads_total") == 1
    seeds = [*range(6), *range(len(during)), *range(6)]
    assert {answer.status for answer in answers} == {200}
    steps = [answer.json["system_fingerprint"] for answer in answers]
    assert {*steps[:6]} == {"step-2"} and {*steps[-6:]} == {"step-4"}
    for step in (2, 4):
        with restored(made, step) as model:
            for seed, answer in zip(seeds, answers, strict=True):
                if answer.json["system_fingerprint"] == f"step-{step}":
                    [[best]] = decoded(model, ["lo"], max_tokens=9, temperature=1, seed=seed)
                    assert answer.json["choices"][0]["text"] == best.text


def test_a_checkpoint_of_another_run_is_not_served(
    trained: Place, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = tmp_path / "run"
    shutil.copytree(trained.folder / "run", model_dir)
    newest = model_dir / "checkpoints" / "4"
    shutil.move(newest, tmp_path / "4")
    record = record_of(model_dir)
    assert record is not None and record.settings is not None
    settings = record.settings.replace("Run.seed = 0", "Run.seed = 7")
    now = time_now()
    other = dataclasses.replace(record, time=now, began=now, settings=settings)
    with serving(model_dir, reload_s=0.05, max_length=15) as client:
        (model_dir / "history.jsonl").write_text(json.dumps(other.dump()) + "\n")
        shutil.move(tmp_path / "4", newest)
        until = time.monotonic() + WAIT_S
        while "different runs, or records are lost: began " not in caplog.text:
            assert time.monotonic() < until
            time.sleep(0.05)
        assert client.metric("meshloom_checkpoint_step") == 2

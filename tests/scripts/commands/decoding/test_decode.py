"""Tests how the flags of `meshloom decode` choose a search."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from jax import monitoring

from configs.errors import UserError
from data.sources.text import TextFiles
from data.task import Task
from data.tokenizers.sentence_piece import SentencePiece
from models.decoding.beam import Beam
from models.decoding.sampling import Sampling
from scripts.commands.decoding import decode
from scripts.commands.decoding.decode import decoder_of, format_line, options_of, search_of
from scripts.commands.decoding.flags import DecodeFlags
from scripts.commands.shared_flags import CheckpointFlags, SearchFlags
from tests.trainer import word_models
from trainer.decoding.decoder import BatchShape
from trainer.decoding.requests import Hypothesis

TASK = Task(name="toy", source=TextFiles(train="none.txt"), length=8, vocab=SentencePiece(size=64))


@pytest.mark.parametrize("flat", [True, False])
def test_samples_share_a_cache_or_have_their_own(flat: bool) -> None:
    search = search_of(SearchFlags(samples=4, flat=flat), TASK)
    assert isinstance(search, Sampling)
    assert (search.width, search.flat) == (4, flat)


@pytest.mark.parametrize("flat", [True, False])
def test_a_beam_shares_a_cache_or_each_hypothesis_has_its_own(flat: bool) -> None:
    assert search_of(SearchFlags(beam=3, flat=flat), TASK) == Beam(3, flat=flat)


def test_a_text_is_continued_greedily() -> None:
    assert search_of(SearchFlags(), TASK) == Sampling(temperature=0)


def test_beams_and_samples_exclude_each_other() -> None:
    with pytest.raises(UserError, match="choose either search or sampling"):
        search_of(SearchFlags(beam=2, samples=2), TASK)
    with pytest.raises(UserError, match="--temperature=1"):
        search_of(SearchFlags(top_k=2), TASK)


def test_several_texts_of_a_line_are_a_table_by_default() -> None:
    def written(**flags: Any) -> str:
        model = CheckpointFlags(model_dir=Path("none"))
        return DecodeFlags(input="-", model=model, **flags).written_format

    assert (written(), written(nbest=2)) == ("text", "tsv")
    assert (written(format="jsonl"), written(nbest=2, format="text")) == ("jsonl", "text")


def test_texts_with_newlines_are_whole_in_json_and_one_line_elsewhere() -> None:
    hypotheses = [Hypothesis("a\r\n\tb", -1.0, -2.0)]
    [text] = format_line("text", 0, "a", hypotheses)
    [row] = format_line("tsv", 0, "a", hypotheses)
    [entry] = format_line("jsonl", 0, "a", hypotheses)
    assert text == "a  \tb\n"
    assert [*format_line("text", 0, "a", hypotheses, alone=True)] == ["a\r\n\tb\n"]
    assert row.split("\t") == ["1", "1", "-1.000000", "-2.000000", "a   b\n"]
    assert json.loads(entry)["hypotheses"][0]["text"] == "a\r\n\tb"


def test_options_are_flags_of_the_same_names() -> None:
    options = options_of(SearchFlags(max_tokens=7, length_extra=3, tag="de"))
    assert (options.max_tokens, options.length_extra, options.tag) == (7, 3, "de")


def test_the_speed_of_decoding_is_without_compilation(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([100.0, 110.0])
    monkeypatch.setattr(decode, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    throughput = decode.Throughput()
    for part, seconds in (("jaxpr_trace", 1.0), ("backend_compile", 7.0)):
        monitoring.record_event_duration_secs(f"/jax/core/compile/{part}_duration", seconds)
    monitoring.record_event_duration_secs("/jax/compilation_cache/retrieval_time", 0.5)
    throughput.print(40)
    said = "40 lines in 10.0 s, of which 8.0 s to compile: 20.0 lines/s without that."
    assert capsys.readouterr().err.strip() == said


def test_a_scan_decodes_with_layers_that_are_split_once() -> None:
    """On a CPU a scan copies the weights of each layer at each token."""
    spec = dataclasses.replace(word_models.DECODER, layers=2, scan=True)
    decoder = decoder_of([word_models.toy(spec)], SearchFlags(), 2).decoder
    layers = decoder.params["decoder"]["layers_N"]
    assert isinstance(layers, list)
    assert len(layers) == spec.layers
    decoder.check_memory([BatchShape(2, 0, 16, 16)])  # traces it

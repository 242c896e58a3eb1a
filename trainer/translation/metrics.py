"""Computes BLEU, chrF and TER with sacrebleu and its signatures; reads its test sets."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from sacrebleu.dataset import DATASETS
from sacrebleu.dataset.wmt_xml import WMTXMLDataset
from sacrebleu.metrics.base import Metric, Score
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF, CHRFScore
from sacrebleu.metrics.ter import TER, TERScore
from sacrebleu.tokenizers.tokenizer_spm import SPM_MODELS
from sacrebleu.utils import SACREBLEU_DIR

from configs.errors import UserError, did_you_mean
from data.sources.text_files import read_lines

References = Sequence[Sequence[str]]  # each is complete: one text per sentence
RESAMPLES = 1000
# sacrebleu holds all resamples at once: per sentence 8 bytes of index and, for chrF, 18 counts.
SENTENCE_BYTES = 8 + 18 * 4
MAX_RESAMPLE_BYTES = 2 << 30
SEED = "SACREBLEU_SEED"
DIGITS = 12  # of an interval's ends, which sacrebleu returns as text


class Chrf(CHRF):
    """Computes chrF with Python's own number types.

    sacrebleu's bootstrap fails if some resamples score a float32 and others, without a match,
    a float.
    """

    def _compute_score_from_stats(self, stats: Sequence[Any]) -> CHRFScore:
        return super()._compute_score_from_stats(np.asarray(stats).tolist())


class Ter(TER):
    """Computes TER with Python's own number types, for the same reason."""

    def _compute_score_from_stats(self, stats: Sequence[Any]) -> TERScore:
        return super()._compute_score_from_stats(np.asarray(stats).tolist())


@dataclasses.dataclass(frozen=True)
class Measure:
    """Holds one metric in percent, with sacrebleu's full signature.

    `low` and `high` are the ends of sacrebleu's 95 % interval: the mean of the resamples, minus and
    plus half the width of their middle 95 %.  They are None without resamples.
    """

    name: str
    score: float
    low: float | None
    high: float | None
    signature: str
    details: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Components of BLEU, by sacrebleu's names; lengths are in words of the tokenizer."""

    def __str__(self) -> str:
        interval = "" if self.low is None else f" ({self.low:.2f} to {self.high:.2f})"
        return f"{self.name} {self.score:.2f}{interval}"


@dataclasses.dataclass(frozen=True)
class TranslationMetrics:
    """Holds the metrics of some translations.  A lower TER is better; None if not computed.

    A hash is the SHA-256 of the texts, each with a "\\n" at its end.  `sha256sum` prints the same
    for a plain file; several references are concatenated.
    """

    bleu: Measure
    chrf: Measure
    ter: Measure | None
    sentences: int
    hypotheses_hash: str
    references_hash: str

    @property
    def measures(self) -> list[Measure]:
        return [self.bleu, self.chrf] + ([] if self.ter is None else [self.ter])

    def __str__(self) -> str:
        scores = ", ".join(map(str, self.measures))
        signatures = "  ".join(f"{measure.name}|{measure.signature}" for measure in self.measures)
        return f"{scores} on {self.sentences:,} sentences\n{signatures}"

    def as_dict(self) -> dict[str, Any]:
        """Returns names and numbers for JSON; the names are always the same."""
        return {
            **_named("bleu", self.bleu),
            **_named("chrf", self.chrf),
            **_named("ter", self.ter),
            "sentences": self.sentences,
            "hypotheses_hash": self.hypotheses_hash,
            "references_hash": self.references_hash,
        }


def compute_metrics(
    hypotheses: Sequence[str],
    references: References,
    *,
    tokenize: str | None = None,
    resamples: int = RESAMPLES,
    ter: bool = True,
    test_set: str | None = None,
    languages: str | None = None,
    name: str = "hypotheses",
) -> TranslationMetrics:
    """Measures raw, detokenised hypotheses against one or more references.

    `tokenize` is one of sacrebleu's tokenizers for BLEU; None uses 13a or, if `languages` (such as
    en-zh) is given, sacrebleu's choice for the target language.  With fewer than 2 resamples, there
    is no interval.  If resamples would need too much memory, there are fewer, as the signatures
    say.  `test_set` and `languages` go into the signatures, `name` into messages.  TER takes
    several seconds for 3,000 sentences, and minutes for sentences with their words in a wrong
    order.
    """
    check_texts(name, hypotheses, references)
    check_settings(tokenize, languages)
    affordable = MAX_RESAMPLE_BYTES // (SENTENCE_BYTES * len(hypotheses))
    resamples = min(resamples, max(1, affordable))

    def measure(metric: Metric, *details: str) -> Measure:
        score = metric.corpus_score(hypotheses, references, resamples)
        signature = metric.get_signature()
        signature.update("test", test_set)
        signature.update("lang", languages)
        low, high = _interval(score, str(signature)) if resamples > 1 else (None, None)
        named = {name: getattr(score, name) for name in details}
        return Measure(score.name, score.score, low, high, str(signature), named)

    bleu = _bleu(tokenize, languages)
    return TranslationMetrics(
        bleu=measure(bleu, "ref_len", "sys_len", "bp", "precisions"),
        chrf=measure(Chrf()),
        ter=measure(Ter()) if ter else None,
        sentences=len(hypotheses),
        hypotheses_hash=text_hash([hypotheses]),
        references_hash=text_hash(references),
    )


def check_texts(name: str, texts: Sequence[str], references: References) -> None:
    """Rejects texts that do not belong together; the name is for messages."""
    if not references or not any(text.strip() for whole in references for text in whole):
        raise UserError("Nothing to score: the references hold no text.")
    for number, reference in enumerate(references, 1):
        if len(texts) != len(reference):
            which = f"reference {number} of {len(references)}" if number > 1 else "reference"
            raise UserError(
                f"{name}: {len(texts)} sentences, but the {which} has {len(reference)}.  "
                "Give one translation per reference, in the same order."
            )


def read_test_set(name: str, languages: str) -> tuple[list[str], list[list[str]]]:
    """Returns sources and references of sacrebleu's test set, such as wmt14/full and en-de.

    Reads sacrebleu's cache and never downloads.
    """
    if name not in DATASETS:
        raise UserError(
            f"test set {name}: unknown to sacrebleu.{did_you_mean(name, DATASETS)}  "
            "See: sacrebleu --list."
        )
    dataset = DATASETS[name]
    if languages not in dataset.langpairs:
        raise UserError(
            f"test set {name}, languages {languages}: no such pair."
            f"{did_you_mean(languages, dataset.langpairs)}  "
            f"Legal: {', '.join(sorted(dataset.langpairs))}."
        )
    # Reading the fields of an XML set would open its archive, and download it if needed.
    if isinstance(dataset, WMTXMLDataset):
        fields = dataset._get_langpair_allowed_refs(languages)
    else:
        fields = [field for field in dataset.fieldnames(languages) if field.startswith("ref")]
    paths = [dataset._get_txt_file_path(languages, field) for field in ("src", *fields)]
    if not all(map(os.path.exists, paths)):
        raise UserError(
            f"test set {name}, languages {languages}: not in sacrebleu's cache at "
            f"{os.path.dirname(paths[0])}.  With a network connection, fetch it with: "
            f"sacrebleu -t {name} -l {languages} --echo src.  Or give files."
        )
    sources, *references = [list(read_lines(path)) for path in paths]
    check_texts(paths[0], sources, references)
    return sources, references


def check_settings(tokenize: str | None = None, languages: str | None = None) -> None:
    """Rejects settings that would fail only after decoding: a tokenizer, a bad seed."""
    seed = os.environ.get(SEED)
    if seed is not None and not (seed.isdecimal() and int(seed) > 0):
        # sacrebleu itself treats "none", and for some tests 0, as no seed at all.
        raise UserError(f"{SEED}={seed}: legal is an integer of at least 1, or unset.")
    if tokenize is not None and tokenize not in BLEU.TOKENIZERS:
        raise UserError(
            f"tokenize = {tokenize}: not a tokenizer of sacrebleu."
            f"{did_you_mean(tokenize, BLEU.TOKENIZERS)}  Legal: {', '.join(BLEU.TOKENIZERS)}."
        )
    if tokenize in SPM_MODELS:
        file = os.path.basename(SPM_MODELS[tokenize]["url"])
        path = os.path.join(SACREBLEU_DIR, "models", file)
        if not os.path.exists(path):
            raise UserError(
                f"tokenize = {tokenize}: its vocabulary is not at {path}.  With a "
                "network connection, fetch it with: "
                f"echo a | sacrebleu <(echo a) --tokenize {tokenize}."
            )
    try:
        _bleu(tokenize, languages)
    except (ImportError, RuntimeError) as error:
        raise UserError(
            f"tokenize = {tokenize}, languages = {languages}: {' '.join(str(error).split())}"
        ) from None


def text_hash(texts: References) -> str:
    """Returns the SHA-256 of texts, each with a line end, in hexadecimal digits."""
    whole = "".join(f"{text}\n" for part in texts for text in part)
    return hashlib.sha256(whole.encode()).hexdigest()


def _bleu(tokenize: str | None, languages: str | None) -> BLEU:
    return BLEU(tokenize=tokenize, trg_lang=(languages or "").rpartition("-")[2])


def _interval(score: Score, signature: str) -> tuple[float, float]:
    interval = json.loads(score.format(width=DIGITS, signature=signature, is_json=True))
    # sacrebleu names no interval if every resample is 0.
    mean, half = interval.get("confidence_mean", 0.0), interval.get("confidence_var", 0.0)
    return mean - half, mean + half


def _named(prefix: str, measure: Measure | None) -> dict[str, Any]:
    """Names the fields of a measure prefix, prefix_low and so on; all None without a measure."""
    fields = {name: getattr(measure, name, None) for name in ("low", "high", "signature")}
    fields |= {} if measure is None else measure.details
    return {prefix: measure and measure.score} | {f"{prefix}_{k}": v for k, v in fields.items()}

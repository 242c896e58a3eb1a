"""Gives mutated input to the command line, and judges how each command ends.

A command accepts its input (exit code 0) or refuses it (exit code 2) in one line, or a list of
indented lines.  It never ends with a traceback, in another way, after more than a minute, or with
a file half-written.  `python -m tests.scripts.fuzz` runs many cases in a process of its own, so
that a crash or an endless loop is one failed case; `test_fuzz.py` runs some with Hypothesis.
"""

import contextlib
import gzip
import io
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from random import Random
from typing import Any

import click

from tests.scripts.conftest import Place, call
from tests.toys import ROOT, optax_promotion
from tests.trainer.command import settings, write_text

LIMIT_S = 60
LONGEST_LINE = 4_000
MOST_LINES = 60

GIN_FILES = sorted([*(ROOT / "configs").rglob("*.gin"), *(ROOT / "layouts").glob("*.gin")])
# What has broken readers of text, numbers and names.
ODD = (
    "", " ", "\t", "\n", "\r\n", "\r", "\0", "\ufeff", "\u2028", "\x1b[31m", "\x85", "é" * 40,
    "🙂", "\udcff", "a\u0301" * 20, "x" * 300, "x" * 5000, "0", "-0", "-1", "00", "1_0", "+1",
    "0x10", "1e3", "1.5", "nan", "inf", "-inf", "1e999", "1e-400", "9" * 25, "9" * 400,
    "9" * 5000, str(2**31), str(2**32), str(2**63), str(2**64), "True", "None", "true", "null",
    "''", '""', "'", '"', "'''", "(", ")", "[" * 30, "{" * 30, "((1,),)", "[]", "{}", "{[]: 1}",
    "@", "%", "@Run()", "%X", "@Moe", "@x/Run()", "#", "\\", "/", "..", "../..", "~", "/dev/null",
    "/dev/full", "/proc/self/mem", "*", "?", ":", ";", ",", "=", "==", "+", "-", ".",
    "include 'x.gin'", "import os", "from os import path", "data:2", "model:x",
    "batch:data;batch:model", "d_model:data?", "batch", ":data", "batch:", "$HOME", "`ls`",
    "<script>", "%s%n", "{0}", "file://x", "gs://x", "-h", "--", "--help", "\\N{no}", "\\x",
)  # fmt: skip


@dataclass(frozen=True)
class Inputs:
    """A toy model, and what trained it; no case changes them."""

    place: Place

    @property
    def model_dir(self) -> Path:
        return self.place.folder / "run"

    @property
    def data_dir(self) -> str:
        return f"--data_dir={self.place.folder / 'data'}"


@dataclass(frozen=True)
class Case:
    """A command, and what its standard input holds."""

    arguments: Sequence[str]
    stdin: bytes = b""


Kind = Callable[[Random, Inputs, Path], Case]


def mutate(random: Random, text: str) -> str:
    """Changes a text in one to three places."""
    for _ in range(random.randint(1, 3)):
        start = random.randint(0, len(text))
        stop = min(len(text), start + random.choice((0, 1, 1, 2, 5, 20, 200)))
        part = text[start:stop]
        new = random.choice(
            ("", part * 2, part[::-1], part.swapcase(), random.choice(ODD), random.choice(ODD))
        )
        text = text[:start] + new + text[stop:]
    return text[: random.randint(0, len(text))] if random.randint(0, 9) == 0 else text


def mutate_line(random: Random, text: str) -> str:
    """Changes one line, or the order or number of lines."""
    lines = text.splitlines(keepends=True) or [""]
    i, j = random.randrange(len(lines)), random.randrange(len(lines))
    way = random.randint(0, 9)
    if way == 0:
        lines[i], lines[j] = lines[j], lines[i]
    elif way == 1:
        lines.insert(i, lines[j])
    elif way == 2:
        del lines[i]
    else:
        lines[i] = mutate(random, lines[i])
    return "".join(lines)


def mutate_bytes(random: Random, content: bytes) -> bytes:
    """Flips, cuts, repeats or inserts bytes."""
    for _ in range(random.randint(1, 4)):
        start = random.randint(0, len(content))
        stop = min(len(content), start + random.choice((0, 1, 1, 4, 50)))
        part = content[start:stop]
        odd = random.choice(ODD).encode(errors="surrogateescape")
        flipped = bytes(b ^ (1 << random.randint(0, 7)) for b in part)
        new = random.choice((b"", part * 2, odd, flipped, flipped, b"\xff", b"\0" * 4))
        content = content[:start] + new + content[stop:]
    return content[: random.randint(0, len(content))] if random.randint(0, 9) == 0 else content


ODD_VALUES = (None, True, 0, -1, 1.5, float("nan"), 2**63, 10**400, "", "x", [], [None], {},
              {"x": None}, "DEEP")  # fmt: skip


def mutate_json(random: Random, value: Any) -> Any:
    """Replaces or removes a node of what a JSON file holds."""
    keys = list(
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    )
    if not keys or random.randint(0, 3) == 0:
        return random.choice(ODD_VALUES)
    key = random.choice(keys)
    copy = value.copy()
    if random.randint(0, 7) == 0:
        del copy[key]
    else:
        copy[key] = mutate_json(random, value[key])
    return copy


def as_json(value: Any) -> str:
    """Returns a file with a value, which may be nested deeper than Python's own writer goes."""
    return json.dumps(value).replace('"DEEP"', "[" * 100_000 + "]" * 100_000)


def changed_json(random: Random, text: str) -> str:
    """Changes one value of a JSON text."""
    return as_json(mutate_json(random, json.loads(text)))


def sign(text: str) -> str:
    """Returns the text of a manifest with the checksum that belongs to it."""
    with contextlib.suppress(ValueError, RecursionError, AttributeError, TypeError):
        fields = json.loads(text)
        fields.pop("crc32", None)
        return json.dumps({**fields, "crc32": zlib.crc32(json.dumps(fields).encode())})
    return text


def as_argument(text: str) -> str:
    """Returns what a program can receive: arguments hold no null byte."""
    return text.replace("\0", "")


def write(path: Path, text: str) -> Path:
    path.write_bytes(text.encode(errors="surrogateescape"))
    return path


# --- what is mutated ----------------------------------------------------------------------------


def gin_file(random: Random, inputs: Inputs, folder: Path) -> Case:
    text = random.choice(GIN_FILES).read_text()
    for _ in range(random.randint(1, 2)):
        text = mutate_line(random, text)
    base = random.choice(("configs/runs/quickstart.gin", "configs/runs/laptop.gin"))
    file = write(folder / "case.gin", text)
    return Case(["inspect", "config", f"--gin_file={base}", f"--gin_file={file}"])


def gin_param(random: Random, inputs: Inputs, folder: Path) -> Case:
    param = random.choice(settings(inputs.place.text))
    name, _, value = param.partition(" = ")
    param = random.choice(
        (
            mutate(random, param),
            f"{name} = {random.choice(ODD)}",
            f"{name} = '{random.choice(ODD)}'",
            f"{random.choice(ODD)} = {value}",
            f"{name} = ({value}, {random.choice(ODD)})",
        )
    )
    flags = [*inputs.place.flags(as_argument(param))[1:]]
    return Case(["inspect", "config", *flags])


def layout_text(random: Random) -> str:
    axes = ("batch", "length", "d_model", "d_ff", "heads", "vocab", "experts", "B", "xyz", "")
    meshes = ("data", "model", "expert", "x", "")
    ends = ("", "?", "+", "?+", "??", ":", "+data")
    rules = [
        f"{random.choice(axes)}:{random.choice(meshes)}{random.choice(ends)}"
        for _ in range(random.randint(0, 5))
    ]
    text = random.choice((";", ",", " ", ";;")).join(rules)
    return mutate(random, text) if random.randint(0, 2) == 0 else text


def layout(random: Random, inputs: Inputs, folder: Path) -> Case:
    sizes = ("1", "2", "4", "8", "3", "0", "-1", "", "x", "2.0", "9" * 30)
    names = ("data", "model", "expert", "x", "", "data")
    mesh = ",".join(
        f"{random.choice(names)}:{random.choice(sizes)}" for _ in range(random.randint(0, 3))
    )
    mesh = mutate(random, mesh) if random.randint(0, 3) == 0 else mesh
    params = [f"Layout.mesh = {mesh!r}", f"Layout.rules = {layout_text(random)!r}"]
    # One in ten is compared with a model, which takes longer than to read it.
    command = random.choice(("config",) * 9 + ("layout",))
    flags = inputs.place.flags(*map(as_argument, params))[1:]
    return Case(["inspect", command, *flags])


def text(random: Random, inputs: Inputs, folder: Path) -> Case:
    lines = inputs.place.text.read_bytes().splitlines(keepends=True)
    lines = lines[: random.choice((0, 1, 3, 50, 500))]
    content = b"".join(lines)
    if random.randint(0, 3) == 0:
        content = random.choice(ODD).encode(errors="surrogateescape") * random.choice((1, 50))
    if random.randint(0, 1):
        content = mutate(random, content.decode(errors="replace")).encode(errors="surrogateescape")
    file = folder / random.choice(("text.txt", "text.txt", "text.gz", "t [x].txt"))
    content = gzip.compress(content) if file.suffix == ".gz" else content
    file.write_bytes(mutate_bytes(random, content) if random.randint(0, 2) == 0 else content)
    flags = inputs.place.flags(f"TextFiles.train = {str(file)!r}")[1:]
    return Case(["prepare", f"--data_dir={folder / 'data'}", *flags])


def copied(inputs: Inputs, folder: Path, changed: str) -> Path:
    """Copies the model directory, and returns the file that is to be changed."""
    shutil.copytree(inputs.model_dir, folder / "run")
    return folder / "run" / changed


def vocabulary(random: Random, inputs: Inputs, folder: Path) -> Case:
    file = copied(inputs, folder, "vocab.model")
    file.write_bytes(mutate_bytes(random, file.read_bytes()))
    if random.randint(0, 2) > 0:
        flags = inputs.place.flags(f"SentencePiece.model_file = {str(file)!r}")[1:]
        return Case(["prepare", f"--data_dir={folder / 'data'}", *flags])
    (folder / "in.txt").write_text("kara lost\n")
    return Case(
        ["score", f"--model_dir={file.parent}", f"--input={folder / 'in.txt'}", "--output=-"]
    )


def prompt(random: Random, inputs: Inputs, folder: Path) -> Case:
    content = mutate_bytes(random, b"kara lost mitu\nnevo\nkara kara\n"[: random.randint(0, 40)])
    (folder / "in.txt").write_bytes(content)
    name = random.choice((str(folder / "in.txt"), "-"))
    command = random.choice(("decode", "score"))
    output = random.choice(("-", str(folder / "out.txt")))
    flags = ["--max_tokens=3"] if command == "decode" else []
    flags += [f"--model_dir={inputs.model_dir}", f"--input={name}", f"--output={output}"]
    return Case([command, *flags], content)


DECODE_FLAGS = (
    "beam", "alpha", "length_penalty", "temperature", "top_k", "top_p", "min_p", "samples", "seed",
    "max_tokens", "min_tokens", "length_factor", "length_extra", "prefix", "tag", "checkpoint",
    "average", "batch_sequences", "nbest", "format", "input", "output", "gin_file", "gin_param",
)  # fmt: skip
NUMBERS = ("0", "1", "2", "3", "-1", "0.5", "nan", "inf", "-inf", "1e30", "100000", str(2**31),
           str(2**63), "9" * 40, "1e-30", "24", "25")  # fmt: skip


def decode_flags(random: Random, inputs: Inputs, folder: Path) -> Case:
    (folder / "in.txt").write_text("kara lost\n")
    flags = [f"--model_dir={inputs.model_dir}", f"--input={folder / 'in.txt'}", "--output=-"]
    flags.append("--max_tokens=3")
    for _ in range(random.randint(1, 2)):
        value = random.choice((random.choice(NUMBERS), random.choice(NUMBERS), random.choice(ODD)))
        flags.append(as_argument(f"--{random.choice(DECODE_FLAGS)}={value}"))
    return Case(["decode", *flags])


def flag(random: Random, inputs: Inputs, folder: Path) -> Case:
    """Names any flag of any command, with an odd value."""
    command = list(random.choice(commands()))
    names = [name for name in flag_names(command) if name not in ("help", "html", "output")]
    pairs = [
        f"--{random.choice(names)}={as_argument(random.choice(ODD + NUMBERS))}"
        for _ in range(random.randint(1, 3))
    ]
    return Case([*command, *pairs])


def commands() -> list[tuple[str, ...]]:
    """Lists commands that end at once where flags are missing or wrong."""
    return [("train",), ("evaluate",), ("decode",), ("score",),
            ("gains",), ("report",), ("prepare",), ("inspect", "config"), ("inspect", "data"),
            ("inspect", "checkpoint"), ("import", "hf"), ("export", "hf")]  # fmt: skip


def flag_names(command: Sequence[str]) -> list[str]:
    from scripts.cli import cli

    computed: click.Command = cli
    for name in command:
        assert isinstance(computed, click.Group)
        made = computed.get_command(click.Context(computed), name)
        assert made is not None
        computed = made
    return [p.opts[0].lstrip("-") for p in computed.params if isinstance(p, click.Option)]


PART = {"bleu": 20.5, "train_pairs": 1000, "references_hash": "abc", "sentences": 10}


def json_file(random: Random, inputs: Inputs, folder: Path) -> Case:
    evaluation = json.dumps({"step": 4, "loss": 2.5, "parts": {"de-en": PART, "fr-en": PART}})
    (folder / "a.json").write_text(evaluation)
    changed = (mutate(random, evaluation), changed_json(random, evaluation), random.choice(ODD))
    write(folder / "b.json", random.choice(changed))
    files = [folder / "a.json", folder / "b.json"]
    random.shuffle(files)
    flags = [f"--baseline={files[0]}", f"--evaluation={files[1]}", f"--output={folder / 'g.png'}"]
    return Case(["gains", *flags])


def metrics_file(random: Random, inputs: Inputs, folder: Path) -> Case:
    (folder / "run").mkdir()
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        lines = (inputs.model_dir / name).read_text()
        if random.randint(0, 1):
            lines = mutate_line(random, lines)
        elif random.randint(0, 1):
            first, *rest = lines.splitlines()
            lines = "\n".join([changed_json(random, first), *rest, ""])
        write(folder / "run" / name, lines)
    return Case(["report", f"--model_dir={folder / 'run'}"])


def hugging_face(random: Random, inputs: Inputs, folder: Path) -> Case:
    t5 = {
        "model_type": "t5", "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2,
        "vocab_size": 288, "feed_forward_proj": "relu", "tie_word_embeddings": True,
    }  # fmt: skip
    decoder = {
        "model_type": "mistral", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 288, "head_dim": 4,
        "sliding_window": 8, "layer_types": ["full_attention"] * 2, "rope_theta": 1e4,
        "rope_scaling": {"rope_type": "linear", "factor": 2.0}, "hidden_act": "silu",
        "rms_norm_eps": 1e-5, "tie_word_embeddings": True, "max_position_embeddings": 64,
    }  # fmt: skip
    index = {"metadata": {}, "weight_map": {"shared.weight": "model-1.safetensors"}}
    source = folder / "model"
    source.mkdir()
    marian = {
        "model_type": "marian", "d_model": 8, "encoder_layers": 1, "decoder_layers": 1,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16, "vocab_size": 288, "max_position_embeddings": 64,
        "activation_function": "swish", "is_encoder_decoder": True, "scale_embedding": True,
    }  # fmt: skip
    m2m_100 = marian | {"model_type": "m2m_100", "activation_function": "relu", "pad_token_id": 1}
    bart = marian | {"model_type": "bart", "activation_function": "gelu", "pad_token_id": 1}
    config = random.choice((t5, decoder, decoder, marian, m2m_100, bart))
    text = json.dumps(config)
    changed = (text, mutate(random, text), changed_json(random, text), changed_json(random, text))
    write(source / "config.json", random.choice(changed))
    odd = random.choice((json.dumps(index), mutate(random, json.dumps(index)), random.choice(ODD)))
    write(source / "model.safetensors.index.json", odd)
    (source / "model-1.safetensors").write_bytes(
        mutate_bytes(random, b"\x08\0\0\0\0\0\0\0{}      ")
    )
    names = {"t5": ["spiece.model"], "marian": ["source.spm", "target.spm"]}
    for name in names.get(config["model_type"], ["tokenizer.model"]):
        shutil.copy(inputs.model_dir / "vocab.model", source / name)
    return Case(["import", "hf", f"--input={source}", f"--model_dir={folder / 'run'}"])


def checkpoint(random: Random, inputs: Inputs, folder: Path) -> Case:
    names = (
        "manifest.json",
        "_METADATA",
        "_METADATA",
        "commit_success.txt",
        "../_CHECKPOINT_METADATA",
    )
    file = copied(inputs, folder, f"checkpoints/4/state/{random.choice(names)}")
    content = file.read_bytes()
    way = random.randint(0, 2)
    if way == 0:
        write(file, mutate(random, content.decode()))
    elif way == 1 and file.suffix != ".txt":
        write(file, changed_json(random, content.decode()))
        sign_checkpoint(folder / "run/checkpoints/4/state")
    else:
        file.write_bytes(mutate_bytes(random, content))
    which = random.choice(("latest", "best", "4", "all", random.choice(ODD)))
    flags = [f"--model_dir={folder / 'run'}", f"--checkpoint={as_argument(which)}"]
    if random.randint(0, 9) == 0:
        return Case(["evaluate", *flags, inputs.data_dir])
    return Case(["inspect", "checkpoint", *flags])


def sign_checkpoint(folder: Path) -> None:
    """Gives the manifest of a checkpoint the fingerprints of its files, and its checksum."""
    file = folder / "manifest.json"
    manifest = json.loads(file.read_text())
    listed = manifest.get("files") if isinstance(manifest, dict) else None
    for name in listed if isinstance(listed, dict) else ():
        if (folder / name).is_file() and isinstance(listed[name], list) and len(listed[name]) == 2:
            content = (folder / name).read_bytes()
            listed[name] = [len(content), zlib.crc32(content)]
    file.write_text(sign(json.dumps(manifest)))


def cache(random: Random, inputs: Inputs, folder: Path) -> Case:
    """Changes the manifest of a cache, and signs it again."""
    shutil.copytree(inputs.place.folder / "data", folder / "data")
    file = folder / "data" / "toy" / "manifest.json"
    write(file, sign(changed_json(random, file.read_text())))
    commands = (
        ["prepare", "--list", *inputs.place.flags()[1:]],
        ["prepare", *inputs.place.flags()[1:]],
        ["inspect", "data", f"--model_dir={inputs.model_dir}", "--rows=0"],
        ["doctor", "--data"],
    )
    flags = [f"--data_dir={folder / 'data'}"]
    return Case([*random.choice(commands[:3]), *flags])


def run_records(random: Random, inputs: Inputs, folder: Path) -> Case:
    """Changes the history or the lock of a run."""
    name = random.choice(("history.jsonl", "history.jsonl", "train.lock"))
    file = copied(inputs, folder, name)
    if name == "train.lock":
        holder = json.dumps({"pid": 1, "host": "elsewhere", "since": "now"})
        changed = changed_json(random, holder).encode()
        file.write_bytes(random.choice((changed, mutate_bytes(random, changed))))
        return Case(["report", f"--model_dir={file.parent}", "--watch"])
    first, *rest = file.read_text().splitlines()
    write(file, "\n".join([changed_json(random, first), *rest, ""]))
    command = random.choice((["inspect", "data", "--rows=0"], ["inspect", "config"], ["train"]))
    flags = [inputs.data_dir] if command[:2] != ["inspect", "config"] else []
    return Case([*command, f"--model_dir={file.parent}", *random.choice((flags, []))])


def saved_config(random: Random, inputs: Inputs, folder: Path) -> Case:
    file = copied(inputs, folder, "config.gin")
    write(file, mutate_line(random, file.read_text()))
    command = random.choice(("config", "config", "data"))
    flags = [inputs.data_dir] if command == "data" else []
    return Case(["inspect", command, f"--model_dir={folder / 'run'}", *flags])


def rows(random: Random, inputs: Inputs, folder: Path) -> Case:
    numbers = ",".join(random.choice(NUMBERS + ODD) for _ in range(random.randint(0, 3)))
    flag = random.choice((f"--rows={numbers}", f"--step={random.choice(NUMBERS)}"))
    arguments = [f"--model_dir={inputs.model_dir}", inputs.data_dir, as_argument(flag)]
    return Case(["inspect", "data", *arguments])


KINDS: dict[Kind, int] = {
    gin_file: 25, gin_param: 20, layout: 15, flag: 10, saved_config: 4, checkpoint: 5, text: 4,
    vocabulary: 3, json_file: 3, metrics_file: 1, hugging_face: 3, rows: 3,
    prompt: 2, decode_flags: 3, cache: 3, run_records: 3,
}  # fmt: skip


# --- how a case ends ----------------------------------------------------------------------------


class Output(io.TextIOWrapper):
    """A standard stream that keeps what is written."""

    def __init__(self) -> None:
        super().__init__(
            io.BytesIO(), encoding="utf-8", errors="backslashreplace", write_through=True
        )

    def text(self) -> str:
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode()


@contextlib.contextmanager
def streams(stdin: bytes) -> Iterator[Output]:
    """Replaces the standard streams; gives what goes to the standard error."""
    error = Output()
    before = sys.stdin, sys.stdout, sys.stderr
    sys.stdin = io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8")
    sys.stdout, sys.stderr = Output(), error
    try:
        yield error
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


def problem_of(kind: Kind, random: Random, inputs: Inputs) -> tuple[str | None, int]:
    """Runs one case; returns what is wrong with how it ended, if anything, and its exit code."""
    with tempfile.TemporaryDirectory(prefix="fuzz") as name:
        folder = Path(name)
        case = kind(random, inputs, folder)
        before = names_in(folder) | names_in(inputs.place.folder)
        start = time.monotonic()
        code, error = 0, ""
        try:
            with streams(case.stdin) as output, optax_promotion(), contextlib.chdir(folder):
                code = call(*case.arguments)
            error = output.text()
            problem = wrong_end(code, error)
        except BaseException as raised:
            if isinstance(raised, KeyboardInterrupt | SystemExit):
                raise
            code, problem = 1, described(raised)
        if time.monotonic() - start > LIMIT_S:
            problem = f"took {time.monotonic() - start:.0f} s"
        left = names_in(folder) | names_in(inputs.place.folder)
        if problem is None and (parts := sorted(filter(is_part, left - before))):
            problem = f"left {parts}"
        if problem is not None:
            problem += f"\n  arguments: {list(case.arguments)!r:.1500}"
    return problem, code


def described(error: BaseException) -> str:
    """Describes an error by its text and the project's lines that led to it."""
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(str(ROOT))
    ]
    lines = [f"{f.filename}:{f.lineno} {f.name}" for f in frames[-4:]]
    return "\n  ".join([f"{type(error).__name__}: {str(error)[:500]}", *lines])


def wrong_end(code: int, error: str) -> str | None:
    """Says what is wrong with an exit code and the standard error."""
    if code == 0:
        return None if "Traceback" not in error else f"a traceback: {error[-1500:]}"
    if code != 2:
        return f"exit code {code}: {error[-1500:]}"
    _, mark, message = error.partition("meshloom: ")
    lines = message.rstrip("\n").split("\n")
    if not mark or not lines[0].strip():
        return f"refused without a reason: {error[-1500:]}"
    if any(not line.startswith("  ") for line in lines[1:]):
        return f"refused in more than one line: {error[-1500:]}"
    if len(lines) > MOST_LINES or max(map(len, lines)) > LONGEST_LINE:
        return f"refused at too great a length: {error[:300]} …"
    return None if "Traceback" not in error else f"a traceback: {error[-1500:]}"


def names_in(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*")}


def is_part(name: str) -> bool:
    """Tells whether a name is that of a file or folder that is not finished."""
    return name.endswith(".tmp") or ".building-" in name or "orbax-checkpoint-tmp" in name


def chosen(random: Random) -> Kind:
    return random.choices(list(KINDS), list(KINDS.values()))[0]


def problem_of_seed(seed: int, inputs: Inputs) -> tuple[str, str | None, int]:
    """Runs the case of a seed; returns its kind, its problem and its exit code."""
    random = Random(seed)
    kind = chosen(random)
    return (kind.__name__, *problem_of(kind, random, inputs))


# --- many cases ---------------------------------------------------------------------------------


def make_inputs(folder: Path) -> Inputs:
    """Trains the toy model."""
    place = Place(folder, write_text(folder / "text.txt"))
    with optax_promotion():
        assert call("train", place.model_dir, *place.flags()) == 0
    return Inputs(place)


def work(folder: Path) -> None:
    """Runs the cases whose seeds are the lines of the standard input."""
    import tests.conftest  # noqa: F401  eight virtual devices

    seeds, out = sys.stdin, sys.stdout
    sys.stdout = sys.stderr
    inputs = Inputs(Place(folder, folder / "text.txt"))
    if not inputs.model_dir.exists():
        make_inputs(folder)
    print("ready", file=out, flush=True)
    for seed in seeds:
        print(json.dumps(problem_of_seed(int(seed), inputs)), file=out, flush=True)


class Worker:
    """A process that runs cases; a dead or endless one fails its case."""

    def __init__(self, folder: Path):
        command = [sys.executable, "-m", "tests.scripts.fuzz", f"--worker={folder}"]
        self.errors = (folder / "worker.log").open("w+")
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors,
            text=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        self.lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        assert self.lines.get(timeout=600) == "ready\n", self.log()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def run(self, seed: int) -> tuple[str, str | None, int] | None:
        """Returns how a case ended; None where the process did not come back."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seed}\n")
        self.process.stdin.flush()
        try:
            line = self.lines.get(timeout=LIMIT_S * 2)
        except queue.Empty:
            line = ""
        if not line:
            self.process.kill()
            self.process.wait()
            return None
        name, problem, code = json.loads(line)
        return name, problem, code

    def log(self) -> str:
        self.errors.seek(0)
        return self.errors.read()[-1500:]


@click.command()
@click.option("--cases", default=10_000, help="Number of cases.")
@click.option("--seed", default=0, help="Seed of the first case; each next one has the next.")
@click.option("--worker", type=click.Path(path_type=Path), hidden=True)
def main(cases: int, seed: int, worker: Path | None) -> None:
    """Runs many cases, and exits with 1 where one ended wrongly."""
    if worker is not None:
        work(worker)
        return
    ends: Counter[tuple[str, int]] = Counter()
    failed, start = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        process = Worker(Path(name))
        for number, current in enumerate(range(seed, seed + cases), 1):
            answer = process.run(current)
            if answer is None:
                kind = chosen(Random(current)).__name__
                answer = kind, f"killed the process or took {LIMIT_S} s: {process.log()}", 1
                process = Worker(Path(name))
            kind_name, problem, code = answer
            ends[kind_name, code] += 1
            if problem is not None:
                failed += 1
                click.echo(f"seed {current}, {kind_name}: {problem}", err=True)
            if number % 250 == 0:
                seconds = time.monotonic() - start
                click.echo(f"{number:,} cases, {failed} failed, {seconds:,.0f} s", err=True)
        process.process.kill()
    seconds = time.monotonic() - start
    click.echo(
        f"{date.today()}: {cases:,} cases from seed {seed} in {seconds:,.0f} s: {failed} failed."
    )
    for kind_name in sorted({kind for kind, _ in ends}):
        accepted, refused = ends[kind_name, 0], ends[kind_name, 2]
        click.echo(f"  {kind_name}: {accepted:,} accepted, {refused:,} refused")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()

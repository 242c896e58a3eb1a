"""Chats: which tokens the template writes, and which of them are answers."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from configs.errors import UserError
from data.packing.pack import Packed
from data.packing.rows import Counts
from data.sources.json_lines import Jsonl, JsonlChats
from data.sources.pair_kinds import Mixture
from data.sources.pairs import Pair
from data.tasks.chats import ChatTask
from data.tasks.prompts import PromptTask
from data.tokenizers.tokenizer_json import TokenizerJson
from data.vocabs import Vocabs
from tests import released

MARKED = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}{% else %}{{ m['content'] }}"
    "<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PLAIN = released.TEMPLATE
CHATS: list[list[dict[str, str]]] = [
    [{"role": "user", "content": "Ça va ?"}, {"role": "assistant", "content": "Oui, très\nbien."}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And 3 + 3?"},
        {"role": "assistant", "content": "6 😀"},
        {"role": "user", "content": "Thanks"},
    ],
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("chats") / "model"
    released.write_smollm2(folder)
    return folder


def with_template(folder: Path, template: str) -> Vocabs:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": template}))
    return Vocabs(TokenizerJson(path=str(folder)).given(), None)


def task(file: Path, **settings: Any) -> ChatTask:
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    source = JsonlChats(train=str(file))
    vocab = TokenizerJson(path="unread")
    return ChatTask(**{"name": "chats", "source": source, "vocab": vocab, "length": 128} | settings)


def packed(made: ChatTask, vocabs: Vocabs) -> tuple[Packed, Counts]:
    return made.chunk_packer(vocabs)([*made.source.read("train")], None, True)


@pytest.mark.parametrize("template", [MARKED, PLAIN], ids=["marked", "plain"])
def test_answers_are_learned_with_their_ends_and_nothing_else_is(
    folder: Path, tmp_path: Path, template: str
) -> None:
    vocabs = with_template(folder, template)
    rows, counts = packed(task(tmp_path / "c.jsonl", packs=False), vocabs)
    for chat, ids, mask, segments in zip(
        CHATS, *(rows.arrays[key] for key in ("targets", "loss_mask", "segments")), strict=True
    ):
        said = [m["content"] for m in chat if m["role"] == "assistant"]
        pieces = vocabs.target.pieces(ids[mask > 0])
        learned = bytes(byte for piece in pieces for byte in bytes_of(piece))
        assert learned.decode() == "".join(f"{text}<|im_end|>" for text in said)
        text = b"".join(map(bytes_of, vocabs.target.pieces(ids[segments > 0]))).decode()
        last = max(i for i, m in enumerate(chat) if m["role"] == "assistant") + 1
        whole = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in chat[:last])
        assert text == whole.rstrip() + "<|im_end|>"  # the end of the segment, which is not learned
        assert ids[segments > 0][-1] == vocabs.target.end_id and not mask[segments > 0][-1]
    assert counts.tokens == rows.arrays["loss_mask"].sum() and counts.lines == 2
    assert counts.words == 3 + 1 + 2  # of the answers


def bytes_of(piece: str) -> bytes:
    """Undoes the alphabet of byte-level tokenizers, in which a space is Ġ."""
    if piece in released.SPECIAL:
        return piece.encode()
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    by_char = {chr(b): b for b in plain} | {chr(256 + i): b for i, b in enumerate(others)}
    return bytes(by_char[char] for char in piece)


def test_packed_chats_are_the_same_in_a_row_of_each(folder: Path, tmp_path: Path) -> None:
    vocabs = with_template(folder, MARKED)
    alone, _ = packed(task(tmp_path / "c.jsonl", packs=False, length=256), vocabs)
    together, counts = packed(task(tmp_path / "c.jsonl", length=256), vocabs)
    assert counts.rows == 1 and alone.rows == 2
    for key in ("targets", "loss_mask"):
        parts = [
            row[s > 0] for row, s in zip(alone.arrays[key], alone.arrays["segments"], strict=True)
        ]
        order = together.pieces[np.argsort(together.pieces[:, 2]), 0]
        whole = together.arrays[key][0][together.arrays["segments"][0] > 0]
        np.testing.assert_array_equal(whole, np.concatenate([parts[i] for i in order]))


def test_masks_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    vocabs = with_template(folder, MARKED)
    rows, _ = packed(task(tmp_path / "c.jsonl", packs=False), vocabs)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    for chat, ids, mask in zip(
        CHATS, rows.arrays["targets"], rows.arrays["loss_mask"], strict=True
    ):
        expected = theirs.apply_chat_template(
            chat, return_dict=True, return_assistant_tokens_mask=True
        )
        count = int(np.flatnonzero(expected["assistant_masks"]).max()) + 1
        np.testing.assert_array_equal(ids[:count], expected["input_ids"][:count])
        np.testing.assert_array_equal(mask[:count], expected["assistant_masks"][:count])
        assert not mask[count:].any()


def test_files_of_sharegpt_are_read(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "s.jsonl"
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    lines = [
        {"data": {"conversations": [{"from": names[m["role"]], "value": m["content"]} for m in c]}}
        for c in CHATS
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = task(tmp_path / "c.jsonl")
    source = JsonlChats(train=str(file), field="data.conversations")
    vocabs = with_template(folder, PLAIN)
    other, _ = packed(dataclasses.replace(made, source=source), vocabs)
    for key, array in packed(made, vocabs)[0].arrays.items():
        np.testing.assert_array_equal(other.arrays[key], array)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"messages": "Hi"}',
            r"line 1: JsonlChats.train needs field 'messages': found str, legal",
        ),
        ('{"chat": []}', "no such field.  Its fields: chat"),
        ('{"messages": [{"role": "user"}]}', "message 1 of field 'messages': found {'role'"),
        (
            '{"messages": [{"from": ["gpt"], "value": "a"}]}',
            "found {'from': ['gpt'], 'value': 'a'}",
        ),
        ('{"messages": ["Hi"]}', "message 1 of field 'messages': found 'Hi'.  Legal"),
        (
            '{"messages": [{"role": "user", "content": "Hi"}, {"role": "model", "content": "Ho"}]}',
            "line 1: JsonlChats.train: roles in field 'messages': 'user', 'model'.  None is",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "Hi"}], "tools": [{}]}',
            "JsonlChats.train: 'tools' is not supported.  Put it into a system message.",
        ),
        ('{"messages": [{"role": "assistant", "content": "a", "weight": 0}]}', "'weight': 0}"),
    ],
)
def test_what_is_no_chat_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "c").write_text(line + "\n")
    with pytest.raises(UserError) as error:
        list(JsonlChats(train=str(tmp_path / "c")).read("train"))
    assert message in str(error.value)


LLAMA_3_AT_FIRST = (  # begins an answer after every message
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>{% endfor %}"
    "<|im_start|>assistant\n"
)
THINKS = (  # only the last answer, and before it
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if loop.last and m['role'] == 'assistant' %}<think></think>{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETS = PLAIN.replace("messages %}", "messages[-2:] %}", 1)


@pytest.mark.parametrize("template", [LLAMA_3_AT_FIRST, THINKS, FORGETS])
@pytest.mark.parametrize("chat", range(len(CHATS)))
def test_a_template_that_changes_answers_must_mark_them(
    folder: Path, tmp_path: Path, template: str, chat: int
) -> None:
    made, vocabs = task(tmp_path / "c.jsonl"), with_template(folder, template)
    pair = [*made.source.read("train")][chat]
    with pytest.raises(UserError, match="other messages change how an answer is written, and the"):
        made.chunk_packer(vocabs)([pair], None, True)


PHI_3 = (  # ends a text that is to have no other answer
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}<|endoftext|>{% endif %}"
)
DEEPSEEK_R1 = PLAIN.replace(
    "<|im_start|>assistant\n{% endif", "<|im_start|>assistant\n<think>{% endif"
)


@pytest.mark.parametrize("template", [PHI_3, DEEPSEEK_R1], ids=["Phi 3", "R1"])
def test_what_is_behind_an_answer_or_before_it_may_differ(
    folder: Path, tmp_path: Path, template: str
) -> None:
    made = task(tmp_path / "c.jsonl", packs=False)
    expected, _ = packed(made, with_template(folder, PLAIN))
    computed, _ = packed(made, with_template(folder, template))
    for key, array in expected.arrays.items():
        np.testing.assert_array_equal(computed.arrays[key], array)


def test_an_answer_may_be_a_call_of_a_tool_alone(folder: Path, tmp_path: Path) -> None:
    """Whose content is null, in OpenAI's form; a null is as nothing."""
    calls = [{"function": {"name": "add", "arguments": "{}"}}]
    chat = [
        {"role": "user", "content": "1 + 1", "name": None},
        {"role": "assistant", "content": None, "tool_calls": calls},
    ]
    source = JsonlChats(train=str(tmp_path / "c.jsonl"), validation=str(tmp_path / "c.jsonl"))
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": chat}))
    [pair] = source.read("train")
    assert "null" not in pair.source
    assert pair.target == str(calls)
    chat[1] = {"role": "assistant", "content": ""}
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": chat}))
    [empty] = source.read("train")
    assert empty.target == ""  # without words
    call = "m.tool_calls[0].function.name }}<|im_end|>{% end"
    template = MARKED.replace("m['content'] }}<|im_end|>{% end", call, 1)
    vocabs = with_template(folder, template)
    rows, _ = task(tmp_path / "d.jsonl").chunk_packer(vocabs)([pair], None, True)
    learned = vocabs.target.pieces(rows.arrays["targets"][rows.arrays["loss_mask"] > 0])
    assert learned == ["a", "d", "d", "<|im_end|>"]


def test_an_answer_at_the_beginning_must_be_marked(folder: Path, tmp_path: Path) -> None:
    made, chat = task(tmp_path / "c.jsonl"), [{"role": "assistant", "content": "Hi"}]
    pair = Pair(json.dumps(chat), "Hi")
    with pytest.raises(UserError, match="it begins with an answer, and the template does not mark"):
        made.chunk_packer(with_template(folder, PLAIN))([pair], None, True)
    rows, _ = made.chunk_packer(with_template(folder, MARKED))([pair], None, True)
    assert rows.arrays["loss_mask"].sum() == 3


def test_settings_in_a_marked_answer_end_with_it(folder: Path, tmp_path: Path) -> None:
    """As with transformers, which reads it as a block of its own."""
    template = (
        "{% set x = 'o' %}{% for m in messages %}{% if m['role'] == 'assistant' %}"
        "{% generation %}{% set x = 'i' %}{{ x }}{% endgeneration %}{{ x }}{% endif %}{% endfor %}"
    )
    vocabs = with_template(folder, template)
    rows, _ = packed(task(tmp_path / "c.jsonl", packs=False), vocabs)
    text = rows.arrays["targets"][1][rows.arrays["segments"][1] > 0]
    assert vocabs.target.pieces(text) == ["i", "o", "i", "<|im_end|>"]
    assert rows.arrays["loss_mask"][1].tolist()[:4] == [1, 0, 1, 0]


def test_a_template_may_refuse_a_chat(folder: Path, tmp_path: Path) -> None:
    refuses = "{{ raise_exception('No system messages') }}"
    with pytest.raises(UserError, match=r"rejects a chat: No system messages.  The chat: \[\{"):
        packed(task(tmp_path / "c.jsonl"), with_template(folder, refuses))


def test_tasks_and_sources_of_chats_go_together(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").touch()
    chats = JsonlChats(train=str(tmp_path / "c.jsonl"))
    pairs = Jsonl(train=str(tmp_path / "c.jsonl"), source_field="a", target_field="b")
    vocab = TokenizerJson(path="unread")
    assert ChatTask(name="c", source=Mixture(parts=(chats, chats)), vocab=vocab, length=8).has_chats
    for kind, source in (
        (PromptTask, chats),
        (ChatTask, pairs),
        (ChatTask, Mixture(parts=(chats, pairs))),
    ):
        with pytest.raises(UserError, match=r"source = @\w+\(\): it yields pairs"):
            kind(name="c", source=source, vocab=vocab, length=8)


def test_a_vocab_without_a_template_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    vocabs = Vocabs(TokenizerJson(path=str(tmp_path)).given(), None)
    with pytest.raises(UserError, match="its vocab has no chat template"):
        packed(task(tmp_path / "c.jsonl"), vocabs)


def test_lines_to_score_are_a_message_and_its_answer(folder: Path, tmp_path: Path) -> None:
    vocabs = with_template(folder, PLAIN)
    rows, predicted = task(tmp_path / "c.jsonl").pack_lines(["Hi [{\tHo"], vocabs, None)
    assert list(predicted) == ["Ho"]
    learned = rows.arrays["targets"][rows.arrays["loss_mask"] > 0]
    assert vocabs.target.pieces(learned) == ["H", "o", "<|im_end|>"]
    for line in ("Hi", "Hi\tHo\tHa"):
        with pytest.raises(UserError, match="a pair is its source, one tab and its target"):
            task(tmp_path / "c.jsonl").pack_lines([line], vocabs, None)


def test_the_chosen_end_is_the_templates(folder: Path, tmp_path: Path) -> None:
    """Where no file of the tokenizer names one."""
    (tmp_path / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    template = PLAIN.replace("'<|im_end|>\n'", "eos_token")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    vocabs = Vocabs(TokenizerJson(path=str(tmp_path), end="<|endoftext|>").given(), None)
    rows, _ = packed(task(tmp_path / "c.jsonl", packs=False), vocabs)
    learned = vocabs.target.pieces(rows.arrays["targets"][0][rows.arrays["loss_mask"][0] > 0])
    assert learned[-1] == "<|endoftext|>" and "<|im_end|>" not in learned


def test_keys_in_another_order_are_the_same_chat(tmp_path: Path) -> None:
    """So that equal chats are held out together."""
    given = [
        {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
        {"messages": [{"content": "a", "role": "user"}, {"content": "b", "role": "assistant"}]},
        {"messages": [{"from": "human", "value": "a"}, {"value": "b", "from": "gpt", "x": None}]},
        {
            "messages": [
                {"from": "x", "role": "user", "content": "a"},
                {"from": "gpt", "value": "b"},
            ]
        },
    ]
    (tmp_path / "c").write_text("".join(json.dumps(line) + "\n" for line in given))
    first, *others = [pair.source for pair in JsonlChats(train=str(tmp_path / "c")).read("train")]
    assert others[:2] == [first] * 2
    assert json.loads(others[2])[0] == {"content": "a", "from": "x", "role": "user"}

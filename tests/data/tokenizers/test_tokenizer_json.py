"""Hugging Face's tokenizer.json: its ids, its special tokens, and what is wrong with a file."""

import json

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from configs.errors import UserError
from data.tokenizers.sentence_piece import SentencePiece
from data.tokenizers.tokenizer_json import TokenizerJson
from data.vocab import make
from data.vocabs import load_vocab

CONFIG = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
TEXT = "two\nlines, naïve 漢字 \t\u2028 x"


def byte_level() -> tokenizers.Tokenizer:
    """Makes a tokenizer of bytes, as those of Llama 3 and Qwen, that would cut and pad."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({byte: i for i, byte in enumerate(bytes_)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>", "<|user|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=4)
    return tokenizer


def byte_fallback() -> tokenizers.Tokenizer:
    """Makes a tokenizer that splits unknown characters into bytes, as those of Llama 2."""
    ids = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>", "▁", "a", "b"])}
    ids |= {f"<0x{byte:02X}>": len(ids) + byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )  # fmt: skip
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}\n")
    return tmp_path


def given(path, **settings):
    return make(TokenizerJson(path=str(path), **settings), iter(()))


def test_the_files_name_the_special_tokens(folder):
    vocab = given(folder)
    assert (vocab.begin_id, vocab.end_id, vocab.pad_id) == (256, 257, None)
    assert vocab.size == 259


@pytest.mark.parametrize(
    ("eos", "stop_ids"),
    [([258, 257], (257, 258)), (258, (257, 258)), (None, (257,)), ("</s>", (257,))],
)
def test_decoding_stops_also_where_the_settings_of_generation_say(
    folder, tmp_path_factory, eos, stop_ids
):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    vocab, saved = given(folder), tmp_path_factory.mktemp("saved") / "vocab.model"
    saved.write_bytes(vocab.model)
    assert vocab.end_id == 257
    assert vocab.stop_ids == load_vocab(saved).stop_ids == stop_ids


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
@pytest.mark.parametrize("text", [" ab a", "b", ".", " ", "", "漢"])
def test_a_continuation_has_the_ids_that_it_has_behind_a_text(tmp_path, kind, text):
    kind().save(str(tmp_path / "tokenizer.json"))
    vocab = given(tmp_path, end="</s>")
    [before, whole] = vocab.encode(["ab", "ab" + text])
    assert [*before, *vocab.encode_continuation(text)] == [*whole]


def test_an_unknown_word_swallows_no_continuation(tmp_path):
    words = tokenizers.Tokenizer(
        models.WordLevel({"[UNK]": 0, "</s>": 1, "is": 2, "good": 3}, unk_token="[UNK]")
    )
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(tmp_path / "tokenizer.json"))
    vocab = given(tmp_path, end="</s>")
    for text in ("is good", " is good"):
        assert vocab.encode_continuation(text).tolist() == [2, 3]


@pytest.mark.parametrize("kind", [byte_level, byte_fallback])
def test_decoding_gives_the_text_back(tmp_path, kind):
    kind().save(str(tmp_path / "tokenizer.json"))
    vocab = given(tmp_path, end="</s>")
    [ids, nothing] = vocab.encode([TEXT, ""])
    assert len(ids) >= len(TEXT.encode())  # neither cut nor padded
    assert vocab.decode([*ids, vocab.end_id, 7]) == TEXT
    assert vocab.decode([*ids, vocab.size + 3]) == TEXT
    assert nothing.size == 0


def test_special_tokens_in_a_text_are_ids_and_no_text(folder):
    vocab = given(folder)
    [ids] = vocab.encode(["<|user|>a"])
    assert vocab.pieces(ids) == ["<|user|>", "a"]
    assert vocab.decode(ids) == "a"


def test_sentinels_of_a_t5_are_text(folder):
    """Though its files call them special: between them is what a model fills in."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens(["<extra_id_1>", "<extra_id_0>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    vocab = given(folder)
    [ids] = vocab.encode(["<s>a<extra_id_0>bc<|user|><extra_id_1>"])
    assert vocab.decode(ids) == "a<extra_id_0>bc<extra_id_1>"


def test_settings_choose_other_special_tokens(folder):
    vocab = given(folder, begin="</s>", end="<|user|>", pad="<s>")
    assert (vocab.begin_id, vocab.end_id, vocab.pad_id) == (257, 258, 256)
    assert vocab.decode([256, 64, 258]) == vocab.decode([64])


def test_a_text_without_a_beginning_begins_with_an_end(folder):
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "bos_token": None}))
    vocab = given(folder)
    assert vocab.begin_id == vocab.end_id == 257 and not vocab.reads_begin


@pytest.mark.parametrize("adds", [True, False])
def test_the_tokenizer_says_whether_prompts_stand_behind_a_beginning(folder, adds):
    # Hugging Face's library leaves add_bos_token alone where there is a tokenizer.json.
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "add_bos_token": not adds}))
    if not adds:  # as SmolLM2's, whose bos_token begins the turns of a chat
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    vocab = given(folder)
    assert (vocab.begin_id, vocab.reads_begin) == (256, adds)
    assert given(folder, begin="<|user|>").reads_begin
    chosen = given(folder, begin="<s>")
    assert (chosen.begin_id, chosen.reads_begin) == (256, True)
    (folder / "vocab.model").write_bytes(chosen.model)
    assert given(folder / "vocab.model").reads_begin
    (folder / "vocab.model").write_bytes(vocab.model)
    assert given(folder / "vocab.model").reads_begin == adds


def test_a_beginning_that_only_the_tokenizer_has_is_read(folder):
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    vocab = given(folder)
    assert (vocab.begin_id, vocab.reads_begin) == (256, True)


def test_a_saved_vocab_is_the_same_and_keeps_the_files(folder, tmp_path):
    vocab, saved = given(folder, end="<|user|>"), tmp_path / "vocab.model"
    saved.write_bytes(vocab.model)
    for again in (load_vocab(saved), given(saved)):
        assert again.hash == vocab.hash
        assert (again.begin_id, again.end_id) == (256, 258)
        assert again.files == {p.name: p.read_text() for p in folder.glob("*[a-z].j*")}
    assert given(saved, end="</s>").end_id == 257


def test_special_tokens_in_a_text_are_split_where_the_settings_say_so(folder):
    assert given(folder).encode(["a</s>"])[0].tolist()[1:] == [257]
    settings = {**CONFIG, "split_special_tokens": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vocab = given(folder)
    ids = vocab.encode(["a</s>"])[0].tolist()
    assert "".join(vocab.pieces(ids)) == "a</s>" and len(ids) == len("a</s>")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"end": "<eos>"}, r"no token '<eos>' \(TokenizerJson.end.*special tokens: <s>, </s>"),
        ({"path": "no"}, "TokenizerJson.path: no: no such file or folder"),
        ({"path": "tokenizer_config.json"}, "is not a tokenizer.json"),
        ({"path": "chat_template.jinja"}, "is not JSON"),
    ],
)
def test_what_is_wrong_is_said(folder, monkeypatch, settings, message):
    monkeypatch.chdir(folder)
    with pytest.raises(UserError, match=message):
        make(TokenizerJson(**{"path": ".", **settings}), iter(()))


def test_a_model_of_sentencepiece_is_recognised(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    settings = SentencePiece(size=290, character_coverage=1.0)
    vocab = make(settings, iter(["one two three four five six seven"] * 9))
    (tmp_path / "tokenizer.model").write_bytes(vocab.model)
    for path in ("tokenizer.model", str(tmp_path)):
        with pytest.raises(UserError) as error:
            TokenizerJson(path=path).given()
        assert "tokenizer.model is a SentencePiece model, not a tokenizer.json" in str(error.value)
        assert "@SentencePiece() reads it: SentencePiece.model_file = '" in str(error.value)


def test_without_a_known_end_it_is_refused(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"no token is known to end a text.*TokenizerJson\.end"):
        given(folder)


@pytest.mark.parametrize("change", [("files", "filez"), ("json 1", "json 0"), ("r.json", "r.jsom")])
def test_a_damaged_vocab_is_refused(folder, tmp_path, change):
    vocab = tmp_path / "vocab.model"
    vocab.write_bytes(given(folder).model.replace(*map(str.encode, change)))
    for load in (load_vocab, lambda path: given(path, end="</s>")):
        with pytest.raises(
            UserError, match=r"vocab\.model: is JSON, but not a vocab of this version"
        ):
            load(vocab)


def test_a_damaged_file_beside_the_tokenizer_is_named_with_its_folder(folder):
    (folder / "tokenizer_config.json").write_text("[]")
    with pytest.raises(UserError) as error:
        given(folder)
    assert str(error.value) == f"{folder}/tokenizer_config.json: should be an object (found [])."


def test_two_tokens_of_one_id_are_refused(folder):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"]["!"] = content["model"]["vocab"]["a"]
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"the tokens '!' and 'a' have the same id, 64.  Give"):
        given(folder)


def test_an_added_token_with_the_id_of_another_is_refused(folder):
    file = folder / "tokenizer.json"
    content = json.loads(file.read_text())
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    content["added_tokens"].append({"id": 64, "content": "<new>", **flags})
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"added token '<new>' has the same id as 'a', 64.  Give"):
        given(folder)
    content["added_tokens"][-1]["id"] = 300_000_000  # the library gives it the next one
    file.write_text(json.dumps(content))
    assert given(folder).size < 1000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vocab.txt", "[PAD]\n[UNK]\na\n"),
        ("vocab.json", '{"a": 0, "b": 1}'),
        ("cl100k_base.tiktoken", "IQ== 0\nIg== 1\n"),
        ("tokenizer.model", "IQ== 0\nIg== 1\n"),
    ],
)
def test_other_vocabularies_are_refused_with_the_way_to_a_tokenizer_json(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    for path in (tmp_path / name, tmp_path):
        with pytest.raises(UserError, match=r"Legal: a tokenizer.json.*save_pretrained\('/"):
            given(path)

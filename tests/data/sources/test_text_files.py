"""Text files: what is read, and what each bad file is told."""

import gzip
import io
import lzma
import os

import pytest
import zstandard

from configs.errors import UserError
from data.sources.text import TextFiles
from data.sources.text_files import MAX_LINE_BYTES, decoded_lines, expand, in_one_line, read_lines

# U+2028, U+0085 and a lone carriage return separate lines for str.splitlines, but not here.
LINES = ["one two", "a\u2028b\u0085c\rd", "naïve 漢字", ""]
RAW = ("\n".join(LINES) + "\n").encode()


PACKED = [("a.gz", gzip.compress), ("a.xz", lzma.compress), ("a.zst", zstandard.compress)]


@pytest.mark.parametrize(("name", "packed"), [("a.txt", bytes), *PACKED])
def test_plain_and_compressed_files_split_on_newline_only(tmp_path, name, packed):
    path = tmp_path / name
    path.write_bytes(packed(RAW))
    assert list(read_lines(str(path))) == LINES


@pytest.mark.parametrize(("name", "packed"), PACKED)
def test_what_follows_within_a_compressed_file_is_read_or_refused(tmp_path, name, packed):
    path, second = tmp_path / name, packed(RAW)
    padding = b"" if name == "a.zst" else bytes(64)
    path.write_bytes(second + padding + second + padding)
    assert list(read_lines(str(path))) == LINES * 2
    for damaged in (bytes([second[0], second[1] ^ 255]) + second[2:], b"junk", second[:-1]):
        path.write_bytes(second + damaged)
        with pytest.raises(UserError, match="cannot be read to its end"):
            list(read_lines(str(path)))


def test_last_line_needs_no_newline_and_windows_files_have_no_carriage_returns(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    assert list(read_lines(str(path))) == ["one", "two"]


def test_examples_are_raw_lines_for_what_counts_bytes(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\n\r\ntwo\n")
    source = TextFiles(train=str(path), validation=str(path))
    assert list(source.lines("train")) == ["one\r", "two"]


def test_globs_are_sorted_and_name_no_file_twice(tmp_path):
    for name in "cab":
        (tmp_path / name).write_text("x\n")
    files = expand((f"{tmp_path}/[bc]", f"{tmp_path}/*"), "here")
    assert [f[-1] for f in files] == ["b", "c", "a"]


def test_a_file_of_two_names_is_read_once(tmp_path):
    (tmp_path / "a").write_text("x\n")
    (tmp_path / "link").symlink_to("a")
    names = (f"{tmp_path}/a", f"{tmp_path}/./a", f"{tmp_path}/../{tmp_path.name}/a")
    assert expand((*names, f"{tmp_path}/*"), "here") == [names[0]]


def test_a_name_with_brackets_may_be_a_file(tmp_path):
    for name in ("a[1].txt", "a1.txt"):
        (tmp_path / name).write_text("x\n")
    assert expand(f"{tmp_path}/a[1].txt", "here") == [f"{tmp_path}/a[1].txt"]
    assert expand(f"{tmp_path}/a[1-9].txt", "here") == [f"{tmp_path}/a1.txt"]


def test_no_files_are_refused():
    with pytest.raises(UserError, match=r"Tsv.train = \(\): names no file"):
        expand((), "Tsv.train")


def test_missing_file_suggests_the_nearest(tmp_path):
    (tmp_path / "train.txt").write_text("x\n")
    with pytest.raises(
        UserError, match=r"TextFiles.train: no file matches '.*trian.txt'.*train\.txt"
    ):
        list(TextFiles(train=f"{tmp_path}/trian.txt").lines("train"))


def test_a_link_to_nothing_is_not_proposed_for_itself(tmp_path):
    (tmp_path / "link.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(UserError, match=r"link\.txt: cannot be opened: [^.]*\.$"):
        list(TextFiles(train=f"{tmp_path}/link.txt").lines("train"))


def test_no_other_file_is_proposed_for_a_folder(tmp_path):
    for name in ("texts", "texts2"):
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=r"texts: cannot be opened: Is a directory\.$"):
        list(read_lines(f"{tmp_path}/texts"))


def test_a_folder_names_the_ending_of_most_of_its_files(tmp_path):
    for name in ("README.md", "a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text("x\n")
    with pytest.raises(UserError, match=r"is a folder.  Name its files, .*/\*\.jsonl'"):
        expand(str(tmp_path), "here")


def test_a_folder_of_folders_names_the_files_in_them(tmp_path):
    (tmp_path / "train").mkdir()
    for name in ("train/a.jsonl", "dataset_dict.json"):
        (tmp_path / name).write_text("x\n")
    with pytest.raises(UserError, match=r"Name its files, such as '.*/train/\*\.jsonl'"):
        expand(str(tmp_path), "here")


def test_folder_is_no_file(tmp_path):
    with pytest.raises(UserError, match=r"is a folder.  Name its files, such as '.*/\*\.txt'"):
        list(TextFiles(train=str(tmp_path)).lines("train"))


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_empty_file_is_named(tmp_path, text):
    (tmp_path / "b.txt").write_text(text)
    with pytest.raises(UserError, match=r"TextFiles.train: .*b\.txt is empty"):
        list(TextFiles(train=f"{tmp_path}/*", validation="-").lines("train"))
    (tmp_path / "c.txt").write_text(text)
    with pytest.raises(UserError, match=r"TextFiles.train: all 2 files are empty, .*b\.txt"):
        list(TextFiles(train=f"{tmp_path}/*", validation="-").lines("train"))


@pytest.mark.parametrize("text", ["", "\n \n"])
def test_an_empty_shard_among_others_is_said_in_a_line(tmp_path, log_lines, text):
    (tmp_path / "a.txt").write_text("x\n")
    (tmp_path / "b.txt").write_text(text)
    assert list(TextFiles(train=f"{tmp_path}/*", validation="-").lines("train")) == ["x"]
    assert log_lines == [f"TextFiles.train: 1 of 2 files are empty, such as {tmp_path / 'b.txt'}"]


def test_bad_utf8_names_file_line_and_byte(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes(b"fine\nfine too\nna\xefve\n")
    with pytest.raises(UserError, match=r"latin\.txt, line 3: byte 3 is 0xef, not UTF-8.*iconv"):
        list(read_lines(str(path)))


@pytest.mark.parametrize("encoding", ["latin1", "utf-16"])
def test_another_encoding_is_named(tmp_path, encoding):
    (tmp_path / "a.txt").write_bytes("naïve\n".encode(encoding))
    with pytest.raises(UserError, match=f"iconv -f {encoding} -t utf-8"):
        list(read_lines(f"{tmp_path}/a.txt"))


@pytest.mark.parametrize(("name", "packed"), PACKED)
@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b"not compressed"])
def test_damaged_archive_is_named(tmp_path, name, packed, damage):
    path = tmp_path / name
    path.write_bytes(damage(packed(RAW * 1000)))
    with pytest.raises(UserError, match=rf"{name}: cannot be read to its end .*again"):
        list(read_lines(str(path)))


@pytest.fixture
def pages(tmp_path):
    (tmp_path / "1.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n \r\n\r\nthree\r\n")
    (tmp_path / "2.txt").write_bytes(b"\n four\n  five\n\n")
    (tmp_path / "3.txt").write_bytes(b"")
    return f"{tmp_path}/*.txt"


@pytest.mark.parametrize(
    ("example", "texts"),
    [
        ("paragraph", ["one\ntwo", "three", " four\n  five"]),
        ("file", ["one\ntwo\n \n\nthree", "\n four\n  five"]),
    ],
)
def test_an_example_may_be_a_paragraph_or_a_file(pages, example, texts):
    source = TextFiles(train=pages, validation=pages, example=example)
    assert list(source.lines("train")) == texts
    assert source.has_newlines and not TextFiles(train=pages).has_newlines


def test_files_without_any_text_are_an_error(tmp_path):
    (tmp_path / "a").write_text(" \n")
    source = TextFiles(train=f"{tmp_path}/a", validation="-", example="file")
    with pytest.raises(UserError, match=r"TextFiles.train: there is no text in 1 files"):
        list(source.lines("train"))


def test_a_line_has_a_largest_length():
    longest = b"x" * (MAX_LINE_BYTES - 1)  # and the newline
    assert [len(line) for line in decoded_lines(io.BytesIO(longest + b"\none"), "a")] == [
        MAX_LINE_BYTES - 1, 3,
    ]  # fmt: skip
    too_long = io.BytesIO(b"one\n" + longest + b"xx\n")
    with pytest.raises(UserError, match=r"a, line 2: is longer than 67,108,864 bytes"):
        list(decoded_lines(too_long, "a"))


def test_a_pointer_of_git_lfs_is_no_text(tmp_path):
    pointer, quoted = tmp_path / "a.txt", tmp_path / "b.txt"
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    quoted.write_text("A pointer begins so:\nversion https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(UserError, match=r"a\.txt: a pointer of Git LFS\.  `git lfs pull`"):
        list(read_lines(str(pointer)))
    assert len(list(read_lines(str(quoted)))) == 2


def test_devices_and_pipes_are_no_text_of_a_task(tmp_path):
    with pytest.raises(UserError, match=r"/dev/zero: is a device"):
        next(TextFiles(train="/dev/zero").lines("train"))
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UserError, match=r"TextFiles.train: .*fifo' is a pipe.*several times"):
        next(TextFiles(train=str(tmp_path / "fifo")).lines("train"))


def test_line_breaks_inside_a_text_become_spaces() -> None:
    assert in_one_line("a\r\nb") == "a  b"

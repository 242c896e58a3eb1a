"""Compressed files: several frames, and files that are not what their name says."""

import bz2

import pytest
import zstandard

from configs.errors import UserError
from data.sources.compression import open_file, read_errors
from data.sources.text_files import read_lines

LINES = [f"line {i}" for i in range(40_000)]


def test_frames_follow_each_other(tmp_path):
    path, half = tmp_path / "a.zst", len(LINES) // 2
    texts = ["".join(f"{x}\n" for x in part) for part in (LINES[:half], [], LINES[half:])]
    path.write_bytes(b"".join(zstandard.compress(text.encode()) for text in texts))
    assert list(read_lines(str(path))) == LINES


def test_a_frame_with_a_long_window_is_read(tmp_path):
    """Published corpora are written by `zstd --long=31`; 28 is the first above the default."""
    path = tmp_path / "a.zst"
    settings = zstandard.ZstdCompressionParameters.from_level(1, window_log=28)
    frame = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    text = "".join(f"{x}\n" for x in LINES)
    path.write_bytes(frame.compress(text.encode()) + frame.flush())
    assert list(read_lines(str(path))) == LINES


@pytest.mark.parametrize("cut", [1, 3, 9])
def test_a_cut_frame_is_no_end(tmp_path, cut):
    path = tmp_path / "a.zst"
    path.write_bytes(2 * zstandard.compress(b"some text" * 99)[:-cut])
    with pytest.raises(UserError, match=r"a\.zst: cannot be read to its end"):
        list(read_lines(str(path)))


def test_an_empty_file_holds_nothing(tmp_path):
    for name in ("a.gz", "a.zst", "a"):
        (tmp_path / name).touch()
        with open_file(str(tmp_path / name)) as file, read_errors(name):
            assert file.read() == b""


def test_a_compressed_file_with_another_ending_is_recognized(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(zstandard.compress(b"some text"))
    with pytest.raises(UserError, match=r"a\.txt: is not text but compressed.*ends in \.zst"):
        list(read_lines(str(path)))


def test_a_compression_that_is_not_read_is_named(tmp_path):
    path = tmp_path / "a.bz2"
    path.write_bytes(bz2.compress("ü".encode()))
    with pytest.raises(UserError, match=r"a\.bz2: is compressed as \.bz2.  Legal: plain"):
        list(read_lines(str(path)))

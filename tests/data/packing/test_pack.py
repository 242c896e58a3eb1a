"""Packing: no token is lost, doubled or moved into another segment."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data.packing import pack
from data.vocab import EOS
from tests.data.packing.packer import pack_at_once

examples_of = st.lists(
    st.lists(st.integers(2, 60_000), max_size=40).map(lambda x: np.array(x, np.uint16)), max_size=60
)


def unpack(packed):
    """The examples again, each with its EOS, in their order: the inverse of `pack`."""
    order = np.argsort(packed.pieces[:, 0], kind="stable")
    examples = []
    for example, row, segment in packed.pieces[order]:
        tokens = packed.arrays["targets"][row][packed.arrays["segments"][row] == segment]
        if example == len(examples):
            examples.append([])
        examples[example].append(tokens)
    return [np.concatenate(pieces) for pieces in examples]


@given(examples_of, st.integers(2, 17), st.booleans())
@settings(deadline=None, max_examples=150)
def test_unpacking_gives_the_examples_back(examples, length, packs):
    packed = pack_at_once(examples, length, packs=packs)
    assert [list(e) for e in unpack(packed)] == [[*e, EOS] for e in examples]
    assert (packed.arrays["segments"] > 0).sum() == sum(len(e) + 1 for e in examples)
    assert not packed.arrays["targets"][packed.arrays["segments"] == 0].any()
    if not packs:
        assert packed.arrays["segments"].max(initial=0) <= 1


@given(examples_of, st.integers(2, 17))
@settings(deadline=None, max_examples=100)
def test_inputs_and_positions_restart_in_each_segment(examples, length):
    packed = pack_at_once(examples, length)
    targets_BL, segments_BL = packed.arrays["targets"], packed.arrays["segments"]
    inputs_BL = pack.inputs(targets_BL, segments_BL)
    positions_BL = pack.positions(segments_BL)
    assert inputs_BL.dtype == positions_BL.dtype == np.int32
    for row, segments in enumerate(segments_BL):
        for segment in range(1, segments.max(initial=0) + 1):
            at = np.flatnonzero(segments == segment)
            assert list(at) == list(range(at[0], at[-1] + 1))
            assert list(positions_BL[row, at]) == list(range(len(at)))
            assert list(inputs_BL[row, at]) == [0, *targets_BL[row, at[:-1]]]
        assert not inputs_BL[row, segments == 0].any()
        assert not positions_BL[row, segments == 0].any()


def test_a_long_row_has_more_segments_than_sixteen_bits_count():
    length, long = 1 << 17, np.full(70_000, 7)
    packed = pack_at_once([np.array([5])] * 65_536, length)
    assert packed.arrays["segments"].max() == 65_536
    positions_BL = pack.positions(packed.arrays["segments"])
    assert positions_BL.dtype == np.int32
    np.testing.assert_array_equal(positions_BL, [[0, 1] * 65_536])
    packed = pack_at_once([long, long], length)
    positions_BL = pack.positions(packed.arrays["segments"])
    np.testing.assert_array_equal(positions_BL[0, 1 : len(long)], np.arange(1, len(long)))


def test_segments_begin_and_end_with_the_ids_of_the_vocab():
    packer = pack.Packer(pack.Side(5, end_id=40), pack.Side(7, end_id=50))
    halves = [np.array([2, 3]), np.array([4])], [np.array([5]), np.array([6, 0])]
    packer.add(*halves)
    packed = packer.finish()
    assert packed.arrays["targets"].tolist() == [[2, 3, 40, 4, 40]]
    assert packed.arrays["sources"].tolist() == [[5, 50, 6, 0, 50, 0, 0]]
    packed = pack_at_once([np.array([2, 3]), np.array([4])], 7)
    inputs_BL = pack.inputs(packed.arrays["targets"], packed.arrays["segments"], begin_id=9)
    assert inputs_BL.tolist() == [[9, 2, 3, 9, 4, 0, 0]]


def test_chunks_do_not_change_what_is_in_the_rows():
    random = np.random.default_rng(0)
    examples = [random.integers(2, 99, n).astype(np.uint16) for n in random.integers(1, 30, 9000)]
    packer = pack.Packer(pack.Side(32))
    for i in range(0, 9000, 700):
        packer.add(examples[i : i + 700])
    packed = packer.finish()
    assert [list(e[:-1]) for e in unpack(packed)] == [list(e) for e in examples]
    assert sum(len(e) + 1 for e in examples) / packed.arrays["targets"].size > 0.97


def test_open_rows_are_bounded():
    packer = pack.Packer(pack.Side(100))
    packer.add([np.full(59, 5, np.uint16)] * 5000)
    assert len(packer._fit.open_rows()) == 512

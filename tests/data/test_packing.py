"""Packing loses no token and doubles none, and no target crosses from one document into the next."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfb.data.packing import pack, pack_lengths
from jaxfb.data.stored.shards import TokenDocuments, TokenStream

CORPORA = st.lists(st.integers(0, 23), min_size=1, max_size=30)  # tokens in each document
PACKINGS = st.sampled_from(["concat", "best_fit"])


def documents_of(lengths):
    """Token values are their own stream positions, so a row shows where its tokens came from."""
    length = np.array(lengths, np.int64)
    start = np.cumsum(length) - length
    tokens = np.arange(length.sum() + 1, dtype=np.uint16)
    cut = len(tokens) // 2
    return TokenDocuments(TokenStream([tokens[:cut], tokens[cut:]]), start, length, None, repr(lengths))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    def build(lengths, sequence_length, packing):
        return pack(documents_of(lengths), sequence_length, packing, tmp_path_factory.mktemp("rows"))

    return build


@given(lengths=CORPORA, sequence_length=st.integers(2, 9), packing=PACKINGS)
@settings(max_examples=60, deadline=None)
def test_rows_hold_every_pair_of_neighbours_once(packed, lengths, sequence_length, packing):
    documents = documents_of(lengths)
    rows = packed(lengths, sequence_length, packing)
    batch = rows.gather(np.arange(len(rows)))
    counted = batch["loss_mask"] > 0
    inputs = [s + t for s, n in zip(documents.start, documents.length, strict=True) for t in range(n - 1)]
    assert sorted(batch["tokens"][counted]) == inputs
    np.testing.assert_array_equal(batch["targets"][counted], batch["tokens"][counted] + 1)
    assert counted.sum() == rows.num_tokens == documents.num_tokens or not (documents.length > 0).all()
    for name in ("tokens", "targets", "segments", "positions"):
        assert not batch[name][~counted].any() and batch[name].dtype == np.int32


@given(lengths=CORPORA, sequence_length=st.integers(2, 9), packing=PACKINGS)
@settings(max_examples=60, deadline=None)
def test_a_segment_is_one_run_of_one_document(packed, lengths, sequence_length, packing):
    documents = documents_of(lengths)
    rows = packed(lengths, sequence_length, packing)
    owner = np.repeat(np.arange(len(lengths)), documents.length)
    for k in range(len(rows)):
        row = rows[k]
        real = row["segments"] > 0
        assert real[: real.sum()].all()  # padding stands last
        segments = row["segments"][real]
        assert segments[0] == 1 and set(np.diff(segments)) <= {0, 1}
        for segment in np.unique(segments):
            where = row["segments"] == segment
            np.testing.assert_array_equal(row["positions"][where], np.arange(where.sum()))
            assert (np.diff(row["tokens"][where]) == 1).all()
            touched = np.concatenate([row["tokens"][where], row["targets"][where]])
            assert len(set(owner[touched])) == 1


@given(lengths=CORPORA, sequence_length=st.integers(2, 9))
@settings(max_examples=60, deadline=None)
def test_best_fit_cuts_only_what_is_too_long(lengths, sequence_length):
    document, _, _, row_start = pack_lengths(np.array(lengths), sequence_length, "best_fit")
    needed = [-(-max(n - 1, 0) // sequence_length) for n in lengths]
    np.testing.assert_array_equal(np.bincount(document, minlength=len(lengths)), needed)
    assert (np.diff(row_start) > 0).all()


def test_concat_fills_all_rows_but_the_last():
    document, skip, length, row_start = pack_lengths(np.array([6, 1, 4]), 4, "concat")
    np.testing.assert_array_equal(document, [0, 0, 2])
    np.testing.assert_array_equal(skip, [0, 4, 0])
    np.testing.assert_array_equal(length, [4, 1, 3])
    np.testing.assert_array_equal(row_start, [0, 1, 3])


def test_best_fit_takes_the_fullest_row_that_fits():
    document, _, _, row_start = pack_lengths(np.array([7, 6, 3, 2]), 8, "best_fit")  # slots 6, 5, 2, 1
    rows = [sorted(document[a:b]) for a, b in zip(row_start[:-1], row_start[1:], strict=True)]
    assert rows == [[0, 2], [1, 3]]


def test_row_minus_one_is_all_zeros_and_select_renumbers(packed):
    rows = packed([5, 9, 3, 12], 4, "concat")
    batch = rows.gather(np.array([2, -1, 0]))
    assert not any(leaf[1].any() for leaf in batch.values())
    assert not any(leaf.any() for leaf in rows.gather(np.array([-1, -1])).values())
    assert batch["loss_mask"].dtype == np.float32
    chosen = rows.select(np.array([2, 0]))
    np.testing.assert_array_equal(chosen.gather(np.arange(2))["tokens"], batch["tokens"][[0, 2]])
    assert chosen.fingerprint != rows.fingerprint
    assert len(rows.spread(3)) == 3 and rows.spread(99) is rows


def test_a_stream_is_the_rows_of_concat_without_the_borders_between_documents(packed):
    rows, apart = packed([4, 9, 3, 12], 4, "stream"), packed([4, 9, 3, 12], 4, "concat")
    batch, same = (source.select(np.arange(2)).gather(np.array([0, 1, -1])) for source in (rows, apart))
    for name in ("tokens", "targets", "loss_mask"):
        np.testing.assert_array_equal(batch[name], same[name])
    assert "segments" not in batch and rows.fingerprint != apart.fingerprint
    np.testing.assert_array_equal(batch["positions"], [[0, 1, 2, 3], [0, 1, 2, 3], [0, 0, 0, 0]])
    assert (same["positions"][:2] != batch["positions"][:2]).any()


def test_the_index_is_built_once(tmp_path: Path):
    first = pack(documents_of([5, 9]), 4, "concat", tmp_path)
    stamp = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = pack(documents_of([5, 9]), 4, "concat", tmp_path)
    assert again.fingerprint == first.fingerprint
    assert stamp == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

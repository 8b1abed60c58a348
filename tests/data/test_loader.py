"""The order of rows is a permutation an epoch; a position means the same rows on any number of processes."""

import json
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxfb.data.loader import Loader, evaluation_batches, row_order
from jaxfb.data.packing import PackedRows
from jaxfb.data.stored.shards import TokenStream


def numbered_rows(num_rows, fingerprint="these"):
    """Row k is full of the token k + 1."""
    stream = TokenStream([np.repeat(np.arange(1, num_rows + 2, dtype=np.uint16), 4)])
    index = np.arange(num_rows + 1)
    return PackedRows(stream, index, index[:-1] * 4, np.full(num_rows, 2, np.int32), 2, fingerprint)


def taken(loader, num_batches=None):
    """The token of each row, batch by batch."""
    batches = (next(loader) for _ in range(num_batches)) if num_batches is not None else loader
    return [batch["tokens"][:, 0].tolist() for batch in batches]


def ramp_up(consumed):
    return 2 if consumed < 8 else 6


@cache
def straight_run(rows):
    return taken(Loader(numbered_rows(60), rows, seed=5), 16)


@given(num_rows=st.integers(1, 200), seed=st.integers(0, 2**40))
@settings(max_examples=10, deadline=None)
def test_each_epoch_is_another_permutation(num_rows, seed):
    order = row_order(num_rows, seed)
    first, second = ([order(epoch * num_rows + k) for k in range(num_rows)] for epoch in (0, 1))
    assert sorted(first) == sorted(second) == list(range(num_rows))
    assert num_rows < 20 or first != second
    neighbour = [row_order(num_rows, seed + 1)(k) for k in range(num_rows)]
    assert num_rows < 20 or neighbour not in (first, second)


@given(stop=st.integers(0, 9), again=st.integers(0, 5), rows=st.sampled_from([5, ramp_up]))
@settings(max_examples=10, deadline=None)
def test_a_run_stopped_twice_reads_the_same_rows(stop, again, rows):
    first, second, third = (Loader(numbered_rows(60), rows, seed=5) for _ in range(3))
    got = taken(first, stop)
    second.restore(json.loads(json.dumps(first.state())))
    got += taken(second, again)
    third.restore(second.state())
    got += taken(third, 16 - stop - again)
    assert got == straight_run(rows)
    assert third.consumed_rows == sum(map(len, got)) > 60  # past the first epoch


def test_restoring_a_running_loader_moves_it():
    loader = Loader(numbered_rows(11), 3, seed=5)
    state, expected = loader.state(), taken(loader, 4)
    loader.restore(state)
    assert taken(loader, 4) == expected and loader.consumed_rows == 12


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_processes_share_one_global_batch_in_order(processes):
    def rows_at(consumed):
        return 4 if consumed < 8 else 8

    whole = taken(Loader(numbered_rows(13), rows_at, seed=1, total_rows=30))

    def share(process):
        return lambda start, rows: np.arange(rows).reshape(processes, -1)[process]

    parts = [
        taken(Loader(numbered_rows(13), rows_at, seed=1, total_rows=30, local_rows=share(process)))
        for process in range(processes)
    ]
    assert [sum(shares, []) for shares in zip(*parts, strict=True)] == whole


def test_position_moves_between_process_counts_with_interleaved_rows():
    one = Loader(numbered_rows(13), 4, seed=1)
    taken(one, 3)
    odd = Loader(numbered_rows(13), 4, seed=1, local_rows=lambda start, rows: np.arange(1, rows, 2))
    odd.restore(one.state())
    assert taken(odd, 2) == [batch[1::2] for batch in taken(one, 2)]


@pytest.mark.parametrize(
    ("remainder", "sizes", "consumed"),
    [("pad", [4, 4, 4], 10), ("drop", [4, 4], 8)],
)
def test_a_short_last_window(remainder, sizes, consumed):
    loader = Loader(numbered_rows(7), 4, seed=0, total_rows=10, remainder=remainder)
    batches = list(loader)
    assert [len(batch["tokens"]) for batch in batches] == sizes
    assert sum(batch["loss_mask"].any(axis=1).sum() for batch in batches) == consumed == loader.consumed_rows
    assert list(loader) == []  # the end stays the end


def test_a_short_last_window_can_be_refused():
    with pytest.raises(ValueError, match="total_rows=10 leaves 2 of the 4 rows .* use total_rows=8 or 12"):
        Loader(numbered_rows(7), 4, total_rows=10, remainder="error")
    Loader(numbered_rows(7), 4, total_rows=12, remainder="error")


def test_evaluation_reads_every_row_once_in_order():
    batches = taken(evaluation_batches(numbered_rows(5), 2))
    assert batches == [[1, 2], [3, 4], [5, 0]]


def test_reading_in_the_calling_thread_gives_the_same():
    assert taken(Loader(numbered_rows(9), 2, prefetch=0), 9) == taken(Loader(numbered_rows(9), 2), 9)


def test_an_error_of_the_reader_reaches_the_caller():
    def refuse(start, rows):
        raise ValueError(f"no rows {start} to {start + rows}")

    with pytest.raises(ValueError, match="no rows 0 to 3"):
        next(Loader(numbered_rows(9), 3, local_rows=refuse))


def test_an_index_past_the_last_row_is_a_row_of_zeros():
    loader = Loader(numbered_rows(13), 3, seed=None, local_rows=lambda start, rows: np.array([2, 3, 0, 4]))
    assert taken(loader, 2) == [[3, 0, 1, 0], [6, 0, 4, 0]]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Loader(numbered_rows(7, "those"), 2), "fingerprint=these, these have fingerprint=those"),
        (Loader(numbered_rows(7), 2, seed=3), "seed=0, these have seed=3"),
        (Loader(numbered_rows(7), 2, seed=None), "seed=0, these have seed=None"),
    ],
)
def test_a_position_in_other_rows_is_refused(other, words):
    with pytest.raises(ValueError, match=words):
        other.restore(Loader(numbered_rows(7), 2).state())


@pytest.mark.parametrize(
    ("num_rows", "arguments", "words"),
    [
        (0, {}, "num_rows=0 must be positive"),
        (3, {"rows_per_update": 0}, "rows_per_update=0 must be positive"),
        (3, {"total_rows": 0}, "total_rows=0 must be positive"),
        (3, {"remainder": "keep"}, "remainder='keep' is not known; use one of pad, drop, error"),
        (3, {"seed": -1}, "seed=-1 must not be negative; use 1"),
    ],
)
def test_impossible_settings_are_refused(num_rows, arguments, words):
    with pytest.raises(ValueError, match=words):
        Loader(numbered_rows(num_rows), **{"rows_per_update": 2, **arguments})

"""Batches of packed rows in a seeded order, from any position: the position is a number, not a state machine.

Part of the data (what each update receives). grain gives the order (the row at position p of an
endless stream, reshuffled each epoch, is a pure function of seed and p) and reads ahead with threads. The
position counts the rows consumed by the whole job, so it means the same on any number of processes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxfb.data.mixture import MixedOrder, MixedRows
from jaxfb.data.order import row_order
from jaxfb.data.packing import Rows
from jaxfb.refusal import INT64, Refused, integer, shown

Batch = dict[str, np.ndarray]
LocalRows = Callable[[int, int], np.ndarray]
READERS = 2
REMAINDERS = ("pad", "drop", "error")


class Loader:
    """An iterator of batches, each {tokens, targets, loss_mask, segments, positions} of [local rows, seq].

    rows_per_update: rows of the global batch, or a pure function of the rows consumed so far (ramp-up); it is
      asked ahead of time, because batches are.
    seed: of the row order, reshuffled each epoch; None keeps the rows in order.
    total_rows: where the run ends; None never ends. A window cut short by it is filled with rows of
      weight 0 ("pad"), left out ("drop") or refused ("error").
    local_rows: (position, rows) of a global batch -> the indices in it that this process holds, in the order
      of its devices; an index past the last row is a row of zeros. None means all.
    prefetch: batches read ahead, by two threads; 0 reads in the calling thread.
    """

    def __init__(
        self,
        rows: Rows,
        rows_per_update: int | Callable[[int], int],
        *,
        seed: int | None = 0,
        total_rows: int | None = None,
        remainder: str = "pad",
        local_rows: LocalRows | None = None,
        prefetch: int = 4,
    ):
        self._rows = rows
        self._seed = seed
        self._prefetch = prefetch
        self._total_rows = total_rows
        self._remainder = remainder
        self._local_rows = local_rows
        self._rows_at = _rows_at(rows_per_update)
        self._consumed_rows = 0
        self._iterator = None
        _check(rows, self._rows_at(0), seed, total_rows, remainder)
        self._order = _order(rows, seed)
        if remainder == "error" and total_rows is not None:
            self._refuse_short_window(total_rows)

    @property
    def consumed_rows(self) -> int:
        """Returns rows of the global batches handed out so far, without the padding."""
        return self._consumed_rows

    @property
    def epoch(self) -> float:
        """Returns the number of passes over the data so far."""
        return self._consumed_rows / len(self._rows)

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Batch:
        if self._iterator is None:
            self._iterator = self._read_from(self._consumed_rows)
        try:
            consumed, batch = next(self._iterator)
        except ValueError as error:  # grain appends its own lines to the message
            raise Refused(str(error).partition("\n")[0]) from None
        if batch is None:
            self.close()
            raise StopIteration
        self._consumed_rows = consumed
        return batch

    def state(self) -> dict:
        """Returns what `restore` needs: a few numbers, to be saved as JSON with the checkpoint."""
        state = {
            "consumed_rows": self._consumed_rows,
            "seed": self._seed,
            "num_rows": len(self._rows),
            "fingerprint": self._rows.fingerprint,
        }
        return state | ({"mixture": self._order.to_dict()} if isinstance(self._order, MixedOrder) else {})

    def restore(self, state: dict) -> None:
        """Continues where `state` was taken, without reading what came before.

        A mixture may have other weights from here on, and sources may come and go.

        Raises ValueError when the rows or the seed are not those of `state`.
        """
        mine = self.state()
        mixed = "mixture" in mine and "mixture" in state
        for name in ("seed",) if mixed else ("fingerprint", "num_rows", "seed"):
            if state[name] != mine[name]:
                raise Refused(
                    f"[data] the saved position belongs to rows with {name}={state[name]}, these have "
                    f"{name}={mine[name]}; use the saved run's text, split, tokenizer, sequence_length, "
                    f"packing and seed (python-stdlib is another text in another Python), or --allow-changes "
                    f"(allow_changes=True in a program) to continue at row {state['consumed_rows']} of these"
                )
        if mixed:
            self._order = self._order.continued(state["mixture"], int(state["consumed_rows"]))
        self.seek(int(state["consumed_rows"]))

    def passes(self, consumed_rows: int) -> dict[str, float]:
        """Returns how often each source of a mixture was read through before a position; empty for a single source."""
        return self._order.passes(consumed_rows) if isinstance(self._order, MixedOrder) else {}

    def seek(self, consumed_rows: int) -> None:
        """Continues as if so many rows of the global batches had been handed out."""
        self.close()
        self._consumed_rows = consumed_rows

    def close(self) -> None:
        """Stops reading ahead; the next batch starts it again."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None and hasattr(iterator, "close"):
            iterator.close()

    def _read_from(self, consumed_rows: int):
        import grain

        windows: Any = _Windows(consumed_rows, self._rows_at, self._total_rows, self._remainder, self._batch)
        options = grain.ReadOptions(
            num_threads=min(self._prefetch, READERS), prefetch_buffer_size=self._prefetch
        )
        return iter(grain.MapDataset.source(windows).to_iter_dataset(options))

    def _batch(self, start: int, rows: int) -> Batch:
        """Returns the local rows of global positions start .. start + rows; zeros past the end of the run."""
        index = np.arange(rows) if self._local_rows is None else self._local_rows(start, rows)
        end = start + rows if self._total_rows is None else min(start + rows, self._total_rows)
        row = [self._order(p) if p < end else -1 for p in (start + index).tolist()]
        return self._rows.gather(np.array(row, np.int64))

    def _refuse_short_window(self, total_rows: int) -> None:
        last = consumed = 0
        while consumed < total_rows:
            last, consumed = consumed, consumed + self._rows_at(consumed)
        if consumed > total_rows:
            whole = f"{last} or {consumed}" if last else f"{consumed}"
            raise Refused(
                f"[data] total_rows={total_rows} leaves {total_rows - last} of the "
                f"{consumed - last} rows of its last update; use total_rows={whole}, or remainder='pad' or 'drop'",
                [
                    *({"total_rows": rows} for rows in (last, consumed) if rows),
                    *({"remainder": one} for one in ("pad", "drop")),
                ],
            )


class _Windows:
    """A grain source: element k is the k-th batch from a starting position, with the position after it.

    Past the end its elements are (end, None), so that its length need not be known.
    """

    def __init__(self, start: int, rows_at, total_rows: int | None, remainder: str, batch):
        self._edges = [start]
        self._lock = threading.Lock()
        self._rows_at, self._batch = rows_at, batch
        self._end = sys.maxsize if total_rows is None else total_rows
        self._drop = remainder == "drop"

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, k: int) -> tuple[int, Batch | None]:
        start, stop = self._window(k)
        if start >= self._end or (self._drop and stop > self._end):
            return self._end, None
        return min(stop, self._end), self._batch(start, stop - start)

    def _window(self, k: int) -> tuple[int, int]:
        with self._lock:
            while len(self._edges) <= k + 1:
                self._edges.append(self._edges[-1] + self._rows_at(self._edges[-1]))
            return self._edges[k], self._edges[k + 1]


def evaluation_batches(
    rows: Rows,
    rows_per_batch: int,
    *,
    local_rows: LocalRows | None = None,
    prefetch: int = 2,
) -> Loader:
    """Yields all `rows` once, in order, in whole batches; the last one is filled with rows of weight 0."""
    return Loader(
        rows, rows_per_batch, seed=None, total_rows=len(rows), local_rows=local_rows, prefetch=prefetch
    )


def _rows_at(rows_per_update: Any) -> Callable[[int], int]:
    """Returns rows consumed -> rows of the next update."""
    own = callable(rows_per_update) and not isinstance(rows_per_update, type)
    rows_at: Any = rows_per_update if own else lambda consumed: rows_per_update
    return rows_at


def _order(rows: Rows, seed: int | None) -> Callable[[int], int]:
    if isinstance(rows, MixedRows) and seed is not None:
        return MixedOrder(rows, seed)
    return row_order(len(rows), seed)


def _check(
    rows: Rows,
    rows_per_update: int,
    seed: int | None,
    total_rows: int | None,
    remainder: str,
) -> None:
    if len(rows) == 0:
        raise Refused("[data] num_rows=0 must be positive; give more text")
    integer("rows_per_update", rows_per_update, who="[data]", least=-INT64)
    for name, value in (("total_rows", total_rows), ("seed", seed)):
        if value is not None:
            integer(name, value, who="[data]", least=-INT64, most=INT64)
    if rows_per_update < 1:
        raise Refused(
            f"[data] rows_per_update={rows_per_update} must be positive; use 1 or more",
            [{"rows_per_update": 1}],
        )
    if total_rows is not None and total_rows < 1:
        choices = [{"total_rows": 1}, {"total_rows": None}]
        raise Refused(
            f"[data] total_rows={total_rows} must be positive; use 1 or more, or None for no end", choices
        )
    if not isinstance(remainder, str) or remainder not in REMAINDERS:
        choices = [{"remainder": one} for one in REMAINDERS]
        raise Refused(
            f"[data] remainder={shown(remainder)} is not known; use one of {', '.join(REMAINDERS)}", choices
        )
    if seed is not None and seed < 0:
        raise Refused(f"[data] seed={seed} must not be negative; use {-seed}", [{"seed": -seed}])

"""Your own rows, in whatever form they come: a position in them is a value that a checkpoint holds.

A row is a tree of arrays without a row dim; a batch is such a tree with one. Every process reads the rows of its own
devices where rows can be indexed, and passes over the others' where they only come one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import jax
import numpy as np

from jaxfb.batch_plan import Window
from jaxfb.data.mixture import MixedOrder, MixedSources, Mixture
from jaxfb.data.order import row_order
from jaxfb.parallel.sharding import automatic
from jaxfb.refusal import Refused, shown
from jaxfb.training.rows.row_digits import fingerprint, is_whole

PyTree = Any


class OwnRows(Protocol):
    """Rows in the order in which training consumes them.

    num_rows: of one epoch; None where they never end or are not counted.
    """

    @property
    def num_rows(self) -> int | None: ...

    def read(self, window: Window, here: np.ndarray) -> PyTree:
        """Returns the rows `here` (indices into the window's padded rows) as a batch; padding rows are zeros."""
        ...

    def fingerprint(self) -> str | None:
        """Returns 16 hexadecimal digits of the rows; None where reading them twice may give other ones."""
        ...

    def position(self, start: int) -> dict[str, Any]:
        """Returns what `restore` needs to continue with the window that begins at row `start`.

        It may have been read already, for an update that was not made.
        """
        ...

    def check_same(self, position: Mapping[str, Any]) -> None:
        """Raises ValueError where a position was saved of rows with other values; it may have no fingerprint."""
        ...

    def restore(self, position: Mapping[str, Any]) -> None:
        """Continues from there."""
        ...


def own_rows(data: Any, seed: int) -> OwnRows:
    """Returns rows out of arrays [rows, ...] in a tree, a sequence of rows, an iterable of rows, or a `Mixture`.

    Arrays and sequences are shuffled anew each epoch, by the seed alone; an iterable keeps its order.

    Raises:
      ValueError: it is none of these, or might be two of them, or its arrays do not have one number of rows.
    """
    if isinstance(data, Mixture):
        return _Mixed(data, seed)
    if type(data) is tuple and data and all(getattr(part, "ndim", 0) for part in data):
        raise Refused(
            "[data] must be arrays [rows, ...] in a dict, or rows in a list; a tuple of arrays could be either, got "
            f"shapes {shown([np.shape(leaf) for leaf in data])}"
        )
    if _is_sequence(data):
        return _Indexed(
            lambda index: _kept(data[index]),
            len(data),
            seed,
            data if isinstance(data, list | tuple) else None,
        )
    if _is_stream(data):
        return _Streamed(data)
    if leaves := _arrays(data := automatic(data)):
        counts = sorted({len(leaf) for leaf in leaves})
        if len(counts) != 1:
            raise Refused(f"[data] every array must have one number of rows, got {counts}")
        return _Indexed(lambda index: jax.tree.map(lambda leaf: leaf[index], data), counts[0], seed, data)
    raise Refused(
        "[data] must be arrays [rows, ...] in a tree, a sequence of rows or an iterable of rows, got "
        f"{type(data).__name__}"
    )


class _Indexed:
    """Rows that can be asked for by number.

    known: the rows, where they are arrays or lists; a sequence of another class may compute each anew.
    """

    def __init__(self, row: Any, num_rows: int, seed: int, known: PyTree = None):
        if not num_rows:
            raise Refused("[data] there is no row to train on; give more")
        self.row, self.num_rows, self._order = row, num_rows, row_order(num_rows, seed)
        self._known = known

    def read(self, window: Window, here: np.ndarray) -> PyTree:
        return _batch(lambda place: self.row(self._order(window.start + place)), window, here)

    def fingerprint(self) -> str | None:
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str | None:
        return None if self._known is None else fingerprint(self._known, self.num_rows)

    def comparable_fingerprint(self) -> str | None:
        """Returns the fingerprint that the same rows have in every job; None for arrays cut over processes."""
        return self.fingerprint() if is_whole(self._known) else None

    def position(self, start: int) -> dict[str, Any]:
        # the place among them follows from the number of updates
        return {"num_rows": self.num_rows, "fingerprint": self.comparable_fingerprint()}

    def check_same(self, position: Mapping[str, Any]) -> None:
        saved, mine = position.get("fingerprint"), self.comparable_fingerprint()
        if position.get("num_rows") == self.num_rows and _differ(saved, mine):
            raise Refused(
                f"[data] the saved run had other rows (fingerprint {saved}, these have {mine}); use its data, another "
                "run.dir, or --allow-changes (allow_changes=True in a program) to continue with these"
            )

    def restore(self, position: Mapping[str, Any]) -> None:
        _check_kind(position, "num_rows")
        if position["num_rows"] != self.num_rows:
            raise Refused(
                f"[data] the saved run had {position['num_rows']} rows, these are {self.num_rows}; use its data, or "
                "another run.dir"
            )


@dataclass(frozen=True)
class _Part:
    """The size of a source, which the order of a mixture reads."""

    num_rows: int

    def __len__(self) -> int:
        return self.num_rows

    @property
    def fingerprint(self) -> str:
        return f"{self.num_rows} rows"


class _Mixed:
    """Rows of several sources that can be asked for by number, in the order of a `MixedOrder`."""

    num_rows = None

    def __init__(self, mixture: Mixture, seed: int):
        self._sources = {
            name: _indexed(name, own_rows(source, seed)) for name, source in mixture.sources.items()
        }
        parts = {name: _Part(source.num_rows) for name, source in self._sources.items()}
        self._order = MixedOrder(MixedSources(parts, mixture.weights), seed)

    def read(self, window: Window, here: np.ndarray) -> PyTree:
        return _batch(lambda place: self._row(window.start + place), window, here)

    def fingerprint(self) -> str | None:
        return str({name: source.fingerprint() for name, source in self._sources.items()})

    def _fingerprints(self) -> dict[str, str | None]:
        return {name: source.comparable_fingerprint() for name, source in self._sources.items()}

    def position(self, start: int) -> dict[str, Any]:
        return {"mixture": self._order.to_dict(), "fingerprints": self._fingerprints()}

    def check_same(self, position: Mapping[str, Any]) -> None:
        saved = position.get("fingerprints", {})
        for name, mine in self._fingerprints().items():
            if _differ(saved.get(name), mine):
                raise Refused(
                    f"[data] the source {name!r} of the Mixture has other rows than in the saved run; use its data, "
                    "another run.dir, or give the new rows another name"
                )

    def restore(self, position: Mapping[str, Any]) -> None:
        _check_kind(position, "mixture")
        self._order = self._order.continued(position["mixture"], position["start"])

    def _row(self, position: int) -> PyTree:
        name, row = self._order.row(position)
        return self._sources[name].row(row)


def _indexed(name: str, rows: OwnRows) -> _Indexed:
    if not isinstance(rows, _Indexed):
        raise Refused(f"[data] the source {name!r} of the Mixture must be arrays or a sequence of rows")
    return rows


class _Streamed:
    """Rows that come one after the other. A source with `get_state` and `set_state`, such as grain's, is put back
    where it was; any other is read again up to there."""

    num_rows = None

    def __init__(self, source: Iterable):
        self._rows: Any = iter(source)
        self._consumed = 0
        # start of the window that was read last, and its rows by place
        self._latest: tuple[int, Mapping[int, PyTree]] | None = None

    def read(self, window: Window, here: np.ndarray) -> PyTree:
        if self._latest is None or self._latest[0] != window.start:  # a rollback returns to the one read last
            self._latest = (window.start, self._rows_of(window, here))
        return _batch(self._latest[1].__getitem__, window, here)

    def _rows_of(self, window: Window, here: np.ndarray) -> Mapping[int, PyTree]:
        while self._consumed < window.start:  # rows of a short window that was dropped
            self._next()
        wanted = {0, *map(int, here)}  # the first one for its shapes
        each = enumerate(self._next() for _ in range(window.rows))
        return {place: _kept(row) for place, row in each if place in wanted}

    def fingerprint(self) -> str | None:
        return None

    def check_same(self, position: Mapping[str, Any]) -> None:
        """Does nothing: rows that come one after the other cannot be read to compare them."""

    def position(self, start: int) -> dict[str, Any]:
        if self._consumed > start:  # the source is past it; from the beginning it can be reached
            return {"consumed_rows": start, "state": None}
        state = self._rows.get_state() if hasattr(self._rows, "get_state") else None
        if isinstance(state, bytes):
            state = {"bytes": state.decode("latin-1")}
        return {"consumed_rows": self._consumed, "state": state}

    def restore(self, position: Mapping[str, Any]) -> None:
        _check_kind(position, "consumed_rows")
        state = position["state"]
        if state is not None and hasattr(self._rows, "set_state"):
            self._put_back(state["bytes"].encode("latin-1") if set(state) == {"bytes"} else state)
            self._consumed, self._latest = position["consumed_rows"], None
        while self._consumed < position["consumed_rows"]:
            self._next()

    def _put_back(self, state: Any) -> None:
        try:
            self._rows.set_state(state)
        except Exception as error:  # of somebody else's class
            raise Refused(
                f"[data] the rows do not take back the position that was saved of them ({shown(str(error))}); give "
                "those that the run began with; the source of a grain DataLoader needs a __repr__ without an address"
            ) from error

    def _next(self) -> PyTree:
        try:
            row = next(self._rows)
        except StopIteration:
            raise Refused(
                f"[data] the rows ended after {self._consumed}, before the run did; give more rows, one by one and "
                "not in batches, a shorter run, or an iterable that begins again by itself"
            ) from None
        self._consumed += 1
        return row


_KINDS = {
    "num_rows": "arrays or a sequence of rows",
    "consumed_rows": "an iterable of rows",
    "mixture": "a Mixture",
}
"""What the data of a saved position is, by the entry that only such a position has."""


def _differ(saved: str | None, mine: str | None) -> bool:
    """Returns whether two fingerprints are known and not the same."""
    return None not in (saved, mine) and saved != mine


def _check_kind(position: Mapping[str, Any], entry: str) -> None:
    if entry not in position:
        saved = next((kind for name, kind in _KINDS.items() if name in position), "other data")
        raise Refused(
            f"[data] the saved run read {saved}, this is {_KINDS[entry]}; use its data, or another run.dir"
        )


def _is_sequence(data: Any) -> bool:
    indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__") and not hasattr(data, "_fields")
    return indexed and not isinstance(data, str | bytes | Mapping | np.ndarray | jax.Array)


def _is_stream(data: Any) -> bool:
    if isinstance(data, Iterator):
        return True
    known = isinstance(data, str | bytes | np.ndarray | jax.Array) or not jax.tree_util.all_leaves([data])
    return isinstance(data, Iterable) and not known


def _arrays(data: Any) -> list[Any]:
    """Returns the leaves of a tree if all of them are arrays with a row dim, else none."""
    leaves = jax.tree.leaves(data)
    return leaves if leaves and all(getattr(leaf, "ndim", 0) > 0 for leaf in leaves) else []


def _batch(row: Callable[[int], PyTree], window: Window, here: np.ndarray) -> PyTree:
    """Returns the rows `here` of a window as a batch, with zeros for padding. row: of a place in the window."""
    rows = {place: row(place) for place in map(int, here) if place < window.rows}
    example = next(iter(rows.values())) if rows else row(0)
    zeros = jax.tree.map(lambda leaf: np.zeros_like(np.asarray(leaf)), example)
    return _stacked([rows.get(int(place), zeros) for place in here])


def _kept(row: PyTree) -> PyTree:
    """Returns a row that stays as it is where its source writes the next one into the same arrays."""
    return jax.tree.map(lambda leaf: leaf if isinstance(leaf, jax.Array) else np.array(leaf), row)


def _stacked(rows: list[PyTree]) -> PyTree:
    """Returns rows as a batch; ValueError where they are not alike."""
    first = jax.tree.map(np.shape, rows[0])
    for row in rows:
        if (shapes := jax.tree.map(np.shape, row)) != first:
            raise Refused(
                f"[data] the rows of an update must be trees of the same shapes, but one is {shown(first)} and "
                f"another {shown(shapes)}; pad them to one length, and leave out what only some have"
            )
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)

"""Arrays of a checkpoint are read layer by layer, whatever the pieces they are stored in, and compared as a whole."""

from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxfb.checkpoint import stored_parts
from jaxfb.checkpoint.store import CheckpointStore
from jaxfb.parallel import totals
from jaxfb.parallel.totals import PartSums, checksums
from jaxfb.refusal import StorageError

VALUE = np.random.default_rng(0).normal(size=(4, 3, 8, 16)).astype(np.float32)


def saved(directory, monkeypatch, large, sharding=None):
    """Returns the arrays of a checkpoint whose arrays of more than `large` bytes are stored in pieces."""
    monkeypatch.setattr(stored_parts, "LARGE", large)
    monkeypatch.setattr(stored_parts, "LEAST", 256)
    leaves = {"stack": jax.device_put(VALUE, sharding), "row": jnp.arange(5, dtype=jnp.bfloat16)}
    with CheckpointStore(directory, asynchronous=False) as store:
        store.save(1, {"params": leaves}, {})
        return store.arrays(1)


@pytest.mark.parametrize("large, pieces", [(100, (1, 1, 8, 16)), (10**6, (4, 3, 8, 16))])
def test_the_parts_of_an_array_are_its_layers(large, pieces, tmp_path, monkeypatch):
    arrays = saved(tmp_path, monkeypatch, large)
    assert stored_parts._opened(arrays._directory, "params.stack").chunk_layout.read_chunk.shape == pieces
    for depth in (0, 1, 2):
        wanted = [VALUE[index] for index in np.ndindex(VALUE.shape[:depth])]
        chex.assert_trees_all_equal(list(arrays.parts("params.stack", depth)), wanted)
    assert [part.tolist() for part in arrays.parts("params.row", 0)] == [[0, 1, 2, 3, 4]]
    assert "params.row" in arrays and "params.column" not in arrays


def test_an_array_that_was_cut_over_devices_is_read_the_same(tmp_path, monkeypatch):
    mesh = jax.make_mesh((2, 2), ("pipe", "fsdp"), axis_types=(AxisType.Auto,) * 2)
    for large in (100, 10**6):
        arrays = saved(
            tmp_path / str(large), monkeypatch, large, NamedSharding(mesh, P("pipe", None, "fsdp"))
        )
        for depth in (1, 2):
            wanted = [VALUE[index] for index in np.ndindex(VALUE.shape[:depth])]
            chex.assert_trees_all_equal(list(arrays.parts("params.stack", depth)), wanted)


def test_changed_bits_are_found_once_all_parts_are_read(tmp_path, monkeypatch):
    arrays = saved(tmp_path, monkeypatch, 100)
    store = {
        "driver": "ocdbt",
        "base": {"driver": "file", "path": f"{tmp_path}/1/state/"},
        "path": "params.stack/",
    }
    stored = tensorstore.open({"driver": "zarr3", "kvstore": store}, open=True).result()
    stored[2, 1, 3, 5].write(np.float32(7)).result()
    with pytest.raises(StorageError, match="differs from what was saved, in params.stack"):
        list(arrays.parts("params.stack", 1))


def test_sums_of_parts_are_the_sum_of_the_whole(monkeypatch):
    monkeypatch.setattr(totals, "_AT_ONCE", 40)
    for value in (VALUE, VALUE[0, 0, 0], VALUE.astype(jnp.bfloat16), np.float32(3)[()].reshape(())):
        whole = PartSums()
        whole.add(value)
        assert whole.digits == checksums({"x": value})["x"]
    parts = PartSums()
    for at in (3, 1, 0, 2):
        parts.add(VALUE[at : at + 1], (at,))
    assert parts.digits == checksums({"x": VALUE})["x"]


def test_small_arrays_and_rows_are_stored_whole():
    def axes(*shape, **placed):
        value = np.broadcast_to(np.float32(0), shape)
        whole = SimpleNamespace(nbytes=value.nbytes, shape=shape, dtype=value.dtype, **placed)
        found = stored_parts.storage_of(None, whole)
        return None if found is None else found.shard_axes

    assert axes(4, 8) is None and axes(128256, 4096) == ()
    assert axes(32, 4096, 14336) == (0,) and axes(9, 128, 2048, 768) == (0, 1)
    # half of an expert on each device is less than a piece of some size
    halves = NamedSharding(jax.make_mesh((2,), ("fsdp",), axis_types=(AxisType.Auto,)), P(None, None, "fsdp"))
    assert axes(9, 128, 2048, 768, sharding=halves) == (0,)

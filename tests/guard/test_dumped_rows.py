"""The rows that a dump keeps come back as the tree they were, or are not kept at all."""

from collections import namedtuple

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb.training.dump import _rebuilt, _save_rows

ARRAYS = [np.arange(6).reshape(2, 3), np.ones((2, 1), np.float32), np.array([True, False])]


def read(path):
    with np.load(path, allow_pickle=False) as stored:
        return [stored[f"a{index}"] for index in range(len(stored.files))]


@pytest.mark.parametrize(
    "tree",
    [
        {"x": ARRAYS[0], "y": {"mask": ARRAYS[2]}},
        (ARRAYS[0], [ARRAYS[1], ARRAYS[2]], {"z": ()}),
        [ARRAYS[2]],
        ARRAYS[1],
    ],
    ids=["dicts", "tuple", "list", "array"],
)
def test_rows_come_back_in_the_tree_they_were_given_in(tree, tmp_path):
    path = tmp_path / "rows.npz"
    found = _rebuilt(_save_rows(path, tree), read(path))
    assert str(found) == str(tree)
    assert type(found) is type(tree)


@pytest.mark.parametrize(
    "tree",
    [
        {1: ARRAYS[0]},
        namedtuple("Point", "x y")(*ARRAYS[:2]),
        {"x": 3},
        jnp.ones(2, jnp.bfloat16),
        np.array(["a"]),
    ],
    ids=["numbers as keys", "namedtuple", "number", "bfloat16", "strings"],
)
def test_what_such_a_file_cannot_hold_is_not_kept(tree, tmp_path):
    assert _save_rows(tmp_path / "rows.npz", tree) is None and not any(tmp_path.iterdir())

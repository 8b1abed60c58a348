"""The rows that a dump keeps come back as the tree they were, or are not kept at all; damaged ones are named."""

import json
from collections import namedtuple

import jax.numpy as jnp
import numpy as np
import pytest

from jaxfb.refusal import Refused, StorageError
from jaxfb.training.guarding.dump import FORMAT, _rebuilt, _save_rows, read_dump

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


@pytest.fixture
def dump(tmp_path):
    values = dict.fromkeys(("reason", "numbers", "config", "versions", "devices"))
    tree = _save_rows(tmp_path / "rows-0.npz", {"x": np.arange(600)})
    values |= {"format": FORMAT, "update": 1, "past": 1, "step": 1, "checkpoint": "state", "tree": tree}
    (tmp_path / "dump.json").write_text(json.dumps(values))
    return tmp_path


def flipped(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 64]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "damaged",
    [lambda content: b"", lambda content: content[: len(content) // 2], flipped],
    ids=["empty", "cut", "flipped"],
)
def test_damaged_rows_are_named(dump, damaged):
    """The traceback of a library for archives came, without the file."""
    path = dump / "rows-0.npz"
    path.write_bytes(damaged(path.read_bytes()))
    with pytest.raises(StorageError, match=f"{path} is damaged; remove it"):
        read_dump(dump).rows(0)
    path.unlink()
    assert read_dump(dump).rows(0) is None


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe"], ids=["empty", "list", "no text"])
def test_a_damaged_description_is_named(dump, content):
    (dump / "dump.json").write_bytes(content)
    with pytest.raises(Refused, match="dump.json is damaged"):
        read_dump(dump)

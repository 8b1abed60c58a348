"""A few of the damaged files that `python tests/misuse/data_files.py` draws by the thousand."""

import pytest
from data_files import outcome, table

from jaxfb.data import DataConfig, prepare


def test_every_damaged_file_is_read_or_refused_in_a_sentence(tmp_path):
    found = set()
    for seed in range(25):
        (tmp_path / str(seed)).mkdir()
        found.add(outcome(seed, tmp_path / str(seed)))
    assert found == {"read", "refused"}


def test_a_column_of_bytes_that_are_no_text_is_refused(tmp_path):
    """pyarrow does not look at them before they are decoded: a flipped bit in an Arrow file is in no checksum."""
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.arrow"
    path.write_bytes(table("arrow").replace(b"Ways", b"\xffays"))
    with pytest.raises(ValueError, match="cannot be read to its end: .*Invalid UTF8"):
        prepare(DataConfig(source="arrow", path=str(path), tokenizer="bytes", cache_dir=str(tmp_path / "c")))

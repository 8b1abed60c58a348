"""What docs/security.md promises about the code itself: what it never calls, and what it imports."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "jaxfb").rglob("*.py"))
NEVER_CALLED = {"eval", "exec", "compile", "__import__"}
NEVER_IMPORTED = {
    *("pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib", "torch"),
    *("urllib", "http", "requests", "httpx", "aiohttp", "ftplib", "smtplib", "xmlrpc", "huggingface_hub"),
}
CONNECT = {
    "training/job/abort.py",
    "training/job/hosts.py",
    "training/job/join.py",
    "training/persistence/local_tier.py",
    "training/persistence/run_lock.py",
    "process/launcher.py",
    "process/loopback.py",
}
READERS = {
    "pyarrow": "pyarrow",
    "tokenizers": "tokenizers",
    "safetensors": "safetensors",
    "jinja2": "jinja2",
    "gzip": "gzip",
}


def imported(tree):
    """Names of the packages that a module imports, inside of functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


@pytest.fixture(scope="module")
def trees():
    return {file.relative_to(ROOT / "jaxfb").as_posix(): ast.parse(file.read_text()) for file in FILES}


def test_no_code_is_made_from_text_and_nothing_is_unpickled(trees):
    for file, tree in trees.items():
        assert not NEVER_IMPORTED.intersection(imported(tree)), file
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call):
                continue
            if isinstance(node.func, ast.Name):
                assert node.func.id not in NEVER_CALLED, f"{file}:{node.lineno}"
            pickles = [word for word in node.keywords if word.arg in ("allow_pickle", "trust_remote_code")]
            for word in pickles:
                assert isinstance(word.value, ast.Constant) and word.value.value is False, (
                    f"{file}:{node.lineno}"
                )


def test_only_the_modules_for_several_processes_use_sockets(trees):
    assert {file for file, tree in trees.items() if "socket" in imported(tree)} <= CONNECT


def test_every_library_that_reads_files_is_listed(trees):
    listed = re.sub(r"\s+", " ", (ROOT / "docs" / "security.md").read_text())
    used = set().union(*(imported(tree) for tree in trees.values()))
    for package, name in READERS.items():
        assert package in used and f"`{name}" in listed, package
    unlisted = used & {
        "msgpack",
        "h5py",
        "zipfile",
        "tarfile",
        "bz2",
        "lzma",
        "toml",
        "tomllib",
        "xml",
        "csv",
        "sqlite3",
    }
    assert not unlisted

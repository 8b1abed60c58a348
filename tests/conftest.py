"""Eight simulated CPU devices, float64 on, and a compile cache that outlives the run."""

import os
from pathlib import Path

import program_cache

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(program_cache.DIRECTORY))
# most programs of a test are small ones, of single operations: kept as well, they come back in every file and run
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
# XLA carries the lines of Python that made an operation through all its passes, which no test reads: without them a
# pipeline of the toy is compiled in a tenth less of a processor
os.environ.setdefault("JAX_TRACEBACK_IN_LOCATIONS_LIMIT", "0")
# processes that tests start read each other's bytecode, in containers too, many of which ask for none to be written
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

import gc  # noqa: E402
import json  # noqa: E402
import shutil  # noqa: E402

import environment  # noqa: E402
import jax  # noqa: E402
import listed  # noqa: E402
import pytest  # noqa: E402
from quickly import flags  # noqa: E402

import jaxfb.platforms.cpu  # noqa: E402
from jaxfb import parts  # noqa: E402
from jaxfb.parallel import collectives  # noqa: E402
from jaxfb.registry import Registry  # noqa: E402
from jaxfb.schedules import KINDS  # noqa: E402

given = os.environ.get("XLA_FLAGS", "")
# The workers of pytest-xdist inherit these flags. Given twice they would be another text, and JAX finds kept programs
# by that text too.
if flags(devices=8) not in given:
    os.environ["XLA_FLAGS"] = f"{given} {flags(devices=8)}".strip()
jaxfb.platforms.cpu.prepare()
jax.config.update("jax_enable_x64", True)
gc.set_threshold(100_000, 20, 20)  # tracing makes many small objects, few of them garbage

REGISTRIES = [KINDS, *(part for part in vars(parts).values() if isinstance(part, Registry))]
GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True)
def same_environment():
    """What a test's command sets in the environment does not reach the processes of the next test."""
    before = dict(os.environ)
    yield
    environment.restore(before)


@pytest.fixture(autouse=True, scope="module")
def programs_of_one_file():
    """Compiled programs are shared within a file and dropped after it: a whole suite of them is gigabytes."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def names_of_one_file():
    """Schedules, losses and so on that a file registers, as the examples of the docs do, are unknown to the next."""
    before = [(registry, dict(registry._parts)) for registry in REGISTRIES]
    yield
    for registry, known in before:
        registry._parts.clear()
        registry._parts.update(known)


@pytest.fixture(scope="session")
def golden():
    """golden("hf_schedules.json") -> the parsed file."""
    return lambda name: json.loads((GOLDEN / name).read_text())


@pytest.fixture
def copied(tmp_path):
    """A directory of Hugging Face files, a tiny Llama, that the test may change."""
    return shutil.copytree(GOLDEN / "hf_llama_tiny", tmp_path / "model")


def pytest_sessionfinish(session):
    """Removes old programs once: in the process that started the workers of pytest-xdist, not in each of them."""
    kept = Path(os.environ["JAX_COMPILATION_CACHE_DIR"])
    if not hasattr(session.config, "workerinput") and kept == program_cache.DIRECTORY:
        program_cache.remove_old(kept)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out those that `-m` does not name
def pytest_collection_modifyitems(config, items):
    """Checks that a name is the same in every process that runs tests: no address of an object in it."""
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(f"the name of a test contains an object's address: {item.nodeid}")
    listed.mark(config, items)


@pytest.fixture
def in_two_steps(monkeypatch):
    """Scatters over fsdp in two steps, a layer apart, as on v6e and v5p where fsdp is a whole slice.

    Calls with equal options share one trace, which knows nothing of this: none is shared with other tests.
    """
    monkeypatch.setattr(collectives, "_falls_back", lambda axes, kind, mesh: "fsdp" in axes)
    monkeypatch.setattr(collectives, "_gains_by_steps_apart", lambda mesh, on_v5p: True)
    jax.clear_caches()
    yield
    jax.clear_caches()

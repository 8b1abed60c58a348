"""Which processes keep their compiled programs."""

import jax
import pytest

from jaxfb.training.compile_cache import use_compile_cache


@pytest.fixture
def no_directory(tmp_path, monkeypatch):
    """JAX keeps no programs yet, and jaxfb's caches are in an empty directory."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("JAXFB_CACHE", str(tmp_path))
    yield tmp_path
    jax.config.update("jax_compilation_cache_dir", before)


def test_programs_of_several_cpu_devices_are_not_kept_unless_it_is_asked_for(no_directory):
    assert jax.local_device_count() == 8
    assert use_compile_cache() is None and not jax.config.jax_compilation_cache_dir
    assert use_compile_cache(no_directory / "asked") == no_directory / "asked"


def test_programs_of_one_device_are(no_directory, monkeypatch):
    monkeypatch.setattr(jax, "local_device_count", lambda: 1)
    assert use_compile_cache() == no_directory / "jaxfb-compiled"
    assert jax.config.jax_compilation_cache_dir == str(no_directory / "jaxfb-compiled")


def test_programs_of_several_gpus_are(no_directory, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert use_compile_cache() == no_directory / "jaxfb-compiled"

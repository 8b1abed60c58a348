"""Fixtures of the tests of forward_backward."""

import jax
import pytest

from jaxfb.parallel import collectives


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

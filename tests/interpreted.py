"""The kernels for GPUs on any device, run by Pallas' interpreter on blocks that divide the sizes of tests."""

from functools import partial
from types import SimpleNamespace

import pytest
from jax import lax

from jaxfb.models import grouped_matmul

platform_dependent = lax.platform_dependent


def use_kernels_of_gpus(monkeypatch):
    """Has every product of experts computed by them, in any dtype."""
    kernels = pytest.importorskip("jaxfb.models.grouped_kernels")
    monkeypatch.setattr(kernels, "SMALL", kernels.Blocks(2, 2, 2, 1, 1, band=3))
    ways = {name: partial(getattr(kernels, name), interpret=True) for name in ("product", "outer_product")}
    monkeypatch.setattr(grouped_matmul, "_gpu_kernels_for", lambda *_: SimpleNamespace(**ways))

    def choose(*arguments, **platforms):
        cuda = platforms.get("cuda")
        return cuda(*arguments) if cuda else platform_dependent(*arguments, **platforms)

    monkeypatch.setattr(lax, "platform_dependent", choose)

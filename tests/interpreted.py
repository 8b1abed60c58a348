"""The kernels for GPUs on any device, run by Pallas' interpreter on blocks that divide the sizes of tests."""

from functools import partial
from types import SimpleNamespace

import pytest

from jaxfb.mesh import by_platform
from jaxfb.models import grouped_matmul


def use_kernels_of_gpus(monkeypatch):
    """Has every product of experts computed by them, in any dtype."""
    kernels = pytest.importorskip("jaxfb.models.grouped_kernels")
    monkeypatch.setattr(kernels, "SMALL", kernels.Blocks(2, 2, 2, 1, 1, band=3))
    ways = {name: partial(getattr(kernels, name), interpret=True) for name in ("product", "outer_product")}
    monkeypatch.setattr(grouped_matmul, "_gpu_kernels_for", lambda *_: SimpleNamespace(**ways))

    def choose(*arguments, **platforms):
        cuda = platforms.get("cuda")
        return cuda(*arguments) if cuda else by_platform(*arguments, **platforms)

    monkeypatch.setattr(grouped_matmul, "by_platform", choose)

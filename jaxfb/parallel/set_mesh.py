"""Makes the programs of one mesh while the caller has set another one by `jax.set_mesh`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import Any, TypeVar

import jax
from jax.sharding import AbstractMesh, Mesh

from jaxfb.platforms.compat import is_tracing
from jaxfb.refusal import Refused

Method = TypeVar("Method", bound=Callable[..., Any])


def on_its_mesh(method: Method) -> Method:
    """Runs a method, of an object that has a `mesh`, as if the caller had set no other mesh by `jax.set_mesh`.

    Raises:
      ValueError: JAX is tracing the caller's function, in which another mesh is set or mapped.
    """

    @wraps(method)
    def run(self, *args, **kwargs):
        with entered(self.mesh):
            return method(self, *args, **kwargs)

    return run  # type: ignore[return-value]


def entered(mesh: Mesh) -> AbstractContextManager:
    """Returns a context in which programs over a mesh can be made; see `on_its_mesh`."""
    around = jax.sharding.get_abstract_mesh()
    if around.empty or around == mesh.abstract_mesh or isinstance(mesh, AbstractMesh):
        return nullcontext()
    if around.manual_axes:
        raise Refused(
            f"the call is inside jax.shard_map over {', '.join(around.manual_axes)}, but jaxfb maps a mesh itself; "
            "call it outside, with the mesh given to it"
        )
    if is_tracing():
        raise Refused(
            f"the call is traced where jax.set_mesh has set a mesh of {dict(around.shape)}, but runs on one of "
            f"{dict(mesh.shape)}; set that one, or none"
        )
    return jax.set_mesh(mesh)

"""jaxfb: the forward-backward engine for training transformers with JAX, and a trainer around it.

`__init__.pyi` lists the public names; each is loaded when it is first used, so `import jaxfb` is immediate.
"""

from importlib import import_module

import lazy_loader

from jaxfb.platforms import cpu, pinned_memory

__version__ = "0.1.0"
_load, _, _names = lazy_loader.attach_stub(__name__, __file__)
__all__ = [*_names]

cpu.prepare()
pinned_memory.prepare()


def __getattr__(name: str):
    """Loads a public name, or a submodule such as `jaxfb.losses`."""
    if name in _names:
        return _load(name)
    try:
        return import_module(f"jaxfb.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"jaxfb.{name}":
            raise
        raise AttributeError(f"jaxfb has no public name {name!r}; it has {', '.join(__all__)}") from None


def __dir__():
    return sorted(__all__)

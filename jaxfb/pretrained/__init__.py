"""Models in the files of Hugging Face: read from a directory onto a mesh, and written to one.

config.json + *.safetensors -> sizes and parameters of the built-in transformer -> the same files again

Names are loaded when they are first used: reading a config.json needs no jax.
"""

from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from jaxfb.pretrained.architectures import ARCHITECTURES, sizes_of
    from jaxfb.pretrained.export import export_model
    from jaxfb.pretrained.load import load_params
    from jaxfb.pretrained.repository import Repository, open_repository

__getattr__, __dir__, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "architectures": ["ARCHITECTURES", "sizes_of"],
        "export": ["export_model"],
        "load": ["load_params"],
        "repository": ["Repository", "open_repository"],
    },
)

__all__ = ["ARCHITECTURES", "Repository", "export_model", "load_params", "open_repository", "sizes_of"]

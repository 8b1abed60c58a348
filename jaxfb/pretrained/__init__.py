"""Models in the files of Hugging Face: read from a directory onto a mesh, and written to one.

config.json + *.safetensors -> sizes and parameters of the built-in transformer -> the same files again
"""

from jaxfb.pretrained.architectures import ARCHITECTURES, sizes_of
from jaxfb.pretrained.export import export_model
from jaxfb.pretrained.load import load_params
from jaxfb.pretrained.repository import Repository, open_repository

__all__ = ["ARCHITECTURES", "Repository", "export_model", "load_params", "open_repository", "sizes_of"]

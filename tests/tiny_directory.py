"""The tiny model of examples/hugging_face, as tests import it."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parent.parent
_spec = importlib.util.spec_from_file_location(
    "tiny_model", ROOT / "examples" / "hugging_face" / "tiny_model.py"
)
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)
make = _module.make

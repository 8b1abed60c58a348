"""Names the kinds of TPU that choices depend on, as `device_kind` has them."""

from __future__ import annotations

V5E, V6E = "TPU v5 lite", "TPU v6 lite"
V5P = ("TPU v5", "TPU v5p")
"""Both names of v5p."""

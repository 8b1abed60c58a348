"""Names what decides the bits of a run beside its config: Python, the packages, jaxfb's own code and the platform."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import jax

import jaxfb

PACKAGES = ("jaxfb", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")
SOURCE = "jaxfb's source"


def versions() -> dict[str, str]:
    """Returns the versions of Python and the packages, the fingerprint of jaxfb's code, and the platform."""
    return {**package_versions(), SOURCE: source_fingerprint(), "platform": jax.devices()[0].platform}


def version_changes(saved: Mapping[str, str]) -> list[tuple[str, str, str]]:
    """Returns (name, saved value, value here) of all that differ; earlier versions of jaxfb saved fewer names."""
    here = versions()
    return [(name, old, here[name]) for name, old in saved.items() if here.get(name, old) != old]


@cache
def package_versions() -> Mapping[str, str]:
    """Returns the versions of Python and of the packages that decide the bits.

    They are read once: each save has them, also one at which no file can be opened.
    """
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


@cache
def source_fingerprint() -> str:
    """Returns 16 hex digits of every Python file of the jaxfb that is imported, as they were at the first call."""
    root, state = Path(jaxfb.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        state.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return state.hexdigest()[:16]

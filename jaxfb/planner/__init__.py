"""Know before you run: whether a config fits a machine and how fast it could be there, from any laptop.

`jaxfb plan configs/8b.yaml --topology v5p:4x4x4`; from Python `jaxfb.planner.plan(config, parse_topology(name))`.
"""

from importlib import import_module

_PUBLIC = {
    "Chip": "chips",
    "GPUS": "chips",
    "TPUS": "chips",
    "Topology": "topology",
    "parse_topology": "topology",
    "Estimate": "formula.estimate",
    "Verdict": "verdict",
    "plan": "verdict",
    "page": "text",
}

__all__ = [*_PUBLIC]


def __getattr__(name: str):
    if name in _PUBLIC:
        return getattr(import_module(f"jaxfb.planner.{_PUBLIC[name]}"), name)
    raise AttributeError(f"jaxfb.planner has no name {name!r}; it has {', '.join(__all__)}")

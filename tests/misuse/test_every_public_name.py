"""No public name is without calls with wrong arguments."""

import ast
import pathlib

import jaxfb

MODULES = {"schedules", "batch_plan"}
MADE_BY_JAXFB = {"ForwardBackwardOutput", "StepMetrics", "TrainState"}
"""What jaxfb returns; nobody makes one."""
SUBCLASSED = {"Callback"}


def used(file):
    """Names of jaxfb that a file of tests uses, as `jaxfb.name` or imported."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.split(".")[0] == "jaxfb":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "jaxfb":
            yield node.attr


def test_every_public_name_is_called_with_wrong_arguments():
    here = {name for file in pathlib.Path(__file__).parent.glob("test_*.py") for name in used(file)}
    wanted = set(jaxfb.__all__) - MODULES - MADE_BY_JAXFB - SUBCLASSED
    assert not wanted - here

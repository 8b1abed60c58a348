"""Modules import only from those above them in one order, which the README shows, and schedules need no jax."""

import ast
import importlib
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import jaxfb

ROOT = Path(jaxfb.__file__).parent
ORDER = (
    "refusal process recomputation registry parts described shared_options types trainable platforms output hlo mesh "
    "schedules batch_plan data parallel losses models forward_backward gradients optim update checkpoint metrics "
    "pretrained config callbacks display guard training inference checking trainer rl chaos planner cli "
    "__main__"
).split()
WITHIN = {
    "platforms": "kinds compat runtime_errors cpu machine_memory pinned_memory compiler programs torus device_order",
    "forward_backward": "arguments reduce microbatches packed loss_function sequential layers "
    "accumulate head_placement in_place pipeline offered options strategies resolved spmd_program calls by_context "
    "engine equivalence",
    "training": "run_dir machine profile compile_cache from_config setup exported_tokenizer parameters hugging_face "
    "origins check guard rows evaluate phases goodput ending job open_mesh persistence session log work guarding "
    "reporting windowed_work pretraining custom updates loop",
    "update": "arguments train_state pipeline_state attempt conditional extra_arguments apply streamed states "
    "programs on_mesh split_step train_step",
    "checkpoint": "manifest stored_parts record obstacles damage step_directories together write_errors abandoned "
    "cannot_write old_steps saved_steps store",
    "cli": "bench supervisor keys parser options given devices memory training models checks layouts others "
    "commands __main__",
}
"""The order within packages whose files and folders build on each other."""


class _WithoutTypes(ast.NodeTransformer):
    """Leaves out what is imported for annotations alone."""

    def visit_If(self, node: ast.If) -> ast.AST | None:
        return None if getattr(node.test, "id", None) == "TYPE_CHECKING" else node


def imported(path: Path, for_types: bool = True) -> set[str]:
    """Modules that a file imports, wherever in it, by full name. for_types: also those for annotations alone."""
    tree, found = ast.parse(path.read_text()), set()
    for node in ast.walk(tree if for_types else _WithoutTypes().visit(tree)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def top(module: str) -> str:
    """Returns the file or package of jaxfb that a module is in."""
    return module.split(".")[1]


FILES = {path.relative_to(ROOT).with_suffix("").parts: path for path in ROOT.rglob("*.py")}


@pytest.mark.parametrize("name", ORDER)
def test_a_module_imports_only_from_those_above_it(name):
    above = ORDER[: ORDER.index(name) + 1]
    for parts, path in FILES.items():
        if parts[0] != name:
            continue
        used = {top(module) for module in imported(path) if module.startswith("jaxfb.")}
        below = {other for other in used & set(ORDER) if other not in above}
        assert not below, f"{'/'.join(parts)}.py imports {sorted(below)}, which come later in the order"


@pytest.mark.parametrize("package", WITHIN)
def test_a_file_imports_only_from_those_above_it_in_its_package(package):
    order = WITHIN[package].split()
    inside = {
        parts[1:]: path for parts, path in FILES.items() if parts[0] == package and parts[1] != "__init__"
    }
    assert {parts[0] for parts in inside} == set(order)
    for parts, path in inside.items():
        modules = imported(path, for_types=False)
        used = {module.split(".")[2] for module in modules if module.startswith(f"jaxfb.{package}.")}
        below = set(order[order.index(parts[0]) + 1 :])
        assert not used & below, (
            f"{package}/{'/'.join(parts)}.py imports {sorted(used & below)}, which come later in the order"
        )


@pytest.mark.parametrize("package", sorted({parts[0] for parts in FILES if len(parts) > 1}))
def test_files_and_folders_of_a_package_do_not_import_each_other_in_a_circle(package):
    used: dict[str, set[str]] = {}
    for parts, path in FILES.items():
        if parts[0] == package and parts[1:] != ("__init__",):
            modules = imported(path, for_types=False)
            used.setdefault(parts[1], set()).update(
                module.split(".")[2] for module in modules if module.startswith(f"jaxfb.{package}.")
            )
    inside = {name: (names & set(used)) - {name} for name, names in used.items()}
    try:
        TopologicalSorter(inside).prepare()
    except CycleError as error:
        pytest.fail(f"jaxfb/{package}: {' -> '.join(error.args[1])}")


def test_every_module_is_in_the_order():
    assert {parts[0] for parts in FILES} - {"__init__"} <= set(ORDER)


def test_the_tree_of_the_readme_has_this_order():
    tree = re.search(r"```\njaxfb/\n(.*?)configs/", (ROOT.parent / "README.md").read_text(), re.DOTALL)[1]
    names = [name for line in tree.splitlines() for name in re.findall(r"(\w+)(?:\.py|/)(?= |$)", line)]
    assert names == ORDER[:-1]  # all but __main__


def test_the_map_of_the_engine_has_every_file():
    page = (ROOT.parent / "docs" / "extending.md").read_text().partition("## A map of")[2]
    files = {f"{parts[-1]}.py" for parts in FILES if parts[0] == "forward_backward"} - {"__init__.py"}
    assert set(re.findall(r"`(\w+\.py)`", page)) == files


def test_no_public_name_is_also_the_name_of_a_submodule():
    """`from package import name` would give one or the other, by what was imported before."""
    for parts in FILES:
        if parts[-1] == "__init__" and (package := parts[:-1]):
            modules = {other[-1] for other in FILES if other[:-1] == package}
            modules |= {other[-2] for other in FILES if other[:-2] == package and other[-1] == "__init__"}
            name = ".".join(("jaxfb", *package))
            exported = {*getattr(importlib.import_module(name), "__all__", ())}
            assert not modules & exported, f"{name} exports {sorted(modules & exported)}, its submodules"


def test_schedules_import_no_jax():
    for parts, path in FILES.items():
        if parts[0] == "schedules":
            assert not any(module.split(".")[0] == "jax" for module in imported(path)), parts


def test_private_modules_of_jax_are_touched_in_one_file():
    for parts, path in FILES.items():
        private = [module for module in imported(path) if module.startswith(("jax._src", "jax.core"))]
        assert parts == ("platforms", "compat") or not private, (parts, private)


def test_every_file_says_first_what_it_is():
    for parts, path in FILES.items():
        text = path.read_text()
        assert not text.strip() or ast.get_docstring(ast.parse(text)), "/".join(parts)


def test_no_two_files_of_tests_have_one_name():
    """For pytest imports each by its name alone."""
    names = [path.name for path in Path(__file__).parent.rglob("*.py") if path.name != "__init__.py"]
    assert sorted(names) == sorted(set(names))

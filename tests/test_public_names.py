"""The names that users import: one list, which Python and type checkers both read."""

import ast
import inspect
import json
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

import jaxfb
from jaxfb.config import CustomConfig
from jaxfb.config.sections import ParallelConfig, PrecisionConfig
from jaxfb.forward_backward.options import EngineOptions, ScheduledKeywords
from jaxfb.shared_options import LayoutOptions, PrecisionOptions
from jaxfb.trainer import Sections

ROOT = Path(jaxfb.__file__).parent
CORRECT = """
import jaxfb

def loss_fn(params, microbatch, rng):
    return jaxfb.Sum((microbatch["x"] @ params["w"]).sum(), microbatch["x"].shape[0])

plan = jaxfb.BatchPlan(rows=64, rows_per_microbatch=2, data_parallel=4)
mesh = jaxfb.make_mesh(data=4)
forward_backward = jaxfb.get_forward_backward_func(mesh, accum_dtype="float32")
out = forward_backward(loss_fn, {}, {}, plan)
print(out.loss + 1, plan.num_microbatches + 1)
optimizer = jaxfb.make_optimizer("adamw", learning_rate=1e-3)
step = jaxfb.make_train_step(loss_fn, optimizer, mesh, plan, max_grad_norm=1.0, remat="layer")
print(jaxfb.schedules.make("1f1b", 4, 8).render())

class Stopping(jaxfb.Callback):
    def on_train_start(self, run):
        self.run = run

    def on_eval(self, step, metrics):
        print(self.run.state.step, self.run.outputs, metrics["eval/loss"])
        self.run.stop("good enough")

trainer = jaxfb.Trainer(
    model=loss_fn, params={}, data={}, optimizer=optimizer, callbacks=[Stopping()], dir="run", updates=1, rows=8,
    rows_per_microbatch=2, mesh={"data": 4}, checkpoint={"every": 2}, evaluate=lambda params: {"loss": 0.0},
)
print(trainer.train(resume=True).status)
"""
MISSPELT = {
    "rows_per_microbatch=2, data": "rows_per_microbach=2, data",
    "accum_dtype=": "acum_dtype=",
    "max_grad_norm=": "max_gradnorm=",
    "evaluate=": "evalute=",
}
"""Right -> wrong keywords of a plan, the engine, an update and the trainer."""


def stub() -> ast.Module:
    return ast.parse((ROOT / "__init__.pyi").read_text())


def test_every_name_of_the_stub_is_the_object_of_its_module():
    for node in stub().body:
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            got = getattr(jaxfb, alias.name)
            module = import_module(f"jaxfb.{node.module}") if node.module else jaxfb
            assert got is getattr(module, alias.name)
            assert isinstance(got, ModuleType) or not isinstance(getattr(module, alias.name), ModuleType)


def test_the_list_of_the_stub_holds_what_it_imports():
    imported = {a.name for n in stub().body if isinstance(n, ast.ImportFrom) for a in n.names}
    listed = next(n for n in stub().body if isinstance(n, ast.Assign))
    assert sorted(ast.literal_eval(listed.value)) == sorted(imported) == sorted(jaxfb.__all__)


def test_keywords_that_are_passed_on_are_those_of_the_function_that_takes_them():
    engine = inspect.signature(jaxfb.get_forward_backward_func).parameters
    own = {"mesh", "layer_order"}  # of make_train_step
    assert set(ScheduledKeywords.__annotations__) == set(engine) - own
    parts = {
        "model",
        "params",
        "data",
        "evaluate",
        "optimizer",
        "lr",
    }  # arguments of Trainer, or needless beside them
    assert set(Sections.__annotations__) == {field.name for field in fields(CustomConfig)} - parts


def test_an_option_of_the_engine_is_defined_and_described_once():
    """`help` lists all of them, and a config gives those that it shares under the same names."""
    shown = jaxfb.get_forward_backward_func
    names = {option.name for option in fields(EngineOptions)}
    assert set(inspect.signature(shown).parameters) == names | {"mesh"}
    described = shown.__doc__.partition("Options:")[2]
    assert {line.split(":")[0] for line in re.findall(r"^  (\w+:)", described, re.MULTILINE)} == names
    for section, shared in ((ParallelConfig, LayoutOptions), (PrecisionConfig, PrecisionOptions)):
        assert issubclass(section, shared) and issubclass(EngineOptions, shared)
    with pytest.raises(TypeError, match=r"get_forward_backward_func\(\) .*'remt'; did you mean 'remat'\?"):
        shown(remt="full")


def test_importing_jaxfb_imports_no_jax():
    program = "import sys, jaxfb; jaxfb.BatchPlan, jaxfb.load_config; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT.parent).returncode == 0


def test_a_wrong_name_is_answered_with_those_there_are():
    with pytest.raises(AttributeError, match="no public name 'make_meshes'; it has .*make_mesh"):
        _ = jaxfb.make_meshes


def built_wheel(directory: Path) -> Path:
    """Returns the files that users install: those of the wheel, unpacked."""
    (directory / "source").mkdir()
    for name in ("jaxfb", "pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        source = ROOT.parent / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, directory / "source" / name)
    # an older setuptools cannot read this project's metadata; then build fetches a newer one for itself
    recent = int(version("setuptools").partition(".")[0]) >= 77
    command = [sys.executable, "-m", "build", "--wheel", "-o", str(directory), "source"]
    subprocess.run(
        command + ["--no-isolation"] * recent, cwd=directory, check=True, capture_output=True, timeout=300
    )
    shutil.unpack_archive(next(directory.glob("*.whl")), directory / "installed", "zip")
    return directory / "installed"


@pytest.mark.slow
def test_a_type_checker_accepts_a_correct_program_and_finds_a_misspelt_keyword(tmp_path):
    for name in ("wheel", "program"):
        (tmp_path / name).mkdir()
    installed = built_wheel(tmp_path / "wheel")
    program = tmp_path / "program"
    correct, wrong = program / "correct.py", program / "wrong.py"
    correct.write_text(CORRECT)
    text = CORRECT
    for right, misspelt in MISSPELT.items():
        assert text.count(right) == 1
        text = text.replace(right, misspelt)
    wrong.write_text(text)
    (program / "pyrightconfig.json").write_text(
        json.dumps({"typeCheckingMode": "standard", "extraPaths": [str(installed)]})
    )
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", str(program)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=program)
    errors = [line for line in found.stdout.splitlines() if "error:" in line]
    assert len(errors) == len(MISSPELT) and all("wrong.py" in error for error in errors), found.stdout
    for misspelt in MISSPELT.values():
        assert f'"{misspelt.partition("=")[0]}"' in found.stdout, misspelt
    assert (installed / "jaxfb" / "py.typed").is_file()

"""Code of README and docs: Python blocks run, commands are those that there are, links lead somewhere."""

import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jaxfb.cli import commands as cli
from jaxfb.cli.options import POST_TRAINING, parse
from jaxfb.config import kind_of_command, load_config, smoke_overrides

ROOT = Path(__file__).parent.parent
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
ELSEWHERE = {"README.md", "extending.md"}
"""Their blocks are run by test_end_to_end.py and test_extending.py."""

LAYERS = """
import jax, jax.numpy as jnp, jaxfb
draw = lambda seed, *shape: 0.3 * jax.random.normal(jax.random.key(seed), shape)
params = {"in": draw(0, 3, 4), "layers": {"kernel": draw(1, 8, 4, 4)}, "out": draw(2, 4, 2)}
batch, rng = {"x": draw(3, 16, 3), "y": draw(4, 16, 2)}, jax.random.key(5)
def embed(outer, microbatch, rng): return microbatch["x"] @ outer["in"]
def layer(layer_params, hidden, microbatch, rng): return hidden + jnp.tanh(hidden @ layer_params["kernel"])
def head(outer, hidden, microbatch, rng):
    return jaxfb.Sum(jnp.square(hidden @ outer["out"] - microbatch["y"]).sum(), 1.0)
model = jaxfb.Pipelined(embed, layer, head)
plan = jaxfb.BatchPlan(rows=16, rows_per_microbatch=1, data_parallel=2)
optimizer = jaxfb.make_optimizer("adamw", learning_rate=1e-3)
"""
TOKENS = """
import jax, numpy as np, jaxfb
from jaxfb.models.config import TransformerConfig
from jaxfb.models.transformer import init_params, transformer
config = TransformerConfig(vocab_size=16, num_layers=1, hidden_size=8, num_heads=2)
params = ref_params = init_params(config, jax.random.key(0))
tokens = np.random.default_rng(0).integers(0, 16, (8, 7))
"""
PRELUDES = {
    "parallelism.md": """
import jax.numpy as jnp
def loss_fn(params, microbatch, rng): return jaxfb.Sum((microbatch["x"] @ params["up"]["kernel"]).sum(), 1.0)
plan = jaxfb.BatchPlan(rows=8, rows_per_microbatch=2, data_parallel=2)
optimizer = jaxfb.make_optimizer("adamw", learning_rate=1e-3)
""",
    "pipeline.md": LAYERS,
    "policy_losses.md": TOKENS
    + """
rollout = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": np.ones((8, 6), np.float32)}
rewards, prompts = np.arange(8.0) % 3, np.arange(8) // 4
fb = jaxfb.get_forward_backward_func(None)
plans = {p: jaxfb.BatchPlan(purpose=p, rows=8, rows_per_microbatch=4, data_parallel=1)
         for p in ("train", "logprob_old", "logprob_ref")}
""",
    "post_training.md": """
import jax, numpy as np, jaxfb
def model(params, microbatch, rng):
    counts = microbatch["segments"] > 0
    return jaxfb.Sum((counts * microbatch["x"] * params["w"]).sum(), counts.sum())
params, widths = {"w": np.float32(2)}, np.arange(1, 257) * 4
batch = {"x": np.ones((256, 1024), np.float32), "segments": (np.arange(1024) < widths[:, None]).astype(np.int32)}
forward_backward = jaxfb.get_forward_backward_func(jaxfb.make_mesh(data=4))
""",
}
"""Page -> what its blocks assume to be there. Where a page is missing, its blocks stand alone."""

SHORTER = {
    'load_config("configs/grpo_arithmetic.yaml")': 'load_config("configs/grpo_arithmetic.yaml", SMOKE)',
    "cases=20": "cases=1",
}
SMOKE = [
    *smoke_overrides(kind_of_command("rl")), "run.dir=run", "mesh.data=1", "model.num_layers=1", "model.hidden_size=32",
    "rollout.prompts=4", "rollout.samples_per_prompt=2", "rollout.rows_per_update=8", "rollout.max_new_tokens=4",
    *(f"plans.{name}.rows_per_microbatch=8" for name in ("train", "logprob_old", "logprob_ref")),
]  # fmt: skip
SLOW = {
    "policy_losses.md",
    "post_training.md",
    "checking.md",
    "pipeline.md",
    "moe.md",
    "trainer.md",
    "split_step.md",
}
"""Pages whose blocks compile more than a second's worth."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


def commands(page: str) -> list[str]:
    """Returns the jaxfb commands of a page, without comments, continued lines joined."""
    text = "\n".join(blocks(page, "sh")).replace("\\\n", " ")
    return [
        line.partition(" #")[0].strip() for line in text.splitlines() if re.match(r"\s*(srun )?jaxfb ", line)
    ]


PYTHON = [page for page in PAGES if page not in ELSEWHERE and blocks(page, "python")]


@pytest.mark.parametrize("page", [pytest.param(p, marks=[pytest.mark.slow] * (p in SLOW)) for p in PYTHON])
def test_the_python_of_a_page_runs(page, tmp_path, monkeypatch):
    for name in ("configs", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXFB_CACHE", str(tmp_path))
    names = {"__name__": page, "SMOKE": SMOKE}
    first, *rest = blocks(page, "python")
    imports, body = re.match(r"((?:(?:import|from) [^\n]*\n|\n)*)(.*)", first, re.DOTALL).groups()
    for text in (imports, PRELUDES.get(page, ""), body, *rest):
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        exec(compile(textwrap.dedent(text), f"<{page}>", "exec"), names)


@pytest.mark.parametrize("command", sorted({c for page in PAGES for c in commands(page)}))
def test_a_command_of_a_page_is_one(command, monkeypatch):
    """Its flags and its config with these overrides are legal; what it does is tested with the command."""
    monkeypatch.chdir(ROOT)
    options = parse(shlex.split(command.removeprefix("srun "))[1:])
    if options.verb == "launch":
        options = parse(options.command)
    path = getattr(options, "config", None)
    if path and (path.startswith("configs/") or path == "quickstart"):
        kind = options.verb if options.verb in POST_TRAINING else "train"
        load_config(path, options.overrides, kind)


@pytest.mark.slow
def test_the_layouts_of_the_planner_page_are_what_it_prints():
    """In a process of its own: others of these tests register schedules, and there are layouts for each."""
    asked = "plan configs/8b.yaml --topology v5p:4x4x4 mesh=auto parallel.remat=none"
    assert f"`jaxfb {asked}`" in PAGES["planner.md"]
    [shown] = re.findall(r"^```\n(mesh: auto on .*?)^```", PAGES["planner.md"], re.DOTALL | re.MULTILINE)
    command = [sys.executable, "-m", "jaxfb.cli", *asked.split(), "--no-compile"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert shown in done.stderr


@pytest.mark.slow
def test_the_config_of_the_trainer_page_trains_the_same_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(blocks("trainer.md", "python")[0].partition("trainer = ")[0])
    (tmp_path / "mine.yaml").write_text(blocks("trainer.md", "yaml")[0])
    assert cli.main(["train", "mine.yaml", "run.updates=2"]) == 0, capsys.readouterr().err


QUICK = [
    "jaxfb init quickstart",
    "jaxfb schedule --pipe 4 --microbatches 8 --chunks 2 --kind interleaved",
    "jaxfb schedule --pipe 4 --microbatches 8 --chunks 2 --compare",
    "jaxfb config show configs/1b.yaml mesh.tp=2",
    "jaxfb bench",
]


@pytest.mark.parametrize("command", QUICK)
def test_a_quick_command_of_the_readme_runs(command, tmp_path, monkeypatch, capsys):
    assert command in commands("README.md")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").symlink_to(ROOT / "configs")
    assert cli.main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out


def test_links_lead_somewhere():
    for page, text in PAGES.items():
        here = ROOT if page == "README.md" else ROOT / "docs"
        for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text):
            assert target.startswith("http") or (here / target).exists(), (page, target)

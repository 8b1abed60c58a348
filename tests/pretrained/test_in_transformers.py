"""Exported directories load in transformers and give the same logits.

Needs a Python with torch and transformers: JAXFB_TRANSFORMERS_PYTHON=path/to/bin/python; left out without one.
"""

import json
import os
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from whole import logits

from jaxfb.models.transformer import init_params
from jaxfb.pretrained import export_model, load_params, open_repository, sizes_of

GOLDEN = Path(__file__).parent.parent / "golden"
PYTHON = os.environ.get("JAXFB_TRANSFORMERS_PYTHON")
MODELS = sorted(path.name for path in GOLDEN.glob("hf_*_tiny"))
PROGRAM = """
import json, sys, torch
from transformers import AutoModelForCausalLM
found = {}
for directory in json.loads(sys.argv[1]):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        found[directory] = model(torch.tensor(json.loads(sys.argv[2]))).logits.tolist()
print("NUMBERS" + json.dumps(found))
"""


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(PYTHON is None, reason="needs JAXFB_TRANSFORMERS_PYTHON")
def test_exported_directories_give_their_logits_in_transformers(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 29, (2, 12))
    ours = {}
    for name in MODELS:
        repository = open_repository(GOLDEN / name)
        sizes = sizes_of(repository.config)
        params = load_params(
            repository, sizes, jax.eval_shape(lambda s=sizes: init_params(s, jax.random.key(0), jnp.float32))
        )
        export_model(tmp_path / name, params, repository.config, GOLDEN / name)
        ours[str(tmp_path / name)] = jax.jit(logits, static_argnums=0)(sizes, params, {"tokens": tokens})
    command = [PYTHON, "-c", PROGRAM, json.dumps(list(ours)), json.dumps(tokens.tolist())]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, cwd=GOLDEN)
    assert done.returncode == 0, done.stderr[-2000:]
    theirs = json.loads(done.stdout.partition("NUMBERS")[2])
    for directory, expected in theirs.items():
        np.testing.assert_allclose(ours[directory], expected, rtol=0, atol=1e-5, err_msg=directory)

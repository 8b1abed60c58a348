"""What training some parameters takes is counted once, by hand here and by the compiler, and trainers log it."""

import pytest

from jaxfb.config import load_config
from jaxfb.config.adapters import trained_patterns
from jaxfb.models.config import flops_per_token
from jaxfb.models.trained_flops import runs_backward, trained_flops
from jaxfb.planner import parse_topology
from jaxfb.planner.compiled import Compiled, compile_for
from jaxfb.planner.job import model_sizes
from jaxfb.planner.verdict import estimated

LENGTH = 256
SMALL = [
    "model.tied_embeddings=false model.num_layers=8 model.hidden_size=128 model.num_heads=2 model.num_kv_heads=2",
    f"model.mlp_size=512 model.vocab_size=512 data.sequence_length={LENGTH} batch.rows=4",
    "batch.rows_per_microbatch=2 mesh.fsdp=1",
]
ATTENTION, MLP, HEAD = 4 * 128 * 128, 3 * 128 * 512, 128 * 512
SCORES = 2 * LENGTH * 128 // 2  # of a layer, in its forward, half of which is masked
LAYER = 2 * (ATTENTION + MLP) + 2 * SCORES
MTP = LAYER + 2 * 2 * 128 * 128
WITH_MTP = "model.mtp_depth=1"


def _config(*more):
    return load_config("configs/1b.yaml", [*" ".join(SMALL).split(), *more])


@pytest.mark.parametrize(
    "more, wanted",
    [
        ([], 3 * 8 * LAYER + 6 * HEAD),
        (["trainable=[layers.attention.*]"], 8 * (3 * LAYER - 2 * MLP) + 4 * HEAD),
        (["trainable=[embed.*]"], 8 * (3 * LAYER - 2 * (ATTENTION + MLP)) + 4 * HEAD),
        (["trainable=[head.*]"], 8 * LAYER + 4 * HEAD),
        (["trainable=[norm.*]"], 8 * LAYER + 4 * HEAD),
        (["trainable=[head.*,norm.*]"], 8 * LAYER + 6 * HEAD),
        (["trainable=[head.*]", WITH_MTP], 8 * LAYER + MTP + 8 * HEAD),
        (["trainable=[mtp.*]", WITH_MTP], 8 * LAYER + 3 * MTP + (2 + 4) * HEAD),
        (
            ["trainable=[embed.*]", WITH_MTP],
            9 * (3 * LAYER - 2 * (ATTENTION + MLP)) + (3 - 1) * 2 * 2 * 128 * 128 + 2 * 4 * HEAD,
        ),
        (["trainable=null", "lora.rank=4"], 8 * (3 * LAYER - 2 * (ATTENTION + MLP)) + 4 * HEAD),
        (["trainable=[head.*]", "lora.rank=4"], 8 * (3 * LAYER - 2 * (ATTENTION + MLP)) + 6 * HEAD),
    ],
    ids=lambda case: " ".join(case) if isinstance(case, list) else "",
)
def test_only_what_is_computed_is_counted(more, wanted):
    config = _config(*more)
    assert trained_flops(model_sizes(config), LENGTH, trained_patterns(config)).total == wanted


def test_all_parameters_take_what_the_model_takes():
    config = _config(WITH_MTP)
    sizes = model_sizes(config)
    assert trained_flops(sizes, LENGTH, None).total == flops_per_token(sizes, LENGTH)
    assert trained_flops(sizes, LENGTH, ("*",)).total == flops_per_token(sizes, LENGTH)


@pytest.mark.parametrize("pattern", ["head.*", "mtp.*", "embed.*"])
def test_the_compiled_step_computes_no_backward_in_front_of_the_first_trained_parameter(pattern):
    config, topology = _config(WITH_MTP, f"trainable=[{pattern}]"), parse_topology("cpu:1")
    compiled, formula = compile_for(config, topology), estimated(config, topology).estimate
    assert isinstance(compiled, Compiled)
    # scores on a CPU are made whole, of which the count has half
    assert formula.flops == pytest.approx(compiled.flops, rel=0.1)
    assert runs_backward(model_sizes(config), (pattern,)) == (pattern == "embed.*")

"""The formula counts what a config's dtypes and optimizer take, in a search too, where no array is looked at."""

import pytest

from jaxfb.config import load_config
from jaxfb.planner import parse_topology
from jaxfb.planner.auto import choose
from jaxfb.planner.candidates import NOTHING
from jaxfb.planner.counts import state_bytes
from jaxfb.planner.formula.estimate import estimate
from jaxfb.planner.job import model_sizes
from jaxfb.planner.search import by_formula
from jaxfb.planner.verdict import estimated

EIGHT_LAYERS = (
    "model.num_layers=8 model.vocab_size=32768 data.tokenizer=bytes mesh.data=1 mesh.fsdp=4 batch.rows=32 "
    "batch.rows_per_microbatch=2"
).split()
OF_A_QUARTER_BILLION = (
    "model.hidden_size=1024 model.mlp_size=4096 model.num_heads=16 model.num_kv_heads=8 model.vocab_size=512 "
    "data.tokenizer=bytes data.sequence_length=64 mesh.data=4 mesh.fsdp=1 batch.rows=16 batch.rows_per_microbatch=1 "
    "parallel.remat=layer"
).split()
OPTIMIZERS = {
    "adamw": ["optimizer.name=adamw"],
    "adamw with bfloat16": ["optimizer.name=adamw", "optimizer.options={mu_dtype: bfloat16}"],
    "lion": ["optimizer.name=lion"],
    "muon": ["optimizer.name=muon"],
    "adafactor": ["optimizer.name=adafactor", "optimizer.options={}"],
    "sgd": ["optimizer.name=sgd", "optimizer.options={}"],
    "sgd with momentum": ["optimizer.name=sgd", "optimizer.options={momentum: 0.9}"],
}


def of(config: str, *layout: str):
    return load_config(f"configs/{config}.yaml", list(layout))


@pytest.mark.parametrize(
    "dtypes, gigabytes, seconds",
    [
        # by the compiler of libtpu 0.0.48
        ("precision.compute_dtype=bfloat16", 8.49, 0.156),
        ("precision.compute_dtype=float32", 10.67, 0.170),
        ("precision.accum_dtype=bfloat16", 6.98, 0.155),
    ],
)
def test_wider_and_narrower_numbers_are_counted_near_the_compiler(dtypes, gigabytes, seconds):
    found = estimated(of("1b", *EIGHT_LAYERS, dtypes), parse_topology("v5p:2x2x1"))
    assert found.needed / 1e9 == pytest.approx(gigabytes, rel=0.1)
    assert found.step_seconds == pytest.approx(seconds, rel=0.15)


@pytest.mark.parametrize(
    "more, gigabytes",
    [
        # by XLA of jax-cuda13-plugin 0.10.2
        (["optimizer.sharding=data"], 3.46),
        (["optimizer.sharding=gradients"], 3.20),
        (["optimizer.sharding=gradients", "precision.accum_dtype=bfloat16"], 3.07),
    ],
)
def test_memory_of_zero_is_near_the_compilers(more, gigabytes):
    found = estimated(of("1b", *OF_A_QUARTER_BILLION, *more), parse_topology("gpu:h100x4"))
    assert found.needed / 1e9 == pytest.approx(gigabytes, rel=0.1)


def test_float64_takes_twice_the_memory_of_float32_but_for_logits():
    totals = {}
    for dtype in ("float32", "float64"):
        config = of("1b", *EIGHT_LAYERS, f"precision.compute_dtype={dtype}")
        found = estimate(config, model_sizes(config), parse_topology("gpu:h100x4"))
        totals[dtype] = found
    for name in ("parameters", "optimizer", "gradients"):
        assert getattr(totals["float64"], name) == 2 * getattr(totals["float32"], name)
    assert 1.9 < totals["float64"].total / totals["float32"].total <= 2


@pytest.mark.parametrize("layout", ["mesh.fsdp=4", "mesh.fsdp=1 mesh.data=4", "mesh.fsdp=2 mesh.data=2"])
@pytest.mark.parametrize("sharding", ["none", "data", "gradients"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_search_counts_the_state_that_the_arrays_have(name, sharding, layout):
    rest = [*layout.split(), *OPTIMIZERS[name], f"optimizer.sharding={sharding}"]
    config, topology = of("1b", *EIGHT_LAYERS, *rest), parse_topology("v5p:2x2x1")
    searched = estimate(config, model_sizes(config), topology).optimizer
    arrays = estimated(config, topology).estimate.optimizer
    assert searched == pytest.approx(arrays, rel=0.02, abs=5e6)


def test_a_small_state_leaves_more_layouts_and_stays_on_the_device():
    adafactor, topology = OPTIMIZERS["adafactor"], parse_topology("v5e:2x4")
    fitting = {}
    for name in ("adamw", "adafactor"):
        config = of("8b", *OPTIMIZERS[name])
        counted = by_formula(config, model_sizes(config), topology, NOTHING)
        fitting[name] = sum(one.total <= topology.chip.memory for one, _ in counted)
    assert fitting["adafactor"] > 10 * fitting["adamw"]
    assert choose(of("8b", "mesh=auto", *adafactor), topology).config.optimizer.memory == "device"


def test_the_sum_under_zero_2_is_cut_and_a_microbatchs_gradients_are_not():
    topology, cut = parse_topology("v5p:2x2x1"), ["mesh.fsdp=1", "mesh.data=4"]
    whole, cut = (
        estimated(of("1b", *EIGHT_LAYERS, *cut, *more), topology).estimate.gradients
        for more in ([], ["optimizer.sharding=gradients"])
    )
    config = of("1b", *EIGHT_LAYERS)
    assert state_bytes(config, model_sizes(config)) == pytest.approx(8)
    assert cut == pytest.approx(whole / 4 + whole)

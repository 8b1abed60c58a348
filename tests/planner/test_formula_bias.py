"""What cuDNN's bias of packed rows takes, beside XLA's compiler of jax 0.10.2 for 32 H100."""

import pytest

from jaxfb.config import load_config
from jaxfb.planner.formula import bias as formula_bias
from jaxfb.planner.job import model_sizes
from jaxfb.planner.topology import parse_topology
from jaxfb.planner.verdict import estimated

MACHINE = parse_topology("gpu:h100x32")


def of(length, context, rows, *more):
    layout = (
        f"data.sequence_length={length} mesh.context={context} mesh.fsdp={32 // context} batch.rows={rows}"
    )
    return load_config("configs/8b-h100.yaml", [*layout.split(), "batch.rows_per_microbatch=1", *more])


@pytest.mark.parametrize(
    "length, context, rows, method, gigabytes, seconds",
    [
        (32768, 4, 32, "auto", 13.47, 3.84),  # one call for all queries
        (65536, 4, 32, "auto", 15.44, 11.13),
        (131072, 8, 16, "auto", 16.44, 19.06),
        (131072, 16, 8, "auto", 14.13, 10.70),  # more devices than kv heads: keys are gathered
        (32768, 4, 32, "all_gather", 10.32, 4.45),
        (65536, 4, 32, "all_gather", 16.52, 12.31),
        (131072, 8, 16, "all_gather", 19.51, 21.01),
    ],
)
def test_long_packed_rows_are_near_the_compiler(length, context, rows, method, gigabytes, seconds):
    found = estimated(of(length, context, rows, f"model.context_attention={method}"), MACHINE)
    assert found.needed / 1e9 == pytest.approx(gigabytes, rel=0.1)
    assert found.step_seconds == pytest.approx(seconds, rel=0.12)


@pytest.mark.parametrize(
    "more, has_bias",
    [
        ("data.packing=concat", True),
        ("data.packing=stream", False),
        ("data.packing=stream model.context_attention=all_gather", True),
        ("model.attention=xla", False),
        ("precision.compute_dtype=float32", False),
        ("model.context_attention=ring", False),
    ],
)
def test_only_packed_rows_and_gathered_keys_have_a_bias(more, has_bias):
    config = of(32768, 4, 32, *more.split())
    given = config, model_sizes(config), MACHINE
    assert (formula_bias.memory(*given) > 0, formula_bias.traffic(*given, 1) > 0) == (has_bias, has_bias)
    assert formula_bias.memory(*given[:2], parse_topology("v5p:2x4x4")) == 0


def test_keys_behind_a_window_cost_products_and_those_before_a_group_do_not():
    """Of 65,536 tokens with a window of 4,096: 8 groups of 8,192 queries see 12,288 keys, the first 8,192."""
    config = of(65536, 4, 32, "model.window=4096")
    sizes = model_sizes(config)
    made = 8192 * (8192 + 7 * 12288)
    seen = 4096 * 65536 - 4096 * 4095 / 2
    needed = 4 * sizes.num_heads * sizes.head_size * sizes.num_layers * seen / 65536
    assert formula_bias.flops(config, sizes, MACHINE) == pytest.approx(needed * (made / seen - 1), rel=1e-3)

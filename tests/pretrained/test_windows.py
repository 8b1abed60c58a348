"""A sliding window that config.json leaves out is that of transformers; layers that would have none are refused."""

import json
from pathlib import Path

import pytest

from jaxfb.models.pattern import stack_of
from jaxfb.pretrained import sizes_of
from jaxfb.refusal import Refused

GOLDEN = Path(__file__).parent.parent / "golden"


def config(name, **changed):
    values = json.loads((GOLDEN / name / "config.json").read_text())
    for key in ("sliding_window", "layer_types", "max_window_layers"):
        values.pop(key, None)
    return {**values, **changed}


def windows(values):
    stack = stack_of(sizes_of(values))
    return [layer.window for layer in (*stack.leading, *stack.period * stack.num_periods)]


@pytest.mark.parametrize("name", ["hf_qwen2_tiny", "hf_qwen3_tiny"])
def test_the_window_of_qwen_is_4096_from_layer_28_on(name):
    used = config(name, use_sliding_window=True, num_hidden_layers=30)
    assert windows(used) == [None] * 28 + [4096] * 2
    assert windows({**used, "max_window_layers": 0}) == [4096] * 30
    assert (
        windows({**used, "sliding_window": None})
        == windows({**used, "use_sliding_window": False})
        == [None] * 30
    )


def test_the_window_of_qwen3_moe_is_4096_in_every_layer():
    assert windows(config("hf_qwen3_moe_tiny", use_sliding_window=True)) == [4096, 4096]


@pytest.mark.parametrize("name", ["hf_gemma2_tiny", "hf_gemma3_tiny", "hf_gpt_oss_tiny", "hf_smollm3_tiny"])
def test_layers_with_a_window_that_is_null_are_refused(name):
    number = config(name)["num_hidden_layers"]
    with pytest.raises(Refused, match="layer_types has sliding_attention, but"):
        sizes_of(config(name, sliding_window=None, layer_types=["sliding_attention"] * number))

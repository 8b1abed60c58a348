"""Rotary positions of config.json are read as transformers reads them, or refused where no layer would have them."""

import json
from pathlib import Path

import numpy as np
import pytest

from jaxfb.models.pattern import stack_of
from jaxfb.models.rope import frequencies
from jaxfb.pretrained import sizes_of
from jaxfb.pretrained.architectures import ARCHITECTURES
from jaxfb.refusal import Refused

GOLDEN = Path(__file__).parent.parent / "golden"
SCALED = {"rope_type": "linear", "rope_theta": 5e5, "factor": 8.0}
ONE_KIND = sorted(
    path.parent.name
    for path in GOLDEN.glob("hf_*_tiny/config.json")
    if json.loads(path.read_text())["model_type"] != "gemma3_text"
)


def config(name):
    return json.loads((GOLDEN / name / "config.json").read_text())


@pytest.mark.parametrize("name", ONE_KIND)
@pytest.mark.parametrize("kinds", [["full_attention"], ["full_attention", "sliding_attention"]])
def test_positions_of_each_type_of_layers_are_refused_where_no_layer_reads_them(name, kinds):
    values = {**config(name), "rope_parameters": dict.fromkeys(kinds, SCALED)}
    with pytest.raises(Refused, match=f"rope_parameters has {', '.join(kinds)}, but all layers of a"):
        sizes_of(values)


def test_positions_of_one_type_alone_are_refused_in_gemma_3():
    with pytest.raises(
        Refused, match="rope_parameters of a gemma3_text model has factor, rope_theta, rope_type"
    ):
        sizes_of({**config("hf_gemma3_tiny"), "rope_parameters": SCALED})


@pytest.mark.parametrize("name", [name for name in ONE_KIND if "phi" not in name])
def test_a_part_of_each_head_turns_only_where_the_architecture_reads_it(name):
    values = config(name)
    for where in (values, values["rope_parameters"]):
        where["partial_rotary_factor"] = 1.0
        sizes_of(values)
        where["partial_rotary_factor"] = 0.5
        with pytest.raises(Refused, match="partial_rotary_factor=0.5 is not supported in a .* only 1.0 is"):
            sizes_of(values)
        del where["partial_rotary_factor"]


def test_a_part_of_each_head_is_refused_in_each_type_of_layers():
    values = config("hf_gemma3_tiny")
    values["rope_parameters"]["full_attention"]["partial_rotary_factor"] = 0.5
    with pytest.raises(Refused, match="partial_rotary_factor=0.5 is not supported in a gemma3_text model"):
        sizes_of(values)


@pytest.mark.parametrize(
    "name, theta",
    [
        ("hf_llama_tiny", 1e4),
        ("hf_mixtral_tiny", 1e6),
        ("hf_smollm3_tiny", 2e6),
        ("hf_qwen2_tiny", 1e4),
        ("hf_phi3_tiny", 1e4),
    ],
)
def test_theta_is_that_of_transformers_where_there_is_none(name, theta):
    values = config(name)
    del values["rope_parameters"]
    found = {layer.rope_theta for layer in stack_of(sizes_of(values)).period}
    assert found - {None} == {theta} and ARCHITECTURES[values["model_type"]].default_theta == theta


def test_gpt_oss_must_tell_its_positions():
    values = config("hf_gpt_oss_tiny")
    del values["rope_parameters"]
    with pytest.raises(Refused, match="must have 'rope_parameters'"):
        sizes_of(values)
    values["rope_parameters"] = {"rope_type": "default"}
    assert sizes_of(values).rope_theta == 150_000.0


def phi3_scaling(**beside):
    factors = {"short_factor": [1.0, 1.2, 1.5], "long_factor": [1.5, 3.0, 6.0]}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16, **factors}
    values = {**config("hf_phi3_tiny"), "rope_parameters": rope}
    del values["original_max_position_embeddings"]
    return sizes_of({**values, **beside}).rope_scaling


def test_the_original_length_of_phi3_is_beside_its_scaling_or_4096():
    assert phi3_scaling(original_max_position_embeddings=32).original_length == 32
    found = phi3_scaling(max_position_embeddings=8192)
    assert (found.original_length, found.factor) == (4096, 2.0)


YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}


def gemma3(rope=YARN, **beside):
    values = config("hf_gemma3_tiny")
    values["rope_parameters"]["full_attention"] = rope
    return sizes_of({**values, **beside})


def test_what_no_type_of_layers_reads_is_refused():
    assert {kind.rope_scaling and kind.rope_scaling.original_length for kind in gemma3().pattern} == {
        None,
        16,
    }
    with pytest.raises(
        Refused, match="original_max_position_embeddings=8 stands beside the rotary positions"
    ):
        gemma3(original_max_position_embeddings=8)
    with pytest.raises(Refused, match="truncate=False is not supported; only truncate=True is"):
        gemma3({**YARN, "truncate": False})


def test_a_scaling_of_gemma_3_has_its_kind_under_the_name_that_is_read():
    values = config("hf_gemma3_tiny")
    del values["rope_parameters"]
    read = sizes_of({**values, "rope_scaling": {"rope_type": "linear", "factor": 8.0}})
    assert {kind.rope_scaling and kind.rope_scaling.factor for kind in read.pattern} == {None, 8.0}
    with pytest.raises(
        Refused, match="rope_scaling of a gemma3_text model has type='linear', which it does not read"
    ):
        sizes_of({**values, "rope_scaling": {"type": "linear", "factor": 8.0}})


@pytest.mark.parametrize(
    "length, truncate, expected",
    [
        (4, True, [1.0, 0.07905694, 0.025, 0.007905694]),
        (4, False, [1.0, 0.31622777, 0.1, 0.031622777]),
        (5, False, [1.0, 0.31622777, 0.1, 0.031622777]),
    ],
)
def test_an_original_length_below_a_turn_is_scaled_as_in_transformers(length, truncate, expected):
    rope = {**YARN, "original_max_position_embeddings": length, "truncate": truncate}
    scaling = sizes_of({**config("hf_llama_tiny"), "rope_parameters": rope}).rope_scaling
    np.testing.assert_allclose(frequencies(8, 100.0, scaling), expected, rtol=1e-6)

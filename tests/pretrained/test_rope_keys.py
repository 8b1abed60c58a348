"""Rotary positions of config.json are read as transformers reads them, or refused where no layer would have them."""

import json
from pathlib import Path

import pytest

from jaxfb.models.pattern import stack_of
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

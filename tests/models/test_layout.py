"""A layout in words gives each stage its layers, or is refused with the nearest layout that works."""

from dataclasses import replace

import pytest

from jaxfb.config import load_config
from jaxfb.config.own_model import OwnModelConfig
from jaxfb.models.config import TransformerConfig
from jaxfb.models.layout import layers_of_stages, stages_of, written
from jaxfb.models.pattern import LayerKind
from jaxfb.planner.formula.estimate import estimate
from jaxfb.planner.job import model_sizes
from jaxfb.planner.topology import parse_topology
from jaxfb.training.from_config.options import stage_lengths

PLAIN = TransformerConfig(
    vocab_size=32, num_layers=5, hidden_size=16, num_heads=4, num_kv_heads=2, mlp_size=16
)
LOCAL = replace(PLAIN, num_layers=8, pattern=(LayerKind(window=3, layers=2), LayerKind()))  # two layers lead
DEEP = replace(
    PLAIN, num_layers=61, num_experts=4, leading=(LayerKind(experts=False, layers=3),), mtp_depth=1
)


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        ("EttL", ["EttL"]),
        ("E t*2 | t, t | L", ["Ett", "tt", "L"]),
        ("E(t|)*3tL", ["Et", "t", "t", "tL"]),
        ("E((tt|)*2t|)*2L", ["Ett", "tt", "t", "tt", "tt", "t", "L"]),
        ("Et|*3tL", ["Et", "", "", "tL"]),
    ],
)
def test_repetitions_are_written_out(layout, stages):
    assert list(stages_of(layout)) == stages


@pytest.mark.parametrize(
    ("config", "layout", "counts"),
    [
        (PLAIN, "Ett|t||ttL", (2, 1, 0, 2)),
        (LOCAL, "Ett|t*6L", (0, 2)),
        (LOCAL, "Et*5|tttL", (1, 1)),
        (DEEP, "Et*3|(tt|)*29,m|L", (0, *[2] * 29, 0, 0)),  # the example of Megatron's documentation
        (None, "Ettt|tL", (3, 1)),
    ],
)
def test_stages_have_layers_or_whole_periods(config, layout, counts):
    assert layers_of_stages(layout, config) == counts


@pytest.mark.parametrize(
    ("config", "layout", "why", "use"),
    [
        (PLAIN, "Ett|x|L", "'x', which is none of E .the embedding., t", None),
        (PLAIN, "Ett*|L", "which is none of", None),
        (PLAIN, "*2EttL", "a symbol or a . before each", None),
        (PLAIN, "Et*0|L", "a number above 0", None),
        (PLAIN, "E(tt|ttt", r"has a \( without its \)", None),
        (PLAIN, "Ett)|L", r"has a \) without its \(", None),
        (PLAIN, "E(t*99999)*99999L", "longer than 100000 symbols", None),
        (PLAIN, "E" + "t*99999" * 9 + "L", "longer than 100000 symbols", None),
        (PLAIN, "tt|tttL", "begin with one E and end with one L", "Ett|tttL"),
        (PLAIN, "", "begin with one E", "EL"),
        (PLAIN, "EtmttttL", "behind its last t", None),
        (PLAIN, "Ett|ttL", "4 t and 0 m, but the model has num_layers=5 and mtp_depth=0", "Ett|tttL"),
        (PLAIN, "Ettt|ttmL", "has 5 t and 1 m", "Ettt|ttL"),
        (DEEP, "Et*60|tL", "has 61 t and 0 m", "Et*60|tmL"),
        (LOCAL, "Ett|t*5|tL", "2 leading layers in the first stage and whole periods of 3", "Ett|t*6|L"),
        (LOCAL, "Et|t*4|tttL", "2 leading layers", "Ett|ttt|tttL"),
    ],
)
def test_refusals_name_a_layout_that_works(config, layout, why, use):
    with pytest.raises(ValueError, match=f"layers_per_stage=.*{why}") as refusal:
        layers_of_stages(layout, config)
    assert [choice["layers_per_stage"] for choice in refusal.value.choices] == [use] * (use is not None)
    if "t" in (use or ""):
        layers_of_stages(use, config)


def test_what_is_written_is_read_again():
    counts = [0, 3, 12, 1]
    assert layers_of_stages(written(counts, 2)) == tuple(counts)
    assert stages_of(written(counts, 2))[-1] == "tmmL"


def quickstart(*overrides):
    rows = ["batch.rows_per_microbatch=1", "batch.num_microbatches=null"]
    return load_config("quickstart", ["mesh.pipe=2", "mesh.data=1", *rows, *overrides])


def test_a_config_takes_either_form():
    number = quickstart().model.num_layers
    layout = written([number - 1, 1])
    for given in (layout, f"[{number - 1},1]"):
        assert stage_lengths(quickstart(f"parallel.layers_per_stage={given}")) == (number - 1, 1)
    with pytest.raises(ValueError, match="has 2 t and 0 m"):
        stage_lengths(quickstart("parallel.layers_per_stage=Et|tL"))
    with pytest.raises(ValueError, match="without its"):
        quickstart("parallel.layers_per_stage=E(t|tL")
    own = replace(quickstart("parallel.layers_per_stage=Ettt|tL"), model=OwnModelConfig("transformer"))
    assert stage_lengths(own) == (3, 1)


def test_a_plan_counts_the_longest_stage_for_each():
    number, topology = quickstart().model.num_layers, parse_topology("cpu:2")
    even, same, uneven = (
        estimate(config, model_sizes(config), topology)
        for config in (
            quickstart(),
            quickstart(f"parallel.layers_per_stage={written([number // 2] * 2)}"),
            quickstart(f"parallel.layers_per_stage={written([number - 1, 1])}"),
        )
    )
    assert same == even
    assert even.parameters < uneven.parameters < 2 * even.parameters
    assert even.flops < uneven.flops and even.activations < uneven.activations

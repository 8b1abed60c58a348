"""The operations that a run reports its speed in are those of the plan."""

import pytest
from tiny import write_tiny

from jaxfb.config import load_config
from jaxfb.config.adapters import trained_patterns
from jaxfb.models.config import TransformerConfig, flops_per_token
from jaxfb.models.trained_flops import trained_flops
from jaxfb.training.setup import make_setup


@pytest.mark.parametrize("more", [[], ["trainable=[layers.attention.*]"], ["lora.rank=2"]], ids=str)
def test_a_run_counts_what_its_plan_counts(more, tmp_path):
    setup = make_setup(load_config(write_tiny(tmp_path), more))
    assert isinstance(setup.sizes, TransformerConfig)
    length = setup.config.data.sequence_length
    planned = trained_flops(setup.sizes, length, trained_patterns(setup.config)).total
    assert setup.flops_per_token == planned
    assert (planned == flops_per_token(setup.sizes, length)) == (not more)

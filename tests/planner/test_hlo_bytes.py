"""What an instruction of a compiled program reads and writes: slices of stacks and updates in place, however deep."""

import pytest

from jaxfb import hlo
from jaxfb.planner.program_cost.hlo_bytes import Bytes

LAYERS, LAYER, OUT = 80, 4 * 64 * 128, 4 * 64 * 32
STACK = f"f32[{LAYERS},64,128]{{2,1,0}}"

# as XLA writes a product for a TPU: the layer's input is sliced out of its stack, scaled and cast in a fusion inside
SLICED = f"""HloModule m, is_scheduled=true
%slice_and_scale (stack.1: f32[80,64,128], at.1: s32[], scale.1: f32[128]) -> f32[64,128] {{
  %stack.1 = {STACK} parameter(0)
  %zero = s32[] constant(0)
  %at.1 = s32[] parameter(1)
  %one = f32[1,64,128]{{2,1,0}} dynamic-slice(%stack.1, %at.1, %zero, %zero), dynamic_slice_sizes={{1,64,128}}
  %scale.1 = f32[128]{{0}} parameter(2)
  %wide = f32[1,64,128]{{2,1,0}} broadcast(%scale.1), dimensions={{2}}
  %scaled = f32[1,64,128]{{2,1,0}} multiply(%one, %wide)
  ROOT %flat = f32[64,128]{{1,0}} bitcast(%scaled)
}}
%as_it_is (matrix.1: f32[128,32]) -> f32[128,32] {{
  %matrix.1 = f32[128,32]{{1,0}} parameter(0)
  ROOT %cast = f32[128,32]{{1,0}} bitcast(%matrix.1)
}}
%product (stack: f32[80,64,128], at: s32[], scale: f32[128], matrix: f32[128,32]) -> f32[64,32] {{
  %stack = {STACK} parameter(0)
  %at = s32[] parameter(1)
  %scale = f32[128]{{0}} parameter(2)
  %layer = f32[64,128]{{1,0}} fusion(%stack, %at, %scale), kind=kLoop, calls=%slice_and_scale
  %matrix = f32[128,32]{{1,0}} parameter(3)
  %weights = f32[128,32]{{1,0}} fusion(%matrix), kind=kLoop, calls=%as_it_is
  ROOT %out = f32[64,32]{{1,0}} convolution(%layer, %weights), dim_labels=bf_io->bf
}}
ENTRY %main (a: f32[80,64,128], i: s32[], s: f32[128], w: f32[128,32]) -> f32[64,32] {{
  %a = {STACK} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[128]{{0}} parameter(2)
  %w = f32[128,32]{{1,0}} parameter(3)
  ROOT %r = f32[64,32]{{1,0}} fusion(%a, %i, %s, %w), kind=kOutput, calls=%product
}}
"""

# a layer's gradient is put into its place in the stack by a fusion inside, beside another result
UPDATED = f"""HloModule m, is_scheduled=true
%put (stack.1: f32[80,64,128], at.1: s32[], new.1: f32[64,128]) -> f32[80,64,128] {{
  %stack.1 = {STACK} parameter(0)
  %zero = s32[] constant(0)
  %at.1 = s32[] parameter(1)
  %new.1 = f32[64,128]{{1,0}} parameter(2)
  %raised = f32[1,64,128]{{2,1,0}} bitcast(%new.1)
  %there = {STACK} dynamic-update-slice(%stack.1, %raised, %at.1, %zero, %zero)
  ROOT %same = {STACK} bitcast(%there)
}}
%put_and_sum (stack: f32[80,64,128], at: s32[], new: f32[64,128]) -> (f32[80,64,128], f32[64]) {{
  %stack = {STACK} parameter(0)
  %at = s32[] parameter(1)
  %new = f32[64,128]{{1,0}} parameter(2)
  %zero = f32[] constant(0)
  %changed = {STACK} fusion(%stack, %at, %new), kind=kLoop, calls=%put
  %sum = f32[64]{{0}} reduce(%new, %zero), dimensions={{1}}, to_apply=%add
  ROOT %both = ({STACK}, f32[64]{{0}}) tuple(%changed, %sum)
}}
ENTRY %main (a: f32[80,64,128], i: s32[], n: f32[64,128]) -> (f32[80,64,128], f32[64]) {{
  %a = {STACK} parameter(0)
  %i = s32[] parameter(1)
  %n = f32[64,128]{{1,0}} parameter(2)
  ROOT %r = ({STACK}, f32[64]{{0}}) fusion(%a, %i, %n), kind=kLoop, calls=%put_and_sum
}}
"""


# the gradient of an embedding: rows of tokens are added into the table
SCATTERED = """HloModule m, is_scheduled=true
%add_rows (table: bf16[1000,64], tokens: s32[16,1], rows: bf16[16,64]) -> bf16[1000,64] {
  %table = bf16[1000,64]{1,0} parameter(0)
  %tokens = s32[16,1]{1,0} parameter(1)
  %rows = bf16[16,64]{1,0} parameter(2)
  ROOT %sum = bf16[1000,64]{1,0} scatter(%table, %tokens, %rows), update_window_dims={1}, to_apply=%add
}
ENTRY %main (t: s32[16,1], g: bf16[16,64]) -> bf16[1000,64] {
  %table = bf16[1000,64]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %t = s32[16,1]{1,0} parameter(0)
  %g = bf16[16,64]{1,0} parameter(1)
  %plain = bf16[1000,64]{1,0} scatter(%table, %t, %g), update_window_dims={1}, to_apply=%add
  ROOT %r = bf16[1000,64]{1,0} fusion(%table, %t, %g), kind=kCustom, calls=%add_rows
}
"""


def bytes_of(text: str, name: str = "r") -> float:
    computations, entry = hlo.parse(text)
    (one,) = [one for one in computations[entry] if one.name == name]
    return Bytes(computations).of(one, entry)


def test_a_slice_taken_by_a_fusion_inside_is_charged_and_not_its_stack():
    index, scale, weights = 4, 4 * 128, 4 * 128 * 32
    assert bytes_of(SLICED) == LAYER + index + scale + weights + OUT


def test_an_update_in_place_by_a_fusion_inside_is_charged_and_not_its_stack():
    index, read, sums = 4, LAYER, 4 * 64
    assert bytes_of(UPDATED) == index + read + LAYER + sums


def test_a_stack_that_is_also_read_whole_is_charged_whole():
    whole = SLICED.replace(
        "ROOT %out = f32[64,32]{1,0} convolution(%layer, %weights)", "%out = f32[] negate(%stack)"
    )
    assert bytes_of(whole) > LAYERS * LAYER


def test_rows_added_to_a_table_are_charged_and_not_the_table():
    tokens, rows = 4 * 16, 2 * 16 * 64
    assert bytes_of(SCATTERED, "r") == bytes_of(SCATTERED, "plain") == tokens + 3 * rows
    assert bytes_of(SCATTERED, "table") == 0  # memory that is set aside and not written


@pytest.mark.parametrize(
    "start, size",
    [
        # a copy from HBM to another memory; the result names what is written before what is read
        ("(f32[64,128]{1,0:S(1)}, f32[64,128]{1,0}, u32[]{:S(2)}) copy-start(%n)", LAYER),
        ("(f32[64,128]{1,0}, f32[64,128]{1,0:S(1)}, u32[]{:S(2)}) copy-start(%n)", LAYER),
        ("(f32[64,128]{1,0}, f32[64,128]{1,0}, u32[]{:S(2)}) copy-start(%n)", 2 * LAYER),
        # a slice; the result names first what it is taken of
        (f"(({STACK}), f32[1,64,128]{{2,1,0:S(1)}}, s32[]{{:S(2)}}) slice-start(%a), slice={{[3:4]}}", LAYER),
    ],
)
def test_what_is_started_is_charged_for_what_it_moves(start, size):
    text = UPDATED.replace("  ROOT %r", f"  %begun = {start}\n  ROOT %r")
    assert bytes_of(text, "begun") == size

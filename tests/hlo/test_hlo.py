"""The reader of compiled programs, on text written by XLA for CPU, GPU and TPU and shortened by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxfb
from jaxfb.hlo import Instruction, collectives, traffic
from jaxfb.hlo.calls import trip_count

PROGRAM = """HloModule m, is_scheduled=true
%add (x: f32[], y: f32[]) -> f32[] {
  ROOT %s = f32[] add(f32[] %x, f32[] %y)
}
%cond (p: (s32[], f32[4,8])) -> pred[] {
  %p = (s32[], /*index=1*/f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}
%body (p.1: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p.1 = (s32[], f32[4,8]{1,0:T(8,128)}) parameter(0)
  %x.1 = f32[4,8]{1,0:T(8,128)} get-tuple-element(%p.1), index=1
  %rs = f32[2,8]{1,0:T(8,128)} reduce-scatter(%x.1), channel_id=1, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}, to_apply=%add
  %inner = (s32[], f32[4,8]{1,0}) while(%p.1), condition=%cond, body=%leaf, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i, %x.1)
}
%leaf (p.2: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p.2 = (s32[], f32[4,8]{1,0}) parameter(0)
  %h = bf16[4,8]{1,0} get-tuple-element(%p.2), index=1
  %cp = (bf16[4,8]{1,0}, bf16[4,8]{1,0}, u32[], u32[]) collective-permute-start(%h), source_target_pairs={{0,1},{1,0}}
  %cpd = bf16[4,8]{1,0} collective-permute-done(%cp)
  ROOT %t.2 = (s32[], f32[4,8]{1,0}) tuple(%i, %x.1)
}
ENTRY %main (a: f32[4,8]) -> f32[4,8] {
  %a = f32[4,8]{1,0} parameter(0)
  %w = (s32[], f32[4,8]{1,0}) while(%a), condition=%cond, body=%body
  %ag = (f32[4,8]{1,0}, f32[8,8]{1,0}) all-gather-start(%a), replica_groups={{0,2},{1,3}}, dimensions={0}
  %agd = f32[8,8]{1,0} all-gather-done(%ag)
  %ar = (f32[4,8]{1,0}, pred[16]{0}) all-reduce(f32[4,8]{1,0} %a, pred[16]{0} %b), replica_groups=mesh['x'=2,'y'=2] {'x','y'}, to_apply=%add, metadata={op_name="jit(f)/psum"}
  ROOT %call = f32[4,8]{1,0} call(%a), to_apply=%helper
}
%helper (a.1: f32[4,8]) -> f32[4,8] {
  %a.1 = f32[4,8]{1,0} parameter(0)
  ROOT %aa = f32[4,8]{1,0} all-to-all(%a.1), replica_groups={}, dimensions={0}
}
"""  # noqa: E501


def test_every_kind_is_read_with_its_bytes_groups_and_loop_lengths():
    found = {one.kind: one for one in collectives(PROGRAM)}
    facts = {kind: (one.arrays, one.bytes, one.times, one.replica_groups) for kind, one in found.items()}
    assert facts == {
        "reduce-scatter": (1, 128, 5, ((0, 2), (1, 3))),
        "collective-permute": (1, 64, 15, ((0, 1), (1, 0))),
        "all-gather": (1, 256, 1, ((0, 2), (1, 3))),
        "all-reduce": (2, 144, 1, ((0, 1, 2, 3),)),
        "all-to-all": (1, 128, 1, ()),
    }
    assert found["all-reduce"].op_name == "jit(f)/psum"
    mesh = jaxfb.make_mesh(data=2, tensor=2)
    assert [found[kind].axes(mesh) for kind in ("all-gather", "collective-permute", "all-to-all")] == [
        ("data",),
        ("tensor",),
        ("data", "tensor"),
    ]
    assert traffic(list(found.values()))["collective-permute"] == (15, 15 * 64)


def test_a_ragged_exchange_is_as_large_as_its_smaller_side():
    """The other is space for the worst case, all rows of all devices on one."""
    sizes = "s32[4]{0} %s, s32[4]{0} %s, s32[4]{0} %s, s32[4]{0} %s"
    for here, there in ((8, 32), (32, 8)):
        exchange = f"ragged-all-to-all(f32[{here},4]{{1,0}} %a, f32[{there},4]{{1,0}} %b, {sizes}), replica_groups={{}}"
        text = f"ENTRY %main (a: f32[8,4]) -> f32[8,4] {{\n  ROOT %x = f32[{there},4]{{1,0}} {exchange}\n}}\n"
        (found,) = collectives(text)
        assert (found.kind, found.bytes) == ("ragged-all-to-all", 8 * 4 * 4)


def test_what_a_tpu_compiler_fuses_is_one_collective():
    """As in a program for v5e: a reduce-scatter is a fusion, a gather several, and two gathers have one channel."""
    gather = "f32[8]{0} all-gather(%p), channel_id=7, replica_groups={{0,1}}, frontend_attributes="
    text = f"""
%all-reduce-scatter.2 (p: f32[8]) -> f32[4] {{
  %p = f32[8]{{0}} parameter(0)
  %sum = f32[8]{{0}} all-reduce(%p), channel_id=3, replica_groups={{{{0,1}}}}, to_apply=%add
  ROOT %s = f32[4]{{0}} dynamic-slice(%sum, %i)
}}
%async_collective_fusion.1 (p: f32[4]) -> f32[8] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %g = {gather}{{chain_id="1"}}
}}
%async_collective_fusion.2 (p: f32[4]) -> f32[8] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %g = {gather}{{chain_id="1"}}
}}
%async_collective_fusion.3 (p: f32[4]) -> f32[8] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %g = {gather}{{chain_id="2"}}
}}
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0}} parameter(0)
  %a = f32[4]{{0}} fusion(%x), kind=kCustom, calls=%all-reduce-scatter.2
  %b = f32[8]{{0}} fusion(%a), kind=kCustom, calls=%async_collective_fusion.1
  %c = f32[8]{{0}} fusion(%a), kind=kCustom, calls=%async_collective_fusion.2
  ROOT %d = f32[8]{{0}} fusion(%a), kind=kCustom, calls=%async_collective_fusion.3
}}
"""
    assert traffic(collectives(text)) == {"all-gather": (2, 64), "reduce-scatter": (1, 32)}


def test_a_loop_of_unknown_length_is_said_and_not_guessed():
    text = PROGRAM.replace("direction=LT", "direction=NE")
    unknown = [one for one in collectives(text) if one.times is None]
    assert {one.kind for one in unknown} == {"reduce-scatter", "collective-permute"}
    with pytest.raises(ValueError, match="reduce-scatter in body runs an unknown number of times"):
        traffic(unknown)


def test_what_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        collectives("hello")
    with pytest.raises(ValueError, match="unknown way to write replica groups"):
        collectives(PROGRAM.replace("replica_groups={{0,2},{1,3}}", "replica_groups=?"))


def test_a_program_compiled_here_reads_as_it_was_written():
    mesh = jaxfb.make_mesh(data=2, fsdp=4)

    def body(x):
        def step(carry, _):
            return carry + lax.psum(x, "data"), None

        total = lax.scan(step, x, None, length=7)[0]
        return lax.all_gather(lax.ppermute(total, "fsdp", [(0, 1), (1, 0)]), "fsdp", tiled=True)

    program = jax.shard_map(body, mesh=mesh, in_specs=P("fsdp"), out_specs=P(), check_vma=False)
    found = collectives(jax.jit(program).lower(jnp.zeros((8, 4), jnp.float32)).compile().as_text())
    assert {(one.kind, one.bytes, one.axes(mesh)) for one in found} == {
        ("all-reduce", 32, ("data",)),
        ("collective-permute", 32, ("fsdp",)),
        ("all-gather", 128, ("fsdp",)),
    }
    # XLA may move a sum that does not change out of the loop; it may not change how often the others run
    assert traffic(found)["all-gather"] == (1, 128)


def test_a_mesh_that_counts_its_devices_in_another_order():
    text = PROGRAM.replace("mesh['x'=2,'y'=2] {'x','y'}", "mesh['x'=4,'y'=2], device_ids=([2,4]T(1,0)) {'x'}")
    (found,) = [one for one in collectives(text) if one.kind == "all-reduce"]
    assert found.replica_groups == ((0, 1, 2, 3), (4, 5, 6, 7))


@pytest.mark.parametrize(
    "written, groups",
    [
        # eight devices in order, the axis of four seen as 2 x 2: its outer part, its inner part, both
        ("'y':(1)2", ((0, 2), (1, 3), (4, 6), (5, 7))),
        ("'y':(2)2", ((0, 1), (2, 3), (4, 5), (6, 7))),
        ("'y':(1)2,'y':(2)2", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("'x','y':(2)2", ((0, 1, 4, 5), (2, 3, 6, 7))),
    ],
)
def test_groups_over_part_of_an_axis(written, groups):
    text = PROGRAM.replace("mesh['x'=2,'y'=2] {'x','y'}", f"mesh['x'=2,'y'=4] {{{written}}}")
    (found,) = [one for one in collectives(text) if one.kind == "all-reduce"]
    assert found.replica_groups == groups


def test_groups_over_the_middle_of_an_axis():
    text = PROGRAM.replace("mesh['x'=2,'y'=2] {'x','y'}", "mesh['x'=8] {'x':(2)2}")
    (found,) = [one for one in collectives(text) if one.kind == "all-reduce"]
    assert found.replica_groups == ((0, 2), (1, 3), (4, 6), (5, 7))


# as XLA for TPUs writes a matrix product that overlaps with its collective: eight parts in both directions, so four
# turns, unrolled into two; one of the numbers is handed in from outside
UNROLLED = """
%condition (p: (u32[], f32[8], u32[])) -> pred[] {
  %limit = u32[]{:T(128)} constant(4)
  %p = (u32[]{:T(128)}, f32[8]{0}, u32[]{:T(128)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %less = pred[] compare(%i, %limit), direction=LT
}
%body (q: (u32[], f32[8], u32[])) -> (u32[], f32[8], u32[]) {
  %one = u32[]{:T(128)} constant(1)
  %q = (u32[]{:T(128)}, f32[8]{0}, u32[]{:T(128)}) parameter(0)
  %i = u32[]{:T(128)} get-tuple-element(%q), index=0
  %x = f32[8]{0} get-tuple-element(%q), index=1
  %given = u32[]{:T(128)} get-tuple-element(%q), index=2
  %first = f32[8]{0} collective-permute(%x), source_target_pairs={{0,1},{1,0}}
  %next = u32[]{:T(128)} add(%i, %one)
  %second = f32[8]{0} collective-permute(%first), source_target_pairs={{0,1},{1,0}}
  %after = u32[]{:T(128)} add(%next, %given)
  ROOT %r = (u32[]{:T(128)}, f32[8]{0}, u32[]{:T(128)}) tuple(%after, %second, %given)
}
ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %start = u32[]{:T(128)} constant(0)
  %step = u32[]{:T(128)} constant(1)
  %copied = u32[]{:T(128)} copy(%step)
  %t = (u32[]{:T(128)}, f32[8]{0}, u32[]{:T(128)}) tuple(%start, %x, %copied)
  %w = (u32[]{:T(128)}, f32[8]{0}, u32[]{:T(128)}) while(%t), condition=%condition, body=%body
  ROOT %out = f32[8]{0} get-tuple-element(%w), index=1
}
"""


@pytest.mark.parametrize("start, turns", [(0, 2), (1, 2), (2, 1), (4, 0)])
def test_a_loop_that_was_unrolled_counts_by_more_than_one(start, turns):
    text = UNROLLED.replace(
        "%start = u32[]{:T(128)} constant(0)", f"%start = u32[]{{:T(128)}} constant({start})"
    )
    found = collectives(text)
    assert [one.times for one in found] == [turns, turns]


def test_a_loop_whose_counter_moves_in_an_unknown_way_is_taken_to_count_by_one():
    text = UNROLLED.replace(
        "%after = u32[]{:T(128)} add(%next, %given)", "%after = u32[] fusion(%i), calls=%f"
    )
    assert [one.times for one in collectives(text)] == [4, 4]


def test_a_loop_that_seldom_turns_is_known_where_it_is_in_something_differentiated():
    scopes = (
        ("layer/seldom_loop", 0),
        ("jvp(seldom_loop)", 0),
        ("my_seldom_loop", 3),
        ("layer/first_turns", 0),
    )
    for scope, turns in scopes:
        rest = f'%x), metadata={{op_name="{scope}/while"}}, backend_config={{"known_trip_count":{{"n":"3"}}}}'
        assert trip_count(Instruction("w", "s32[]", "while", rest), {}) == turns

"""Options of XLA: a table by kind of device, changed by the caller, tried out before they are used."""

import jax
import jax.numpy as jnp
import pytest

import jaxfb
from jaxfb.platforms import compiler

KNOWN = {"xla_cpu_enable_fast_math": False}
PLAN = jaxfb.BatchPlan(rows=4, num_microbatches=2)


def loss(params, microbatch, rng):
    return jaxfb.Sum((params * microbatch).sum(), float(len(microbatch)))


def call(**options):
    fb = jaxfb.get_forward_backward_func(**options)
    return fb(loss, jnp.ones(3), jnp.ones((4, 3)), PLAN), fb.compiler_options


@pytest.fixture
def table(monkeypatch):
    """The options of the table for the CPU of this process."""
    options = dict(KNOWN)
    monkeypatch.setitem(compiler.TABLE, jax.devices()[0].device_kind, options)
    return options


def test_the_table_is_changed_by_what_is_asked_for(table):
    assert call()[1] == (("xla_cpu_enable_fast_math", False),)
    assert call(compiler_options={"xla_cpu_enable_fast_math": True})[1] == (
        ("xla_cpu_enable_fast_math", True),
    )
    assert call(compiler_options={"xla_cpu_enable_fast_math": None})[1] == ()


def test_programs_are_compiled_with_them(table, monkeypatch):
    monkeypatch.setattr(compiler, "_known", lambda device, options, asked: options)
    table["xla_tpu_no_such_option"] = True
    mesh = jaxfb.make_mesh(devices=jax.devices()[:1])
    step = jaxfb.make_train_step(loss, jaxfb.make_optimizer("sgd", learning_rate=1.0), mesh, PLAN)
    for run in (call, lambda: step(step.init(jnp.ones(3)), jnp.ones((4, 3)))):
        with pytest.raises(jax.errors.JaxRuntimeError, match="xla_tpu_no_such_option"):
            run()


def test_an_option_of_the_table_that_the_compiler_lacks_is_left_out_with_a_warning(table):
    table["xla_tpu_no_such_option"] = True
    with pytest.warns(UserWarning, match="does not take xla_tpu_no_such_option"):
        assert call()[1] == tuple(KNOWN.items())


def test_one_that_is_asked_for_is_refused(table):
    with pytest.raises(ValueError, match="xla_cpu_enable_fast_maths.*nearest.*is xla_cpu_enable_fast_math,"):
        call(compiler_options={"xla_cpu_enable_fast_maths": True})
    with pytest.raises(ValueError, match="compiler_options"):
        call(compiler_options={"xla_cpu_enable_fast_math": "perhaps"})


@pytest.mark.parametrize("wrong", [["xla"], "xla", {1: True}, {"xla": []}, ("xla",)], ids=str)
def test_what_is_no_mapping_of_names_is_refused(wrong):
    with pytest.raises(ValueError, match="compiler_options must map names"):
        jaxfb.get_forward_backward_func(compiler_options=wrong)


def test_inside_the_callers_own_jit_they_are_left_out(table):
    fb = jaxfb.get_forward_backward_func()
    inside = jax.jit(lambda p, b: fb(loss, p, b, PLAN).loss)(jnp.ones(3), jnp.ones((4, 3)))
    assert inside == call()[0].loss


def test_chips_with_sparsecores_have_options():
    kinds = {"TPU v5", "TPU v6 lite"}
    assert kinds <= set(compiler.TABLE) and "TPU v5 lite" not in compiler.TABLE


def test_a_tensor_axis_adds_options():
    alone, beside = compiler.table_for("TPU v5"), compiler.table_for("TPU v5", tensor=8)
    assert alone.items() < beside.items()
    assert compiler.table_for("TPU v5 lite", tensor=8) == compiler.table_for("TPU v5 lite")


def test_a_tpu_computes_nothing_twice_unless_a_program_is_too_large():
    limit = ("xla_jf_rematerialization_percent_shared_memory_limit", 300)
    for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite"):
        options = tuple(compiler.table_for(kind).items())
        assert limit in options and compiler.without_memory(options) == tuple(
            one for one in options if one != limit
        )
    assert limit[0] not in compiler.table_for("NVIDIA H100")
    assert compiler.without_memory(((limit[0], 95),)) == ((limit[0], 95),)  # the user's own limit stays

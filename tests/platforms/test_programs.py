"""A program that is too large with the options that save time is compiled without those that take memory."""

import jax
import jax.numpy as jnp
import pytest

from jaxfb.platforms import compiler, programs
from jaxfb.platforms.programs import Program, size_of_refusal

ONCE = tuple(compiler.table_for("TPU v5 lite").items())
OTHER = ("xla_tpu_enable_something", True)
TOO_LARGE = (
    "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "
    "Used 18.00G of 15.75G hbm. Exceeded hbm capacity by 2.25G."
)


class Refusing(Program):
    """A program that cannot be compiled with some options."""

    def __init__(self, refused, message=TOO_LARGE):
        self.tried, self._refused, self._message = [], refused, message
        super().__init__(lambda x: 2 * x, (OTHER, *ONCE), {})

    def _with(self, options):
        self.tried.append(options)
        if options not in self._refused:
            return jax.jit(lambda x: 2 * x)
        return jax.jit(self._refuse)

    def _refuse(self, x):
        raise jax.errors.JaxRuntimeError(self._message)


@pytest.mark.parametrize("compiles_first", [False, True])
def test_what_is_too_large_is_compiled_without_options_that_take_memory(compiles_first):
    program = Refusing([(OTHER, *ONCE)])
    with pytest.warns(UserWarning, match=r"needs 19.3 GB of 16.9 GB.*None in Python.*shared_memory_limit"):
        if compiles_first:
            program.compile(jnp.ones(3))
        else:
            program(jnp.ones(3))
    assert (program(jnp.ones(3)) == 2).all()  # without another warning, which would be an error
    assert program.tried == [(OTHER, *ONCE), (OTHER,)]


def test_what_fits_is_compiled_once():
    program = Refusing([])
    assert (program(jnp.ones(3)) == 2).all() and program.tried == [(OTHER, *ONCE)]


def test_what_is_too_large_in_any_form_is_refused():
    with pytest.raises(jax.errors.JaxRuntimeError, match="18.00G"), pytest.warns(UserWarning):
        Refusing([(OTHER, *ONCE), (OTHER,)])(jnp.ones(3))


def test_another_error_is_raised_as_it_is():
    program = Refusing([(OTHER, *ONCE)], "INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        program(jnp.ones(3))
    assert len(program.tried) == 1


def test_options_are_left_out_inside_another_jit():
    double = programs.per_options(lambda x: 2 * x)
    assert jax.jit(lambda x: double((OTHER,))(x))(1.0) == 2.0


def test_both_messages_of_the_compiler_are_read():
    temporaries = "Memory required for HLO temporaries (20.00G) exceeds available HBM (15.75G)"
    assert size_of_refusal(temporaries) == (20 * 2**30, 15.75 * 2**30)
    assert size_of_refusal(TOO_LARGE) == (18 * 2**30, 15.75 * 2**30)
    assert size_of_refusal("RESOURCE_EXHAUSTED: out of memory while trying to allocate") is None

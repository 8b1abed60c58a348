"""The one place that touches JAX names which are not part of its stable surface. Tested on both ends of the range."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax._src import compilation_cache, core, distributed, lru_cache, source_info_util, xla_bridge
from jax._src.clusters import ClusterEnv
from jax._src.interpreters import mlir
from jax._src.lax import parallel
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]  # the private name is meant
from jax._src.lib.mlir.dialects import hlo
from jax.extend.core import ClosedJaxpr, Literal
from jax.interpreters.partial_eval import dce_jaxpr, dce_rules

Result = TypeVar("Result")


def cut_down(closed: ClosedJaxpr, used_outputs: list[bool]) -> tuple[ClosedJaxpr, list[bool]]:
    """Cuts a traced function down to some of its outputs.

    Returns (the program over the inputs that remain, list of bool: which inputs those are). The dead part is
    gone from the program, collectives and all, and not just left for the compiler to find.
    """
    with _rule_for_while_loops():
        jaxpr, used_inputs = dce_jaxpr(closed.jaxpr, used_outputs)
    return ClosedJaxpr(jaxpr, closed.consts), used_inputs


@contextlib.contextmanager
def _rule_for_while_loops():
    """Lets `dce_jaxpr` cut while loops too, which older versions of JAX leave whole."""
    if lax.while_p in dce_rules:
        yield
        return
    dce_rules[lax.while_p] = _cut_while_loop
    try:
        yield
    finally:
        del dce_rules[lax.while_p]


def _cut_while_loop(used_outputs: list[bool], eqn) -> tuple[list[bool], Any]:
    """Cuts a loop to the values that it needs to continue and to make the used outputs: (used inputs, equation or
    None).
    """
    if not any(used_outputs) and not eqn.effects:
        return [False] * len(eqn.invars), None
    condition, body = eqn.params["cond_jaxpr"], eqn.params["body_jaxpr"]
    of_condition, of_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    before = None
    used = [
        a or b
        for a, b in zip(used_outputs, dce_jaxpr(condition.jaxpr, [True])[1][of_condition:], strict=True)
    ]
    while used != before:
        before = used
        used = [a or b for a, b in zip(used, dce_jaxpr(body.jaxpr, used)[1][of_body:], strict=True)]
    new_condition, in_condition = dce_jaxpr(condition.jaxpr, [True], [False] * of_condition + used)
    new_body, in_body = dce_jaxpr(body.jaxpr, used, [False] * of_body + used)
    consts = in_condition[:of_condition], in_body[:of_body]
    inputs = [*consts[0], *consts[1], *used]
    params = eqn.params | {
        "cond_jaxpr": ClosedJaxpr(new_condition, condition.consts),
        "body_jaxpr": ClosedJaxpr(new_body, body.consts),
        "cond_nconsts": sum(consts[0]),
        "body_nconsts": sum(consts[1]),
    }
    keep = lambda values, kept: [value for value, one in zip(values, kept, strict=True) if one]  # noqa: E731
    return inputs, eqn.replace(
        invars=keep(eqn.invars, inputs), outvars=keep(eqn.outvars, used), params=params
    )


def silent(program):
    """Returns the same program without prints, callbacks' effects and the like, so that `cut_down` may cut them.

    An equation whose results are used stays; writes to refs stay always.
    """
    if type(program) in (tuple, list):  # branches of a cond; no named tuple holds programs
        return type(program)(map(silent, program))
    if isinstance(program, ClosedJaxpr) and program.jaxpr is not program:
        return program.replace(jaxpr=silent(program.jaxpr))
    return _silent_equations(program) if hasattr(program, "eqns") else program


def _silent_equations(program: Any):
    eqns = [
        eqn.replace(
            params={name: silent(value) for name, value in eqn.params.items()}, effects=_lasting(eqn.effects)
        )
        for eqn in program.eqns
    ]
    return program.replace(eqns=eqns, effects=_lasting(program.effects))


def _lasting(effects) -> set:
    return {effect for effect in effects if type(effect).__name__ not in _OBSERVERS}


_OBSERVERS = {"DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect"}


def equations(program) -> Iterator:
    """Yields every operation of a traced function, those inside its loops, branches and calls too."""
    if type(program) in (tuple, list):
        for part in program:
            yield from equations(part)
    for eqn in getattr(getattr(program, "jaxpr", program), "eqns", ()):
        yield eqn
        for value in eqn.params.values():
            yield from equations(value)


def custom_vjp(*nondiff_argnums: int) -> Callable[[Callable[..., Result]], jax.custom_vjp[Result]]:
    """Returns `jax.custom_vjp` as a decorator, in a form whose results type checkers know."""
    decorated: Any = partial(jax.custom_vjp, nondiff_argnums=nondiff_argnums)
    return decorated


def config_value(name: str) -> Any:
    """Returns an option of `jax.config`, whose names JAX adds as it is imported, unseen by type checkers."""
    return getattr(jax.config, name)


def is_tracing() -> bool:
    """Returns whether a function is being traced at this moment, such as the caller's own under `jax.jit`."""
    return not core.trace_state_clean()


def is_traced(tree) -> bool:
    """Returns whether any leaf is an abstract value of a function being traced."""
    return any(isinstance(leaf, core.Tracer) for leaf in jax.tree.leaves(tree))


_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr"}
_CALLS |= {"remat2": "jaxpr", "checkpoint": "jaxpr", "remat": "jaxpr", "custom_jvp_call": "call_jaxpr"}
_CALLS |= {"custom_vjp_call": "call_jaxpr"}


def called(eqn: Any) -> ClosedJaxpr | None:
    """Returns the program that an equation calls once (jit, remat, custom derivatives); None if it is no such call."""
    inner = eqn.params.get(_CALLS.get(eqn.primitive.name))
    return inner if inner is None or isinstance(inner, ClosedJaxpr) else ClosedJaxpr(inner, ())


def inlined(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the same program with calls (jit, remat, custom derivatives) written out, so that it can be cut at
    equations.

    For programs that are not differentiated any more.
    """

    def run(*leaves):
        jaxpr = closed.jaxpr
        constants = dict(zip(jaxpr.constvars, closed.consts, strict=True))
        return evaluate(
            jaxpr.eqns, dict(zip(jaxpr.invars, leaves, strict=True)), constants, jaxpr.outvars, True
        )

    return jax.make_jaxpr(run)(
        *(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in closed.jaxpr.invars)
    )


def opened(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns the same program with calls written out, in loops too, so that `cut_down` can cut inside of them."""
    program = inlined(closed)
    eqns = [
        eqn.replace(params={name: _opened(value) for name, value in eqn.params.items()})
        if eqn.primitive.name in ("scan", "while", "cond")
        else eqn
        for eqn in program.jaxpr.eqns
    ]
    return ClosedJaxpr(program.jaxpr.replace(eqns=eqns), program.consts)


def _opened(value: Any) -> Any:
    if type(value) in (tuple, list):
        return type(value)(map(_opened, value))
    return opened(value) if isinstance(value, ClosedJaxpr) else value


def evaluate(eqns: list, env: dict, constants: dict, outvars: list, inline: bool = False) -> list:
    """Runs equations on an environment Var -> value and returns the values of `outvars`.

    They keep their named scopes, which readers of compiled programs look for.
    """
    env = {**constants, **env}
    read = lambda var: var.val if isinstance(var, Literal) else env[var]  # noqa: E731
    for eqn in eqns:
        values = [read(var) for var in eqn.invars]
        inner = eqn.params.get(_CALLS.get(eqn.primitive.name)) if inline else None
        with _scopes_of(eqn):
            if inner is not None:
                jaxpr, consts = (inner.jaxpr, inner.consts) if isinstance(inner, ClosedJaxpr) else (inner, ())
                out = evaluate(
                    jaxpr.eqns,
                    dict(zip(jaxpr.invars, values, strict=True)),
                    dict(zip(jaxpr.constvars, consts, strict=True)),
                    jaxpr.outvars,
                    True,
                )
            else:
                with eqn.ctx.manager:
                    out = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
                out = out if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outvars, out, strict=True))
    return [read(var) for var in outvars]


def _scopes_of(eqn: Any) -> contextlib.AbstractContextManager:
    """Returns a context in which equations have the named scopes of this one, inside of those that are open."""
    found = eqn.source_info
    scopes = source_info_util.current_name_stack() + found.name_stack
    return source_info_util.user_context(found.traceback, name_stack=scopes)


def coordination() -> tuple[Any, int, int, str | None]:
    """Returns the job's coordination service, this process, how many there are, the address: all without a device.

    The client, None where `jax.distributed` was not started, has key_value_set(key, text, allow_overwrite),
    blocking_key_value_get(key, milliseconds) and key_value_dir_get(prefix) -> [(key, text)]; each raises
    jax.errors.JaxRuntimeError.
    """
    state = distributed.global_state
    return state.client, state.process_id, state.num_processes, state.coordinator_address


_left: list[Any] = []  # what `leave_coordination` has taken: freed, its threads would end the process


def leave_coordination() -> None:
    """Lets this process end without waiting for the others, which jax does at exit until all have come."""
    state = distributed.global_state
    _left.extend([state.client, state.service, state.preemption_sync_manager])
    state.client = state.service = state.preemption_sync_manager = None


def find_cluster(name: str | None = None, skipped: tuple[str, ...] = ()):
    """Returns the cluster this process was started in, as jax detects them, or None.

    name: of one kind, see `cluster_names`; None takes the first that is there and may be taken unasked.
    The class has get_process_count(), get_process_id(), get_local_process_id() and
    get_coordinator_address(timeout_secs=, override_coordinator_port=).
    """
    for kind in ClusterEnv._cluster_types:
        called = _cluster_name(kind)
        wanted = called == name if name else not kind.opt_in_only_method and called not in skipped
        if wanted and kind.is_env_present():
            return kind
    return None


def cluster_names() -> list[str]:
    """Returns the kinds of cluster that jax knows."""
    return sorted(set(map(_cluster_name, ClusterEnv._cluster_types)) - {"tpu"})


def _cluster_name(kind) -> str:
    return kind.name or kind.__name__.removesuffix("Cluster").lower()


def backends_are_made() -> bool:
    """Returns whether jax has looked for devices already, after which it can join no other process."""
    return xla_bridge.backends_are_initialized()


_SUMS = ("psum", "pmax", "pmin", "reduce_scatter", "psum_invariant", "unreduced_psum", "unreduced_pmax")
_SUMS += ("unreduced_pmin", "unreduced_reduce_scatter")
_MOVES = ("ppermute", "all_gather", "all_to_all", "all_gather_invariant", "all_gather_reduced")


def mend_cpu_collectives() -> None:
    """Changes how collectives are lowered for CPU from now on, in every program; for other platforms nothing changes.

    Each gets its own channel, where JAX gives all of them the same one: XLA:CPU lets devices meet by channel, so
    two of one channel that run at the same time mix up. And bfloat16 is reduced in float32: beside an axis that XLA
    partitions, XLA:CPU's own way of doing that ends the process ("Invalid binary instruction opcode copy").
    Does nothing where JAX keeps its lowering rules in another way.
    """
    for name in (*_SUMS, *_MOVES):
        primitive = getattr(parallel, f"{name}_p", None)
        if primitive is None:
            continue
        entry = mlir._platform_specific_lowerings["cpu"].get(primitive) or mlir._lowerings.get(primitive)
        if entry is not None and not hasattr(entry.rule, "is_mended"):
            rule = _with_own_channel(_in_float32(entry.rule) if name in _SUMS else entry.rule)
            rule.is_mended = True
            mlir.register_lowering(primitive, rule, platform="cpu", cacheable=False)


def _with_own_channel(rule: Callable) -> Callable:
    def lower(ctx, *operands, **params):
        out = rule(ctx, *operands, **params)
        given = list(jax.tree.leaves(operands))
        for value in jax.tree.leaves(out):
            _renumber(value, given, ctx.module_context)
        return out

    return lower


def _renumber(value: ir.Value, given: list, module) -> None:
    """Gives a new channel to the collective that `value` was made by, between it and the values `given`."""
    if isinstance(value.owner, ir.Block) or any(value == other for other in given):
        return
    operation = value.owner.operation
    if "channel_handle" in operation.attributes:
        kind = mlir.DEVICE_TO_DEVICE_TYPE
        operation.attributes["channel_handle"] = hlo.ChannelHandle.get(module.new_channel(), kind)
        return
    for operand in operation.operands:
        _renumber(operand, given, module)


def _in_float32(rule: Callable) -> Callable:
    """Returns the lowering rule with bfloat16 operands converted before it and results after it."""

    def lower(ctx, *operands, **params):
        if not any(aval.dtype == jnp.bfloat16 for aval in ctx.avals_in):
            return rule(ctx, *operands, **params)
        into, out_of = (list(map(_widened, avals)) for avals in (ctx.avals_in, ctx.avals_out))
        operands = [
            mlir.convert_hlo(ctx, *triple) for triple in zip(operands, ctx.avals_in, into, strict=True)
        ]
        out = rule(ctx.replace(avals_in=into, avals_out=out_of), *operands, **params)
        return [mlir.convert_hlo(ctx, *triple) for triple in zip(out, out_of, ctx.avals_out, strict=True)]

    return lower


def _widened(aval):
    return aval.update(dtype=jnp.dtype("float32")) if aval.dtype == jnp.bfloat16 else aval


def replace_damaged_programs() -> None:
    """Removes what cannot be read in the compile cache, so that the program is written again once it is compiled.

    JAX keeps a file that was cut short, by a full disk or a kill, and compiles that program anew at every start.
    """
    read = compilation_cache.get_executable_and_time
    if hasattr(read, "__wrapped__"):
        return

    @wraps(read)
    def or_removed(key: str, *others: Any, **options: Any) -> Any:
        try:
            return read(key, *others, **options)
        except (OSError, MemoryError):  # of the machine, not of what the file holds
            raise
        except Exception:
            directory = str(config_value("jax_compilation_cache_dir"))
            if "://" not in directory:
                with contextlib.suppress(OSError):
                    (Path(directory) / f"{key}{lru_cache._CACHE_SUFFIX}").unlink()
            raise

    compilation_cache.get_executable_and_time = or_removed

"""Writes a short program that shows a finding by itself. No JAX in here."""

from __future__ import annotations

from typing import Any

from jaxfb.checking.drawing.case import Case
from jaxfb.checking.outcome import Outcome

TEMPLATE = '''"""jaxfb check found: {what}"""

import os

os.environ["XLA_FLAGS"] = "{flags}"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax

import jaxfb
from jaxfb.checking.toy_models import arguments
from jaxfb.checking.toy_models import problem
from jaxfb.checking.comparison import trial
from jaxfb.checking.drawing.case import Case

case = Case({case})
own = {own}
with jax.enable_x64(case.x64), trial.large_tables(case):
    toy = problem.problem_of(case, own)  # toy.model, toy.params, toy.batch
    mesh = jaxfb.make_mesh({mesh})
    plan = jaxfb.BatchPlan({plan})
    forward_backward = jaxfb.get_forward_backward_func({options})
    out = forward_backward(toy.model, toy.params, toy.batch, plan, arguments.rng_of(case){last})
    print("loss", out.loss)
    print("gradients", out.grads)

print(trial.try_case(case, own))  # all of it next to one device, and the update if the case has one
'''


def program(case: Case, outcome: Outcome, flags: str, model: str | None = None) -> str:
    """Returns the text of a program that runs this case.

    flags: of XLA, as the search's own processes had them. model: where the user's comes from, "module:function".
    """
    table = {"schedule": _Code("arguments.schedule_of(case)")} if case.schedule == "random" else {}
    options = "".join(f", {name}={value!r}" for name, value in (case.engine_options() | table).items())
    sizes = {"rows": case.rows, "rows_per_microbatch": case.rows_per_microbatch}
    sizes |= {"data_parallel": case.data_parallel, "remainder": case.remainder}
    return TEMPLATE.format(
        what=outcome.detail.partition("\n")[0].replace('"""', "'''").replace("\\", "/"),
        flags=flags,
        case=_arguments(case.not_default()),
        own=_own(case, model),
        mesh=_arguments(case.mesh | {"devices": _Code(f"jax.devices()[:{case.num_devices}]")}),
        plan=_arguments(sizes),
        options=f"mesh{options}",
        last=", forward_only=True" if case.forward_only else "",
    )


def _own(case: Case, model: str | None) -> str:
    if model is not None:
        return f"problem.load({model!r})"
    return "(model, params, batch)  # yours" if case.model == "own" else "None"


class _Code(str):
    def __repr__(self) -> str:
        return str(self)


def _arguments(values: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())

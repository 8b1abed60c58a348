"""Sections on accumulation: on this machine, and by the TPU's compiler next to MaxText."""

from __future__ import annotations

from page.markdown import Table
from page.section import Claim, Result, Section, microbatches

PAIRS = {
    "one call / calls of `value_and_grad`": (
        "time_one_call_to_calls_of_value_and_grad", "one_call", "value_and_grad",
    ),
    "train step / `MultiSteps`": ("time_train_step_to_multi_steps", "train_step", "multi_steps"),
}  # fmt: skip


def costs(result: Result) -> dict:
    sizes = {"peak": result["peak_bytes"], "temp": result["temp_bytes"]}
    state = result["optimizer_state_bytes"]
    return {
        "count": result["settings"]["num_microbatches"],
        "call": result[PAIRS["one call / calls of `value_and_grad`"][0]]["median_of_rounds"],
        "step": result[PAIRS["train step / `MultiSteps`"][0]]["median_of_rounds"],
        "state": state["train_step"] / state["multi_steps"],
        "peak_of_call": sizes["peak"]["one_call"] / sizes["peak"]["value_and_grad"],
        "peak_of_step": sizes["peak"]["train_step"] / sizes["peak"]["multi_steps"],
        "state_mb": [state[name] / 1e6 for name in ("train_step", "multi_steps")],
    }


def cost_table(result: Result) -> list[Table]:
    head = {
        f"jax {result['machine']['jax']}": "",
        "time, median of rounds": ".2f",
        "time, best to best": ".2f",
    }
    head |= {"peak MB": ".1f", "the other's": ".1f", "temporaries MB": ".1f", "the other's ": ".1f"}
    rows = []
    for label, (time, ours, theirs) in PAIRS.items():
        sizes = [result[kind][name] / 1e6 for kind in ("peak_bytes", "temp_bytes") for name in (ours, theirs)]
        rows.append([label, result[time]["median_of_rounds"], result[time]["best_to_best"], *sizes])
    return [Table(head, rows)]


def cost_claims(result: Result) -> list[Claim]:
    found, count = costs(result), result["settings"]["num_microbatches"]
    ours, theirs = found["state_mb"]
    return [
        Claim(f"time of {microbatches(count)} in one call", "", "a loop of `value_and_grad`", found["call"]),
        Claim(f"time of an update of {microbatches(count)}", "", "`optax.MultiSteps`", found["step"]),
        Claim("optimizer state", f"{ours:.1f} MB", f"`optax.MultiSteps`: {theirs:.1f} MB", found["state"]),
    ]


def tpu_row(result: Result, remat: str, count: int) -> dict:
    return result["rows"][f"{remat}, {count} microbatches"]


def tpu_counts(result: Result) -> list[int]:
    return sorted({int(key.split(", ")[1].split()[0]) for key in result["rows"]})


def tpu_facts(result: Result) -> dict:
    few, *_, many = tpu_counts(result)
    theirs = {int(key.split()[0]): value for key, value in result["maxtext_temp_mb"].items()}
    one, all_of_them = tpu_row(result, "full", few), tpu_row(result, "full", many)
    return {
        "topology": result["settings"]["topology"],
        "data": result["settings"]["data"],
        "few": few,
        "many": many,
        "ours_few": one["temp_mb"],
        "ours_many": all_of_them["temp_mb"],
        "theirs_few": theirs[few],
        "theirs_many": theirs[many],
        "reductions_few": one["gradient_reductions"],
        "reductions_many": all_of_them["gradient_reductions"],
        "reduced": all_of_them["reduced_mb"],
    }


def tpu_table(result: Result) -> list[Table]:
    head = {"": "", "remat": "", "microbatches": "d", "temporaries MB": ".1f", "HBM MB": ".1f"}
    head |= {"arguments MB": ".1f", "reductions of gradients": "d", "MB reduced": ".1f"}
    rows = []
    for key, row in result["rows"].items():
        remat, count = key.split(", ")
        numbers = [
            row[name] for name in ("temp_mb", "hbm_mb", "argument_mb", "gradient_reductions", "reduced_mb")
        ]
        rows.append(["jaxfb", remat, int(count.split()[0]), *numbers])
    for key, temp in result["maxtext_temp_mb"].items():
        hbm = result["maxtext_hbm_mb"][key]
        rows.append(["MaxText", "full", int(key.split()[0]), temp, hbm, None, None, None])
    return [Table(head, sorted(rows, key=lambda row: (row[0] != "jaxfb", row[1], row[2])))]


def tpu_claims(result: Result) -> list[Claim]:
    found = tpu_facts(result)
    return [
        Claim(
            f"temporaries per chip of {found['topology']}, data {found['data']}, {microbatches(count)}",
            f"{found[f'ours_{which}']:.1f} MB",
            f"MaxText: {found[f'theirs_{which}']:.1f} MB",
            found[f"ours_{which}"] / found[f"theirs_{which}"],
        )
        for which, count in (("few", found["few"]), ("many", found["many"]))
    ]


SECTIONS = (
    Section(
        "accumulation",
        "Accumulation compared with a loop and `optax.MultiSteps`",
        """One call of `forward_backward` with all {count} microbatches, their gradients summed, takes
        **{call:.2f}** times as long as the same number of calls of a jitted `value_and_grad` whose gradients
        are not even summed. A whole update takes **{step:.2f}** times as long as `optax.MultiSteps` around
        the same AdamW. The optimizer state is {state:.2f} times the size, because jaxfb does not keep the sum
        of gradients between updates. The peak memory of an update is {peak_of_step:.2f} times that of one
        `MultiSteps` call, and the peak of `forward_backward` {peak_of_call:.2f} times that of one
        `value_and_grad`.""",
        costs,
        cost_table,
        cost_claims,
    ),
    Section(
        "accumulation_tpu",
        "Accumulation on a TPU pod, compared with MaxText",
        """A data-parallel train step on {topology}, compiled ahead of time by the TPU compiler without a TPU,
        for jaxfb and for MaxText with the same shapes. With {few} microbatch and `remat="full"` a chip needs
        {ours_few:.1f} MB of temporaries (MaxText {theirs_few:.1f}), and with {many} microbatches
        **{ours_many:.1f} MB (MaxText {theirs_many:.1f})**. The number of gradient reductions does not grow
        with the number of microbatches: {reductions_few} with {few} and {reductions_many} with {many},
        {reduced:.1f} MB in all.""",
        tpu_facts,
        tpu_table,
        tpu_claims,
    ),
)  # fmt: skip

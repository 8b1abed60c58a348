"""The section on models of real size, by the TPU's compiler, next to MaxText."""

from __future__ import annotations

from real_sizes_bytes import beside_formula

from page.markdown import Table
from page.section import Claim, Result, Section

SIDES = {
    "jaxfb": "jaxfb, compiler's own options",
    "jaxfb_best": "jaxfb",
    "jaxfb_rounded": "jaxfb, bfloat16 sums",
    "maxtext": "MaxText, compiler's own options",
    "maxtext_best": "MaxText, jaxfb's options",
}


ROUNDED = ", bfloat16 sums"
MEMORY_NEAR, TIME_NEAR = 0.1, 0.15  # what the planner's formula is to be within


def pairs(result: Result, *ours: str) -> dict[str, tuple[dict, dict]]:
    """Row -> (ours, theirs), of the rows that both have: each with the options under which its step is shortest.

    ours: sides of jaxfb; none: those that sum over chips in the accum dtype.
    """
    found = {}
    for name, row in result["rows"].items():
        sides = (
            _shortest(row, *(ours or ("jaxfb", "jaxfb_best"))),
            _shortest(row, "maxtext", "maxtext_best"),
        )
        if None not in sides:
            found[name] = sides
    return found


def bounds(result: Result) -> dict[str, float]:
    """Row -> the least that anybody's step can be of MaxText's: its products without recomputation, at the chip's
    peak."""
    return {name: theirs["mfu"] for name, (_, theirs) in pairs(result).items()}


def uses_memory(name: str) -> bool:
    """Whether a row's job keeps activations that fit in place of computing them again."""
    return name.endswith("memory used")


def spares_memory(name: str) -> bool:
    """Whether a row's job has a longer step for less memory: a layer's weights are gathered when it runs."""
    return name.endswith("nothing ahead")


def is_older(side: str, row: dict) -> bool:
    """Whether attention's gradients are two kernels in a program of jaxfb."""
    return side.startswith("jaxfb") and not row.get("one_kernel_of_gradients", False)


def _shortest(row: dict, *sides: str) -> dict | None:
    return min((row[side] for side in sides if side in row), key=lambda one: one["step_s"], default=None)


def facts(result: Result) -> dict:
    both = pairs(result)
    compared = [name for name in both if not uses_memory(name) and not spares_memory(name)]
    memory = [both[name][0]["hbm_gb"] / both[name][1]["hbm_gb"] for name in compared]
    steps = {name: ours["step_s"] / theirs["step_s"] for name, (ours, theirs) in both.items()}
    time = [steps[name] for name in compared]
    sparing = [sides for name, sides in both.items() if spares_memory(name)]
    sparing += [sides for name, sides in pairs(result, "jaxfb_rounded").items() if spares_memory(name)]
    spared = {key: [ours[key] / theirs[key] for ours, theirs in sparing] for key in ("hbm_gb", "step_s")}
    with_memory = [ratio for name, ratio in steps.items() if uses_memory(name)]
    in_bfloat16 = pairs(result, "jaxfb_rounded")
    rounded = [ours["step_s"] / theirs["step_s"] for ours, theirs in in_bfloat16.values()]
    rounded_memory = [
        ours["hbm_gb"] / theirs["hbm_gb"]
        for name, (ours, theirs) in in_bfloat16.items()
        if not uses_memory(name)
    ]
    ours = [_shortest(row, "jaxfb", "jaxfb_best") for row in result["rows"].values()]
    exposed = [row["exposed_s"] / row["step_s"] for row in ours if row is not None]
    as_shipped = [
        row.get("jaxfb_best", row["jaxfb"])["step_s"] / row["maxtext"]["step_s"]
        for row in result["rows"].values()
        if {"jaxfb", "maxtext"} <= row.keys()
    ]
    possible = bounds(result)
    programs = [one for row in result["rows"].values() for one in row.items() if one[0].startswith("jaxfb")]
    return {
        "programs": len(programs),
        "starred": sum(is_older(*one) for one in programs),
        "bound_least": min(possible.values()),
        "bound_most": max(possible.values()),
        "bound_of": max(possible, key=lambda name: possible[name]),
        "spared_least": min(spared["hbm_gb"]),
        "spared_most": max(spared["hbm_gb"]),
        "spared_time_least": min(spared["step_s"]),
        "spared_time_most": max(spared["step_s"]),
        "used_least": min(with_memory),
        "used_most": max(with_memory),
        "shipped_least": min(as_shipped),
        "shipped_most": max(as_shipped),
        "dtype": result["settings"]["compute_dtype"],
        "rounded_count": len(rounded),
        "rounded_least": min(rounded),
        "rounded_most": max(rounded),
        "rounded_memory_least": min(rounded_memory),
        "rounded_memory_most": max(rounded_memory),
        "seq": result["settings"]["seq"],
        "count": len(memory),
        "smaller": sum(ratio <= 1 for ratio in memory),
        "least": min(memory),
        "most": max(memory),
        "faster": sum(ratio <= 1 for ratio in time),
        "time_least": min(time),
        "time_most": max(time),
        "exposed_least": min(exposed),
        "exposed_most": max(exposed),
    }


def table(result: Result) -> list[Table]:
    head = {"job": "", "": "", "HBM GB": ".2f", "arguments GB": ".2f", "step s": ".2f", "work s": ".2f",
            "matrix products s": ".2f", "collectives s": ".2f", "exposed s": ".2f", "exposed": ".0%", "MFU": ".1%",
            "step over MaxText's": ".2f", "bound": ".2f", "compile CPU s": ".0f",
            "compiler's peak GB": ".1f"}  # fmt: skip
    rows, both, possible = [], pairs(result), bounds(result)
    for name, sides in result["rows"].items():
        for side, row in sorted(sides.items()):
            times = [row[key] for key in ("step_s", "work_s", "products_s", "collectives_s", "exposed_s")]
            share = row["exposed_s"] / row["collectives_s"] if row["collectives_s"] else None
            over = (
                row["step_s"] / both[name][1]["step_s"] if name in both and side.startswith("jaxfb") else None
            )
            beside = (over, possible[name] if over is not None else None)
            compiler = (row["compile_cpu_s"], row["peak_memory_gb"])
            memory = (row["hbm_gb"], row["arguments_gb"])
            rows.append(
                [
                    name,
                    SIDES[side] + "*" * is_older(side, row),
                    *memory,
                    *times,
                    share,
                    row["mfu"],
                    *beside,
                    *compiler,
                ]
            )
    return [Table(head, rows)]


def claims(result: Result) -> list[Claim]:
    rounded = {f"{name}{ROUNDED}": both for name, both in pairs(result, "jaxfb_rounded").items()}
    found = []
    for name, (ours, theirs) in (pairs(result) | rounded).items():
        row = result["rows"][name.removesuffix(ROUNDED)]
        for what, key, unit in (
            ("HBM per chip", "hbm_gb", "GB"),
            ("lower bound of a step's time", "step_s", "s"),
        ):
            if key == "hbm_gb" and (uses_memory(name) or name.endswith(ROUNDED)):
                continue
            best = "maxtext_best" in row or "jaxfb_best" not in row
            library = "MaxText" if best else "MaxText, compiler's own options"
            said = f"{ours[key]:.2f} {unit}", f"{library}: {theirs[key]:.2f} {unit}"
            found.append(Claim(f"{what}, {name}", *said, ours[key] / theirs[key]))
    return found


def axes_of(result: Result) -> list[tuple[str, str, str, dict[str, float]]]:
    """(job, side, axis, gigabytes sent and by hand) of each axis."""
    return [
        (name, side, axis, row)
        for name, sides in result["rows"].items()
        for side, axes in beside_formula(name, sides).items()
        for axis, row in axes.items()
    ]


def bytes_facts(result: Result) -> dict:
    ratios: dict[str, list[float]] = {}
    for _, side, axis, row in axes_of(result):
        kind = axis if axis in ("fsdp", "tensor") else "others"
        ratios.setdefault(f"{side.split('_')[0]}_{kind}", []).append(row["sent_gb"] / row["by_hand_gb"])
    return {f"{key}_{end.__name__}": end(found) for key, found in ratios.items() for end in (min, max)}


def bytes_table(result: Result) -> list[Table]:
    head = {"job": "", "": "", "axis": "", "sent GB": ",.1f", "by hand GB": ",.1f", "ratio": ".2f"}
    rows = [
        [name, SIDES[side], axis, row["sent_gb"], row["by_hand_gb"], row["sent_gb"] / row["by_hand_gb"]]
        for name, side, axis, row in axes_of(result)
    ]
    return [Table(head, rows)]


def errors(result: Result, key: str) -> list[float]:
    return [row[f"formula_{key}"] / row[key] - 1 for row in result["rows"].values()]


def accuracy_facts(result: Result) -> dict:
    return {
        f"{name}_{end.__name__}": end(errors(result, key))
        for name, key in (("memory", "hbm_gb"), ("time", "step_s"))
        for end in (min, max)
    } | {
        "count": len(result["rows"]),
        "memory_near": MEMORY_NEAR,
        "time_near": TIME_NEAR,
        "near": sum(abs(one) <= MEMORY_NEAR for one in errors(result, "hbm_gb")),
        "near_in_time": sum(abs(one) <= TIME_NEAR for one in errors(result, "step_s")),
    }


def accuracy_table(result: Result) -> list[Table]:
    head = {"job": "", "HBM GB, compiler": ".2f", "formula": ".2f", "formula over compiler": "+.0%",
            "step s, compiler": ".2f", "formula ": ".2f", "formula over compiler ": "+.0%"}  # fmt: skip
    rows = [
        [name, row["hbm_gb"], row["formula_hbm_gb"], memory, row["step_s"], row["formula_step_s"], time]
        for (name, row), memory, time in zip(
            result["rows"].items(), errors(result, "hbm_gb"), errors(result, "step_s"), strict=True
        )
    ]
    return [Table(head, rows)]


SECTIONS = (
    Section(
        "real_sizes_tpu",
        "Models of real size on TPU pods, compared with MaxText",
        """Whole train steps, compiled ahead of time by the TPU compiler; nothing was run. Both libraries have the same
        model, mesh, rows (of {seq:,} tokens unless another length is named) and microbatches, full rematerialization
        and flash attention. The time of a step is a lower bound, from a roofline of the compiled program, instruction
        by instruction. What follows takes each library with the compiler options that give it the shorter step.

        - **Memory.** jaxfb's HBM per chip, as the compiler reports it, is **{least:.2f} to {most:.2f}** times
          MaxText's, and no larger in {smaller} of {count} jobs.
        - **Time.** jaxfb's step takes **{time_least:.2f} to {time_most:.2f}** times as long as MaxText's, and no longer
          in {faster} of {count} jobs. Over all rows of jaxfb, communication that no computation
          hides takes {exposed_least:.0%} to {exposed_most:.0%} of the step.
        - **With the memory that is left.** In the jobs "memory used", which the figures above leave out, both libraries
          keep activations that fit instead of computing them again: MaxText by that of its policies
          "minimal_with_context", "minimal" and "save_dot_except_mlpwi" which fits and gives it the shortest step,
          jaxfb by `selective`, in the largest model over all chips for some of the layers. jaxfb keeps gathered weights
          for the whole step where that pays. Its step takes {used_least:.2f} to {used_most:.2f} times as long as
          MaxText's.
        - **With less memory.** In the jobs "nothing ahead", which the first two figures leave out as well, a layer's
          weights are gathered only when it runs (`parallel.gather_ahead=false`). HBM is {spared_least:.2f} to
          {spared_most:.2f} times MaxText's, and the step {spared_time_least:.2f} to {spared_time_most:.2f} times as
          long.
        - **As installed.** jaxfb chooses compiler options by the kind of chip and the layout; MaxText sets none, though
          some of its recipes do. Compared like that, jaxfb's step takes {shipped_least:.2f} to {shipped_most:.2f} times
          as long.
        - **With sums in {dtype}.** MaxText sums FSDP's gradients over the chips in the compute dtype, jaxfb in the
          wider accum dtype: twice the bytes are sent, and gradients that wait for their sum take twice the memory. With
          `precision.reduce_dtype={dtype}` jaxfb does as MaxText: in the {rounded_count} rows "{dtype} sums" its step
          takes {rounded_least:.2f} to {rounded_most:.2f} times as long as MaxText's. Its HBM is
          {rounded_memory_least:.2f} to {rounded_memory_most:.2f} times MaxText's in those of them that are not "memory
          used".
        - **What is possible.** The column "bound" is the least ratio to MaxText's step that any program could reach:
          the products that the model needs without recomputation, at the chip's peak, divided by MaxText's step. It is
          {bound_least:.2f} to {bound_most:.2f}, the largest for {bound_of}.

        How to read the rows:

        - "Compiler's own options" are rows without the options that jaxfb chooses; "MaxText, jaxfb's options" has them.
        - With long sequences both libraries cut parameters and optimizer state over fsdp and context, and gather keys
          over context.
        - "State on the host" keeps the optimizer state in the host's memory, so that a model fits on chips for which
          the compiler refuses it otherwise. Moving that state twice over the host's link, almost none of it
          hidden, is part of the step.
        - A star marks programs of jaxfb in which attention's gradients are two kernels with seven products:
          {starred} of {programs}. Compiled again they would have one kernel with five products, and a shorter step. The
          others were compiled beside other work, which makes the CPU time of compiling up to twice as long.
        - "Half a layer ahead" is `parallel.gather_ahead=half`: less HBM, since only attention's parameters are gathered
          while the layer before computes. The rows with a tensor or context axis do so by default; on chips
          without SparseCores nothing is gathered ahead, since the compiler overlaps gathers with matmuls by itself.
        - "Layers' inputs on the host" is `remat=offload`: what the backward reads of each layer waits in the host's
          memory. It takes less HBM, and the transfers lengthen the step.
        - Rows of jaxfb alone were not compiled with MaxText, or it has nothing of the kind: it refuses an optimizer cut
          over data in addition to fsdp.
        - In a pipeline, jaxfb's `remat=full` keeps the input of a stage, whose forward then runs three times; MaxText
          keeps the input of each layer, and so does jaxfb in the row "layers' inputs kept" (`remat=layer`).
        - "Five chunks" are stages of two layers, five on each device: `schedule=interleaved`, and MaxText's circular
          pipeline. With few microbatches both are faster and smaller like that than with one stage a device.
        - "Compiler's peak" is the memory of the process that compiles.""",
        facts, table, claims,
    ),
    Section(
        "real_sizes_tpu",
        "Bytes along each axis at real size, compared with a formula",
        """What a chip sends along each mesh axis in the steps above, counted in the compiled program with the shorter
        step, divided by what the layout needs when worked out by hand (`benchmarks/real_sizes_bytes.py`):

        - **fsdp**: weights gathered in the forward and in the backward of every microbatch, and gradients scattered, in
          the accum dtype or in the rows "sums" and for MaxText in the compute dtype. jaxfb sends
          {jaxfb_fsdp_min:.2f} to {jaxfb_fsdp_max:.2f} times that, MaxText {maxtext_fsdp_min:.2f} to
          {maxtext_fsdp_max:.2f}: where its scatter has become an all-reduce, each gradient travels twice.
        - **tensor**, with the sequence cut: inputs gathered and results scattered, and in the backward the inputs
          gathered once more. jaxfb sends {jaxfb_tensor_min:.2f} to {jaxfb_tensor_max:.2f} times that, MaxText
          {maxtext_tensor_min:.2f} to {maxtext_tensor_max:.2f}.
        - **The other axes**: keys and values around the context axis, tokens to their experts and back, hidden states
          from stage to stage and around the head, and one reduction a step of what several devices of an axis hold
          whole. jaxfb sends {jaxfb_others_min:.2f} to {jaxfb_others_max:.2f} times that.""",
        bytes_facts, bytes_table,
    ),
    Section(
        "planner_accuracy",
        "The planner's formula compared with the compilers",
        """What `jaxfb plan --no-compile` estimates for the rows above, and what the compilers report: that of TPUs with
        the options that jaxfb chooses, that of GPUs with the configs made for them. Memory is within {memory_near:.0%}
        in {near} of {count} rows and off by {memory_min:+.0%} to {memory_max:+.0%} over all of them; the step's lower
        bound in time is within {time_near:.0%} in {near_in_time} and off by {time_min:+.0%} to {time_max:+.0%}.""",
        accuracy_facts, accuracy_table,
    ),
)  # fmt: skip

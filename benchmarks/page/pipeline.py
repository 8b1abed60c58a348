"""Sections on the pipeline's memory and its head: by the CPU's compiler, by the TPU's next to MaxText, by placement."""

from __future__ import annotations

from page.markdown import Table
from page.plots import Panel, Picture
from page.section import Claim, Result, Section, microbatches

V_KINDS = ("v_shape", "zb_v", "v_half", "v_min")
SCHEDULES = ("1f1b", "interleaved", "zero_bubble", *V_KINDS, "gpipe", "gpipe by autodiff")
REMAT = ("none", "selective", "layer", "full")
AUTODIFF, FIRST = "gpipe by autodiff", "1f1b"


def grid(result: Result, separator: str) -> dict[tuple[str, str], dict[int, dict]]:
    """(schedule, remat) -> num_microbatches -> row, in the order of this page."""
    found: dict[tuple[str, str], dict[int, dict]] = {}
    for key, row in result["rows"].items():
        schedule, remat, count = key.rsplit(separator, 2)
        found.setdefault((schedule, remat), {})[int(count)] = row
    order = lambda key: (REMAT.index(key[1]), SCHEDULES.index(key[0]))  # noqa: E731
    return {key: dict(sorted(found[key].items())) for key in sorted(found, key=order)}


def points(cells: dict[int, dict], name: str) -> list[tuple[float, float]]:
    return [(count, row[name]) for count, row in cells.items() if name in row]


def memory_facts(result: Result) -> dict:
    cells = grid(result, ", ")
    ours, theirs = cells[FIRST, "none"], cells[AUTODIFF, "none"]
    few, many = min(ours), max(ours)
    growth = [max(temp) / min(temp) - 1 for key, each in cells.items() if "gpipe" not in key[0]
              for temp in [[row["temp_mb"] for row in each.values()]]]  # fmt: skip
    return {
        "pipe": result["settings"]["pipe"],
        "few": few,
        "many": many,
        "growth": max(growth),
        "ours_few": ours[few]["temp_mb"],
        "ours_many": ours[many]["temp_mb"],
        "theirs_few": theirs[few]["temp_mb"],
        "theirs_many": theirs[many]["temp_mb"],
        "compile_ours": ours[many]["compile_cpu_s"],
        "compile_theirs": theirs[many]["compile_cpu_s"],
        "difference": result["gradient_difference_to_autodiff"],
    }


def memory_table(result: Result) -> list[Table]:
    cells = grid(result, ", ")
    counts = sorted({count for each in cells.values() for count in each})
    head = {"schedule": "", "remat": "", **{f"MB, {count} microbatches": ",.1f" for count in counts}}
    head |= {"most / least": ".2f", "compile CPU s": ".1f", "program kB": ",d"}
    rows = []
    for key, each in cells.items():
        temp = [each[count]["temp_mb"] if count in each else None for count in counts]
        known, last = [value for value in temp if value], each[max(each)]
        rows.append([*key, *temp, max(known) / min(known), last["compile_cpu_s"], last["hlo_kb"]])
    return [Table(head, rows)]


def memory_claims(result: Result) -> list[Claim]:
    f = memory_facts(result)
    what = f"temporaries per device, pipeline, {FIRST}, {microbatches(f['many'])}, no remat"
    theirs = f"GPipe by autodiff: {f['theirs_many']:,.1f} MB"
    return [Claim(what, f"{f['ours_many']:.1f} MB", theirs, f["ours_many"] / f["theirs_many"])]


def memory_picture(result: Result) -> list[Picture]:
    panels = []
    cells = grid(result, ", ")
    for remat in dict.fromkeys(key[1] for key in cells):
        lines = {schedule: points(each, "temp_mb") for (schedule, r), each in cells.items() if r == remat}
        panels.append(Panel(f'remat="{remat}"', "microbatches", "temporaries of a device, MB", lines))
    says = "Temporary memory against the number of microbatches: flat for every schedule but GPipe"
    return [Picture("pipeline_memory", says, tuple(panels))]


def tpu_facts(result: Result) -> dict:
    cells, settings = grid(result, " ")[FIRST, "full"], result["settings"]
    theirs = {int(count): value for count, value in result["maxtext_temp_mb"].items()}
    few, many = min(theirs), max(theirs)
    reductions = [
        one for one in cells[many]["data_axis"] if one["bytes"] == cells[many]["data_axis"][0]["bytes"]
    ]
    return {
        "topology": settings["topology"],
        "pipe": settings["pipe"],
        "data": settings["data"],
        "few": few,
        "many": many,
        "ours_few": cells[few]["step_temp_mb"],
        "ours_many": cells[many]["step_temp_mb"],
        "theirs_few": theirs[few],
        "theirs_many": theirs[many],
        "hbm_few": cells[few]["hbm_mb"],
        "hbm_many": cells[many]["hbm_mb"],
        "their_hbm_few": result["maxtext_hbm_mb"][str(few)],
        "their_hbm_many": result["maxtext_hbm_mb"][str(many)],
        "arguments": cells[many]["argument_mb"],
        "their_arguments": result["maxtext_argument_mb"][str(many)],
        "reductions": sum(one["times"] for one in reductions),
        "reduced": cells[many]["data_axis"][0]["bytes"] / 1e6,
        "gradients": cells[many]["gradients_mb"],
        "inner": cells[many]["forward_backward_temp_mb"],
        **{
            f"hbm_{kind}": grid(result, " ")[kind, "none"][few]["hbm_mb"]
            for kind in ("zero_bubble", *V_KINDS)
        },
    }


def tpu_table(result: Result) -> list[Table]:
    cells = grid(result, " ")
    counts = sorted({count for each in cells.values() for count in each})
    head = {"schedule": "", "remat": ""}
    head |= {f"temporaries MB, {count} microbatches": ",.1f" for count in counts}
    head |= {f"HBM MB, {count} microbatches": ",.1f" for count in counts}
    head |= {
        "arguments MB": ",.1f",
        "permutes hidden in a tick": "",
        "exposed in all": "d",
        "compile CPU s": ".1f",
        "program kB": ",d",
    }
    rows = []
    for key, each in cells.items():
        last = each[max(each)]
        sizes = [each.get(count, {}).get(size) for size in ("step_temp_mb", "hbm_mb") for count in counts]
        inner = (*hidden(last["permutes"]), last["compile_cpu_s"], last["hlo_kb"])
        rows.append([*key, *sizes, last["argument_mb"], *inner])
    theirs = [result[f"maxtext_{size}_mb"].get(str(count)) for size in ("temp", "hbm") for count in counts]
    arguments = max(result["maxtext_argument_mb"].values())
    return [Table(head, [*rows, ["MaxText", "full", *theirs, arguments, None, None, None, None]])]


def hidden(permutes: dict) -> tuple[str, int]:
    """In the phase that fills most of a step (forward and backward in one tick, or what comes nearest), and in all."""
    phase = permutes[max(permutes, key=lambda name: (name != "outside", len(name)))]
    exposed = sum(each["exposed"] for each in permutes.values())
    return f"{phase['hidden']} of {sum(phase.values())}", exposed


def tpu_claims(result: Result) -> list[Claim]:
    f = tpu_facts(result)
    return [
        Claim(
            f"HBM per chip of {f['topology']}, pipe {f['pipe']} x data {f['data']}, {FIRST}, {microbatches(count)}",
            f"{f[f'hbm_{which}']:.1f} MB",
            f"MaxText: {f[f'their_hbm_{which}']:.1f} MB",
            f[f"hbm_{which}"] / f[f"their_hbm_{which}"],
        )
        for which, count in (("few", f["few"]), ("many", f["many"]))
    ]  # fmt: skip


def tpu_picture(result: Result) -> list[Picture]:
    cells = grid(result, " ")
    lines = {
        schedule: points(each, "step_temp_mb") for (schedule, remat), each in cells.items() if remat == "full"
    }
    lines["MaxText"] = [(int(count), temp) for count, temp in result["maxtext_temp_mb"].items()]
    says = "Temporary memory of a TPU chip against the number of microbatches, next to MaxText"
    panel = Panel(
        f'{result["settings"]["topology"]}, remat="full"', "microbatches", "temporaries of a chip, MB", lines
    )
    return [Picture("pipeline_tpu", says, (panel,))]


def head_facts(result: Result) -> dict:
    rows = result["rows"]
    return {
        "vocab": result["settings"]["model"]["vocab_size"],
        "pipe": result["settings"]["pipe"],
        "last": rows["last"]["time_over_vocabulary"]["median_of_rounds"],
        "rows": rows["rows"]["time_over_vocabulary"]["median_of_rounds"],
        "params": rows["vocabulary"]["params_mb"],
        "params_else": rows["last"]["params_mb"],
        "losses": same_losses(max(result["losses"].values()) - min(result["losses"].values())),
    }


def same_losses(spread: float) -> str:
    return f"The losses differ by at most {spread:.1g}" if spread else "The losses are the same"


def head_table(result: Result) -> list[Table]:
    sizes = {"params_mb": "parameters MB", "gradients_mb": "gradients MB", "temp_mb": "temporaries MB",
             "pipe_axis_mb": "MB sent along pipe"}  # fmt: skip
    head = {"head": "", **dict.fromkeys(sizes.values(), ".1f"), "time": ".2f", "time, best to best": ".2f"}
    rows = [
        [f"`{name}`", *(row[size] for size in sizes), *row["time_over_vocabulary"].values()]
        for name, row in result["rows"].items()
    ]
    return [Table(head, rows)]


SECTIONS = (
    Section(
        "pipeline_memory",
        "Pipeline: memory by the number of microbatches",
        """Forward and backward of a pipeline of {pipe} stages, compiled for simulated devices. It is compared
        with the usual pipeline in JAX, a scan over ticks whose backward is made by autodiff (equal gradients,
        to {difference:.1g} in float32). From {few} to {many} microbatches the temporaries of that pipeline
        grow from {theirs_few:,.1f} to {theirs_many:,.1f} MB, those of jaxfb's 1f1b from {ours_few:.1f} to
        {ours_many:.1f} MB. No schedule but GPipe grows by more than {growth:.2%}. Program size and compile
        time do not grow either, but compiling takes longer than with autodiff: {compile_ours:.1f} against
        {compile_theirs:.1f} s of CPU time without rematerialization.""",
        memory_facts, memory_table, memory_claims, memory_picture,
    ),
    Section(
        "pipeline_tpu",
        "Pipeline on a TPU pod, compared with MaxText",
        """A whole train step on {topology}, {pipe} stages x {data} replicas, compiled ahead of time by the TPU
        compiler without a TPU, for jaxfb and for MaxText's pipeline with the same shapes.

        - **Temporaries.** With full rematerialization, 1f1b needs {ours_few:.1f} MB per chip with {few} microbatches
          (MaxText {theirs_few:.1f}) and **{ours_many:.1f} MB with {many} (MaxText {theirs_many:.1f})**.
        - **Arguments** take another {arguments:.1f} MB (MaxText {their_arguments:.1f}, which keeps embedding and head
          on every stage).
        - **In total** the compiler plans {hbm_few:.1f} MB of HBM with {few} microbatches (MaxText {their_hbm_few:.1f})
          and {hbm_many:.1f} MB with {many} (MaxText {their_hbm_many:.1f}). Some temporaries are in VMEM alone and not
          part of this.
        - **Gradients** take {gradients:.1f} MB per chip, and forward and backward {inner:.1f} MB of temporaries
          besides, whatever the number of microbatches. Gradients are reduced over the data axis by {reductions}
          collective of {reduced:.1f} MB, outside of all loops.
        - **Without rematerialization** and with {few} microbatches the compiler plans {hbm_zero_bubble:.1f} MB for
          zero_bubble and {hbm_v_shape:.1f} for v_shape; zb_v, v_half and v_min, in which each chip branches to its own
          action of a tick, take {hbm_zb_v:.1f}, {hbm_v_half:.1f} and {hbm_v_min:.1f}.
        - A permute counts as hidden if matrix products run between its start and its end in the compiler's order.""",
        tpu_facts, tpu_table, tpu_claims, tpu_picture,
    ),
    Section(
        "head_placement",
        "Pipeline: where the head is computed",
        """A vocabulary of {vocab:,} on {pipe} stages. With the default, `vocabulary`, the vocabulary is cut over
        the stages and a device stores {params:.1f} MB of parameters instead of {params_else:.1f}. Splitting
        the `rows` of the head's input takes {rows:.1f} times as long on this machine's shared cores, and
        computing the head on the `last` stage {last:.1f} times, because in a program of shared ticks every
        stage then spends the time of the whole head. {losses}.""",
        head_facts, head_table,
    ),
)  # fmt: skip

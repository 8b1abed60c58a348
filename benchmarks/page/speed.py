"""Sections on the pipeline's time: schedule against schedule, measured against simulated, and next to torch."""

from __future__ import annotations

from page.markdown import Table
from page.plots import Panel, Picture
from page.section import Claim, Result, Section

FIRST, OVER_FIRST, SIMULATED = "1f1b", "over_1f1b", "simulated_over_1f1b_at_equal_costs"


def by_schedule(result: Result) -> dict[str, dict[int, dict]]:
    """schedule -> num_microbatches -> row."""
    found: dict[str, dict[int, dict]] = {}
    for key, row in result["rows"].items():
        schedule, count = key.rsplit(" ", 1)
        found.setdefault(schedule, {})[int(count)] = row
    return found


def lines(result: Result, value) -> dict[str, list[tuple[float, float]]]:
    """value: row -> number."""
    return {
        name: [(count, value(row)) for count, row in sorted(each.items())]
        for name, each in by_schedule(result).items()
    }


def median(row: dict, name: str) -> float:
    return row[name]["median_of_rounds"]


def counts(result: Result) -> list[int]:
    return sorted({count for each in by_schedule(result).values() for count in each})


def time_facts(result: Result) -> dict:
    few, *_, most = counts(result)
    last = {name: each[most] for name, each in by_schedule(result).items()}
    off = {count: [each[count]["measured_over_simulated"] for each in by_schedule(result).values()]
           for count in (few, most)}  # fmt: skip
    fastest = min(last, key=lambda name: median(last[name], OVER_FIRST))
    return {
        "pipe": result["settings"]["pipe"],
        "layer": median(result["remat_over_none"], "layer"),
        "full": median(result["remat_over_none"], "full"),
        "few": few,
        "most": most,
        "fastest": fastest_sentence(fastest, last),
        **{"few_least": min(off[few]), "few_most": max(off[few])},
        **{"most_least": min(off[most]), "most_most": max(off[most])},
    }


def fastest_sentence(fastest: str, last: dict) -> str:
    if fastest == FIRST:
        return f"`{FIRST}` is the fastest schedule"
    return (
        f"`{fastest}` is the fastest schedule, at **{median(last[fastest], OVER_FIRST):.2f}** times `{FIRST}`'s time, "
        f"where the bubble alone predicts {last[fastest][SIMULATED]:.2f}"
    )


def time_table(result: Result) -> list[Table]:
    over, off = [], []
    for name, each in by_schedule(result).items():
        rows = [each[count] for count in counts(result)]
        over.append([name, *(f"{median(row, OVER_FIRST):.2f} ({row[SIMULATED]:.2f})" for row in rows)])
        off.append([name, *(row["measured_over_simulated"] for row in rows)])
    head = {f"{count} microbatches": ".2f" for count in counts(result)}
    remats = {name: ratio["median_of_rounds"] for name, ratio in result["remat_over_none"].items()}
    at = f"{result['settings']['remat_over_none_at']} microbatches"
    return [
        Table({"time over 1f1b's (of the bubble alone)": "", **head}, over),
        Table({"measured over simulated": "", **head}, off),
        Table({f"remat, {at}": "", **dict.fromkeys(remats, ".2f")}, [["time over none", *remats.values()]]),
    ]


def time_picture(result: Result) -> list[Picture]:
    over = lines(result, lambda row: median(row, OVER_FIRST))
    simulated = lines(result, lambda row: row["measured_over_simulated"])
    panels = (
        Panel("time of a step over that of 1f1b", "microbatches", "", over, rule=1.0),
        Panel("measured over simulated time", "microbatches", "", simulated, rule=1.0),
    )
    says = "Time of each schedule over that of 1f1b, and measured over simulated time, against microbatches"
    return [Picture("pipeline_time", says, panels)]


def torch_facts(result: Result) -> dict:
    ratios = {key: median(row, "jaxfb_over_torch") for key, row in result["rows"].items()}
    few, *_, many = counts(result)
    at = lambda count: [ratio for key, ratio in ratios.items() if key.endswith(f" {count}")]  # noqa: E731
    return {
        "pipe": result["settings"]["pipe"],
        "slower": sum(ratio > 1 for ratio in ratios.values()),
        "count": len(ratios),
        "few": few,
        "many": many,
        "few_least": min(at(few)),
        "few_most": max(at(few)),
        "many_least": min(at(many)),
        "many_most": max(at(many)),
        "difference": max(row["loss_difference"] for row in result["rows"].values()),
    }


def torch_table(result: Result) -> list[Table]:
    head = {"jaxfb / torch": "", "theirs": "", **{f"{count} microbatches": ".2f" for count in counts(result)}}
    head |= {f"ms with {max(counts(result))}": ",.1f", "torch's": ",.1f"}
    rows = []
    for name, each in by_schedule(result).items():
        last = each[max(each)]
        ratios = [median(each[count], "jaxfb_over_torch") for count in counts(result)]
        rows.append([name, last["theirs"], *ratios, last["jaxfb_ms"], last["torch_ms"]])
    return [Table(head, rows)]


def torch_claims(result: Result) -> list[Claim]:
    many = torch_facts(result)["many"]
    ratio = median(result["rows"][f"1f1b {many}"], "jaxfb_over_torch")
    return [
        Claim(
            f"time of a pipeline's step, 1f1b, {many} microbatches, CPU",
            "",
            "torch.distributed.pipelining",
            ratio,
        )
    ]


def torch_picture(result: Result) -> list[Picture]:
    panel = Panel("time of a step over torch's", "microbatches", "",
                  lines(result, lambda row: median(row, "jaxfb_over_torch")), rule=1.0)  # fmt: skip
    return [
        Picture("pipeline_against_torch", "Step time over that of torch.distributed.pipelining", (panel,))
    ]


SECTIONS = (
    Section(
        "pipeline_time",
        "Pipeline: measured and simulated time",
        """Forward and backward on {pipe} simulated devices with one thread each. With {most} microbatches
        {fastest}. `Schedule.simulate`, given the measured cost of a stage, knows about the
        bubble but not about the overhead of a step and of a tick: a measured step takes {few_least:.2f} to
        {few_most:.2f} times the simulated time with {few} microbatches, and {most_least:.2f} to
        {most_most:.2f} times with {most}. Compared with no rematerialization, `remat="layer"` takes
        {layer:.2f} times as long and `remat="full"` {full:.2f} times.""",
        time_facts, time_table, pictures=time_picture,
    ),
    Section(
        "pipeline_against_torch",
        "Pipeline compared with torch.distributed.pipelining",
        """The same transformer, microbatches and kind of schedule on {pipe} stages of the CPU with one thread
        each, steps of both libraries in turn; the losses differ by at most {difference:.1g}. jaxfb is slower
        in {slower} of {count} rows. Its time is {few_least:.2f} to {few_most:.2f} times torch's with {few}
        microbatches and **{many_least:.2f} to {many_most:.2f}** times with {many}. torch's zero-bubble
        schedule is also interleaved, and its V-shaped schedule is also a zero-bubble schedule; jaxfb's are
        not.""",
        torch_facts, torch_table, torch_claims, torch_picture,
    ),
)  # fmt: skip

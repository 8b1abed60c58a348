"""Sections on whole updates: next to MaxText, next to the Accelerate loop, in post-training, and a GPU's memory."""

from __future__ import annotations

from page.markdown import Table
from page.plots import Panel, Picture
from page.section import Claim, Result, Section

TIME, PADDED = "step_time_over_maxtext", "padded"


def maxtext_facts(result: Result) -> dict:
    times = {name: row["median_of_rounds"] for name, row in result[TIME].items()}
    temp = {name: row["jaxfb_over_maxtext"] for name, row in result["temp_mb"].items()}
    apart = result["largest_difference_over_updates"].values()
    compiled = [row["jaxfb_compile"] / row["maxtext_compile"] for row in result["start_up_cpu_s"].values()]
    return {
        "count": len(times),
        "faster": sum(ratio < 1 for ratio in times.values()),
        "least": min(times.values()),
        "most": max(times.values()),
        "smaller": sum(ratio <= 1 for ratio in temp.values()),
        "temp_least": min(temp.values()),
        "temp_most": max(temp.values()),
        "compile_least": min(compiled),
        "compile_most": max(compiled),
        "difference": max(row["loss"] for row in apart),
        "replicas": (replicas := [name for name in times if name.startswith("data ")][-1]),
        "ours": result["gradient_reductions"][replicas]["jaxfb_times"],
        "theirs": result["gradient_reductions"][replicas]["maxtext_times"],
    }


def maxtext_table(result: Result) -> list[Table]:
    head = {"mesh": "", "time over MaxText's": ".2f", "best to best": ".2f",
            "temporaries MB": ".1f", "MaxText's": ".1f",
            "gradient reductions": "d", "MaxText's ": "d", "MB reduced": ".1f", "MaxText's  ": ".1f",
            "compile CPU s": ".1f", "MaxText's   ": ".1f"}  # fmt: skip
    rows = []
    for name, time in result[TIME].items():
        temp, times = result["temp_mb"][name], result["gradient_reductions"][name]
        start = result["start_up_cpu_s"][name]
        pairs = [
            (given[f"jaxfb{what}"], given[f"maxtext{what}"])
            for given, what in ((temp, ""), (times, "_times"), (times, "_mb"), (start, "_compile"))
        ]
        rows.append(
            [name, time["median_of_rounds"], time["best_to_best"], *(x for pair in pairs for x in pair)]
        )
    return [Table(head, rows)]


def maxtext_claims(result: Result) -> list[Claim]:
    """The first row, and the one that is worst for us."""
    times = {name: row["median_of_rounds"] for name, row in result[TIME].items()}
    first, worst = next(iter(times)), max(times, key=times.__getitem__)
    return [
        Claim(f"time of an update on CPU, {what}{name}", "", "MaxText", times[name])
        for what, name in (("", first), ("slowest case: ", worst))
    ]


def maxtext_picture(result: Result) -> list[Picture]:
    panels = (
        Panel("time of a step", "jaxfb / MaxText (below 1: jaxfb is faster)", rule=1.0,
              bars={name: row["median_of_rounds"] for name, row in result[TIME].items()}),
        Panel("temporary memory", "jaxfb / MaxText (below 1: jaxfb needs less)", rule=1.0,
              bars={name: row["jaxfb_over_maxtext"] for name, row in result["temp_mb"].items()}),
    )  # fmt: skip
    return [Picture("against_maxtext", "Time and temporary memory of a step over MaxText's", panels)]


def loop_cases(result: Result) -> dict[str, dict[str, dict]]:
    """case -> side -> row."""
    found: dict[str, dict[str, dict]] = {}
    for key, row in result["rows"].items():
        case, side = key.rsplit(": ", 1)
        found.setdefault(case, {})[side] = row
    return found


def best(sides: dict[str, dict], ours: bool) -> tuple[str, dict]:
    """The fastest of jaxfb's variants, or of theirs, of those that ran."""
    those = {k: row for k, row in sides.items() if k.startswith("jaxfb") == ours and "time_to_jaxfb" in row}
    name = min(those, key=lambda key: those[key]["time_to_jaxfb"])
    return name, those[name]


def loop_facts(result: Result) -> dict:
    ratios, memory, cases = [], [], loop_cases(result)
    for sides in cases.values():
        ours, theirs = best(sides, True)[1], best(sides, False)[1]
        ratios.append(theirs["time_to_jaxfb"] / ours["time_to_jaxfb"])
        memory.append(ours["peak_mb"] / theirs["peak_mb"])
    return {
        "least": min(ratios),
        "most": max(ratios),
        "memory_least": min(memory),
        "memory_most": max(memory),
        "difference": max(row.get("loss_difference", 0.0) for row in result["rows"].values()),
    }


def loop_table(result: Result) -> list[Table]:
    head = {"case": "", "loop": "", "tokens/s": ",d", "time over jaxfb's": ".2f", "best to best": ".2f",
            "peak MB": ",d", "loss differs by": ".1g"}  # fmt: skip
    columns = ("tokens_per_second", "time_to_jaxfb", "time_to_jaxfb_best", "peak_mb", "loss_difference")
    return [
        Table(
            head,
            [
                [case, side, *(row.get(column) for column in columns)]
                for case, sides in loop_cases(result).items()
                for side, row in sides.items()
            ],
        )
    ]


def loop_claims(result: Result) -> list[Claim]:
    claims = []
    for case, sides in loop_cases(result).items():
        theirs, their_row = best(sides, False)
        on = " and ".join(result["machine"].get("devices", []))
        for ours in (
            name for name, row in sides.items() if name.startswith("jaxfb") and "time_to_jaxfb" in row
        ):
            ratio = sides[ours]["time_to_jaxfb"] / their_row["time_to_jaxfb"]
            claims.append(Claim(f"time of an update of a Llama, {case} ({on})", ours, theirs, ratio))
    return claims


def passes(result: Result) -> dict[str, dict[str, dict]]:
    """pass -> kind of plan -> row."""
    return loop_cases(result)


def passes_facts(result: Result) -> dict:
    kinds = {kind: [each[kind] for each in passes(result).values()] for kind in (PADDED, "budget", "packed")}
    spans = {}
    for kind in ("budget", "packed"):
        times = [row["time_to_padded"] for row in kinds[kind]]
        spans |= {f"{kind}_least": min(times), f"{kind}_most": max(times)}
    shares = {f"{kind}_padding": max(row["padding_share"] for row in rows) for kind, rows in kinds.items()}
    return spans | shares | {"difference": max(result["gradient_difference"].values())}


def passes_table(result: Result) -> list[Table]:
    head = {"pass": "", "plan": "", "tokens/s": ",d", "time over padded": ".2f", "best to best": ".2f",
            "padding": ".1%", "microbatches": ".1f", "programs": "d"}  # fmt: skip
    columns = (
        "tokens_per_second",
        "time_to_padded",
        "time_to_padded_best",
        "padding_share",
        "microbatches",
        "programs",
    )
    rows = [
        [name, kind, *(row.get(column) for column in columns)]
        for name, kinds in passes(result).items()
        for kind, row in kinds.items()
    ]
    return [Table(head, rows)]


def passes_claims(result: Result) -> list[Claim]:
    return [
        Claim(f"time of post-training's {name}", "packed", PADDED, kinds["packed"]["time_to_padded"])
        for name, kinds in passes(result).items()
    ]


def gpu_facts(result: Result) -> dict:
    rows = {name: row for name, row in result["memory"].items() if "peak_gb" in row}
    cut = [name for name in rows if name.endswith("remat none")]
    most = max(cut, key=lambda name: int(name.split()[0]))
    count = most.split(" rows")[0]
    return {
        "hbm": result["settings"]["hbm_gb"],
        "state": rows[most]["state_gb"],
        "count": count,
        **{remat: rows[f"{count} rows, remat {remat}"]["peak_gb"] for remat in ("none", "selective", "full")},
        "fit": sum(bool(row["fits"]) for row in rows.values()),
        "of": len(result["memory"]),
    }


def gpu_table(result: Result) -> list[Table]:
    head = {"setting": "", "peak GB": ".1f", "of it state": ".1f", "temporaries GB": ".1f", "fits": "",
            "flash kernels, forward": "d", "backward": "d"}  # fmt: skip
    columns = ("peak_gb", "state_gb", "temp_gb", "fits", "flash_forward", "flash_backward")
    answers = {True: "yes", False: "no"}
    shown = lambda value: answers[value] if isinstance(value, bool) else value  # noqa: E731
    rows = [[name, *(shown(row.get(column)) for column in columns)] for name, row in result["memory"].items()]
    return [Table(head, rows)]


def gpu_picture(result: Result) -> list[Picture]:
    lines: dict[str, list[tuple[float, float]]] = {}
    for name, row in result["memory"].items():
        if " rows, remat " in name and "peak_gb" in row:
            count, remat = name.split(" rows, remat ")
            lines.setdefault(remat, []).append((int(count), row["peak_gb"]))
    panel = Panel("peak of an update, by remat", "rows of a microbatch", "GB", lines)
    return [Picture("gpu_compiled", "Memory of an update against the rows of a microbatch", (panel,))]


SECTIONS = (
    Section(
        "against_maxtext",
        "A train step on CPU, compared with MaxText",
        """Both train steps run in one process on a CPU, from the same parameters, tokens, AdamW and clipping;
        the losses of all updates agree within {difference:.1g}.

        - **Time.** jaxfb's step is faster in {faster} of {count} rows, at **{least:.2f} to {most:.2f}** times MaxText's
          time. Compiling takes {compile_least:.2f} to {compile_most:.2f} times MaxText's CPU time.
        - **Memory.** jaxfb's temporary memory is no larger in {smaller} of {count} rows, at {temp_least:.2f} to
          {temp_most:.2f} times MaxText's; `zero_bubble` needs more because it keeps activations until the weight
          gradients are computed.
        - **Reductions.** In one update ({replicas}) jaxfb reduces gradients {ours} time and MaxText {theirs} times.
        - **Pipelines.** MaxText has one schedule per mesh, which is compared with each of jaxfb's. When the pipelines
          were measured, an idle device of jaxfb left its core to the others, on CPUs only. Now it computes during
          a bubble, as MaxText's does and as jaxfb's does on GPUs and TPUs, and takes up to a third more CPU time where
          bubbles are long.""",
        maxtext_facts, maxtext_table, maxtext_claims, maxtext_picture,
    ),
    Section(
        "accelerate_loop",
        "An update compared with Hugging Face Accelerate",
        """The plain training loop of Hugging Face Accelerate with the same Llama, weights, rows and
        microbatches; the losses of all updates agree within {difference:.1g}. Comparing the fastest variant
        of each, Accelerate takes **{least:.2f} to {most:.2f}** times as long as jaxfb. The peak memory of
        jaxfb's process, its compiler included, is {memory_least:.2f} to {memory_most:.2f} times Accelerate's.
        tokens/s is that of the fastest round, so its ratio is that of the column "best to best".""",
        loop_facts, loop_table, loop_claims,
    ),
    Section(
        "rl_throughput",
        "Post-training: padding, token budgets and packing",
        """The log-prob pass and the policy updates of a rollout whose responses have very different lengths; the
        gradients of all plans agree within {difference:.1g}. Compared with padding every row to the longest,
        a token budget takes {budget_least:.2f} to {budget_most:.2f} times as long and packing
        **{packed_least:.2f} to {packed_most:.2f}** times. Padding is up to {padded_padding:.0%} of what is
        computed with padded rows, {budget_padding:.0%} with a token budget and {packed_padding:.0%} with
        packing. tokens/s counts real tokens only, and includes the time in which the host arranges the rows.""",
        passes_facts, passes_table, passes_claims,
    ),
    Section(
        "gpu_compiled",
        "Memory on a GPU, from its compiler",
        """Memory of one update as XLA's compiler reports it for the GPU benchmark's card, without the card:
        {fit} of {of} settings fit into {hbm} GB, of which parameters and optimizer state take {state:.1f} GB. With
        {count}
        rows in a microbatch the peak is {none:.1f} GB if nothing is recomputed, {selective:.1f} GB with
        `remat="selective"` and {full:.1f} GB with `remat="full"`. This table has no speeds; `jaxfb bench gpu`
        measures them on a card.""",
        gpu_facts, gpu_table, pictures=gpu_picture,
    ),
)  # fmt: skip

"""Section on one GPU: updates of a 1B model timed on it, next to the plain Accelerate loop, and where the time goes."""

from __future__ import annotations

from page.markdown import Table
from page.section import Claim, Result, Section

PARTS = ("step", "changes", "training", "experts", "microbatch", "remat", "context", "flags")
SHOWN_OF_PROFILE = 12


def facts(result: Result) -> dict:
    steps, sides, verdict = result["step"], result["accelerate"], result["accelerate"]["the best of each"]
    best = fastest(steps)
    experts = {int(name): row for name, row in result["experts"].items() if name.isdigit()}
    ours, theirs = (peak(sides, side) for side in ("jaxfb", "accelerate"))
    return {
        "device": result["machine"]["devices"][0],
        "parameters": result["settings"]["parameters"] / 1e9,
        "compute": "bfloat16",
        "tokens": best["rows"] * best["length"],
        "square": result["rate"]["square"]["tflops"],
        "remat": best["remat"],
        "speed": best["tokens_per_second"],
        "mfu": best["mfu_of_measured_rate"],
        "ratio": verdict["ratio"],
        "our_speed": verdict["jaxfb_tokens_per_second"],
        "their_speed": verdict["accelerate_tokens_per_second"],
        "difference": verdict["loss_difference"],
        "torch": next(row["torch"] for row in sides.values() if "torch" in row),
        "ours": ours,
        "theirs": theirs,
        "few": min(experts),
        "many": max(experts),
        "mfu_few": experts[min(experts)]["mfu_of_measured_rate"],
        "mfu_many": experts[max(experts)]["mfu_of_measured_rate"],
        "trainer": trainer(result.get("training", {}).get("jaxfb train")),
    }


def trainer(row: dict | None) -> str:
    """Sentences on `jaxfb train`, where it was measured."""
    if row is None or "updates" not in row:
        return "`jaxfb train` was not measured."
    middle = row["median_seconds_a_step"]
    # a run with one checkpoint was measured before the pauses were
    pauses = row.get("seconds_saving") or [(row["slowest_to_median"] - 1) * middle]
    return (
        f"`jaxfb train`, with its loader, log and guard, takes {middle:.3f} s an update in the median. Its "
        f"checkpoints, in order, stopped it for {', '.join(f'{pause:.1f} s' for pause in pauses)}; for the first one "
        "programs are compiled and pinned memory is allocated on the host."
    )


def fastest(rows: dict) -> dict:
    ran = [row for row in rows.values() if "tokens_per_second" in row]
    return max(ran, key=lambda row: row["tokens_per_second"])


def peak(sides: dict, side: str) -> float:
    return fastest({name: row for name, row in sides.items() if name.startswith(side)})["peak_gb"]


def tables(result: Result) -> list[Table]:
    return [updates(result), beside_accelerate(result), products(result), profile(result)]


def updates(result: Result) -> Table:
    """A line for each setting, those that several parts have once."""
    head = {"update": "", "s": ".3f", "tokens/s": ",.0f", "of the rate of products": ".3f", "peak GB": ".1f",
            "compile s": ".1f"}  # fmt: skip
    columns = (
        "seconds_a_step_ahead",
        "tokens_per_second",
        "mfu_of_measured_rate",
        "peak_gb",
        "compile_seconds",
    )
    lines: dict[tuple, list] = {}
    for part in PARTS:
        for name, row in result.get(part, {}).items():
            if "length" in row:
                shown = [f"{part}: {name}", *(row.get(column, row.get("result")) for column in columns)]
                lines.setdefault(tuple(shown[1:]), shown)
    return Table(head, list(lines.values()))


def beside_accelerate(result: Result) -> Table:
    head = {
        "loop": "",
        "s": ".3f",
        "tokens/s": ",.0f",
        "peak GB": ".1f",
        "first update s": ".1f",
        "last loss": ".4f",
    }
    columns = ("seconds_a_step", "tokens_per_second", "peak_gb", "first_step_seconds", "last_loss")
    rows = {name: row for name, row in result["accelerate"].items() if "tokens_per_second" in row}
    return Table(head, [[name, *(row[column] for column in columns)] for name, row in rows.items()])


def products(result: Result) -> Table:
    rows = [[f"{row['shape']} ({name})", row["tflops"]] for name, row in result["rate"].items()]
    return Table({"products of bfloat16": "", "TFLOP/s": ".0f"}, rows)


def profile(result: Result) -> Table:
    profile = result["profile"]
    found = list(profile["milliseconds"].items())[:SHOWN_OF_PROFILE]
    earlier = f", commit {profile['taken with']['commit']}" if "taken with" in profile else ""
    return Table({f"where an update's time goes{earlier}": "", "ms": ".0f"}, [list(row) for row in found])


def claims(result: Result) -> list[Claim]:
    ratio = 1 / result["accelerate"]["the best of each"]["ratio"]
    device = result["machine"]["devices"][0]
    return [Claim(f"time of an update of a 1B model on an {device}", "", "Accelerate, torch.compile", ratio)]


SECTIONS = (
    Section(
        "gpu",
        "An update on a GPU, timed",
        """A Llama-like model of {parameters:.1f} billion parameters on one {device}: updates of {tokens:,} tokens,
        computed in {compute}, with float32 master weights and sums, AdamW and clipping.

        - **Speed.** {speed:,.0f} tokens/s with `remat="{remat}"`, **{mfu:.0%}** of the rate that large products reach
          in the same session ({square:.0f} TFLOP/s). The model's own operations are counted, none for recomputation.
        - **Compared with Accelerate.** The plain loop of Hugging Face Accelerate (torch {torch}, `torch.compile`, SDPA,
          fused AdamW) reaches {their_speed:,.0f} tokens/s. In the same comparison jaxfb reaches {our_speed:,.0f},
          **{ratio:.2f}** times as many, with {ours:.1f} GB of memory where that loop takes {theirs:.1f} GB. The
          relative difference of their losses is {difference:.1g}.
        - **Experts.** With {few} experts of which a token goes to two, and as many operations a token, {mfu_few:.0%} of
          that rate; with {many}, {mfu_many:.0%}, since there are more parameters to update.
        - **The trainer.** {trainer}""",
        facts, tables, claims,
    ),
)  # fmt: skip

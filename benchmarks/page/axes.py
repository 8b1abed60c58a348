"""Sections on mesh axes: what each sends, what context parallelism saves, sequence parallelism, experts."""

from __future__ import annotations

from page.markdown import Table
from page.plots import Panel, Picture
from page.section import Claim, Result, Section

KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
EQUAL = 0.01


def bytes_facts(result: Result) -> dict:
    ratios = {name: row["ratio"] for name, row in result["rows"].items()}
    off = {name: ratio for name, ratio in ratios.items() if abs(ratio - 1) > EQUAL}
    words = ", ".join(f"{name} {ratio:.2f}" for name, ratio in off.items())
    return {
        "devices": result["settings"]["devices"],
        "equal": len(ratios) - len(off),
        "count": len(ratios),
        "within": EQUAL,
        "off": words or "none",
    }


def bytes_table(result: Result) -> list[Table]:
    head = {"axis": "", "sent kB": ",.1f", "by hand kB": ",.1f", "ratio": ".2f",
            **{f"{kind} kB": ",.1f" for kind in KINDS}, "what the formula counts": ""}  # fmt: skip
    rows = [
        [name, row["sent_kb"], row["by_hand_kb"], row["ratio"],
         *(row["kinds_kb"].get(kind) or None for kind in KINDS), row["by_hand"]]
        for name, row in result["rows"].items()
    ]  # fmt: skip
    return [Table(head, rows)]


def bytes_picture(result: Result) -> list[Picture]:
    ratios = {name: row["ratio"] for name, row in result["rows"].items()}
    panel = Panel("bytes sent in a step", "compiled program / formula", bars=ratios, rule=1.0)
    return [Picture("axis_bytes", "Bytes sent along each axis compared with the formula", (panel,))]


def context_lines(result: Result) -> dict[str, list[tuple[float, float]]]:
    return {
        method: [(int(key.split("=")[1]), value) for key, value in row.items() if key.startswith("context=")]
        for method, row in result["temp_mb_per_device"].items()
    }


def context_facts(result: Result) -> dict:
    lines = context_lines(result)
    most = max(size for size, _ in lines["ring"])
    whole = dict(lines["ring"])[1]
    return {
        "length": result["settings"]["length"],
        "most": most,
        "whole": whole,
        **{method: dict(points)[most] for method, points in lines.items()},
        "share": dict(lines["ring"])[most] / whole,
        "even": 1 / most,
    }


def context_table(result: Result) -> list[Table]:
    lines = context_lines(result)
    sizes = [size for size, _ in next(iter(lines.values()))]
    head = {"MB a device": "", **{f"context {size}": ",.1f" for size in sizes}, "of one device": ".1%"}
    return [Table(head, [[f"`{m}`", *dict(p).values(), p[-1][1] / p[0][1]] for m, p in lines.items()])]


def context_picture(result: Result) -> list[Picture]:
    panel = Panel(
        "", "devices of the context axis", "temporaries of a device, MB", context_lines(result), log_y=True
    )
    return [
        Picture(
            "context_memory", "Temporary memory of a device against the size of the context axis", (panel,)
        )
    ]


def tensor_facts(result: Result) -> dict:
    rows = result["rows"]
    ratio = {
        remat: rows[f"remat {remat}, sequence_parallel True"]["temp_mb"]
        / rows[f"remat {remat}, sequence_parallel False"]["temp_mb"]
        for remat in ("none", "full")
    }
    return ratio | {"length": result["settings"]["length"]}


def tensor_table(result: Result) -> list[Table]:
    kinds = [kind for kind in KINDS if any(kind in row["in_a_layer"] for row in result["rows"].values())]
    head = {"": "", "temporaries MB": ".1f", **{f"{kind}s in a layer": "d" for kind in kinds}}
    rows = [
        [name.replace("_", " "), row["temp_mb"], *(row["in_a_layer"].get(kind, 0) for kind in kinds)]
        for name, row in result["rows"].items()
    ]
    return [Table(head, rows)]


def moe_facts(result: Result) -> dict:
    times, temp = result["time_of_forward_and_backward"], result["temp_bytes"]
    return {
        "experts": result["settings"]["experts"],
        "per_token": result["settings"]["per_token"],
        "dropless": times["dropless_to_dense"]["median_of_rounds"],
        "cut": times["dropless_to_dense_on_4_devices"]["median_of_rounds"],
        "parameters": result["parameters"]["dropless"] / result["parameters"]["dense"],
        "temp": temp["dropless"] / temp["dense"],
        "temp_cut": temp["dropless_cut"] / temp["dense_cut"],
        "ragged": result["time_of_matmul_grouped_to_ragged_dot"]["median_of_rounds"],
        "matmul": result["time_of_matmul_grouped_to_dense"]["median_of_rounds"],
    }


def moe_table(result: Result) -> list[Table]:
    head = {"model": "", "time over dense": ".2f", "best to best": ".2f", "parameters": ",d",
            "flops a token": ",d", "temporaries MB": ".1f"}  # fmt: skip
    rows = []
    for name, temp in result["temp_bytes"].items():
        base = name.removesuffix("_cut")
        key = f"{base}_to_dense" + ("_on_4_devices" if name != base else "")
        time = result["time_of_forward_and_backward"].get(key, {})
        label = base.replace("_", " ") + (", cut over devices" if name != base else "")
        sizes = [result[kind][base] for kind in ("parameters", "flops_per_token")]
        rows.append([label, time.get("median_of_rounds"), time.get("best_to_best"), *sizes, temp / 1e6])
    return [Table(head, rows)]


def moe_claims(result: Result) -> list[Claim]:
    f = moe_facts(result)
    return [
        Claim(
            "time of a dropless mixture of experts, one device",
            "",
            "dense, equal active flops",
            f["dropless"],
        ),
        Claim("time of a grouped matmul and its gradients", "", "`lax.ragged_dot`", f["ragged"]),
    ]


SECTIONS = (
    Section(
        "axis_bytes",
        "Bytes sent along each axis",
        """Bytes that one device sends along one axis of {devices} devices in a forward and backward pass: the
        collectives of the CPU's compiled program, multiplied by the trip counts of their loops, compared with
        a formula worked out by hand. {equal} of {count} rows agree within {within:.0%}. The others: {off}.
        The CPU compiler sums the gradients of several projections of one input after the tensor axis's
        all-reduces instead of before, and does not turn an all-reduce and a slice into a reduce-scatter; the TPU
        compiler does better on both (see sequence parallelism). XLA for CPUs has no ragged all-to-all, so each
        all-to-all of tokens and experts is padded to the worst case there, and only there.""",
        bytes_facts, bytes_table, pictures=bytes_picture,
    ),
    Section(
        "context_memory",
        "Context parallelism: memory by the size of the axis",
        """Rows of {length:,} tokens, cut over the context axis. One device alone needs {whole:,.1f} MB of
        temporaries. Each of {most} devices needs **{ring:.1f} MB** with `ring`, {all_gather:.1f} MB with
        `all_gather` and {all_to_all:.1f} MB with `all_to_all`. An equal share would be {even:.1%} of the
        whole; the ring's {share:.1%} is less because it never stores the whole score matrix of its rows.""",
        context_facts, context_table, pictures=context_picture,
    ),
    Section(
        "sequence_parallel",
        "Sequence parallelism, from the TPU compiler",
        """A tensor axis with and without `sequence_parallel`, rows of {length:,} tokens, compiled by the TPU
        compiler without a TPU. All-reduces of hidden states become reduce-scatters and all-gathers.
        Temporaries are {none:.2f} times as large with `remat="none"` and {full:.2f} times with
        `remat="full"`.""",
        tensor_facts, tensor_table, script="sequence_parallel_tpu",
    ),
    Section(
        "moe_against_dense",
        "Mixture of experts compared with a dense model",
        """A mixture of {experts} experts, {per_token} for each token, compared with a dense model of the same
        active flops. It has {parameters:.1f} times the parameters and takes **{dropless:.2f}** times the time
        and {temp:.2f} times the temporaries on one device. With experts cut over simulated devices that share
        a CPU's cores it takes {cut:.2f} times the time and {temp_cut:.2f} times the temporaries of the dense
        model with rows cut over them, because the all-to-all of tokens is padded on a CPU. The grouped matmul
        takes {ragged:.2f} times as long as `lax.ragged_dot`, and {matmul:.2f} times as long as one dense
        matmul with the same number of rows.""",
        moe_facts, moe_table, moe_claims,
    ),
)  # fmt: skip

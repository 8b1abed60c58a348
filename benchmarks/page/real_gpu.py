"""The section on models of real size, by XLA's compiler for GPUs."""

from __future__ import annotations

from page.markdown import Table
from page.section import Result, Section

SIDES = {"jaxfb": "for H100", "any_chip": "for any chip"}


def over_products(row: dict) -> float:
    return row["step_s"] / row["products_s"]


def facts(result: Result) -> dict:
    rows = result["rows"].values()
    ours = [row["jaxfb"] for row in rows if "jaxfb" in row]
    faster = [row["any_chip"]["step_s"] / row["jaxfb"]["step_s"] for row in rows if len(row) == len(SIDES)]
    return {
        "gpu": result["settings"]["gpu"],
        "seq": result["settings"]["seq"],
        "least": min(map(over_products, ours)),
        "most": max(map(over_products, ours)),
        "faster_least": min(faster),
        "faster_most": max(faster),
        "exposed_least": min(row["exposed_s"] / row["step_s"] for row in ours),
        "exposed_most": max(row["exposed_s"] / row["step_s"] for row in ours),
    }


def table(result: Result) -> list[Table]:
    head = {"job": "", "config": "", "HBM GB": ".2f", "arguments GB": ".2f", "step s": ".2f", "work s": ".2f",
            "matrix products s": ".2f", "step over products": ".2f", "collectives s": ".2f", "exposed s": ".2f",
            "exposed": ".0%", "MFU": ".1%", "compile CPU s": ".0f", "compiler's peak GB": ".1f"}  # fmt: skip
    rows = []
    for name, sides in result["rows"].items():
        for side, row in sorted(sides.items(), reverse=True):
            share = row["exposed_s"] / row["collectives_s"] if row["collectives_s"] else None
            cells = [row[key] for key in ("hbm_gb", "arguments_gb", "step_s", "work_s", "products_s")]
            cells += [over_products(row), row["collectives_s"], row["exposed_s"], share, row["mfu"]]
            rows.append([name, SIDES[side], *cells, row["compile_cpu_s"], row["peak_memory_gb"]])
    return [Table(head, rows)]


SECTIONS = (
    Section(
        "real_sizes_gpu",
        "Models of real size on hosts of GPUs",
        """Whole train steps of models of real size, rows of {seq:,} tokens, compiled ahead of time by XLA's compiler
        for GPUs; nothing was run. GPUs of a host are joined by NVLink, hosts by a network card for each GPU. A
        config for {gpu} has the layout that suits such a network (the reason is in its first lines); the config
        for any chip has the same model, rows and optimizer, and is as it was made for a TPU's torus. With the
        configs for {gpu} the lower bound of a step's time is **{least:.2f} to {most:.2f}** times that of its
        matrix products alone, and the step {faster_least:.2f} to {faster_most:.2f} times as fast as with the
        others. Collectives that nothing hides take {exposed_least:.1%} to {exposed_most:.1%} of it. Products
        include recomputation and, in a pipeline, what is computed in its bubble. Kernels are those that XLA takes
        where it cannot try them, and libraries' workspaces are not in the memory. MaxText is not compared: to
        compile for GPUs ahead of time it takes the devices of a host that has them.""",
        facts, table,
    ),
)  # fmt: skip

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
        """Whole train steps of rows of {seq:,} tokens, compiled ahead of time by XLA's compiler for GPUs; nothing was
        run. The GPUs of a host are joined by NVLink, the hosts by a network card for each GPU. A config "for {gpu}" has
        a layout for such a network, explained in its first lines; the config "for any chip" has the same model, rows
        and optimizer, and a layout for a TPU's torus.

        - With the configs for {gpu} the lower bound of a step's time is **{least:.2f} to {most:.2f}** times that of its
          matrix products alone, and the step is {faster_least:.2f} to {faster_most:.2f} times as fast as with the
          others. Communication that no computation hides takes {exposed_least:.1%} to {exposed_most:.1%} of it.
        - The products include recomputation and, in a pipeline, what is computed during its bubble.
        - Layers' inputs on the host: the transfers are overlapped with matmuls. The optimizer's state on the host is
          not compiled for GPUs without one.
        - Without a GPU XLA cannot try kernels and takes its default ones; the workspaces of libraries are not part of
          the memory.
        - MaxText is not compared, because it compiles for GPUs ahead of time only on a host that has them.""",
        facts, table,
    ),
)  # fmt: skip

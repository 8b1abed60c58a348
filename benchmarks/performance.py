"""Writes docs/performance.md and its pictures from results/*.json; every number in it is one of a results file.

    python benchmarks/performance.py        # or: jaxfb bench report

The text, tables and pictures of each benchmark are defined in `page/`; a benchmark without
them is shown as plain tables.
"""

from __future__ import annotations

import ast
import json
import re
import textwrap
from pathlib import Path
from typing import Any

from page import accumulation, axes, compile_time, gpu, pipeline, real, real_gpu, restart, speed, whole
from page.markdown import Table, machines, settings_line
from page.plots import Picture
from page.section import Claim, Section, generic

ROOT = Path(__file__).parent.parent
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "performance.md"
UNBROKEN = {"break_long_words": False, "break_on_hyphens": False}
SECTIONS = (
    *real.SECTIONS, *gpu.SECTIONS, *real_gpu.SECTIONS, *compile_time.SECTIONS, *whole.SECTIONS,
    *accumulation.SECTIONS, *pipeline.SECTIONS, *speed.SECTIONS, *axes.SECTIONS, *restart.SECTIONS,
)  # fmt: skip
HEAD, GUIDE = ((ROOT / "benchmarks" / "page" / name).read_text() for name in ("head.md", "guide.md"))


def main() -> None:
    results = load()
    text, pictures = page(results)
    PAGE.write_text(text)
    for path, picture in pictures.items():
        picture.draw(path)
    for path in set(drawings().glob("*.svg")) - set(pictures):
        path.unlink()
    print(f"wrote {PAGE.relative_to(ROOT)} from {len(results)} results")


def load() -> dict[str, dict[str, Any]]:
    """File -> result."""
    return {path.name: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}


def drawings() -> Path:
    return PAGE.with_suffix("")


def page(results: dict[str, dict[str, Any]]) -> tuple[str, dict[Path, Picture]]:
    """The page's text, and its pictures by the paths that it gives them."""
    claims, chapters, pictures = [], [], {}
    for asked, files in chosen(results):
        last = files[max(files)]
        fit = all([fits(asked, file, result) for file, result in files.items()])
        section = asked if fit else plain_section(asked.benchmark)
        claims += [(claim, section) for claim in section.claims(last)]
        drawn = {drawings() / f"{picture.name}.svg": picture for picture in section.pictures(last)}
        pictures |= drawn
        chapters += chapter(section, files, drawn)
    where = ["## Machines and versions", "", *machines(results)]
    return "\n".join([HEAD, summary(claims), GUIDE, *chapters, *where]), pictures


def chosen(results: dict[str, dict[str, Any]]) -> list[tuple[Section, dict[str, dict[str, Any]]]]:
    """Every section that has results, with these; known ones in order, then the others."""
    named: dict[str, dict[str, dict[str, Any]]] = {}
    for file, result in results.items():
        named.setdefault(result.get("benchmark", file.removesuffix(".json")), {})[file] = result
    known = {section.benchmark: section for section in SECTIONS}
    others = [plain_section(name) for name in named if name not in known]
    return [
        (section, named[section.benchmark]) for section in (*SECTIONS, *others) if section.benchmark in named
    ]


def fits(section: Section, file: str, result: dict[str, Any]) -> bool:
    """Whether a result holds what the section speaks of: one of a shortened run may not."""
    try:
        section.text.format(**section.facts(result))
        section.tables(result), section.claims(result), section.pictures(result)
    except (KeyError, ValueError) as error:
        print(
            f"{file} lacks what its section shows ({error!r}); {section.benchmark} is shown as plain tables"
        )
        return False
    return True


def plain_section(benchmark: str) -> Section:
    """Returns a section whose text is the first line of the docstring of the benchmark's script."""
    script = ROOT / "benchmarks" / f"{benchmark}.py"
    said = ast.get_docstring(ast.parse(script.read_text())) if script.exists() else None
    return generic(benchmark, said.split("\n")[0] if said else "Its numbers, as they are.")


def summary(claims: list[tuple[Claim, Section]]) -> str:
    """Returns two tables: where jaxfb costs as much or more, then where it costs less."""
    more = [(claim, section) for claim, section in claims if claim.ratio is not None and claim.ratio >= 1]
    less = [(claim, section) for claim, section in claims if claim.ratio is not None and claim.ratio < 1]
    found = []
    for title, those in (("Where jaxfb costs as much or more", more), ("Where jaxfb costs less", less)):
        if those:
            found += [f"## {title}", "", *claim_table(those).lines()]
    return "\n".join(found)


def claim_table(claims: list[tuple[Claim, Section]]) -> Table:
    """Returns a line for each claim; of times there may be a ratio only."""
    head = {"what": "", "jaxfb": "", "compared with": "", "ratio": ".2f", "measured by": ""}
    rows = [
        [
            claim.what,
            claim.ours or "-",
            claim.theirs,
            claim.ratio,
            f"[{section.benchmark}](#{anchor(section.title)})",
        ]
        for claim, section in claims
    ]
    return Table(head, rows)


def anchor(title: str) -> str:
    """Where Markdown viewers put a heading."""
    kept = "".join(letter for letter in title.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")


def chapter(section: Section, files: dict[str, dict[str, Any]], drawn: dict[Path, Picture]) -> list[str]:
    """Sentences and pictures are of the newest version's file, tables of each."""
    newest = files[max(files)]
    lines = [f"## {section.title}", "", *prose(section.text.format(**section.facts(newest)))]
    for path, picture in drawn.items():
        lines += [f"![{picture.says}]({path.relative_to(PAGE.parent)})", ""]
    for file, result in files.items():
        for table in section.tables(result):
            lines += table.lines()
        lines += [source(section, file, result), ""]
    return lines


def prose(text: str) -> list[str]:
    """Lines of at most 120 columns: paragraphs and lists, with an empty line after each."""
    lines = []
    for block in re.split(r"\n\s*\n", text):
        for part in re.split(r"\n\s*(?=- )", block.strip()):
            indent = "  " if part.startswith("- ") else ""
            lines += textwrap.wrap(" ".join(part.split()), 120, subsequent_indent=indent, **UNBROKEN)
        lines.append("")
    return lines


def source(section: Section, file: str, result: dict[str, Any]) -> str:
    """The file, the command that writes it, and its settings."""
    link = f"[`{file}`](../benchmarks/results/{file})"
    settings = settings_line(result.get("settings", {}))
    return f"<sub>{link}, `jaxfb bench {section.script or section.benchmark}`: {settings}</sub>"


if __name__ == "__main__":
    main()

"""The pictures of the pages are those that their commands draw, and pictures of the pages can be read."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGE_WIDTH = 880
"""Pixels that GitHub gives a picture at most."""


def texts(svg: Path) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg.read_text())


@pytest.mark.parametrize("pictures", ["glossary", pytest.param("schedules", marks=pytest.mark.slow)])
def test_the_command_of_a_page_draws_its_pictures(tmp_path, pictures):
    """By their words and by the number of their shapes: another matplotlib writes other bytes."""
    pytest.importorskip("matplotlib")
    runpy.run_path(str(DOCS / f"draw_{pictures}.py"))["main"](tmp_path)
    committed = sorted((DOCS / pictures).iterdir())
    assert [path.name for path in committed] == sorted(path.name for path in tmp_path.iterdir())
    for path in committed:
        new = tmp_path / path.name
        assert texts(new) == texts(path) and texts(path)
        assert new.read_text().count("<path") == path.read_text().count("<path")


def test_every_picture_of_a_page_exists_and_every_drawn_one_is_on_a_page():
    pages = [ROOT / "README.md", *DOCS.glob("*.md")]
    shown = set()
    for page in pages:
        found = re.findall(r"!\[[^]]*\]\(([^)]*)\)", page.read_text())
        shown |= {(page.parent / name).resolve() for name in found}
    drawn = {path.resolve() for path in DOCS.rglob("*.svg")}
    assert shown == drawn


@pytest.mark.parametrize("name", sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.svg")))
def test_letters_of_a_picture_are_large_enough_on_a_page(name):
    """At least 11 pixels, where a page shows the picture at most 880 pixels wide."""
    text = (DOCS / name).read_text()
    width = float(re.search(r'<svg[^>]* width="([\d.]+)pt"', text)[1]) * 96 / 72
    shown = min(1.0, PAGE_WIDTH / width) * 96 / 72
    sizes = [float(size) for size in re.findall(r"<text[^>]*font-size: ([\d.]+)px", text)]
    assert sizes and min(sizes) * shown >= 10.99, (min(sizes) * shown, width)

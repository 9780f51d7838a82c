"""The page is a function of the result files, and the repository's page is that of the repository's results."""

import re

from benchmarks.claims.page import write_page
from benchmarks.claims.store import Store
from benchmarks.claims.trainings import SCALES
from tests.helpers import ROOT

RESULTS = ROOT / "benchmarks" / "results" / "cpu"


def rendered(folder):
    folder.mkdir()
    write_page(SCALES["cpu"], Store(RESULTS), folder / "claims.md")
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_rendering_twice_gives_the_same_bytes_and_the_page_of_the_repository(tmp_path):
    first, second = rendered(tmp_path / "a"), rendered(tmp_path / "b")
    assert first == second
    pages = {path: data for path, data in first.items() if path.suffix == ".md"}
    assert list(pages.values()) == [(ROOT / "docs" / "claims.md").read_bytes()], "run: make paper, or --render"
    pictures = {path.name for path in first if path.suffix != ".md"}
    assert pictures == {path.name for path in (ROOT / "docs" / "images").glob("claims_*")}


def test_without_results_the_page_says_why(tmp_path):
    write_page(SCALES["cpu"], Store(tmp_path / "none"), tmp_path / "claims.md")
    page = (tmp_path / "claims.md").read_text()
    assert "cannot be judged: not run" in page
    assert "Not run, because it was not trained yet" in page
    assert not list((tmp_path / "images").iterdir())


def test_a_picture_without_its_results_is_removed(tmp_path):
    (tmp_path / "images").mkdir()
    for name in ("claims_old.svg", "claims_full_kept.svg", "mine.svg"):
        (tmp_path / "images" / name).touch()
    write_page(SCALES["cpu"], Store(tmp_path / "none"), tmp_path / "claims.md")
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == ["claims_full_kept.svg", "mine.svg"]


def test_no_result_holds_a_path_of_a_machine():
    found = list(RESULTS.rglob("*.json"))
    assert found
    for path in found:
        assert not re.search(r'[":]/\w', path.read_text("utf-8")), path

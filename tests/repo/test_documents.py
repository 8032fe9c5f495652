"""What the documentation says exists, exists; and every module is in ARCHITECTURE.md."""

import re

import pytest

from tests.repo.documents import missing_targets, unknown_names, unlisted_modules
from tests.repo.source import ROOT, Module, package_modules, text_files

PAGES = {path.name: path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("*.md"))}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
SAMPLE = [
    Module("kv.pool", "src/dalsegno/kv/pool.py", "__all__ = ['Pool']\nclass Pool: ..."),
    Module("kv", "src/dalsegno/kv/__init__.py", "", is_package=True),
]


def test_the_pages_are_there() -> None:
    expected = {"README.md", "ARCHITECTURE.md", "GLOSSARY.md", "CONTRIBUTING.md", "CHANGELOG.md"}
    assert expected <= set(PAGES)
    assert "Apache License" in (ROOT / "LICENSE").read_text(encoding="utf-8")


def test_every_module_has_its_line_in_the_architecture_page() -> None:
    assert unlisted_modules(PAGES["ARCHITECTURE.md"], package_modules()) == []


@pytest.mark.parametrize("name", sorted(PAGES))
def test_modules_and_names_a_page_gives_exist(name: str) -> None:
    files = [path for path, _ in text_files()]
    assert unknown_names(PAGES[name], package_modules(), files) == []


@pytest.mark.parametrize("name", sorted(PAGES))
def test_make_targets_a_page_gives_exist(name: str) -> None:
    assert missing_targets(PAGES[name], MAKEFILE) == []


@pytest.mark.parametrize("name", sorted(PAGES))
def test_links_of_a_page_lead_to_files(name: str) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", PAGES[name])
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_all_rules_are_in_the_architecture_page() -> None:
    missing = [f"R{i}" for i in range(1, 11) if not re.search(rf"\*\*R{i}\b", PAGES["ARCHITECTURE.md"])]
    assert missing == []


def test_an_unlisted_module_is_found() -> None:
    assert unlisted_modules("- `kv/pool.py`: blocks of every group\n", SAMPLE) == []
    for page in ("", "- `kv/pool.py`:\n", "see `kv/pool.py`: blocks\n", "- `pool.py`: blocks\n"):
        assert unlisted_modules(page, SAMPLE) == ["src/dalsegno/kv/pool.py"]


def test_a_name_that_does_not_exist_is_found() -> None:
    page = "`kv/pool.py` `tests/kv` `dalsegno.kv.pool` `dalsegno.kv.pool.Pool` `dalsegno.kv` `pool.free()`"
    assert unknown_names(page, SAMPLE, ["tests/kv/test_pool.py"]) == []
    gone = ["kv/gone.py", "tests/gone", "dalsegno.kv.gone", "dalsegno.kv.pool.Gone", "dalsegno.gone"]
    page = " ".join(f"`{name}`" for name in gone)
    assert unknown_names(page, SAMPLE, []) == gone


def test_a_make_target_that_does_not_exist_is_found() -> None:
    page = "`make demo` or `make gone`; make sure\n\n    make lost\n"
    assert missing_targets(page, "demo: venv\n") == ["gone", "lost"]

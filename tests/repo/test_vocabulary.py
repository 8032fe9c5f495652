"""Identifiers keep to the glossary."""

import pytest

from tests.repo.source import ROOT, module_of, modules_of_tests, package_modules
from tests.repo.vocabulary import BannedWords, banned_identifiers, parse_banned_words, words_of

BANNED = parse_banned_words((ROOT / "GLOSSARY.md").read_text(encoding="utf-8"))
SAMPLE = BannedWords(("page_table", "swap"), ("info",), ("utils",))


def test_no_identifier_of_the_package_is_banned() -> None:
    assert banned_identifiers(package_modules(), BANNED) == []


def test_no_identifier_of_the_tests_uses_a_banned_word() -> None:
    # A whole name such as `data` may be what a test library calls its argument.
    assert banned_identifiers(modules_of_tests(), BannedWords(BANNED.anywhere, (), BANNED.module)) == []


def test_the_glossary_lists_the_words() -> None:
    assert {"page_table", "swap", "mirror"} <= set(BANNED.anywhere)
    assert {"data", "info", "meta"} <= set(BANNED.whole)
    assert "utils" in BANNED.module


@pytest.mark.parametrize(
    "text",
    [
        "page_table = 1",
        "def swap_blocks(): ...",
        "def read(PageTable): ...",
        "class BlockSwap: ...",
        "self.page_table = 1",
        "import json as swap",
        "for info in (): ...",
        "def read(*, info): ...",
        "_info = 1",
        "with open() as info: ...",
    ],
)
def test_a_banned_identifier_is_found(text: str) -> None:
    assert len(banned_identifiers([module_of(text)], SAMPLE)) == 1


def test_a_banned_module_name_is_found() -> None:
    assert banned_identifiers([module_of("", "kv.utils")], SAMPLE) == ["kv/utils.py: module name utils"]


def test_words_that_only_look_alike_are_left_alone() -> None:
    text = "swapped = page_tables = table_page = hit_info = informed = 1\nread(info, other.swap)"
    assert banned_identifiers([module_of(text)], SAMPLE) == []


def test_identifiers_split_into_words() -> None:
    assert words_of("KVCacheManager_page2Table") == ["kv", "cache", "manager", "page", "2", "table"]

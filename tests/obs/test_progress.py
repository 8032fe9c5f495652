"""Progress is for terminals, and only for work that takes a moment."""

import io
import sys

import pytest

from dalsegno.obs import progress
from dalsegno.obs.progress import Progress


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _terminal(monkeypatch: pytest.MonkeyPatch) -> _Terminal:
    """Replace stderr; called inside the test, since pytest puts its own there between the phases of a test."""
    screen = _Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    return screen


def _work(*, enabled: bool = True) -> None:
    with Progress("prompts", 7, enabled=enabled) as shown:
        for done in range(8):
            if shown.is_due():
                shown.show(done, 10 * done)


def test_long_work_on_a_terminal_shows_how_much_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_PERIOD_SECONDS", 0.0)
    _work()
    assert "prompts" in terminal.getvalue()
    assert "/7" in terminal.getvalue()
    assert "tokens/s" in terminal.getvalue()


def test_work_that_makes_no_tokens_has_no_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.0)
    with Progress("tensors", 3) as shown:
        shown.show(2)
    assert "2/3" in terminal.getvalue()
    assert "tokens/s" not in terminal.getvalue()


def test_short_work_shows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    _work()
    assert terminal.getvalue() == ""


def test_nothing_is_shown_where_it_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch)
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.0)
    _work(enabled=False)
    assert terminal.getvalue() == ""


def test_nothing_is_shown_where_stderr_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_PATIENCE_SECONDS", 0.0)
    _work()
    assert capsys.readouterr().err == ""

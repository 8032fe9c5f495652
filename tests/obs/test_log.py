"""Log lines of the application go to stderr, once."""

import logging

import pytest

from dalsegno.obs.log import log_to_stderr


@pytest.fixture(autouse=True)
def _restored() -> object:
    logger = logging.getLogger("dalsegno")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers, logger.level = handlers, level


def test_lines_from_the_level_up_reach_stderr_once(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr(logging.WARNING)
    log_to_stderr(logging.INFO)
    logging.getLogger("dalsegno.engine.x").info("started")
    logging.getLogger("dalsegno.engine.x").debug("detail")
    captured = capsys.readouterr()
    assert captured.err == "INFO dalsegno.engine.x: started\n"
    assert captured.out == ""


def test_the_level_can_be_raised_again(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr(logging.INFO)
    log_to_stderr(logging.WARNING)
    logging.getLogger("dalsegno").info("started")
    assert capsys.readouterr().err == ""

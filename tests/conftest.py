"""Settings of every test run: sizes, hypothesis profiles, one torch thread, no network."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.small_disk import mounted

if TYPE_CHECKING:
    from dalsegno.ops.native.library import Kernels
    from dalsegno.store.mooncake.master import MooncakeMaster

LONG = os.environ.get("DALSEGNO_TEST_LONG", "") not in ("", "0")
"""True under `make test-long`: the same tests at full size."""

MOONCAKE_SKIP = "the real Mooncake was not tested"
"""How the reason of a skip begins where Mooncake is missing."""

# Set before anything imports torch or transformers: a test never reaches for a network or for all cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

# Machines that run the tests differ in speed, so examples have no deadline; a hang is caught by faulthandler_timeout.
_SLOW_OK = [HealthCheck.too_slow, HealthCheck.data_too_large]
settings.register_profile("dev", max_examples=50, stateful_step_count=40, deadline=None, suppress_health_check=_SLOW_OK)
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.register_profile("long", settings.get_profile("dev"), max_examples=2000, stateful_step_count=100)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "long" if LONG else "ci"))


@pytest.fixture(scope="session")
def long() -> bool:
    """Whether this run asks for full sizes (`make test-long`); tests choose their own numbers by it."""
    return LONG


@pytest.fixture(scope="session")
def traces_folder() -> Path:
    """The folder of recorded conversations named by DALSEGNO_TRACES; tests that need one skip without it."""
    folder = os.environ.get("DALSEGNO_TRACES")
    if not folder:
        pytest.skip("DALSEGNO_TRACES is not set: tests on recorded conversations were not run")
    path = Path(folder)
    assert path.is_dir(), f"DALSEGNO_TRACES={folder} is not a folder"
    return path


@pytest.fixture(scope="session")
def kernels() -> "Kernels":
    """The native kernels of the ops; tests that need them skip on a machine without a C compiler."""
    from dalsegno.ops.native.library import load_kernels

    loaded = load_kernels()
    if loaded is None:
        pytest.skip("no C compiler: the native kernels are not tested")
    return loaded


@pytest.fixture(scope="session")
def mooncake_package() -> None:
    """Skip where the real Mooncake cannot be used; the run's last lines say so."""
    from dalsegno.errors import OptionError
    from dalsegno.store.mooncake.client import load_package
    from dalsegno.store.mooncake.master import find_master

    try:
        load_package()
        find_master()
    except OptionError as error:
        pytest.skip(f"{MOONCAKE_SKIP}: {error}")


@pytest.fixture
def mooncake_master(mooncake_package: None) -> "Iterator[MooncakeMaster]":
    """A real master on a free port, whose leases last a second."""
    from dalsegno.store.mooncake.master import MooncakeMaster

    with MooncakeMaster(lease_s=1.0) as master:
        yield master
        master.stop(kill=True)  # by itself it takes a second to end


def pytest_unconfigure(config: pytest.Config) -> None:
    """Say behind everything else which tests did not run for want of Mooncake."""
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or hasattr(config, "workerinput"):
        return
    reasons = [str(report.longrepr[2]) for report in reporter.stats.get("skipped", ()) if report.longrepr]
    missing = [reason for reason in reasons if MOONCAKE_SKIP in reason]
    if missing:
        reporter.write_line(f"{len(missing)} tests skipped, {missing[0].removeprefix('Skipped: ')}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB; tests that need one skip where nothing may be mounted."""
    yield from mounted(tmp_path / "disk")

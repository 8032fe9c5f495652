"""Fixture of the op tests: both forms of an op in turn."""

from collections.abc import Iterator

import pytest

from dalsegno.ops.native.library import kernels_in_use


@pytest.fixture(params=["torch", "native"])
def either_form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test twice: in torch alone, and with native kernels where the op has one for the step."""
    if request.param == "torch":
        yield
        return
    with kernels_in_use(request.getfixturevalue("kernels")):
        yield

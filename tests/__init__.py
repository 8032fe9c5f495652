"""Tests, one folder per area; helpers shared by several test files are imported as `tests.<area>.<name>`."""

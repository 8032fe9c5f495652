"""The command line: one module per command, terminal output, no engine logic."""

"""The store connector: keeps prefixes in an external store and resumes from it."""

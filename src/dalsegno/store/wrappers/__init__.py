"""Stores around a store: the same protocol, plus one thing each. All of them pass the contract suite."""

"""What is shown and counted: a leaf that any package may import."""

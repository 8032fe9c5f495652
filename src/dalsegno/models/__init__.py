"""Model families, one file each, and reading Hugging Face checkpoints."""

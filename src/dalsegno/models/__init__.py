"""Model families on Hugging Face checkpoints: reading them, checking them, computing with them."""

"""Finding the longest boundary that every group can restore, and choosing which states to keep. No torch."""

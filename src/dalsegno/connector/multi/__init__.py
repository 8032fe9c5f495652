"""The connector made of others: loads from the one that has most, saves to all."""

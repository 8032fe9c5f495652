"""What runs in a step: queues, budget, admission, preemption, waiting for a common prefix. No torch."""

"""Key-value spaces that outlive a request, a process or a machine: one protocol, its stores and wrappers. No torch."""

"""What a run is built on: threads, processes, shared memory, copies of the weights."""

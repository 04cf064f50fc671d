"""Beneath a run: threads, memory, copies of the weights."""

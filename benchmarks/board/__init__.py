"""The parts of `benchmarks/scoreboard.py`."""

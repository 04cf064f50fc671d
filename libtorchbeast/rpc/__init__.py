"""Environments on other machines: gRPC streams that end in lanes.

    environments ── env.proto ──► gateway (a process) ── lanes ──► actors in the learner's process

Who dials whom is free: `server.py` has environments that listen, `client.py` and `connect.py` such
that dial in. `gateway.py` is the learner's end of all of them, and `gateways.py` what starts it.
"""

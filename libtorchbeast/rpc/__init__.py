"""Environments on other machines, or in other languages: gRPC both ways.

`env.proto` is the protocol. Who dials whom is free: `env_server.py` has environments that listen,
`env_client.py` and `simulator.py` such that dial in. `gateway.py` is the learner's end of all of
them, and `gateway_processes.py` what starts it.
"""

"""The network: gRPC connections between a learner and environments on other machines.

`env.proto` defines the protocol, also for clients in other languages. Either end may dial: the
environments of `env_server.py` listen, while those of `env_client.py` and `simulator.py`, and the
actors of `actor_client.py`, dial. `gateway.py` is the learner's end of all these connections, and
`gateway_processes.py` starts it.
"""

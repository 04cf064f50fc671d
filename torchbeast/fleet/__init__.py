"""Fleets: many environment processes that dial one learner, placed and kept alive by a scheduler.

    flags.py        what `python -m torchbeast.fleet` takes, and its validation
    task.py         what a scheduler places: a share of the servers, run as `polybeast_env` does
    state.py        what is known of a fleet, and what launchers do with it
    local.py        the launchers: processes on this machine,
    ray_actors.py       actors of a Ray cluster,
    slurm_jobs.py       an array job of Slurm
    __main__.py     the commands: start, status, stop

Membership, placement and restarts of machines are the scheduler's; docs/cluster.md has examples.
"""

"""Fleets: many environment processes that dial one learner, placed and kept alive by a scheduler.

    flags.py        what `python -m torchbeast.fleet` takes, and its validation
    task.py         what a scheduler places: a share of the servers, run as by `polybeast_env`
    state.py        a fleet's state file, and the interface of the launchers
    local.py        the launchers: processes on this machine,
    ray_actors.py       actors of a Ray cluster,
    slurm_jobs.py       an array job of Slurm
    __main__.py     the commands: start, status, stop

The scheduler handles membership, placement and restarts of machines; docs/cluster.md has examples.
"""

"""Flags as a command line with nothing but an environment has them."""

import dataclasses

from torchbeast.run.flags import with_recipe


def default_flags(flags_class, env, recipe="default"):
    return with_recipe(dataclasses.replace(flags_class(), env=env, recipe=recipe))

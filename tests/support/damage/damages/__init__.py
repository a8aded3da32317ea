"""All damages. Importing this registers them."""

from support.damage import switched  # noqa: F401
from support.damage.damages import (  # noqa: F401
    devices,
    gradients,
    messages,
    microbatches,
    optimizers,
    restored,
    saved,
    shared,
    teams,
    versions,
)
from support.damage.registry import DAMAGES

__all__ = ["DAMAGES"]

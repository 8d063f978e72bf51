"""Memory of quantised parameters by recipe, from the shapes in TransformerEngine 2.20.2's source."""

from __future__ import annotations

from typing import NamedTuple


class Recipe(NamedTuple):
    """Properties of a recipe that a plan depends on.

    Attributes:
        param_bytes: bytes for each element of a large matrix: codes by rows and once more by
            columns, as Hopper multiplies by them, with the scales of both.
        agrees: True if ranks that share a parameter agree on its scale.
    """

    param_bytes: float
    agrees: bool = False


RECIPES = {
    "delayed": Recipe(2.0),
    "tensorwise": Recipe(2.0, agrees=True),
    "blockwise": Recipe(2 * (1 + 4 / 128**2)),  # float32 for 128 x 128
    "mxfp8": Recipe(2 * (1 + 1 / 32)),  # a byte for 32
    "nvfp4": Recipe(2 * (1 / 2 + 1 / 16), agrees=True),  # a byte for 16
}
"""Recipe by Megatron's name of it."""

"""A generative model of model parameters, usable by itself.

layout = Layout.of(models[0], models[0])                      # which tensors, in which order
generator = Generator.fit(layout.flatten(models), layout.sizes, SIZES["fast"])
mine = layout.unflatten(generator.invert(layout.flatten([model]), start=250, seed=0)[0])
"""

from fedhelix.generative.buffer import Buffer
from fedhelix.generative.diffusion import Diffusion
from fedhelix.generative.generator import FEWEST, SIZES, Generator, Size, size_for
from fedhelix.generative.recipe import Recipe, findings
from fedhelix.generative.vectors import Layout, Normaliser, slice_of

__all__ = [
    "FEWEST",
    "SIZES",
    "Buffer",
    "Diffusion",
    "Generator",
    "Layout",
    "Normaliser",
    "Recipe",
    "Size",
    "findings",
    "size_for",
    "slice_of",
]

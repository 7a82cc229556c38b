"""A generative model of model parameters, usable by itself.

layout = Layout.of(models[0], models[0])                      # which tensors, in which order
generator = Generator.fit(layout.flatten(models), layout.sizes, SIZES["fast"])
mine = layout.unflatten(generator.invert(layout.flatten([model]), start=250, seed=0)[0])
"""

from fedhelix.components.generative.arrival import receive_newcomer
from fedhelix.components.generative.buffer import Buffer
from fedhelix.components.generative.diffusion import Diffusion
from fedhelix.components.generative.generator import SIZES, Generator, Size, size_for
from fedhelix.components.generative.hypernetwork import Hyper, Hypernetwork
from fedhelix.components.generative.recipe import Recipe
from fedhelix.components.generative.vectors import Layout, Normaliser, slice_of

__all__ = [
    "SIZES",
    "Buffer",
    "Diffusion",
    "Generator",
    "Hyper",
    "Hypernetwork",
    "Layout",
    "Normaliser",
    "Recipe",
    "Size",
    "receive_newcomer",
    "size_for",
    "slice_of",
]

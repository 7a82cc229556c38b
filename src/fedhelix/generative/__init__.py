"""A generative model of model parameters, usable by itself.

layout = Layout.of(models[0], models[0])                      # which tensors, in which order
generator = Generator.fit(layout.flatten(models), layout.sizes, SIZES["fast"])
mine = layout.unflatten(generator.invert(layout.flatten([model]), start=250, seed=0)[0])
"""

from fedhelix.generative.arrival import receive_newcomer
from fedhelix.generative.buffer import Buffer
from fedhelix.generative.diffusion import Diffusion
from fedhelix.generative.generator import SIZES, Generator, Size, size_for
from fedhelix.generative.hypernetwork import Hyper, Hypernetwork
from fedhelix.generative.recipe import Recipe
from fedhelix.generative.vectors import Layout, Normaliser, slice_of

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

"""Mends for faults of pinned upstream packages that a stock pipeline meets on torch_xla.

Nothing is patched at import. `apply(pipe)` puts the mends in place that the pipeline's classes need, `apply()` all of
them; `revert()` takes them all back. They change what happens on XLA devices only. Each module here tells what it
mends, in which versions, and when to delete it.

Example:
    >>> from torch_svg import patches
    >>> patches.apply(pipe)
    ['wan_vae_slices', 'nearest_upsampling', 'unipc_solve', 'host_timesteps', 'timesteps_to_device', ...]
"""

from . import (
    animate_basis,
    cosmos_padding,
    framepack_text_length,
    host_timesteps,
    hunyuan15_text_order,
    mochi_text_length,
    nearest_upsampling,
    tile_blending,
    timesteps_to_device,
    transformer_graphs,
    unipc_solve,
    vae_graphs,
    wan_prompt_lengths,
    wan_vae_slices,
)

_PATCHES = {
    module.PATCH.name: module.PATCH
    for module in (
        wan_vae_slices,
        cosmos_padding,
        nearest_upsampling,
        tile_blending,
        vae_graphs,
        unipc_solve,
        host_timesteps,
        wan_prompt_lengths,
        framepack_text_length,
        hunyuan15_text_order,
        mochi_text_length,
        animate_basis,
        timesteps_to_device,
        transformer_graphs,
    )
}

__all__ = ["applied", "apply", "list_patches", "revert"]


def apply(pipe=None, names=None):
    """Apply patches. Those that are applied already stay.

    Args:
        pipe (diffusers.DiffusionPipeline or None): apply only what its components need.
        names (sequence of str or None): apply these instead, and what they need.

    Returns:
        list[str]: the names of all patches that are applied now.

    Raises:
        ValueError: an unknown name.
        NotImplementedError: an upstream package has an untested version. Nothing is applied then.
    """
    if names is None:
        names = [name for name, patch in _PATCHES.items() if pipe is None or patch.concerns(pipe)]
    wanted = _with_needs(names)
    for name in wanted:
        _PATCHES[name].check_versions()
    for name in wanted:
        _PATCHES[name].apply()
    return [patch.name for patch in list_patches() if patch.applied]


def revert(names=None):
    """Take patches back, all of them by default. Those that are not applied are passed over.

    Raises:
        ValueError: an unknown name.
    """
    for name in _known(_PATCHES if names is None else names):
        _PATCHES[name].revert()


def applied(name):
    """Whether a patch is in place.

    Raises:
        ValueError: an unknown name.
    """
    return _PATCHES[_known([name])[0]].applied


def list_patches():
    """All patches, as `patch.Patch` objects: name, what, upstream, versions, delete_when, applied."""
    return list(_PATCHES.values())


def _known(names):
    unknown = [name for name in names if name not in _PATCHES]
    if unknown:
        raise ValueError(f"unknown patches {unknown}, expected some of {list(_PATCHES)}")
    return list(names)


def _with_needs(names):
    wanted = _known(names)
    for name in wanted:
        # the list grows while it is walked, so what is needed may itself need others
        wanted.extend(needed for needed in _PATCHES[name].needs if needed not in wanted)
    return wanted

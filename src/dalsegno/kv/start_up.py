"""The start-up plan: what a layout means for the user, in a few lines of text."""

import math

from dalsegno.config import CacheConfig
from dalsegno.kv.layout import GroupSpec, MemoryLayout

__all__ = ["describe_plan", "smallest_prompt_that_hits"]


def smallest_prompt_that_hits(layout: MemoryLayout, config: CacheConfig) -> int | None:
    """Tokens of the shortest prompt whose resend can hit; None with caching off.

    One token is always computed for its logits; a group that hits at block boundaries only moves all hits there.
    """
    if not config.enable_prefix_caching:
        return None
    coarse = [group.block_size for group in layout.groups if group.prefix == "block"]
    return math.lcm(config.hash_block_size, *coarse) + 1


def describe_plan(layout: MemoryLayout, config: CacheConfig, max_model_len: int) -> str:
    """Describe how the memory is cut, how much fits, and which prompts can hit."""
    usable = layout.num_slabs - 1
    lines = [
        f"KV cache: {_size(layout.total_bytes)} in {layout.num_slabs} slabs of {_size(layout.slab_bytes)}, "
        "one of them the null slab"
    ]
    lines += [_describe_group(group, layout) for group in layout.groups]
    fits = [f"{usable * g.blocks_per_slab * g.block_size:,} {g.name} tokens" for g in layout.paged_groups]
    if layout.state_group is not None:
        fits.append(f"{usable * layout.state_group.blocks_per_slab:,} states")
    lines.append(f"  fits: {' or '.join(fits)}, in any mix of slabs")
    lines.append(f"  hits: {_describe_hits(layout, config, max_model_len)}")
    return "\n".join(lines)


def _describe_group(group: GroupSpec, layout: MemoryLayout) -> str:
    waste = layout.slab_bytes - group.blocks_per_slab * group.block_bytes
    holds = "one state" if group.is_state else f"{group.block_size} tokens"
    window = f", window {group.window}" if group.window is not None else ""
    return (
        f"  {group.name}: {len(group.layers)} layers{window}; a block of {_size(group.block_bytes)} holds {holds}; "
        f"{group.blocks_per_slab} per slab, {100 * waste / layout.slab_bytes:.1f} % of a slab unused"
    )


def _describe_hits(layout: MemoryLayout, config: CacheConfig, max_model_len: int) -> str:
    smallest = smallest_prompt_that_hits(layout, config)
    if smallest is None:
        return "prefix caching is off"
    if smallest > max_model_len:
        return (
            f"none: the shortest prompt that can hit has {smallest} tokens, max_model_len={max_model_len}; "
            "lower hash_block_size"
        )
    step = smallest - 1
    coarse = [group.name for group in layout.groups if group.prefix == "block"]
    why = f" (the {', '.join(coarse)} group hits at whole blocks only)" if coarse else ""
    return f"at multiples of {step} tokens{why}; the shortest prompt that can hit has {smallest} tokens"


def _size(num_bytes: int) -> str:
    value, unit = float(num_bytes), "B"
    for bigger in ("KiB", "MiB", "GiB"):
        if value < 1024:
            break
        value, unit = value / 1024, bigger
    return f"{value:.4g} {unit}"

"""Timing of the ops: cases, arrays that rotate past the caches, checks, bytes and flops, ceilings, other packages.

Nothing is printed here; `gdn bench` renders what `gdn.bench.measure` returns.
"""

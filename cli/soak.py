"""`gdn soak`: run a speculative decode loop for very long and show whether it stayed right and memory flat."""

from __future__ import annotations

import time
from contextlib import closing
from typing import Any

import click

import gdn
from gdn.backends import BACKENDS
from gdn.backends.launch import KERNEL_TYPE
from gdn.cli import report
from gdn.cli.names import Name, heads_options
from gdn.cli.soak_results import SoakRun, as_document, show_head, show_results
from gdn.geometry import HeadGeometry
from gdn.ring import MAX_RING_LEN
from gdn.testing import soak as loop
from gdn.testing.soak import SoakCase

#: Minutes on any backend: steps of a GPU are an order of magnitude faster.
_DEFAULT_STEPS = {"cuda": 1_000_000, "host": 100_000, "numpy": 100_000}
_DEFAULT = SoakCase()


@click.command()
@click.option(
    "--backend",
    type=Name("backend", BACKENDS),
    metavar="NAME",
    help=f"Run on this backend; unless given the first of {', '.join(BACKENDS)} that this machine can run.",
)
@click.option(
    "--steps",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Steps of the loop: {_DEFAULT_STEPS['cuda']} on cuda and {_DEFAULT_STEPS['host']} elsewhere unless given.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    default=0,
    show_default=True,
    metavar="S",
    help="Draw everything from this seed.",
)
@click.option(
    "--checkpoint",
    "steps_to_checkpoint",
    type=click.IntRange(1, 100_000),
    default=_DEFAULT.steps_to_checkpoint,
    show_default=True,
    metavar="N",
    help="Steps from one comparison to the next.",
)
@click.option(
    "--rows",
    "num_rows",
    type=click.IntRange(1, 4096),
    default=_DEFAULT.num_rows,
    show_default=True,
    metavar="N",
    help="Sequences.",
)
@click.option(
    "--layers", "num_layers", type=click.IntRange(1, 256), default=_DEFAULT.num_layers, show_default=True, metavar="N"
)
@click.option(
    "--ring-len",
    type=click.IntRange(1, MAX_RING_LEN),
    default=_DEFAULT.ring_len,
    show_default=True,
    metavar="N",
    help="Records of a ring row; windows have up to one more token.",
)
@heads_options("Key and value heads; 1,2 of 16,16 unless given.")
@click.option(
    "--work-dtype",
    type=Name("type", KERNEL_TYPE),
    default=_DEFAULT.work_dtype,
    show_default=True,
    metavar="TYPE",
    help="Type of queries, keys and values.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone on standard output.")
@click.pass_context
def soak(
    ctx: click.Context,
    /,
    backend: str | None,
    steps: int | None,
    heads: tuple[int, int] | None,
    head_dims: tuple[int, int] | None,
    as_json: bool,
    **settings: Any,
) -> None:
    """Run a speculative decode loop for very long, with random windows and acceptances.

    Its states and readouts must be those of plain forward calls at every checkpoint, to the bit, and finite, and memory
    must be flat after the first tenth of the run. The loop verifies and folds, or leaves records pending, eagerly and
    lazily, by turns. Stops at the first checkpoint that is wrong.
    """
    base = _DEFAULT.heads
    counts = heads or (base.num_key_heads, base.num_value_heads)
    dims = head_dims or (base.key_head_dim, base.value_head_dim)
    case = SoakCase(HeadGeometry(*counts, *dims), **settings)
    chosen = choose_backend(backend)
    run = SoakRun(case, chosen, steps or _DEFAULT_STEPS[chosen], ctx.command_path)
    if not as_json:
        show_head(run)
    run_loop(run)
    if as_json:
        report.print_json(as_document(run))
    else:
        show_results(run)
    ctx.exit(run.exit_code)


def choose_backend(name: str | None) -> str:
    """The backend asked for, or the first that can run. Raises UsageError where that which is asked for cannot."""
    unavailable = gdn.unavailable_backends()
    if name in unavailable:
        raise click.UsageError(f"backend {name} cannot run here: {unavailable[name]}")
    return name or next(known for known in BACKENDS if known not in unavailable)


def run_loop(run: SoakRun) -> None:
    """Fill in the checkpoints. After Ctrl-C, or one that is wrong, those before stay."""
    start = time.perf_counter()
    try:
        with (
            report.progress("gdn soak", run.num_checkpoints) as advance,
            closing(loop.soak(run.case, run.backend, run.num_steps)) as checkpoints,
        ):
            for checkpoint in checkpoints:
                run.checkpoints.append(checkpoint)
                advance(f"{checkpoint.num_steps} steps")
                if checkpoint.failures:
                    break
    except KeyboardInterrupt:
        run.interrupted = True
    except Exception as refusal:  # whatever it was, a loop that cannot go on has failed
        run.error = f"{type(refusal).__name__}: {refusal}"
    run.seconds = time.perf_counter() - start

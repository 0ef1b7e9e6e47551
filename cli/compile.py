"""`gdn compile`: compile the kernels that calls pick ahead of time, with no GPU, and show what they take."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Any

import click

from gdn.backends import ahead
from gdn.backends.launch import KERNEL_TYPE
from gdn.cli import report
from gdn.cli.compile_results import CompileRun, as_document, show_head, show_results
from gdn.cli.files import require_writable
from gdn.cli.names import Counts, Name, Names, heads_options
from gdn.errors import GdnError
from gdn.geometry import HeadGeometry
from gdn.models import MODELS, model_geometry
from gdn.variants import OPS, Layer

_DEFAULT_MODEL = "qwen3-next-80b-a3b"
_DEFAULT_STATES = ("float32", "bfloat16")
_DEFAULT_RING_LENS = (8,)

_TYPE = Name("type", KERNEL_TYPE)


@click.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    type=Name("model", MODELS),
    metavar="NAME",
    help=f"Heads as in this model ({_DEFAULT_MODEL}). Repeatable.",
)
@heads_options("Key and value heads in place of the model's, as a tensor-parallel shard has them.")
@click.option(
    "--work-dtype",
    "work_dtypes",
    multiple=True,
    type=_TYPE,
    default=("bfloat16",),
    show_default=True,
    metavar="TYPE",
    help="Type of queries, keys and values. Repeatable.",
)
@click.option(
    "--state-dtype",
    "state_dtypes",
    multiple=True,
    type=_TYPE,
    default=_DEFAULT_STATES,
    show_default=True,
    metavar="TYPE",
    help="Type of the pool. Repeatable.",
)
@click.option(
    "--gate-dtype", type=_TYPE, default="float32", show_default=True, metavar="TYPE", help="Type of decay and beta."
)
@click.option("--ring-dtype", type=_TYPE, default="float32", show_default=True, metavar="TYPE", help="Type of rings.")
@click.option("--float32-out", is_flag=True, help="For readouts of float32 too, beside the type of the queries.")
@click.option(
    "--ring-lens",
    multiple=True,
    type=Counts(),
    default=(_DEFAULT_RING_LENS,),
    metavar="N,...",
    help=f"Records of a ring row. Unless given: {','.join(map(str, _DEFAULT_RING_LENS))}.",
)
@click.option(
    "--ops", multiple=True, type=Names("op", OPS), metavar="NAME,...", help="Unless given: all that run a kernel."
)
@click.option(
    "--arch",
    "architectures",
    multiple=True,
    type=Names("architecture", ahead.GENERATIONS, also=lambda name: re.fullmatch(r"sm_\d+", name) is not None),
    metavar="sm_NN,...",
    help=f"Unless given: that of the GPUs here; without a GPU {', '.join(ahead.GENERATIONS)}.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="FOLDER",
    help="Folder to write to, for GDN_KERNEL_DIR to name where the kernels run. Unless given: gdn's cache.",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Kernels to compile side by side. Unless given: one for each CPU.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone on standard output.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Keep the JSON.")
@click.pass_context
def compile(
    ctx: click.Context,
    /,
    ops: Sequence[tuple[str, ...]],
    architectures: Sequence[tuple[str, ...]],
    out: Path | None,
    workers: int | None,
    as_json: bool,
    save: Path | None,
    **shape: Any,
) -> None:
    """Compile the kernels that calls with these heads and types pick, ahead of time and with no GPU.

    Calls find them in gdn's cache folder, or in the folders that GDN_KERNEL_DIR names. Kernels for an architecture
    such as sm_80 run on later GPUs of its generation too. Dense arrays that start on 16-byte boundaries are served,
    with a record_stride that is a multiple of 8, and a convolution of four taps with SiLU and no bias, whose pool has
    the work type; other calls compile at their first use, as they do without this.

    The table says what a thread of each kernel takes, and its block of shared memory. What is there already is not
    compiled again.
    """
    if save is not None:
        require_writable(save)
    chosen = ahead.choose_architectures([name for names in architectures for name in names])
    run = CompileRun(chosen, ahead.open_folder(out))
    run.add_uses(layers(**shape), tuple(dict.fromkeys(name for names in ops for name in names)) or tuple(OPS))
    if not as_json:
        show_head(run)
    compile_all(run, workers)
    report.save_and_show(as_document(run), save, as_json=as_json, show=lambda: show_results(run))
    ctx.exit(run.exit_code)


def layers(
    *,
    models: Sequence[str],
    heads: tuple[int, int] | None,
    head_dims: tuple[int, int] | None,
    work_dtypes: Sequence[str],
    state_dtypes: Sequence[str],
    float32_out: bool,
    ring_lens: Sequence[tuple[int, ...]],
    **rest: Any,
) -> list[Layer]:
    """The layers whose calls are served. Raises ShapeError for heads that no kernel serves."""
    geometries = []
    for base in (model_geometry(model) for model in models or (_DEFAULT_MODEL,)):
        counts = heads or (base.num_key_heads, base.num_value_heads)
        geometries.append(HeadGeometry(*counts, *(head_dims or (base.key_head_dim, base.value_head_dim))))
    outs = (None, "float32") if float32_out else (None,)
    lens = tuple(dict.fromkeys(length for lengths in ring_lens for length in lengths))
    kinds = product(dict.fromkeys(geometries), dict.fromkeys(work_dtypes), dict.fromkeys(state_dtypes), outs)
    return [Layer(geometry, work, state, out, ring_lens=lens, **rest) for geometry, work, state, out in kinds]


def compile_all(run: CompileRun, workers: int | None) -> None:
    """Fill in what is compiled. After Ctrl-C, or a kernel that cannot be made or written, the finished ones stay."""
    start = time.perf_counter()
    try:
        with (
            report.progress("gdn compile", run.num_wanted) as advance,
            closing(ahead.build(list(run.uses), run.architectures, run.folder, workers)) as results,
        ):
            for built in results:
                run.built.append(built)
                advance(f"{built.variant.kernel.stem} for {built.architecture}")
    except KeyboardInterrupt:
        run.interrupted = True
    except GdnError as refusal:
        run.error = str(refusal).partition("\n")[0]
    run.seconds = time.perf_counter() - start

"""`gdn bench`: time the ops on this machine, after a check of every case, against what its memory could do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

import gdn
from gdn.backends import BACKENDS
from gdn.backends.chunked import ALGORITHMS
from gdn.backends.launch import KERNEL_TYPE
from gdn.bench.case_lists import PENDING, build_cases, named_case, named_cases, too_short_ring_lens
from gdn.bench.cases import REGIMES, SLOT_ORDERS, BenchCase, CaseOptions
from gdn.bench.cpu import CpuMachine
from gdn.bench.machine import Machine
from gdn.bench.measure import measure, op_of
from gdn.bench.peers import PEERS, load_peer
from gdn.bench.peers.peer import Peer, PeerRefused
from gdn.bench.traffic import Ceilings
from gdn.cli import report
from gdn.cli.bench_document import as_document
from gdn.cli.bench_results import show_head, show_results
from gdn.cli.bench_run import BenchRun, load_baseline
from gdn.cli.files import require_writable
from gdn.cli.names import Counts, Name, Shares, heads_options, suggestion
from gdn.geometry import HeadGeometry
from gdn.models import MODELS, model_geometry
from gdn.ring import MAX_RING_LEN

#: Whose heads are timed where nothing is said, and the part of them that a CPU gets: an eighth, as one of eight shards.
_DEFAULT_MODEL = "qwen3-next-80b-a3b"
_CPU_HEADS = (2, 4)
_GPU_REPEATS, _CPU_REPEATS = 30, 9

_Number = TypeVar("_Number", int, float)
_POSITIVE = click.IntRange(min=1)


@click.command()
@click.argument("regimes", nargs=-1, type=Name("regime", REGIMES), metavar="[REGIME]...")
@click.option(
    "--case",
    "case_names",
    multiple=True,
    type=Name("case", named_cases()),
    metavar="NAME",
    help="A case of `gdn verify` instead of a regime's own, with the heads and types that it has. Repeatable.",
)
@click.option(
    "--backend", "backend_names", multiple=True, type=Name("backend", BACKENDS), metavar="NAME", help="Repeatable."
)
@click.option("--model", type=Name("model", MODELS), metavar="NAME", help=f"Heads as in this model ({_DEFAULT_MODEL}).")
@heads_options("Key and value heads in place of the model's, as a tensor-parallel shard has them.")
@click.option("--batch", "batches", multiple=True, type=Counts(), metavar="B,...", help="Sequences; not for prefill.")
@click.option("--window", type=_POSITIVE, default=4, show_default=True, metavar="T", help="Tokens of a verify.")
@click.option("--ring-len", type=_POSITIVE, metavar="N", help="Records of a ring row, but for loops.")
@click.option(
    "--pending",
    type=click.IntRange(0, MAX_RING_LEN),
    metavar="N",
    help=f"Pending records of fused and lazy. Unless given: {PENDING}, or what fits the ring.",
)
@click.option(
    "--accept",
    multiple=True,
    type=Shares(),
    metavar="P,...",
    help="Shares of a window that loops of step accept. Unless given: 0,0.5,1.",
)
@click.option(
    "--ring-lens",
    multiple=True,
    type=Counts(),
    metavar="N,...",
    help="Records of a ring row of lazy loops. Unless given: 8,16,32, on a CPU 8.",
)
@click.option("--lazy", is_flag=True, help="Time decode lazily too: windows of one token that stay pending.")
@click.option("--layers", type=_POSITIVE, default=1, show_default=True, metavar="L", help="Layers of a fold.")
@click.option(
    "--algorithm",
    type=click.Choice(ALGORITHMS),
    default="recurrent",
    show_default=True,
    help="How a prefill is computed; chunked and auto time longer rows too.",
)
@click.option("--seq-len", "seq_lens", multiple=True, type=Counts(), metavar="T,...", help="Single rows of a prefill.")
@click.option(
    "--state-dtype",
    "state_dtypes",
    multiple=True,
    type=Name("type", KERNEL_TYPE),
    metavar="TYPE",
    help="Type of the states; windows of conv have the work type. Repeatable; unless given: float32 and bfloat16.",
)
@click.option(
    "--work-dtype",
    type=Name("type", KERNEL_TYPE),
    default="bfloat16",
    show_default=True,
    metavar="TYPE",
    help="Type of queries, keys and values.",
)
@click.option(
    "--slots",
    type=click.Choice(SLOT_ORDERS),
    default="ordered",
    show_default=True,
    help="Whether neighbouring sequences use neighbouring slots.",
)
@click.option("--max-slots", type=_POSITIVE, metavar="N", help="Slots that the pool may have.")
@click.option(
    "--warm", is_flag=True, help="Time one set of inputs over and over, instead of sets larger than the cache."
)
@click.option(
    "--repeats", type=_POSITIVE, metavar="N", help=f"Unless given: {_GPU_REPEATS} on a GPU, else {_CPU_REPEATS}."
)
@click.option(
    "--peer", "peer_names", multiple=True, type=Name("peer", PEERS), metavar="NAME", help="Another package. Repeatable."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone on standard output.")
@click.option("--save", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Keep the JSON.")
@click.option(
    "--compare",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Show the ratio of each row's time to that in a saved FILE.",
)
@click.option("--fail-above", type=click.FloatRange(min=0, min_open=True), metavar="X", help="Exit 1 above this ratio.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="A picture; needs gdn[plot]."
)
@click.pass_context
def bench(
    ctx: click.Context,
    /,
    regimes: tuple[str, ...],
    case_names: tuple[str, ...],
    backend_names: tuple[str, ...],
    repeats: int | None,
    peer_names: tuple[str, ...],
    as_json: bool,
    save: Path | None,
    compare: Path | None,
    fail_above: float | None,
    plot: Path | None,
    **shape: Any,
) -> None:
    """Time the ops on this machine, and say how near they come to what its memory could do.

    Regimes: decode, verify, fold, fused (folds pending records, then verifies, in one pass), lazy (verifies behind
    records that stay pending), step (verify and fold, and steps of decode loops: separate, fused, lazy) and prefill;
    around them conv (ahead of a decode, a verify or a prefill), commit (of a window's tokens) and gates; all of them
    unless some are named. A case is timed only after it passed a check on the very arrays that are timed.
    Without a GPU the CPU backends are timed, with an eighth of the model's heads unless heads are given.
    """
    if fail_above is not None and compare is None:
        raise click.UsageError("--fail-above is about the ratios of --compare FILE, which is missing")
    if shape["lazy"] and (regimes or case_names) and "decode" not in regimes:
        raise click.UsageError("--lazy is about decode, which is not among the regimes")
    for path in (save, plot):
        if path is not None:
            require_writable(path)
    baseline = None if compare is None else load_baseline(compare)
    draw = None if plot is None else _drawing(plot)
    backends, unavailable = select_backends(backend_names)
    machines = [_machine(backend) for backend in backends]
    on_gpu = "cuda" in backends
    options = case_options(on_gpu=on_gpu, **shape)
    cases = [named_case(name, options) for name in dict.fromkeys(case_names)]
    if regimes or not cases:
        wanted = [regime for regime in REGIMES if regime in (regimes or REGIMES)]
        cases += build_cases(wanted, options, on_gpu=on_gpu)
    peers, absent = load_peers(peer_names, on_gpu=on_gpu)
    if options.algorithm != "recurrent" and not any(case.is_chunked for case in cases):
        raise click.UsageError("--algorithm is about prefill, which is not among the regimes")
    run = BenchRun(cases, backends, unavailable, options, repeats, absent, baseline, fail_above)
    if any(case.regime == "step" and case.loop for case in cases):
        run.too_short = too_short_ring_lens(options, on_gpu=on_gpu)
    time_cases(run, machines, peers, quiet=as_json)
    report.save_and_show(as_document(run), save, as_json=as_json, show=lambda: show_results(run))
    if plot is not None and draw is not None:
        draw(run, plot)
    ctx.exit(run.exit_code)


def case_options(
    *,
    on_gpu: bool,
    model: str | None,
    heads: tuple[int, int] | None,
    head_dims: tuple[int, int] | None,
    batches: Sequence[tuple[int, ...]],
    seq_lens: Sequence[tuple[int, ...]],
    state_dtypes: tuple[str, ...],
    accept: Sequence[tuple[float, ...]],
    ring_lens: Sequence[tuple[int, ...]],
    layers: int,
    warm: bool,
    **rest: Any,
) -> CaseOptions:
    """What the options say of all cases. Raises ShapeError for heads that no kernel serves."""
    base = model_geometry(model or _DEFAULT_MODEL)
    if heads is None:
        heads = (base.num_key_heads, base.num_value_heads) if on_gpu or model else _CPU_HEADS
    dims = head_dims or (base.key_head_dim, base.value_head_dim)
    given = {"state_dtypes": tuple(dict.fromkeys(state_dtypes)), "accept": _flat(accept)}
    chosen: dict[str, Any] = {name: values for name, values in given.items() if values}
    return CaseOptions(
        HeadGeometry(*heads, *dims),
        batches=_flat(batches),
        seq_lens=_flat(seq_lens),
        ring_lens=_flat(ring_lens),
        num_layers=layers,
        cold=not warm,
        **chosen,
        **rest,
    )


def _flat(lists: Sequence[tuple[_Number, ...]]) -> tuple[_Number, ...]:
    """The numbers of a repeated option, each once."""
    return tuple(dict.fromkeys(number for numbers in lists for number in numbers))


def select_backends(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The backends to time, and why others cannot run. Raises UsageError where one that is asked for cannot.

    Unless some are named: cuda where it runs, else all that run.
    """
    unavailable = gdn.unavailable_backends()
    for name in names:
        if name in unavailable:
            raise click.UsageError(f"backend {name} cannot run here: {unavailable[name]}")
    runnable = [name for name in BACKENDS if name not in unavailable]
    wanted = names or (["cuda"] if "cuda" in runnable else runnable)
    return [name for name in BACKENDS if name in wanted], unavailable


def _machine(backend: str) -> Machine:
    if backend != "cuda":
        return CpuMachine(backend)
    from gdn.bench.cuda import GpuMachine

    return GpuMachine()


def load_peers(names: Sequence[str], *, on_gpu: bool) -> tuple[tuple[Peer, ...], dict[str, str]]:
    """The packages that can be timed beside ours, and why others cannot."""
    peers, absent = [], {}
    for name in dict.fromkeys(names):
        if not on_gpu:
            absent[name] = "it is timed beside the cuda backend, which is not timed"
            continue
        try:
            peers.append(load_peer(name))
        except PeerRefused as refusal:
            absent[name] = str(refusal)
    return tuple(peers), absent


def _drawing(path: Path) -> Any:
    """The function that draws, found before anything is timed. Raises UsageError where it cannot draw such a file."""
    try:
        from gdn.cli.bench_plot import draw, endings
    except ImportError as error:
        raise click.UsageError(
            f"--plot needs matplotlib, which cannot be imported ({error}): install gdn[plot]"
        ) from error
    ending = path.suffix.removeprefix(".").lower()
    if ending and ending not in endings():
        raise click.UsageError(f"--plot writes no file that ends in .{ending}; {suggestion(ending, endings())}")
    return draw


def time_cases(run: BenchRun, machines: Sequence[Machine], peers: tuple[Peer, ...], *, quiet: bool) -> None:
    """Fill in ceilings, rows and overheads. After Ctrl-C what is finished stays."""
    try:
        _know_machines(run, machines)
        if not quiet:
            show_head(run)
        with report.progress("gdn bench", len(machines) * len(run.cases)) as advance:
            for machine in machines:
                for case in run.cases:
                    _time_case(run, case, machine, peers if machine.backend == "cuda" else ())
                    advance(f"{case.regime} {case.call.name} on {machine.backend}")
    except KeyboardInterrupt:
        run.interrupted = True


def _know_machines(run: BenchRun, machines: Sequence[Machine]) -> None:
    """Fill in facts and ceilings; numpy and host have one memory, which is measured once."""
    by_kind: dict[type[Machine], Ceilings] = {}
    for machine in machines:
        if type(machine) not in by_kind:
            by_kind[type(machine)] = machine.measure_ceilings()
            run.facts.update(machine.facts())
        run.ceilings[machine.backend] = by_kind[type(machine)]


def _time_case(run: BenchRun, case: BenchCase, machine: Machine, peers: tuple[Peer, ...]) -> None:
    repeats = run.repeats or (_GPU_REPEATS if machine.backend == "cuda" else _CPU_REPEATS)
    ops = ("verify", "fold") if case.regime == "step" else (case.regime,)
    is_new = case.loop is None and not {op_of(case, op) for op in ops} <= run.overhead.keys()
    ceilings = run.ceilings[machine.backend]
    measured = measure(case, machine, ceilings, repeats, with_overhead=is_new, peers=peers)
    run.rows += measured.rows
    run.overhead.update({op: overhead for op, overhead in measured.overhead.items() if op not in run.overhead})

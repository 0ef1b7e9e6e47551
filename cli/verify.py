"""`gdn verify`: run the sweep of `gdn.testing` on this machine and show what it found."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import click

import gdn
from gdn.backends import BACKENDS
from gdn.backends.launch import KERNEL_TYPE
from gdn.cli import report
from gdn.cli.names import Name, heads_options
from gdn.cli.verify_results import Run, as_document, show_backends, show_cases, show_results
from gdn.geometry import HeadGeometry
from gdn.models import MODELS, model_geometry
from gdn.testing.catalogue import SWEEP_CASES, SweepCase, random_case, random_case_numbers, random_heads
from gdn.testing.checks import CHECKS
from gdn.testing.chunked_checks import CHUNKED_CHECKS
from gdn.testing.conv1d_checks import CONV1D_CHECKS
from gdn.testing.gates_checks import GATES_CHECKS
from gdn.testing.pending_checks import PENDING_CHECKS
from gdn.testing.ring_checks import RING_CHECKS
from gdn.testing.steps_checks import STEPS_CHECKS
from gdn.testing.sweep import run_sweep

#: Random cases of a default run: with the named ones they take well under a minute on two cores, compiler included.
DEFAULT_RANDOM_CASES = 6
_MAX_WORKERS = 8  # a worker of a wide case holds hundreds of megabytes
_MAX_SEED = 2**32 - 1


@dataclass(frozen=True, slots=True)
class RandomChoice:
    """What the options fix of every random case; None is drawn from the seed."""

    model: str | None = None
    heads: tuple[int, int] | None = None
    head_dims: tuple[int, int] | None = None
    work_dtype: str | None = None
    state_dtype: str | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """The options that say the same on a command line."""
        values = {
            "--model": self.model,
            "--heads": self.heads and "{},{}".format(*self.heads),
            "--head-dims": self.head_dims and "{},{}".format(*self.head_dims),
            "--work-dtype": self.work_dtype,
            "--state-dtype": self.state_dtype,
        }
        return tuple(word for option, value in values.items() if value for word in (option, value))

    def case(self, seed: int, number: int) -> SweepCase:
        """Case `number` of a seed, the same however many are run. Raises ShapeError for heads nobody serves."""
        fixed: dict[str, Any] = {"work_dtype": self.work_dtype, "state_dtype": self.state_dtype}
        if self.model or self.heads or self.head_dims:
            base = model_geometry(self.model) if self.model else random_heads(seed, number)
            counts = self.heads or (base.num_key_heads, base.num_value_heads)
            dims = self.head_dims or (base.key_head_dim, base.value_head_dim)
            fixed["heads"] = HeadGeometry(*counts, *dims)
        return random_case(seed, number, **{name: value for name, value in fixed.items() if value})


class _VerifyCommand(click.Command):
    """The command, with the list of checks in its help."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, checks in (
            ("Checks of the recurrence", CHECKS),
            ("Checks of chunked prefill", CHUNKED_CHECKS),
            ("Checks of the ring and the fold", RING_CHECKS),
            ("Checks of pending records", PENDING_CHECKS),
            ("Checks of the convolution", CONV1D_CHECKS),
            ("Checks of the gates", GATES_CHECKS),
            ("Checks of steps of the whole layer", STEPS_CHECKS),
        ):
            with formatter.section(title):
                formatter.write_dl(
                    [(name, _first_line(check).removeprefix(f"{name}: ")) for name, check in checks.items()]
                )


def _first_line(documented: object) -> str:
    return (documented.__doc__ or "").partition("\n")[0]


_CASE = Name(
    "case",
    SWEEP_CASES,
    also=lambda name: random_case_numbers(name) is not None,
    more=" (--list shows all; random-SEED-NUMBER is a random one)",
)


@click.command(cls=_VerifyCommand)
@click.option(
    "--case",
    "case_names",
    type=_CASE,
    multiple=True,
    metavar="NAME",
    help="Run this case instead of the default ones; repeatable. random-SEED-NUMBER is a random case.",
)
@click.option(
    "--backend",
    "backend_names",
    type=Name("backend", BACKENDS),
    multiple=True,
    metavar="NAME",
    help=f"Run on this backend ({', '.join(BACKENDS)}) instead of all that this machine can run; repeatable.",
)
@click.option(
    "--cases",
    "num_random_cases",
    type=click.IntRange(min=0),
    metavar="N",
    help=f"How many random cases to run: {DEFAULT_RANDOM_CASES} unless given, none with --case.",
)
@click.option(
    "--seed",
    type=click.IntRange(0, _MAX_SEED),
    default=0,
    show_default=True,
    metavar="S",
    help="Draw the random cases from this seed. Case i of a seed is the same whatever N is.",
)
@click.option("--model", type=Name("model", MODELS), metavar="NAME", help="Heads as in this model.")
@heads_options("Key and value heads; with --model in place of the model's, as a tensor-parallel shard has them.")
@click.option("--work-dtype", type=Name("type", KERNEL_TYPE), metavar="TYPE", help="Type of queries, keys and values.")
@click.option("--state-dtype", type=Name("type", KERNEL_TYPE), metavar="TYPE", help="Type of the pool.")
@click.option("--fail-fast", is_flag=True, help="Stop at the first case that fails.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help=f"Cases to run side by side. Unless given: one with cuda, else one for each CPU up to {_MAX_WORKERS}.",
)
@click.option("--list", "list_only", is_flag=True, help="Describe the cases instead of running them.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON alone on standard output.")
@click.pass_context
def verify(
    ctx: click.Context,
    /,
    case_names: tuple[str, ...],
    backend_names: tuple[str, ...],
    num_random_cases: int | None,
    seed: int,
    fail_fast: bool,
    workers: int | None,
    list_only: bool,
    as_json: bool,
    **fixed: Any,
) -> None:
    """Check every backend of this machine against the float64 oracle and against the exact promises.

    The named cases come first, then random ragged batches drawn from a seed.

    --model, --heads, --head-dims, --work-dtype and --state-dtype say what random cases look like; what is not
    given is drawn. Named cases are what they are, so with one of these options they are left out, unless --case
    asks for them.
    """
    random_choice = RandomChoice(**fixed)
    cases = select_cases(case_names, num_random_cases, seed, random_choice)
    if list_only:
        show_cases(cases, as_json)
        return
    backends, unavailable = select_backends(backend_names)
    run = Run(cases, backends, unavailable, random_choice.options, ctx.command_path)
    if not as_json:
        show_backends(run)
    sweep(run, workers or default_workers(backends), fail_fast)
    if as_json:
        report.print_json(as_document(run))
    else:
        show_results(run)
    ctx.exit(run.exit_code)


def select_cases(
    case_names: Sequence[str], num_random_cases: int | None, seed: int, random_choice: RandomChoice
) -> list[SweepCase]:
    """The cases that the options ask for. Raises UsageError where that is none."""
    cases: dict[str, SweepCase] = {}
    if not case_names and not random_choice.options:
        cases.update(SWEEP_CASES)
    for name in case_names:
        numbers = random_case_numbers(name)
        case = random_choice.case(*numbers) if numbers else SWEEP_CASES[name]
        cases[case.name] = case
    if num_random_cases is None:
        num_random_cases = 0 if case_names else DEFAULT_RANDOM_CASES
    for number in range(num_random_cases):
        case = random_choice.case(seed, number)
        cases[case.name] = case
    if not cases:
        raise click.UsageError("no case to run: --cases 0 leaves no random ones")
    if random_choice.options and not any(random_case_numbers(name) for name in cases):
        raise click.UsageError(f"{random_choice.options[0]} is for random cases, and none is asked for: add --cases N")
    return list(cases.values())


def select_backends(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The backends to run, and why others cannot. Raises UsageError where one that is asked for cannot."""
    unavailable = gdn.unavailable_backends()
    for name in names:
        if name in unavailable:
            raise click.UsageError(f"backend {name} cannot run here: {unavailable[name]}")
    wanted = names or [name for name in BACKENDS if name not in unavailable]
    return [name for name in BACKENDS if name in wanted], unavailable


def default_workers(backends: Sequence[str]) -> int:
    """One worker for each CPU that this process may use; one alone where a GPU is among the backends.

    A fault on a GPU is reported by whichever call waits for it next, which must be one of the same case.
    """
    if "cuda" in backends:
        return 1
    usable = getattr(os, "sched_getaffinity", None)
    num_cpus = len(usable(0)) if usable else os.cpu_count() or 1
    return min(num_cpus, _MAX_WORKERS)


def sweep(run: Run, workers: int, fail_fast: bool) -> None:
    """Fill in the results. After Ctrl-C the finished ones stay."""
    start = time.perf_counter()
    total = len(run.cases) * len(run.backends)
    try:
        with (
            report.progress("gdn verify", total) as advance,
            closing(run_sweep(run.cases, run.backends, workers=workers)) as results,
        ):
            for result in results:
                run.results.append(result)
                advance(f"{result.case.name} on {result.backend}")
                if fail_fast and not result.passed:
                    break
    except KeyboardInterrupt:
        run.interrupted = True
    run.seconds = time.perf_counter() - start

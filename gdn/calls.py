"""How ops run: a call is checked, made ready and run at once, or kept with its arrays to be run many times."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from gdn import arrays, plans
from gdn.arrays import Argument
from gdn.backends import backend_for_numpy_arrays, cuda, host, row_tile
from gdn.backends.launch import Launch


@dataclass(frozen=True, slots=True)
class Ready:
    """A call that lacks nothing but to be run.

    arguments: its arrays in the order of the call, None for one left out. written: those of them that it writes.
    numpy_form: what runs it on the backend numpy. launches: its kernels on the others, in order. idle: whether it has
    nothing to do. result: what the op returns.
    """

    arguments: tuple[Argument | None, ...]
    written: tuple[Argument, ...]
    numpy_form: Callable[[], None]
    launches: Callable[[], Sequence[Launch]]
    idle: bool
    result: Any = None


@dataclass(frozen=True, slots=True)
class Checked:
    """A call whose arrays keep every rule about shapes, types, layout and places.

    check_values: looks at the values of its index arrays. ready: decides the grid and makes a readout not given.
    """

    place: str
    check_values: Callable[[], None]
    ready: Callable[[], Ready]


#: The rules of an op: takes what the op takes, in the order of its signature, and raises what breaks a rule.
Rules = Callable[..., Checked]


def run(rules: Rules, *given: Any) -> Any:
    """Check a call and run it. On CuPy arrays, what was checked of a call of the same kind is not checked again.

    Returns what the op does; for an op that returns nothing, anything.
    """
    seen = arrays.signature(given)
    return (BoundCall(rules, given) if seen is None else _of_kind(rules, given, *seen))()


def made_ready(rules: Rules, *given: Any) -> Callable[[], Any]:
    """What runs a call, once all that can be refused of it was not: it is checked, compiled, and has its output.

    Raises what `run` would. What is returned runs the call once, and returns what `run` would.
    """
    seen = arrays.signature(given)
    if seen is not None:
        return _of_kind(rules, given, *seen)
    bound = BoundCall(rules, given)
    bound.prepare_for_cpu()
    return bound


def _of_kind(
    rules: Rules, given: Sequence[Any], metadata: Sequence[Any], addresses: Sequence[int]
) -> Callable[[], Any]:
    """What runs a call on CuPy arrays: by the plan of its kind, or, where there is none, making one."""
    kind = _kind(rules, metadata)
    plan = plans.find(kind)
    if plan is not None and plan.takes(addresses):
        return partial(_run_plan, plan, addresses, given[-1])  # an op that returns its readout takes it last
    return partial(_run_and_keep, BoundCall(rules, given), kind, given)


def _run_plan(plan: plans.Plan, addresses: Sequence[int], result: Any) -> Any:
    plan.run(addresses)
    return result


def _run_and_keep(bound: BoundCall, kind: Hashable, given: Sequence[Any]) -> Any:
    result = bound()
    bound.keep_plan(kind, given)
    return result


def warmup(rules: Rules, *given: Any) -> None:
    """Check a call, compile it and keep a plan for others of its kind; nothing is run or written.

    Raises what the op would, but for index values.
    """
    bound = BoundCall(rules, given)
    bound.compile_for_cpu()
    seen = arrays.signature(given)
    if seen is not None:
        bound.keep_plan(_kind(rules, seen[0]), given)


def _kind(rules: Rules, metadata: Sequence[Any]) -> Hashable:
    """What calls have in common that take one plan."""
    return (rules, row_tile.forced(), *metadata)


class BoundCall:
    """A call bound to its arrays and checked, to be run as often as it is called; `gdn.ops.bind` makes one."""

    def __init__(self, rules: Rules, given: Sequence[Any]) -> None:
        """Check the call, and compile it for a GPU. Raises what the op would, but for index values."""
        checked = rules(*given)
        if checked.place != arrays.CPU:
            cuda.require_device(arrays.device_index(checked.place))
        self._ready = checked.ready()
        self._on_gpu: tuple[cuda.ReadyLaunch, ...] = ()
        if checked.place != arrays.CPU and not self._ready.idle:
            device = arrays.device_index(checked.place)
            self._on_gpu = tuple([cuda.ReadyLaunch(launch, device) for launch in self._ready.launches()])
        self._run = _runner(checked, self._ready, self._on_gpu)
        self._result = self._ready.result
        self._place, self._check_values = checked.place, checked.check_values

    def __call__(self) -> Any:
        """Run the call on what its arrays hold now; returns what the op would."""
        self._run()
        return self._result

    def compile_for_cpu(self) -> None:
        """Compile what binding does not: the kernels of a call on NumPy arrays, where the backend host is to run it."""
        if self._place == arrays.CPU and not self._ready.idle and backend_for_numpy_arrays() == "host":
            for launch in self._ready.launches():
                host.load(launch.variant)

    def prepare_for_cpu(self) -> None:
        """The same, and look at the index values that a run on NumPy arrays would refuse."""
        if self._place == arrays.CPU:
            self._check_values()
        self.compile_for_cpu()

    def keep_plan(self, kind: Hashable, given: Sequence[Any]) -> None:
        """Make a plan of this call on a GPU, which is of this kind and was given these arrays."""
        arguments = self._ready.arguments
        makes_a_readout = any(
            value is None and argument is not None for value, argument in zip(given, arguments, strict=True)
        )
        if self._on_gpu and not makes_a_readout:
            plans.keep(kind, self._on_gpu, arguments, self._ready.written)


def _runner(checked: Checked, ready: Ready, on_gpu: Sequence[cuda.ReadyLaunch]) -> Callable[[], None]:
    """What runs the call where its arrays are; for NumPy arrays on the backend that is chosen here and now."""
    if checked.place != arrays.CPU:
        return on_gpu[0] if len(on_gpu) == 1 else partial(_run_all, on_gpu)
    if ready.idle:
        compute: Callable[[], None] = _nothing
    elif backend_for_numpy_arrays() == "host":
        compute = partial(_run_on_host, ready.launches())
    else:
        compute = ready.numpy_form

    def check_and_compute() -> None:
        checked.check_values()
        compute()

    return check_and_compute


def _run_all(runs: Sequence[Callable[[], None]]) -> None:
    for run in runs:
        run()


def _run_on_host(launches: Sequence[Launch]) -> None:
    if len(launches) > 1:  # what does not compile is refused before the first of them writes
        for launch in launches:
            host.load(launch.variant)
    for launch in launches:
        host.run(launch)


def _nothing() -> None:
    """What a call without sequences and tokens does."""

"""What `gdn soak` has to show: the run, its verdict, a line for each form of the loop and kind of memory, JSON."""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.text import Text

import gdn
from gdn.cli import report
from gdn.cli.report import Column
from gdn.testing.soak import FORMS, Checkpoint, Growth, SoakCase, growth


@dataclass(slots=True)
class SoakRun:
    """What is run and what came of it so far. command: how `gdn soak` was called, without options."""

    case: SoakCase
    backend: str
    num_steps: int
    command: str
    checkpoints: list[Checkpoint] = field(default_factory=list)
    seconds: float = 0.0
    interrupted: bool = False
    error: str | None = None

    @property
    def num_checkpoints(self) -> int:
        """Checkpoints of the whole run."""
        return -(-self.num_steps // self.case.steps_to_checkpoint)

    @property
    def steps_done(self) -> int:
        """Steps up to the last checkpoint."""
        return self.checkpoints[-1].num_steps if self.checkpoints else 0

    @property
    def failures(self) -> tuple[str, ...]:
        """What is wrong with the last checkpoint, or came up behind it; there the run stopped."""
        found = self.checkpoints[-1].failures if self.checkpoints else ()
        return found if self.error is None else (*found, self.error)

    @property
    def memory(self) -> list[Growth]:
        """How memory grew."""
        return growth(self.checkpoints)

    @property
    def exit_code(self) -> int:
        """0 only where all steps were run, everything was right and memory flat."""
        if self.interrupted:
            return 130
        is_right = not self.failures and all(grown.passed for grown in self.memory)
        return 0 if is_right and self.steps_done == self.num_steps else 1

    @property
    def reproduction(self) -> str:
        """The one command that runs to where this run ended again."""
        case, heads = self.case, self.case.heads
        next_one = self.steps_done + case.steps_to_checkpoint
        options = {
            "--backend": self.backend,
            "--steps": self.steps_done if self.error is None else min(next_one, self.num_steps),
            "--seed": case.seed,
            "--checkpoint": case.steps_to_checkpoint,
            "--rows": case.num_rows,
            "--layers": case.num_layers,
            "--ring-len": case.ring_len,
            "--heads": f"{heads.num_key_heads},{heads.num_value_heads}",
            "--head-dims": f"{heads.key_head_dim},{heads.value_head_dim}",
            "--work-dtype": case.work_dtype,
        }
        return f"{self.command} {shlex.join(str(word) for option in options.items() for word in option)}"


def show_head(run: SoakRun) -> None:
    """Print what is about to run."""
    case, heads = run.case, run.case.heads
    what = (
        f"gdn {gdn.__version__}: {run.num_steps} steps of {case.num_rows} rows in {case.num_layers} layers on "
        f"{run.backend}, {heads.num_key_heads},{heads.num_value_heads} heads of "
        f"{heads.key_head_dim},{heads.value_head_dim}, {case.work_dtype}, windows of up to {case.ring_len + 1} tokens, "
        f"ring of {case.ring_len}"
    )
    console = report.output()
    report.print_indented(console, what, indent=0)
    console.print()


def show_results(run: SoakRun) -> None:
    """Print what each form did, memory, the failure and the summary."""
    console = report.output()
    if run.checkpoints:
        columns = (Column("form"), Column("checkpoints", right=True), Column("compared", right=True), Column("verdict"))
        report.print_table(console, columns, [_form_row(run, form) for form in FORMS])
        console.print()
    for grown in run.memory:
        verdict = "flat" if grown.passed else "GROWS"
        text = f"{grown.kind} memory: {report.size(grown.warm)} warm, then {report.size(grown.most)}: {verdict}"
        report.print_indented(console, text, indent=0)
    if not run.memory:
        report.print_indented(console, "memory: not judged, in a run of this few checkpoints", indent=0)
    for message in run.failures:
        report.print_indented(console, message, indent=0)
    if run.exit_code == 1:
        report.print_command(console, "reproduce:", run.reproduction)
    report.print_verdict(console, _summary(run), passed=run.exit_code == 0)


def _form_row(run: SoakRun, form: str) -> tuple[str | Text, ...]:
    of_form = [checkpoint for checkpoint in run.checkpoints if checkpoint.form == form]
    compared = sum(len(checkpoint.comparisons) for checkpoint in of_form)
    is_right = not any(checkpoint.failures for checkpoint in of_form)
    verdict = Text("ok", "green") if is_right else Text("FAILED", "bold red")
    return form, str(len(of_form)), str(compared), verdict if of_form else "-"


def _summary(run: SoakRun) -> str:
    if run.interrupted:
        verdict = "INTERRUPTED"
    elif run.failures:
        verdict = "FAILED"
    elif run.exit_code:
        verdict = "FAILED: memory grows"
    else:
        verdict = "all right"
    num_tokens = run.checkpoints[-1].num_tokens if run.checkpoints else 0
    compared = sum(len(checkpoint.comparisons) for checkpoint in run.checkpoints)
    return (
        f"{verdict}: {run.steps_done} of {run.num_steps} steps on {run.backend}, {num_tokens} tokens accepted in each "
        f"layer, {compared} comparisons in {run.seconds:.1f} s"
    )


def as_document(run: SoakRun) -> dict[str, Any]:
    """The run for machines."""
    return {
        "gdn": gdn.__version__,
        "passed": run.exit_code == 0,
        "interrupted": run.interrupted,
        "backend": run.backend,
        "case": asdict(run.case),
        "num_steps": run.num_steps,
        "steps_done": run.steps_done,
        "num_tokens": run.checkpoints[-1].num_tokens if run.checkpoints else 0,
        "num_comparisons": sum(len(checkpoint.comparisons) for checkpoint in run.checkpoints),
        "seconds": round(run.seconds, 3),
        "failures": run.failures,
        "memory": [{**asdict(grown), "passed": grown.passed} for grown in run.memory],
        "checkpoints": [
            {"num_steps": point.num_steps, "form": point.form, "memory": dict(point.memory)}
            for point in run.checkpoints
        ],
        "reproduce": run.reproduction,
    }

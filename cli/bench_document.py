"""What `gdn bench` has found as JSON, for machines and for --compare."""

from __future__ import annotations

from datetime import date
from typing import Any

import gdn
from gdn.bench.measure import Row
from gdn.cli.bench_run import BenchRun


def as_document(run: BenchRun) -> dict[str, Any]:
    """The run for machines, and for --compare."""
    return {
        "gdn": gdn.__version__,
        "date": date.today().isoformat(),
        "machine": run.facts,
        "ceilings_gb_s": {
            backend: {"copy": ceilings.copy_gb_s, "read": ceilings.read_gb_s}
            for backend, ceilings in run.ceilings.items()
        },
        "passed": run.exit_code == 0,
        "interrupted": run.interrupted,
        "backends": list(run.backends),
        "unavailable_backends": run.unavailable,
        "absent_peers": run.absent_peers,
        "python_overhead_us": {op: overhead.op_us for op, overhead in run.overhead.items()},
        "bound_overhead_us": {op: overhead.bound_us for op, overhead in run.overhead.items()},
        "compared_with": None if run.baseline is None else run.baseline.title,
        "fail_above": run.fail_above,
        "rows": [_row_document(run, row) for row in run.rows],
    }


def _row_document(run: BenchRun, row: Row) -> dict[str, Any]:
    heads, call, timing, speedup = row.case.heads, row.case.call, row.timing, run.speedup(row)
    return {
        "key": row.key,
        "by": row.by,
        "regime": row.case.regime,
        "algorithm": row.case.algorithm,
        "shape": call.name,
        "heads": [heads.num_key_heads, heads.num_value_heads],
        "head_dims": [heads.key_head_dim, heads.value_head_dim],
        "batch": row.case.batch_size,
        "ring_len": row.case.ring_len,
        "num_pending": None if row.case.loop else row.case.pending,
        "form": row.case.form,
        "accept": row.case.loop and row.case.loop.accept,
        "work_dtype": call.work_dtype,
        "state_dtype": None if row.case.regime == "gates" else call.state_dtype,
        "slots": row.case.slots,
        "cold": row.is_cold,
        "num_sets": row.num_sets,
        "checked": row.checked,
        "failed": row.failed,
        "problem": row.problem,
        "bytes": row.num_bytes,
        "us": timing and timing.us.median_us,
        "p10_us": timing and timing.us.p10_us,
        "p90_us": timing and timing.us.p90_us,
        "num_samples": timing and timing.us.num_samples,
        "parts_us": timing and timing.parts_us,
        "gb_per_s": timing and timing.gb_per_s,
        "attainable_us": timing and timing.attainable_us,
        "percent": timing and timing.percent,
        "tokens_per_s": timing and timing.tokens_per_s,
        "gflop_per_s": timing and timing.gflop_per_s,
        "ratio": run.ratio(row),
        "speedup": speedup and {"over": speedup[0], "times": speedup[1]},
    }

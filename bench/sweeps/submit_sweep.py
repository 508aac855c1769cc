"""Submit a sweep to SLURM, or show what would be submitted."""

from __future__ import annotations

import contextlib

from bench.launch.slurm import submissions
from bench.launch.slurm.launcher import SlurmLauncher
from bench.planning.planned_runs import write_skipped_rows
from bench.planning.run_predictions import predict_configs
from bench.sweeps.planned_sweep import PlannedSweep
from bench.sweeps.submission_tables import build_arrays_table, build_submission_text, list_scripts


def submit_sweep(sweep: PlannedSweep, launcher: SlurmLauncher) -> int:
    """Submit what is to run and come back at once; a dry run only shows what would be submitted.

    Raises
    ------
    UsageError
        If SLURM refuses a job, or cannot be asked.
    """
    request, plan, console = sweep.request, sweep.plan, sweep.console
    with contextlib.ExitStack() as stack:
        if not request.dry_run:  # what is queued must not change between looking and submitting
            stack.enter_context(submissions.hold_submission_lock(request.store))
        sweep.set_aside_submitted()
        run_predictions = sweep.predict_plan()
        tasks = sweep.build_tasks()
        predict_configs([task.config for task in tasks])  # all at once: each array asks for its own
        submission_name = submissions.create_submission_name()
        batches = launcher.plan_arrays(tasks, request.store, submission_name)
        arrays = [batch.array for batch in batches]
        sweep.show_plan(run_predictions)
        if batches:
            console.print(build_arrays_table(launcher, arrays))
        if request.show_script:
            for text in list_scripts(launcher, batches, request.store, submission_name):
                print(text)
        launcher.refuse_rejected_arrays(arrays, request.store, submission_name)
        if request.dry_run:
            return 0
        write_skipped_rows(request, plan, "slurm")
        if batches:
            submission = launcher.submit(batches, request.store, request.sweep, submission_name, request.tracker)
            console.print(build_submission_text(submission, request.store), soft_wrap=True)
    sweep.send_attempts(excluded_run_ids={task.config.run_id for task in tasks})
    return 0

"""Dispatches each command to the code that carries it out."""

from __future__ import annotations

from triaccel_ray.service import jobs
from triaccel_ray.service.cli import arguments
from triaccel_ray.service.cli.spec_builder import replayed_control
from triaccel_ray.service.commands import ui
from triaccel_ray.service.commands.doctor import show_findings
from triaccel_ray.service.commands.next_steps import print_next_steps
from triaccel_ray.service.commands.replay import reasons_table, verdict
from triaccel_ray.service.commands.train import carry_out
from triaccel_ray.service.console import out, rich_table
from triaccel_ray.service.locations import find, find_run, tracker_of
from triaccel_ray.service.report.report import show
from triaccel_ray.service.report.view import view_at
from triaccel_ray.service.runs.record import read_run
from triaccel_ray.trainables.registry import TASKS, load_task


def execute(command: arguments.Command) -> int:
    """Carries out one command and returns its exit status."""
    match command:
        case arguments.TrainingCommand() | arguments.Resume():
            outcome = carry_out(command, show=show)
            if outcome.view is not None:
                print_next_steps(outcome.context.place, outcome.context.where)
            return int(not outcome.is_complete)
        case arguments.Report():
            show(view_at(find(command.name, command.where)))
        case arguments.Replay():
            run = read_run(find_run(command.name, command.where))
            lines = list(verdict(run, replayed_control(command, run.start.control)))
            out.print(rich_table(reasons_table(run, max_rows=command.reasons)))
            out.print("\n".join(lines), soft_wrap=True)
        case arguments.Ui():
            return ui.show(tracker_of(command.where), command.host, command.port)
        case arguments.Doctor(tasks=False, where=where):
            return show_findings(where)
        case arguments.Doctor():
            for name in TASKS:
                task = load_task(name, None)
                out.print(f"{name:40} {task.recipe.epochs} epochs, batch {task.control.batch.start}, {task.goal.words}")
        case arguments.Submit():
            jobs.submit(command.words, name=command.name, address=command.address)
        case arguments.Jobs():
            jobs.list_jobs(address=command.address)
        case arguments.Logs():
            return jobs.show_logs(command.job, follow=command.follow, address=command.address)
        case arguments.Stop():
            jobs.stop(command.job, address=command.address)
    return 0

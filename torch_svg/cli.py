"""The command `torch-svg`, also `python -m torch_svg`."""

import argparse
import json
import sys
from dataclasses import asdict

from .doctor import diagnose
from .families import catalogue
from .running import add_command as _add_run


def main(arguments=None):
    """Run one sub-command; the exit status is 0 when all is well, 1 when a fault was found, 2 for a wrong call."""
    parser = argparse.ArgumentParser(prog="torch-svg", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (_add_doctor, _add_models, _add_run):
        add(commands)
    options = parser.parse_args(arguments)
    return options.run(options)


def _add_doctor(commands):
    doctor = commands.add_parser(
        "doctor",
        help="check versions and device, and say what is wrong and what mends it",
        description="Checks the installed versions against the tested ones and tries a kernel on the device.",
    )
    doctor.add_argument("--json", action="store_true", help="print everything as JSON")
    doctor.set_defaults(run=_run_doctor)


def _run_doctor(options):
    diagnosis = diagnose()
    if options.json:
        print(json.dumps(diagnosis.as_dict(), indent=2))
    elif sys.stdout.isatty():
        _show_rich(diagnosis)
    else:
        _show_plain(diagnosis)
    return 1 if diagnosis.faults else 0


def _package_rows(diagnosis):
    for package in diagnosis.packages:
        yield (
            package.name,
            package.found or "none",
            package.tested,
            "ok" if package.fits else "differs" if package.found else "missing",
        )


def _device_line(diagnosis):
    device = diagnosis.device
    if "error" in device:
        return f"none: {device['error']}"
    kernel = "a Pallas kernel runs" if device["kernel"] else "a Pallas kernel gives wrong numbers"
    return f"{device['count']} x {device['type']}, {kernel} ({diagnosis.tpu_chips} TPU chips on this machine)"


def _show_plain(diagnosis):
    print(f"python {diagnosis.python}")
    for row in _package_rows(diagnosis):
        print("{:14}{:12}{:18}{}".format(*row).rstrip())
    print(f"device: {_device_line(diagnosis)}")
    for patch in diagnosis.patches:
        print(f"patch {patch['name']} ({'applies' if patch['fits'] else 'untested version'}): {patch['what']}")
    for fault in diagnosis.faults:
        print(f"wrong: {fault.problem}\n  mend: {fault.command}")
    if not diagnosis.faults:
        print("all is as tested")


def _show_rich(diagnosis):
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    packages = Table("package", "found", "tested", "", title=f"torch_svg on Python {diagnosis.python}")
    for name, found, tested, verdict in _package_rows(diagnosis):
        packages.add_row(name, found, tested, f"[{'green' if verdict == 'ok' else 'yellow'}]{verdict}[/]")
    console.print(packages)
    console.print(f"[bold]device[/] {escape(_device_line(diagnosis))}", highlight=False)
    patches = Table("patch", "", "what it mends", title="patches of pinned upstreams (torch_svg.patches.apply)")
    for patch in diagnosis.patches:
        fits = "[green]applies[/]" if patch["fits"] else "[yellow]untested version[/]"
        patches.add_row(patch["name"], fits, escape(patch["what"]))
    console.print(patches)
    for fault in diagnosis.faults:
        console.print(
            f"[red]wrong[/] {escape(fault.problem)}\n  mend: [bold]{escape(fault.command)}[/]", highlight=False
        )
    if not diagnosis.faults:
        console.print("[green]all is as tested[/]")


def _add_models(commands):
    models = commands.add_parser(
        "models",
        help="list the video transformers of diffusers that are served, and why the others are not",
        description="The registry of transformers: what is served, where text stands, what becomes of padding.",
    )
    form = models.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print everything as JSON")
    form.add_argument("--markdown", action="store_true", help="print the tables of docs/models.md")
    models.set_defaults(run=_run_models)


def _run_models(options):
    entries = catalogue()
    if options.json:
        print(json.dumps([asdict(entry) for entry in entries], indent=2))
    elif options.markdown:
        print(models_markdown(entries))
    elif sys.stdout.isatty():
        _show_models_rich(entries)
    else:
        _show_models_plain(entries)
    return 0


def models_markdown(entries):
    """The tables of docs/models.md; a test holds them against the registry."""
    served = [
        (
            f"{entry.transformer} ({entry.models})",
            ", ".join(map(str, entry.head_dims)),
            "; ".join(part for part in (entry.text, entry.others) if part),
            entry.masks,
            entry.grid,
            "; ".join(part for part in (entry.note, _tested(entry)) if part),
        )
        for entry in entries
        if entry.sparse == "yes"
    ]
    others = [(entry.transformer, entry.reason) for entry in entries if entry.sparse != "yes"]
    header = ("class", "head_dim", "text, and other tokens", "padding", "grid comes from", "note")
    return "\n".join([*_markdown(header, served), "", "Not served:", "", *_markdown(("class", "why"), others)])


def _tested(entry):
    return f"{', '.join(entry.pipelines)} tested whole" if entry.pipelines else ""


def _markdown(header, rows):
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return [lines[0], "|" + "---|" * len(header), *lines[1:]]


_MODEL_COLUMNS = ("class", "family", "sparse", "head_dim", "text", "padding", "tested pipeline")


def _model_row(entry):
    return (
        entry.transformer,
        entry.family or "-",
        entry.sparse,
        ", ".join(map(str, entry.head_dims)) or "-",
        entry.text or "-",
        entry.masks or "-",
        ", ".join(entry.pipelines) or "-",
    )


def _remarks(entries):
    """(class, what else there is to say) of every entry that has something."""
    for entry in entries:
        remarks = [part for part in (entry.reason, entry.others, entry.note) if part]
        if remarks:
            yield entry.transformer, "; ".join(remarks)


def _show_models_plain(entries):
    rows = [_MODEL_COLUMNS, *map(_model_row, entries)]
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    for row in rows:
        print("".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    print()
    for name, remark in _remarks(entries):
        print(f"{name}: {remark}")


def _show_models_rich(entries):
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(*_MODEL_COLUMNS, title="video transformers of diffusers")
    for entry in entries:
        name, family, sparse, *rest = map(escape, _model_row(entry))
        table.add_row(name, family, f"[{'green' if entry.sparse == 'yes' else 'yellow'}]{sparse}[/]", *rest)
    console.print(table)
    for name, remark in _remarks(entries):
        console.print(f"[bold]{name}[/] {escape(remark)}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())

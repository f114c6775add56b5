"""The command `torch-svg`, also `python -m torch_svg`."""

import argparse
import json
import sys

from .doctor import diagnose


def main(arguments=None):
    """Run one sub-command; the exit status is 0 when all is well, 1 when a fault was found, 2 for a wrong call."""
    parser = argparse.ArgumentParser(prog="torch-svg", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_doctor(commands)
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


if __name__ == "__main__":
    sys.exit(main())

"""The command line: `harbor-trl check`, `harbor-trl index`, `harbor-trl clean`."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from harbor_trl import _native
from harbor_trl.errors import HarborTrlError

if TYPE_CHECKING:
    from harbor_trl.checks import Finding
    from harbor_trl.suite import Suite

#: Exit codes.
FINE, FINDINGS, USAGE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Those behind the program's name; default: `sys.argv`.

    Returns:
        The exit code: 0 fine, 1 findings, 2 usage; 128 + the signal's number when a signal ended it.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has seen enough; what Python flushes at its end would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (HarborTrlError, OSError) as error:
        print(f"harbor-trl: {error}", file=sys.stderr)
        return USAGE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="harbor-trl", description="Look at suites of Harbor tasks.")
    parser.add_argument("--version", action="version", version=f"harbor-trl {_native.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    check = commands.add_parser("check", help="name each task that Harbor would refuse or that cannot be built")
    check.add_argument("path", metavar="PATH", help="a suite, or a single task")
    check.add_argument("--json", action="store_true", help="one JSON object a finding and line")
    check.add_argument("--backend", metavar="B", help="environment_type that the tasks are to run on")
    check.set_defaults(run=_check)

    index = commands.add_parser(
        "index",
        help="the table that HarborSpec.train_dataset has",
        description="The table that HarborSpec.train_dataset has, without the tasks that Harbor would refuse or that "
        "cannot be built: those are named on standard error.",
    )
    index.add_argument("path", metavar="PATH", help="a suite, or a single task")
    form = index.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="one JSON object a task and line")
    form.add_argument("--parquet", metavar="FILE", help="write the table to a Parquet file")
    index.set_defaults(run=_index)

    clean = commands.add_parser("clean", help="remove what harbor-trl runs that are over left in Docker")
    clean.add_argument("--json", action="store_true", help="one JSON object a removed thing and line")
    clean.add_argument("--images", action="store_true", help="also the images that rollouts of later runs would share")
    clean.set_defaults(run=_clean)
    return parser


def _check(options: argparse.Namespace) -> int:
    from harbor_trl.checks import iter_findings, require_tasks

    suite = _open(options.path)
    require_tasks(suite)
    counts: Counter[tuple[str, str]] = Counter()
    with_any: dict[str, set[str | None]] = {"error": set(), "warning": set()}
    paint = _painter()
    with _progress("Checking tasks") as progress:
        for finding in iter_findings(suite, backend=options.backend, progress=progress):
            counts[finding.severity, finding.code] += 1
            with_any[finding.severity].add(finding.task_id)
            if options.json:
                print(json.dumps(dataclasses.asdict(finding), ensure_ascii=False))
            else:
                print(_readable(finding, paint))
    if not options.json:
        if counts:
            print()
        for (severity, code), count in sorted(counts.items(), key=lambda item: (item[0][0], -item[1], item[0][1])):
            print(f"{count:7,}  {paint(f'{severity:7}', severity)}  {code}")
        errors, warnings = (found - {None} for found in with_any.values())
        print(
            f"{_number(len(suite), 'task')}: {len(suite) - len(errors | warnings):,} without a finding, "
            f"{len(errors):,} with errors, {len(warnings):,} with warnings"
        )
    return FINDINGS if counts else FINE


def _readable(finding: Finding, paint: Callable[[str, str], str]) -> str:
    place = "".join(f":{number}" for number in (finding.line, finding.column) if number)
    file, message = _on_one_line(finding.file), _on_one_line(finding.message)
    severity = paint(finding.severity, finding.severity)
    return f"{file}{place}: {severity}: {message} [{finding.code}]\n    {finding.remedy}"


def _on_one_line(text: str) -> str:
    """With control characters escaped, as a name may hold them and a terminal obeys them."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _index(options: argparse.Namespace) -> int:
    from harbor_trl.checks import require_tasks, usable_tasks

    suite = _open(options.path, read=True)
    require_tasks(suite)
    found = usable_tasks(suite, None, None)
    if options.parquet is not None:
        from pyarrow import parquet

        parquet.write_table(found.table, options.parquet)
    elif options.json:
        for batch in found.table.to_batches(max_chunksize=1000):
            for row in batch.to_pylist():
                print(json.dumps(row, ensure_ascii=False, default=_plain))
    for task in found.broken:
        print(_on_one_line(str(task)), file=sys.stderr)
    if not options.json:
        for field in found.table.schema:
            missing = found.table.column(field.name).null_count
            note = f"  ({missing:,} null)" if missing else ""
            print(f"{field.name}: {field.type}{note}")
        left_out = "" if not found.broken else " and left out, as HarborSpec(on_invalid='skip') does"
        print(
            f"{_number(len(suite), 'task')}: {len(found.table):,} in the table, {len(found.broken):,} refused{left_out}"
        )
        if options.parquet is not None:
            print(f"written to {options.parquet}")
    return FINDINGS if found.broken else FINE


def _plain(value: Any) -> str:
    """Dates and times, which JSON has not."""
    return str(value.isoformat())


def _clean(options: argparse.Namespace) -> int:
    from harbor_trl.environments import leftovers

    removed = 0
    for thing in leftovers.remove(images=options.images):
        if thing.problem is None:
            removed += 1
        if options.json:
            print(json.dumps(thing._asdict(), ensure_ascii=False))
        elif thing.problem is None:
            print(f"removed {thing.kind} {thing.name}")
        else:
            print(f"kept {thing.kind} {thing.name}: {thing.problem}", file=sys.stderr)
    if not options.json:
        print(f"{_number(removed, 'thing')} removed")
    return FINE


def _open(path: str, *, read: bool = False) -> Suite:
    from harbor_trl.suite import open_suite

    return open_suite(path, read=read, progress=sys.stderr.isatty())


@contextlib.contextmanager
def _progress(title: str) -> Iterator[Callable[[int], object]]:
    from harbor_trl.suite import Progress

    with Progress(title, enabled=sys.stderr.isatty()) as bar:
        yield lambda done: bar.read(0, done)


def _painter() -> Callable[[str, str], str]:
    """Colours a word by its meaning, on a terminal only."""
    if not sys.stdout.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return lambda word, _: word
    colours = {"error": "31", "warning": "33"}
    return lambda word, meaning: f"\x1b[{colours[meaning]}m{word}\x1b[0m"


def _number(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


if __name__ == "__main__":
    sys.exit(main())

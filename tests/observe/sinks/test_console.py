"""What the console shows: plain lines without a terminal, a table with one; unknown figures read n/a."""

import io
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from observe.sinks.console import ROWS, ConsoleSink, header_line, plain_line

ROOT = Path(__file__).parents[3]
HEADER = {"model": "llama3_debug", "parameters": 4_700_000, "world_size": 2, "microbatch": 4, "accumulation": 2}
RECORD = {
    "step": 7,
    "loss": 3.14159,
    "lr": 1e-3,
    "grad_norm": 0.5,
    "tokens_per_second": 12345.6,
    "tokens_per_second_per_device": 6172.8,
    "mfu": None,
    "memory": {"process_peak": 3 * 2**29, "device_peak_reserved": None},
    "step_seconds": 0.5,
    "step_split": {"data": 0.05, "forward": 0.15, "backward": 0.2, "reduce": 0.05, "optimizer": 0.05, "other": 0.0},
}


def build_sink(terminal):
    stream = io.StringIO()
    return ConsoleSink(HEADER, Console(file=stream, force_terminal=terminal, width=150)), stream


def test_header_names_model_parameters_and_batch():
    assert header_line(HEADER) == "llama3_debug · parameters 4.7 M · world size 2 · microbatch 4 · accumulation 2"
    assert header_line({"folder": "/r", "model": "m", "parameters": None}) == "m · parameters n/a\nrun folder /r"


def test_plain_line_has_every_figure():
    assert plain_line(RECORD) == (
        "step 7 loss 3.1416 lr 1.00e-03 norm 0.500 tok/s 12,346 tok/s/dev 6,173 mfu n/a memory 1.50G "
        "sec 0.500 | data 10% forward 30% backward 40% reduce 10% optimizer 10% other 0%"
    )


def test_unknown_figures_read_na_and_never_zero():
    line = plain_line({"step": 1, "loss": None})
    assert "loss n/a" in line and "tok/s n/a" in line and "memory n/a" in line and " 0" not in line
    assert "mfu 41.2%" in plain_line({**RECORD, "mfu": 0.4123})


def test_without_a_terminal_one_line_per_record():
    sink, stream = build_sink(terminal=False)
    sink.step(RECORD)
    sink.evaluation(7, {"val_loss": 3.5})
    sink.event({"time": "t", "kind": "checkpoint", "step": 7, "blocked_seconds": 0.062174370999855455})
    sink.finish({"status": "done", "steps": 7, "loss": 3.1416, "val_loss": None, "sample": "a\nb", "folder": "/runs/x"})
    sink.close()
    lines = stream.getvalue().splitlines()
    assert lines[1].startswith("step 7 loss 3.1416")
    assert lines[2] == "step 7 val_loss 3.5000"
    assert lines[3] == "step 7 checkpoint: blocked seconds 0.0622"
    assert lines[5].startswith("done after step 7 · loss 3.1416 · held-out loss n/a")
    assert lines[7:9] == ["    a", "    b"] and lines[9].startswith("run folder /runs/x")
    assert "\x1b" not in stream.getvalue()


def test_brackets_in_an_event_are_text():
    sink, stream = build_sink(terminal=False)
    sink.event({"kind": "start", "changed": ["[bold]x[/y]"]})
    assert "[bold]x[/y]" in stream.getvalue()


def test_with_a_terminal_a_table_of_the_last_steps():
    sink, stream = build_sink(terminal=True)
    for step in range(1, 21):
        sink.step({**RECORD, "step": step})
    sink.evaluation(20, {"val_loss": 3.4567})
    sink.finish({})
    sink.close()
    picture = stream.getvalue().split("llama3_debug")[-1]
    assert "norm" in picture and "3.4567" in picture and "12,346" in picture
    # rich pads each row; the step stands first
    assert "time data 10% forward 30%" in picture
    shown = [line.split()[0] for line in picture.splitlines() if line.strip()[:2].isdigit()]
    assert shown == [str(step) for step in range(21 - ROWS, 21)]


def test_many_fast_steps_cost_few_redraws():
    sink, stream = build_sink(terminal=True)
    before = len(stream.getvalue())
    for step in range(1, 2001):
        sink.step({**RECORD, "step": step})
    size = len(stream.getvalue()) - before
    sink.close()
    assert size < 200 * 1500


def test_the_cursor_is_never_left_hidden():
    sink, stream = build_sink(terminal=True)
    sink.step(RECORD)
    # as if killed here
    assert stream.getvalue().rindex("\x1b[?25h") > stream.getvalue().rindex("\x1b[?25l")
    sink.close()
    sink.close()


def test_the_table_fits_into_80_characters():
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    sink = ConsoleSink(HEADER, console)
    sink.step({**RECORD, "step": 10000, "val_loss": 2.0, "mfu": 0.4, "tokens_per_second": 1234567.0})
    sink.close()
    picture = console.file.getvalue().split("llama3_debug")[-1]
    assert "…" not in picture and "1,234,567" in picture and "40.0%" in picture


def test_a_reader_that_leaves_does_not_end_the_program():
    code = (
        "import time; from observe.sinks.console import ConsoleSink\n"
        "sink = ConsoleSink({'model': 'm'}); time.sleep(0.5)\n"
        "try:\n    sink.step({'step': 1})\nexcept OSError as error:\n    print(error, file=sys.stderr)\n"
        "sink.step({'step': 2}); sink.close(); print('end', file=sys.stderr)"
    )
    command = f'{sys.executable} -c "import sys; {code}" | head -1 > /dev/null; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "nobody reads standard output any more\nend\n")

import io
import sys
import time

from rich.console import Console

from jaxspec.console import Display


def run(display: Display) -> None:
    with display:
        display.progress("loading", 1, 2)
        with display.waiting("compiling"):
            print("text")
        display.progress("loading", 2, 2)


def test_without_a_terminal_nothing_is_drawn(capsys):
    run(Display())
    assert capsys.readouterr() == ("text\n", "")


def test_on_a_terminal_stdout_stays_stdout(capsys):
    terminal = io.StringIO()
    stdout = sys.stdout
    run(Display(Console(file=terminal, force_terminal=True)))
    assert capsys.readouterr() == ("text\n", "")
    assert sys.stdout is stdout
    assert "loading" in terminal.getvalue()
    assert "compiling" in terminal.getvalue()


def test_what_was_left_undone_is_gone_at_the_end():
    terminal = io.StringIO()
    with Display(Console(file=terminal, force_terminal=True)) as display:
        display.progress("loading", 1, 2)
    drawn = len(terminal.getvalue())
    display.say("[bold] as it is")
    assert terminal.getvalue()[drawn:] == "[bold] as it is\n"


def test_lines_are_said_as_they_are(capsys):
    with Display() as display:
        display.say("[bold] " + 200 * "x")
    assert capsys.readouterr() == ("", "[bold] " + 200 * "x" + "\n")


def test_bytes_have_a_speed_and_a_time_left():
    """What an earlier run had done says nothing about the speed."""
    terminal = io.StringIO()
    console = Console(file=terminal, force_terminal=True, width=120)
    with Display(console) as display:
        for done in (600, 601, 602, 603):
            display.progress_bytes("converting", done * 10**9, 1000 * 10**9)
            time.sleep(0.02)
        assert display._progress is not None
        display._progress.refresh()
        (task,) = display._progress.tasks
        assert task.speed is not None and task.speed < 10**9 / 0.02
    assert "603.0 of 1000.0 GB" in terminal.getvalue()
    assert "MB/s, 0:00:" in terminal.getvalue()

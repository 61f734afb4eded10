"""Without a terminal a start speaks in lines."""

from __future__ import annotations

import re
import time

import pytest

from v4graph.cli.progress import progress_lines, show_progress


def test_lines_name_what_is_done_and_for_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_lines(quiet=False, interval_s=0.05) as show:
        show("load", 3, 30)
        time.sleep(0.12)
        show("compile", 2, 7, "decode of 8 tokens")
        time.sleep(0.12)
    out, err = capsys.readouterr()
    first, *between, last = err.splitlines()
    assert out == ""
    assert first.startswith("loading and compiling")
    assert re.fullmatch(r"loading weights: 3 of 30 done, \d+ s so far", between[0])
    told = r"compiling decode of 8 tokens: 2 of 7 done, \d+ s so far"
    assert re.fullmatch(told, between[-1])
    assert re.fullmatch(r"loaded and compiled after \d+\.\d s", last)


def test_a_quick_quiet_start_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(quiet=True) as show:
        show("compile", 1, 2)
    assert capsys.readouterr().err == ""


def test_a_slow_quiet_start_speaks(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_lines(quiet=True, interval_s=0.02):
        time.sleep(0.1)
    lines = capsys.readouterr().err.splitlines()
    assert lines
    assert all(line.endswith("s so far") for line in lines)


def test_a_start_that_fails_has_no_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="planted"), progress_lines(quiet=False):
        raise ValueError("planted")
    assert capsys.readouterr().err.count("\n") == 1

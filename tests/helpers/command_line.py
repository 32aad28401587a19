"""A command of ours in this process."""

from fst.cli import main


def run(capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as stop:  # the parser's own errors and --help
        code = int(stop.code or 0)
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err + captured.out
    return code, captured.out, captured.err

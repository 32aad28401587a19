"""The loss curves of `speed.py`'s section `agreement` as one picture, and what follows from them.

    python benchmarks/draw_agreement.py results/speed-h200/agreement.json docs/images/agreement.png

Each thin line is a training, averaged over windows of steps; the thick ones are the geometric means
of each path. Where the thin lines are apart, a rounding has been magnified.
"""

import argparse
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from speed import SECTIONS
from speed_agreement import PATHS, Agreement, smoothed, smoothing
from speed_resume import read_results

COLOURS = {"plain": "tab:orange", "fast": "tab:blue"}


def draw(axes: Axes, rows: list[dict]) -> None:
    """Losses against steps."""
    for name in PATHS:
        losses = [row["losses"] for row in rows if row["path"] == name]
        if not losses:
            continue
        width, curves = smoothing(losses[0]), [smoothed(each) for each in losses]
        steps = [width * (window + 0.5) for window in range(len(curves[0]))]
        for curve in curves:
            axes.plot(steps, curve.exp(), color=COLOURS[name], linewidth=0.6, alpha=0.6)
        mean = sum(curves[1:], curves[0]) / len(curves)
        label = f"{name}, {len(curves)} starts"
        axes.plot(steps, mean.exp(), color=COLOURS[name], linewidth=2.2, label=label)
    axes.set(yscale="log", xlabel="step", ylabel="training loss")
    axes.legend(frameon=False)


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", type=Path, help="what `speed.py --sections agreement` wrote")
    parser.add_argument("picture", type=Path, help="PNG file to write")
    options = parser.parse_args(given)
    try:
        rows = read_results(options.rows, SECTIONS)["sections"].get("agreement", [])
    except ValueError as error:
        parser.error(str(error))
    good = [row for row in rows if not row["error"] and {"path", "start", "losses"} <= row.keys()]
    if not good:
        parser.error(f"{options.rows} has no measured rows of the section 'agreement'")
    if options.picture.suffix != ".png":
        parser.error(f"the picture must be a .png file, got {options.picture}")
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    draw(figure.subplots(), good)
    figure.savefig(options.picture, dpi=150)
    print("\n".join(Agreement().conclude(good, {}).lines))


if __name__ == "__main__":
    main()

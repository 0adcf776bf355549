"""Draw the README's picture from the records: one refit of Qwen3-30B-A3B on one H200, ours and the peers', on a log scale.

    python benchmarks/plot_refit.py docs/measured/refit-megatron-*-bf16-1.json docs/measured/peers-bf16.json docs/refit.png

The dashed line is what a device-to-device copy of the same bytes takes, at the speed that was measured in the same run.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def bars(ours: list[dict[str, Any]], peers: dict[str, Any]) -> list[tuple[str, float, bool]]:
    """(label, seconds, whether it is ours), fastest first."""
    found = [(f"vllm-refit, {row['wire']}", row["seconds"]["total"], True) for row in ours if "error" not in row]
    found += [(row["way"], row["seconds"], False) for row in peers["rows"] if "error" not in row]
    return sorted(found, key=lambda bar: bar[1])


def main(ours: Path, peers: Path, out: Path) -> None:
    """Draw it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows, others = json.loads(ours.read_text()), json.loads(peers.read_text())
    floor = 2 * others["bytes"] / rows[0]["copy_gbytes_per_s"] / 1e9
    found = bars(rows, others)
    figure, axis = pyplot.subplots(figsize=(8, 0.45 * len(found) + 1.4))
    drawn = axis.barh(
        [label for label, _, _ in found],
        [seconds for _, seconds, _ in found],
        color=["tab:blue" if mine else "lightgray" for _, _, mine in found],
    )
    axis.bar_label(
        drawn, [f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.0f} ms" for _, seconds, _ in found], padding=3
    )
    axis.axvline(floor, color="black", linestyle="--", linewidth=1)
    axis.text(floor, -0.75, f" a copy of the same bytes, {1e3 * floor:.0f} ms", fontsize=8, va="center")
    axis.set_xscale("log")
    axis.set_xlim(floor / 2, 4 * max(seconds for _, seconds, _ in found))
    where = f"trainer and engine on one {others['gpu']}"
    axis.set_xlabel(f"seconds of one refit, {others['model']}, {others['engine'].upper()} engine\n{where}")
    axis.invert_yaxis()
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    figure.tight_layout()
    figure.savefig(out, dpi=120)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))

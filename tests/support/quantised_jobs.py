"""What the trainer's ranks do in the tests of prequantisation. Run by `run_ranks`; the engine is behind a URL."""

from __future__ import annotations

from typing import Any

from tests.support.refit_jobs import Trainer


def hand_over(folder: str, geometry: dict[str, Any], url: str, config: dict[str, Any]) -> dict[str, Any]:
    """Quantise, refit twice, verify. What was sent, and what was compared."""
    trainer = Trainer(folder, {"dtype": "bfloat16", **geometry}, url, prequantize=True, **config)
    plan = trainer.sender.prepare()
    reports = [trainer.sender.refit(f"coded-{i}") for i in range(2)]
    compared = trainer.sender.verify()
    coded = [n for n, spec in plan.manifest.tensors.items() if spec.format == "mxfp8"]
    trainer.sender.close()
    return {"nbytes": reports[0].nbytes, "compared": compared, "coded": coded, "seconds": reports[0].seconds}


def refused(folder: str, geometry: dict[str, Any], url: str, config: dict[str, Any]) -> str:
    """The error of a preparation."""
    trainer = Trainer(folder, {"dtype": "bfloat16", **geometry}, url, prequantize=True, **config)
    try:
        trainer.sender.prepare()
    except Exception as error:  # noqa: BLE001 - the test looks at it
        return f"{type(error).__name__}: {error}"
    return ""

"""Writes reference_values.json: metrics of jiwer and pytrec_eval on random cases.

Run in an environment of its own, so that the tests need neither package::

    pip install jiwer==4.0.0 pytrec-eval-terrier==0.5.11 && python tests/metrics/reference_values.py
"""

from __future__ import annotations

import json
import random
from importlib.metadata import version
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_suffix(".json")
WORDS = ("a", "bee", "sea", "seas", "Bee", "é", "日本", "d'")
MEASURES = {"ndcg@10": "ndcg_cut_10", "ndcg@3": "ndcg_cut_3", "recall@10": "recall_10", "mrr": "recip_rank"}


def _texts(rng: random.Random) -> dict[str, Any]:
    import jiwer  # type: ignore[import-not-found]

    def sentence(least: int) -> str:
        words = [rng.choice(WORDS) for _ in range(rng.randint(least, 9))]
        return rng.choice(["", " "]) + rng.choice([" ", "  "]).join(words) + rng.choice(["", " "])

    references, found = [sentence(1) for _ in range(5)], [sentence(0) for _ in range(5)]
    measured = {"wer": jiwer.wer(references, found), "cer": jiwer.cer(references, found)}
    return {"references": references, "texts": found, **measured}


def _rankings(rng: random.Random) -> dict[str, Any]:
    import pytrec_eval  # type: ignore[import-not-found]

    documents = [f"d{number}" for number in range(rng.randint(8, 20))]
    scores = {
        f"q{number}": {name: rng.choice([rng.random(), 0.25, 0.5]) for name in documents}
        for number in range(rng.randint(2, 6))
    }
    names = [*documents, "missing"]
    relevant = {query: {name: rng.randint(0, 3) for name in rng.sample(names, 5)} for query in scores}
    scored = pytrec_eval.RelevanceEvaluator(relevant, {"ndcg_cut.3,10", "recall.10", "recip_rank"}).evaluate(scores)
    means = {name: sum(row[measure] for row in scored.values()) / len(scored) for name, measure in MEASURES.items()}
    return {"scores": scores, "relevant": relevant, **means}


def main() -> None:
    """Write the file."""
    rng = random.Random(0)
    made = {name: version(name) for name in ("jiwer", "pytrec-eval-terrier")}
    values = {
        "versions": made,
        "texts": [_texts(rng) for _ in range(20)],
        "rankings": [_rankings(rng) for _ in range(10)],
    }
    FILE.write_text(json.dumps(values, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

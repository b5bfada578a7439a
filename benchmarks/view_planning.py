"""Plans per second on one core: python benchmarks/view_planning.py"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

from panscan import PanAndScan
from panscan.images.views import plan_views
from panscan.records.environment import environment

RECORD = Path(__file__).parent / "records" / "view-planning.json"
COUNT, ROUNDS = 100_000, 5


def main() -> None:
    draw = random.Random(0)
    sizes = [(draw.randint(200, 4000), draw.randint(200, 4000)) for _ in range(COUNT)]
    settings = PanAndScan()
    rates = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for width, height in sizes:
            plan_views(width, height, settings)
        rates.append(COUNT / (time.perf_counter() - start))
    record = {"plans_per_second": sorted(rates), "target": 100_000, "environment": environment()}
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{sorted(rates)[ROUNDS // 2]:,.0f} plans per second (median of {ROUNDS} rounds of {COUNT:,})")


if __name__ == "__main__":
    main()

"""Compare three methods on the same twenty clients, and write a report.

python examples/compare_methods.py
"""

from pathlib import Path

from fedhelix import FedAvg, FedAvgFT, Federation, LocalOnly, partition
from fedhelix.report.locate import Selection
from fedhelix.report.page import html

folders = []
for method in (FedAvg(), FedAvgFT(), LocalOnly()):
    fed = Federation("digits", partition.dirichlet(clients=20, alpha=0.1), method=method, seed=0)
    run = fed.fit(rounds=15, eval_every=3, out=f"runs/example-{method.label}")
    worst = run.metrics["personal_p10"].dropna().iloc[-1]
    print(f"{method.label:10} 10th percentile of the clients: {100 * worst:.0f} %")
    folders.append(run.folder)

Path("example-report.html").write_text(html(Selection(folders, [])), encoding="utf-8")
print("open example-report.html")

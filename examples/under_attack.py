"""A fifth of the clients send poisoned updates. Compare FedAvg, the median and GenFed.

python examples/under_attack.py
"""

from fedhelix import FedAvg, Federation, GenFed, Median
from fedhelix.report.diagnostics import fitness
from fedhelix.report.results import read
from fedhelix.report.style import save

for method in (FedAvg(), Median(FedAvg()), GenFed(FedAvg(), rho_max=3)):
    fed = Federation(
        "digits", clients=20, method=method, attack="sign-flip", validation_size=0.1, seed=0
    )
    run = fed.fit(rounds=15, out=f"runs/attacked-{method.label}")
    print(f"{method.label:16} {100 * run.summary['final_accuracy']:.1f} %")

# The fitness of every uploaded model: selected ones are filled, attackers are marked.
save(fitness(read(run.folder)), "attack.png")
print("open attack.png")

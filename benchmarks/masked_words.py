"""Words of 8, 16 and 32 bits under masks: bytes and accuracy, against FedAvg without masks.

    python benchmarks/masked_words.py [--out benchmarks/results/masked_words.json]

The comparison is an ordinary command, which the file records.
"""

from __future__ import annotations

from compared import main

METHODS = "fedavg compact secure secure@word_bits=16 secure@word_bits=8 secure+compact@word_bits=8"
COMMAND = f"fedhelix compare {METHODS} --clients 10 --rounds 10 --seeds 3 --eval-every 10"

if __name__ == "__main__":
    main(__doc__ or "", "masked_words", {"digits": COMMAND})

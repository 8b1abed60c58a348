"""A policy improves on what it was taught: fine-tuned on some sums, then GRPO with a reward of one's own.

    python examples/grpo_arithmetic.py [number of seeds]

Draws the accuracy on sums that were never trained on, one line a seed, into runs/grpo_arithmetic/accuracy.png.
"""

import sys
from pathlib import Path

from jaxfb.config import load_config
from jaxfb.metrics import plot_policy
from jaxfb.rl import post_train
from jaxfb.rl.tasks import Arithmetic

CONFIG = Path(__file__).parent.parent / "configs" / "grpo_arithmetic.yaml"


class Sums(Arithmetic):
    """Any object with `train`, `held_out`, `reward` and `is_correct` is a task."""

    def reward(self, problem, response):
        return 1.0 if response == problem.answer else 0.0


def main(num_seeds):
    accuracies, files = [], []
    for seed in range(num_seeds):
        directory = f"runs/grpo_arithmetic/seed{seed}"
        config = load_config(CONFIG, [f"run.dir={directory}", f"run.seed={seed}"])
        result = post_train(config, task=Sums(digits=2, operations="+", num_held_out=512), fresh=True)
        accuracies.append(result.metrics["eval/accuracy"])
        files.append(Path(directory) / "metrics.jsonl")
    picture = plot_policy(files, "runs/grpo_arithmetic/accuracy.png")
    print(f"held-out accuracy {', '.join(f'{a:.3f}' for a in accuracies)}; the way there: {picture}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)

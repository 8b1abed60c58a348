"""The model of state_space.py in the trainer: kill it whenever you like and start it again, it ends in the same bits.

python examples/train_state_space.py [RUN_DIRECTORY] [UPDATES]
"""

import sys
from functools import partial

import jax
import numpy as np
from state_space import init, model, text, windows

import jaxfb


def main(directory="runs/state_space", updates=60):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    trainer = jaxfb.Trainer(
        model=model,
        params=partial(init, width=32, heads=2, state=8),
        data=windows(text(500_000), 2000, 32, np.random.default_rng(0)),
        optimizer=jaxfb.make_optimizer("adamw", learning_rate=3e-3),
        dir=directory,
        updates=int(updates),
        rows=32,
        rows_per_microbatch=2,
        max_grad_norm=1.0,
        mesh={"pipe": 4, "data": 2},
        schedule="1f1b",
        checkpoint={"every": 4},
    )
    return trainer.train(resume=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Counts what comes of calls with one changed argument: `python tests/misuse/count.py [seed]`.

Every call of the `test_misuse_*.py` files is made once for each of its arguments and each value of the pool, legal
values too unless these start a run. The tests themselves fail where this counts "other".
"""

import collections
import importlib
import os
import pathlib
import sys
import tempfile

HERE = pathlib.Path(__file__).parent
FILES = sorted(file.stem for file in HERE.glob("test_misuse_*.py"))
RUNS = ("check_random", "train", "post_train", "CheckpointStore.save")
"""Calls that take long once they are legal, or that change what the next ones find."""


def calls(file):
    """Returns the calls of one file of tests."""
    module = importlib.import_module(file)
    if hasattr(module, "CALLS"):
        return module.CALLS
    directory = pathlib.Path(tempfile.mkdtemp())
    store = module.CheckpointStore(directory / "checkpoints", asynchronous=False)
    store.save(1, module.STATE, {"update": 1})
    return module.calls(directory, store)


def main(seed):
    """Prints a line for each call that is made, then their sums."""
    from wrong import ACCEPTED, REFUSED, pool

    kinds = (REFUSED, ACCEPTED)

    total = collections.Counter()
    for file in FILES:
        for call in calls(file):
            counted = collections.Counter()
            for argument, value, answer in call.answers(pool(seed), legal_too=call.name not in RUNS):
                counted[answer if answer in kinds else "other"] += 1
                if answer not in kinds:
                    print(f"  {call.name}({argument}={value}): {answer}")
            total += counted
            print(f"{call.name:<45} {sum(counted.values()):>6} {dict(counted)}", flush=True)
    print(f"{sum(total.values())} calls: {dict(total)}")


if __name__ == "__main__":
    sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]
    os.chdir(HERE.parent.parent)
    import conftest  # noqa: F401  (eight simulated devices)

    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
